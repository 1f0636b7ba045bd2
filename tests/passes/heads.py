"""What the tests of heads with their loss share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from helpers import Program, calls, compiled, recorded, run
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.passes import head_loss
from fx_fuser.verify.accuracy import Observed, compare, errors_of

B, T, K, V = 2, 7, 16, 51
BF16, F16 = torch.bfloat16, torch.float16
Body = Callable[..., Tensor]  # (model, x, labels) to a loss
IGNORED = -100


def found() -> int:
    return counters[head_loss.COUNTER]["cross_entropy"]


def model(body: Body, dtype: torch.dtype | None = None) -> Program:
    made = Program(
        body,
        head=nn.Linear(K, V, bias=False),
        biased=nn.Linear(K, V),
        w=nn.Parameter(torch.randn(K, V)),
        loss=nn.CrossEntropyLoss(),
    )
    return made.to(dtype) if dtype else made


def rows(*shape: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, K) * size).to(dtype).requires_grad_()


def labels(*shape: int) -> Tensor:
    """Both ends among them, and one that does not count."""
    made = torch.randint(0, V, shape)
    made.view(-1)[:3] = torch.tensor([0, V - 1, IGNORED])[: made.numel()]
    return made


def widened(v: Tensor) -> Tensor:
    """v.float(), of float64 nothing."""
    return v.to(torch.promote_types(v.dtype, torch.float32))


def autocast(body: Body, dtype: torch.dtype = BF16) -> Body:
    """Within it. float64 is not cast."""

    def cast(*given: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return body(*given)

    return cast


Taken = Callable[[Any], Any]  # results of a program → those that a gradient reaches


def by_eager(
    program: nn.Module, inputs: Sequence[Tensor], taken: Taken = lambda made: made
) -> tuple[Observed, Observed, list[Tensor]]:
    """What eager makes, what is exact, and eager's outputs."""

    def call(m: nn.Module) -> Callable[..., Any]:
        return lambda *given: taken(m(*given))

    eager, outputs = run(program, inputs, True, call)
    exact, _ = run(program, inputs, True, call, dtype=torch.float64, narrow=outputs)
    return *(Observed(r.outputs, r.grads) for r in (eager, exact)), outputs


def larger(inputs: Sequence[Tensor], factor: float) -> list[Tensor]:
    made = [(v * factor).to(v.dtype).detach() for v in inputs]
    return [m.requires_grad_() if v.requires_grad else v for m, v in zip(made, inputs)]


def check(
    program: nn.Module,
    *inputs: Tensor,
    heads: int = 1,
    taken: Taken = lambda made: made,
    **options: Any,
) -> list[Any]:
    """Values and gradients are as eager's; so many heads are one op with their loss.

    Each gradient of a logit is rounded by luck, and eager's errors in a few tiny tensors are lucky
    or not: those of the same program on inputs a little larger count as well.
    """
    own, truth, outputs = by_eager(program, inputs, taken)
    chosen = {"auto": True, **options}

    def call(m: nn.Module) -> Callable[..., Any]:
        fast = compiled(m, **chosen)
        return lambda *given: taken(fast(*given))

    with recorded() as graphs:
        ours, got = run(program, inputs, True, call, narrow=outputs)
    seen = Observed(ours.outputs, ours.grads)
    if compare(seen, own, truth):
        others = (by_eager(program, larger(inputs, 1 + i / 64), taken) for i in range(1, 6))
        assert not compare(seen, own, truth, peers=[errors_of(*one[:2]) for one in others])
    assert [(g.dtype, g.shape) for g in got] == [(o.dtype, o.shape) for o in outputs]
    assert found() == heads
    losses = calls(graphs)["cross_entropy"] + calls(graphs)["nll_loss"]
    assert bool(losses) is not bool(heads)
    return graphs


def viewed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).float().view(-1, V), y.view(-1))
