"""What the graph tells of the numbers in a mask: may scores be lost beside a row's largest?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attending import BF16, B, D, H, S, sdpa, tensors
from helpers import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fx_fuser.ops.attention import ATTENTION
from fx_fuser.passes import masks

INF, LEAST, LEAST32 = torch.inf, torch.finfo(BF16).min, torch.finfo(torch.float32).min
Make = Callable[["Given"], Tensor]


class Given(nn.Module):
    """What masks of [H, L, S] are made of."""

    def __init__(self, make: Make, dtype: torch.dtype) -> None:
        super().__init__()
        self.make = make
        self.bias = nn.Parameter(torch.randn(H, S, S).to(dtype))
        self.frozen = nn.Parameter(torch.randn(H, S, S).to(dtype), requires_grad=False)
        self.table = nn.Embedding(2 * S, H).to(dtype)
        self.register_buffer("buffer", torch.zeros(H, S, S).to(dtype))
        self.shown, self.number = torch.ones(H, S, S) > 0, torch.zeros(H, S, S).to(dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shown: Tensor, number: Tensor) -> Tensor:
        self.shown, self.number = shown, number
        return sdpa(q, k, v, self.make(self))

    def places(self) -> Tensor:
        at = torch.arange(S)
        return at - at[:, None] + S

    def causal(self) -> Tensor:
        return self.places() <= S


def absorbs(make: Make, dtype: torch.dtype = BF16, autocast: bool = False) -> bool:
    """As the pass says to the op."""
    found: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        reader = masks.Reader()
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                reader.simplify(module, module.graph, on_cpu=True)
                module.recompile()
                found.extend(n.args[8] for n in module.graph.nodes if n.target is ATTENTION)
        return gm

    torch._dynamo.reset()
    qkv = tensors(*[(B, H, S, D)] * 3, dtype=dtype)
    shown, number = torch.ones(H, S, S) > 0, torch.zeros(H, S, S).to(dtype)
    with torch.autocast("cpu", BF16, enabled=autocast):
        torch.compile(Given(make, dtype), backend=backend)(*qkv, shown, number)
    (answer,) = found
    return answer


def written(g: Given) -> Tensor:
    mask = g.bias * 1
    mask[:, 1:3] = g.number[:, 1:3]
    return mask.transpose(1, 2)


def filled(g: Given, fill: float) -> Tensor:
    return g.bias.masked_fill(~g.shown, fill)


def causal(g: Given, fill: float) -> Tensor:
    return torch.zeros(S, S, dtype=g.bias.dtype).masked_fill(~g.causal(), fill)


def first(g: Given) -> Tensor:
    """[S]: hides all keys but the first."""
    return torch.where(torch.arange(S) == 0, 0.0, LEAST).to(g.bias.dtype)


MODERATE: dict[str, Make] = {
    "a parameter": lambda g: g.bias,
    "one that is not trained": lambda g: g.frozen,
    "seen otherwise": lambda g: g.bias.permute(0, 2, 1).contiguous().view(H, S, S).detach(),
    "an embedding": lambda g: g.table(g.places()).permute(2, 0, 1),
    "some of it": lambda g: g.bias.reshape(-1, H)[g.places()].permute(2, 0, 1),
    "bounded": lambda g: 16 * torch.sigmoid(g.number),
    "scaled": lambda g: -(2 * g.bias / 3) * 0.5,
    "a sum": lambda g: g.bias + g.frozen - 1.0,
    "with a constant": lambda g: g.bias + (g.places() * -0.5).to(g.bias.dtype),
    "hiding by -inf": lambda g: filled(g, -INF),
    "hiding by few": lambda g: filled(g, -1e4),
    "a choice": lambda g: torch.where(g.shown, g.bias, -INF),
    "a choice, as a method": lambda g: g.bias.where(g.shown, torch.zeros((), dtype=g.bias.dtype)),
    "0 and -inf": lambda g: torch.where(g.shown, 0.0, -INF).to(g.bias.dtype),
    "of bool": lambda g: (1.0 - g.shown.to(g.bias.dtype)) * -1e4,
    "causal by the least": lambda g: g.bias + causal(g, LEAST),
    "one key that is shown": lambda g: (g.bias + first(g)).contiguous(),
    "causal by choice": lambda g: torch.where(g.causal(), g.bias, LEAST),
    "causal by choice, the other way": lambda g: torch.where(~g.causal(), LEAST, g.bias),
}  # fmt: skip
NOT: dict[str, Make] = {
    "an input": lambda g: g.number,
    "a buffer": lambda g: g.buffer,
    "a sum with an input": lambda g: g.bias + g.number,
    "a product with an input": lambda g: g.bias * g.number,
    "a large factor": lambda g: g.bias * 1e30,
    "a large divisor": lambda g: g.bias / 1e-30,
    "hiding by the least": lambda g: filled(g, LEAST),
    "hiding by much": lambda g: filled(g, -1e15),
    "a choice of the least": lambda g: torch.where(g.shown, g.bias, LEAST),
    "of bool and the least": lambda g: (1.0 - g.shown.to(g.bias.dtype)) * LEAST,
    "a constant": lambda g: torch.full((H, S, S), LEAST, dtype=g.bias.dtype),
    "a constant with rows of it": lambda g: (
        g.bias + causal(g, LEAST).masked_fill(g.places() >= S, LEAST)
    ),
    "rows that were columns": lambda g: (g.bias + first(g)).transpose(1, 2),
    "one of a row": lambda g: (g.bias + first(g))[..., 1:2].expand(H, S, S),
    "the least where all else is -inf": lambda g: torch.where(g.causal(), -INF, filled(g, LEAST)),
    "the least beside what is hidden": lambda g: filled(g, -INF) + causal(g, LEAST),
    "filled and written to": written,
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but([*MODERATE][::3], MODERATE))
def test_moderate(name: str) -> None:
    assert not absorbs(MODERATE[name])


@pytest.mark.parametrize("name", slow_but([*NOT][::3], NOT))
def test_not_known_to_be_moderate(name: str) -> None:
    assert absorbs(NOT[name])


def test_fp16_has_no_such_numbers() -> None:
    assert not absorbs(lambda g: filled(g, -65504.0), torch.float16)


@pytest.mark.slow
def test_what_autocast_rounds_to_infinity() -> None:
    assert not absorbs(lambda g: filled(g, LEAST32), torch.float32, autocast=True)
    assert absorbs(lambda g: filled(g, LEAST), torch.float32, autocast=True)


def test_within_a_checkpoint() -> None:
    """The body's placeholder is the parameter that is handed in."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(H, S, S).to(BF16))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, more: Tensor | None = None) -> Tensor:
            bias = self.bias * 2.0 if more is None else self.bias + more
            return checkpoint(sdpa, q, k, v, bias, use_reentrant=False)

    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        reader = masks.Reader()
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                reader.simplify(module, module.graph, on_cpu=True)
                found.extend(n.args[8] for n in module.graph.nodes if n.target is ATTENTION)
        return gm

    qkv = tensors(*[(B, H, S, D)] * 3)
    for more in ((), (torch.zeros(H, S, S).to(BF16),)):
        torch._dynamo.reset()
        torch.compile(Net(), backend=backend)(*qkv, *more)
    assert found == [False, True]
