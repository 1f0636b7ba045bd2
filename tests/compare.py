"""Whole models, run fused and eagerly side by side: what the life-cycle tests share.

The bounds are those of the project: relative Frobenius error against float64 at most 1.5 times
eager's (at least 4e-7) in float32, and at most twice eager's in bfloat16 and float16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser  # noqa: F401  (registers the backend in a bare checkout)

MUL_MUL, MUL_ADD, CONV = "linear_sigmoid_mul_mul", "linear_sigmoid_mul_add", "conv2d_batchnorm_mul"
# Named patterns alone, as in helpers.OPTIONS.
CPU_OPS = {"inner": "aot_eager", "cpu_ops": True, "strict": True, "auto": False}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code, no counts and the same random numbers at the start of each test."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class ThreePatterns(nn.Module):
    """Conv2d → BatchNorm2d → mul, then both Linear patterns."""

    def __init__(self, conv_bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=conv_bias)
        self.bn = nn.BatchNorm2d(6)
        self.gate = nn.Linear(6, 12)
        self.up = nn.Linear(6, 12, bias=False)
        self.down = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn(self.conv(x)) * 0.5).mean((2, 3))
        h = F.silu(self.gate(h)) * self.up(h)
        z = self.down(h)
        return z + 2.0 * torch.sigmoid(z)


ALL_THREE = {MUL_MUL: 1, MUL_ADD: 1, CONV: 1}


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 6, 6)


def fused_compile(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """torch.compile on the kernel-op path, where a fault of ours raises."""
    return torch.compile(model, backend="fx_fuser", dynamic=dynamic, options={**CPU_OPS, **options})


def sites() -> dict[str, int]:
    """How often each pattern was fused since the test began."""
    return dict(counters["fx_fuser"])


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error."""
    exact = exact.detach().double()
    distance = torch.linalg.vector_norm(actual.detach().double() - exact)
    return (distance / torch.linalg.vector_norm(exact).clamp_min(1e-30)).item()


def bound(eager: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    own = error(eager, exact)
    return max(1.5 * own, 4e-7) if dtype == torch.float32 else max(2 * own, 4e-7)


def assert_close_to_exact(
    actual: Mapping[str, Tensor | None],
    eager: Mapping[str, Tensor | None],
    exact: Mapping[str, Tensor | None],
    dtype: torch.dtype = torch.float32,
    peers: Sequence[Mapping[str, Tensor | None]] = (),
    slack: float = 1.0,
) -> None:
    """Every tensor as close to the float64 one as eager's; in its dtype, shape and stride.

    peers: what others made of it, the worst of whom may be equalled: the inner compiler alone.
    slack: what the bound is multiplied by, where eager's own error varies as much by the seed.
    """
    assert actual.keys() == eager.keys() == exact.keys()
    for name, value in actual.items():
        expected, true = eager[name], exact[name]
        if value is None or expected is None or true is None:
            assert value is None and expected is None and true is None, name
            continue
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        assert value.stride() == expected.stride(), name
        if not value.dtype.is_floating_point:
            assert torch.equal(value, expected), name
            continue
        others = [expected, *(theirs for p in peers if (theirs := p[name]) is not None)]
        allowed = slack * max(bound(theirs, true, dtype) for theirs in others)
        assert error(value, true) <= allowed, (name, error(value, true), allowed)


def double(value: Any) -> Any:
    """A copy in float64: of a tensor, of a module, or of a tuple of them."""
    if isinstance(value, tuple):
        return tuple(map(double, value))
    if isinstance(value, Tensor):
        made = value.detach().double() if value.is_floating_point() else value.detach().clone()
        return made.requires_grad_(value.requires_grad)
    return copy.deepcopy(value).double() if isinstance(value, nn.Module) else value


def copied(value: Any) -> Any:
    """An independent copy of a tensor (with its own .grad), or of a tuple of them."""
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def observe(
    model: nn.Module, run: Callable[..., Tensor], inputs: tuple[Any, ...], backward: bool
) -> dict[str, Tensor | None]:
    """Everything one call leaves behind: value, gradients, buffers."""
    value = run(*inputs)
    seen: dict[str, Tensor | None] = {"value": value.detach()}
    if backward:
        weights = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).reshape(value.shape)
        (value * weights.to(value.dtype)).sum().backward()
        seen |= {f"grad {n}": p.grad for n, p in model.named_parameters()}
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        seen |= {f"grad input {i}": v.grad for i, v in enumerate(tensors)}
    return seen | {f"buffer {n}": b for n, b in model.named_buffers()}


def assert_same_as_eager(
    model: nn.Module,
    inputs: tuple[Any, ...],
    expected: Mapping[str, int],
    backward: bool = True,
    no_bound: tuple[str, ...] = (),
    peers: Sequence[Callable[[nn.Module], Any]] = (),
    slack: float = 1.0,
    **options: Any,
) -> None:
    """One call of the model and its gradients: fused, eager and float64.

    no_bound: names whose true value is zero, so that a relative error means nothing.
    peers: compilers whose error is as good a bound as eager's. slack: see assert_close_to_exact.
    """
    models = [model, copy.deepcopy(model), double(model)]
    args = [inputs, copied(inputs), double(inputs)]
    theirs = [(copy.deepcopy(model), copied(inputs), peer) for peer in peers]
    fused = observe(models[0], fused_compile(models[0], **options), args[0], backward)
    assert sites() == dict(expected)
    eager, exact = (observe(m, m, a, backward) for m, a in zip(models[1:], args[1:]))
    others = [observe(m, peer(m), a, backward) for m, a, peer in theirs]
    for name in no_bound:
        for seen in (fused, eager, exact, *others):
            seen.pop(name)
    assert_close_to_exact(fused, eager, exact, peers=others, slack=slack)
