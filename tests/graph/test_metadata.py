"""Calls that read of an anchor's value only its dtype, device or size do not end its tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import GROWTH, MUL, check, compiled, epilogues, leaf, linear_program, recorded
from torch import Tensor, nn
from torch._dynamo.utils import counters

Body = Callable[[Any, Tensor], Any]
MASKED = "v0 = sigmoid(z); v1 = mul(v0, t0)"


def _of(make: Callable[[Tensor], Tensor]) -> Body:
    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        return torch.sigmoid(z) * (make(z) * 3)

    return body


READS: dict[str, Body] = {
    "new_ones": _of(lambda z: z.new_ones(6)),
    "new_zeros": _of(lambda z: z.new_zeros(6) + 1),
    "new_full": _of(lambda z: z.new_full((5, 6), 0.5)),
    "new_ones of another dtype": _of(lambda z: z.new_ones(6, dtype=torch.float64).float()),
    "new_ones of no dtype": _of(lambda z: z.new_ones(6, dtype=None)),
    "ones_like": _of(torch.ones_like),
    "zeros_like": _of(lambda z: torch.zeros_like(z) - 1),
    "full_like": _of(lambda z: torch.full_like(z, 0.25)),
    "ones_like of a dtype": _of(lambda z: torch.ones_like(z, dtype=torch.float64).float()),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", READS)
def test_metadata_alone_is_no_reader(case: str, train: bool) -> None:
    model = linear_program(READS[case])
    graphs = check(model, leaf(2, 5, 8), fuses={"auto_linear": 1}, train=train, **GROWTH)
    assert epilogues(graphs) == [MASKED]


def test_of_a_view_and_of_an_inner_value() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(m.lin(x)).view(10, 6)
        return (h * (h.new_ones(6) * 3)).view(2, 5, 6)

    graphs = check(linear_program(body), leaf(2, 5, 8), fuses={"auto_linear": 1}, **GROWTH)
    assert epilogues(graphs) == [MASKED]


def test_the_dtype_is_that_of_the_value() -> None:
    """Under autocast z is bfloat16 and x is not."""

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        mask = z.new_ones(6)
        assert mask.dtype == torch.bfloat16
        return torch.sigmoid(z) * (mask * 3)

    model, x = linear_program(body), torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(model, **GROWTH)(x), model(x)
    assert counters["fx_fuser"] == {"auto_linear": 1} and y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)


READS_LAYOUT: dict[str, Body] = {
    "a transposed layout": _of(lambda z: torch.ones_like(z.mT).mT),
    "a memory format": _of(lambda z: torch.ones_like(z, memory_format=torch.preserve_format)),
    "its values": _of(lambda z: torch.ones_like(z).copy_(z.detach())),
}


@pytest.mark.parametrize("case", READS_LAYOUT)
def test_what_reads_more_ends_the_tail(case: str) -> None:
    model = linear_program(READS_LAYOUT[case])
    graphs = check(model, leaf(2, 5, 8), fuses={"auto_linear": 1}, **GROWTH)
    assert epilogues(graphs) == [""]


@pytest.mark.slow
def test_dynamic_sizes() -> None:
    """Of symbolic size, `ones_like` stays; `new_ones` of a constant size does not."""
    for case, text in (("new_ones", MASKED), ("ones_like", "")):
        torch._dynamo.reset()
        counters.clear()
        model = linear_program(READS[case])
        with recorded() as graphs:
            run = compiled(model, True, **GROWTH)
            for rows in (3, 4, 7):
                x = torch.randn(rows, 5, 8)
                torch.testing.assert_close(run(x), model(x))
        assert epilogues(graphs) == [text]


def test_what_is_not_fused_reads_what_it_read() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.gate = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Any:
            g, z = self.gate(x), self.lin(x)
            return g * torch.sigmoid(g) * 2.0, torch.exp(z) * z.new_ones(6) + torch.ones_like(z)

    model, x = Model(), torch.randn(2, 5, 8)
    with recorded() as graphs:
        for ours, its in zip(compiled(model)(x), model(x)):
            torch.testing.assert_close(ours, its)
    assert counters["fx_fuser"] == {MUL: 1}
    nodes = list(graphs[0].graph.nodes)
    (z,) = (n for n in nodes if n.target is torch._C._nn.linear)
    names = sorted(getattr(n.target, "__name__", n.target) for n in z.users)
    assert names == ["exp", "new_ones", "ones_like"]
