"""Faults planted in an op, each of which `verify` must find: the site goes back to the model's own
operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import MUL_MUL, fused_compile, sites
from helpers import linear_program, slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters
from verify_cases import FIRST, _told

from fx_fuser.ops import apply, library
from fx_fuser.testing import assert_equivalent


def _gate(m: Any, x: Tensor) -> Tensor:
    return F.silu(m.bare(x)) * m.p


def _spoil_values(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Any]) -> None:
    right = apply.finish

    def finish(*args: Any) -> None:
        right(*args)
        spoil(args[-1])

    monkeypatch.setattr(apply, "finish", finish)


def _spoil_scales_gradient(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]
) -> None:
    right = library._pull_back

    def pull_back(*args: Any) -> tuple[Tensor, ...]:
        dz, *others = right(*args)
        return (dz, *map(spoil, others))

    monkeypatch.setattr(library, "_pull_back", pull_back)


def _is_found(model: nn.Module, x: Tensor) -> bool:
    """Does `verify` call the model's one site wrong?"""
    torch._dynamo.reset()
    counters.clear()
    with _told() as told:
        value = fused_compile(model, inner="eager", strict=False, **FIRST)(x)
    torch.testing.assert_close(value, model(x), equal_nan=True)
    found = bool(counters["fx_fuser_wrong"])
    assert (sites() == ({} if found else {MUL_MUL: 1})) and len(told) == found
    return found


def _overflowing() -> tuple[nn.Module, Tensor]:
    """In float16 the gemm overflows in about half of the results, in float64 nowhere."""
    return linear_program(_gate).half().requires_grad_(False), torch.randn(64, 8).clamp(
        -2, 2
    ).half() * 3e4


def _poisoned(value: float) -> tuple[nn.Module, Tensor]:
    x = torch.randn(16, 8)
    x[3, 2] = value
    return linear_program(_gate), x


def _set(where: Callable[[Tensor], Tensor], value: float) -> Callable[[Tensor], Any]:
    return lambda out: out.masked_fill_(where(out), value)


def _of_usual_size(values: Tensor) -> Tensor:
    """Where there are elements beyond the root mean square, in order."""
    flat = values.detach().double().flatten().abs()
    return flat.gt(flat.square().mean().sqrt()).nonzero().flatten()


VALUES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], Callable[[Tensor], Any]]] = {
    "7 for an overflow": (_overflowing, _set(torch.isinf, 7.0)),
    "an overflow of the other sign": (_overflowing, _set(torch.isposinf, float("-inf"))),
    "NaN for an overflow": (_overflowing, _set(torch.isinf, float("nan"))),
    "0.5 for NaN": (lambda: _poisoned(float("nan")), _set(torch.isnan, 0.5)),
    "an infinity for NaN": (lambda: _poisoned(float("nan")), _set(torch.isnan, float("inf"))),
    "the largest number for an infinity": (
        lambda: _poisoned(float("inf")),
        _set(torch.isposinf, torch.finfo(torch.float32).max),
    ),
    "NaN for a number": (
        lambda: (linear_program(_gate), torch.randn(16, 8)),
        lambda out: out[3, :2].fill_(float("nan")),
    ),
    "two zeros among many": (
        lambda: (linear_program(_gate).bfloat16(), torch.randn(2**14, 8).bfloat16()),
        lambda out: out.view(-1).index_fill_(0, _of_usual_size(out)[:2], 0.0),
    ),
}


@pytest.mark.parametrize("fault", slow_but([*VALUES][::2], VALUES))
def test_a_wrong_value_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, spoil = VALUES[fault]
    torch.manual_seed(0)
    model, x = case()
    assert not _is_found(model, x)
    _spoil_values(monkeypatch, spoil)
    assert _is_found(model, x)


@pytest.mark.slow
@pytest.mark.parametrize("factor", slow_but([0.0], [-1.0, 1000.0, 0.0]))
def test_a_wrong_small_gradient_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale's gradient is 10^12 times smaller than that of x."""
    torch.manual_seed(0)
    model, x = linear_program(_gate), (torch.randn(16, 8) * 1e-12).requires_grad_()
    assert not _is_found(model, x)
    assert_equivalent(model, (x,), True, {"inner": "eager", "cpu_ops": True, "auto": False})
    _spoil_scales_gradient(monkeypatch, lambda g: g * factor)
    assert _is_found(model, x)
    with pytest.raises(AssertionError, match="gradient of p: error"):
        assert_equivalent(model, (x,), True, {"inner": "eager", "cpu_ops": True, "auto": False})


def test_other_strides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values, where autograd keeps the gemm's result apart from the op's."""
    model, x = linear_program(_gate), torch.randn(16, 8)
    assert not _is_found(model, x)
    anchor = library.ANCHORS["linear"]
    monkeypatch.setattr(
        type(anchor), "empty_output", lambda self, c, shape, dtype: c.new_empty(shape[::-1]).t()
    )
    assert _is_found(model, x)


@pytest.mark.slow
def test_a_folded_convolution_is_held_to_the_users_own_in_its_layout() -> None:
    """oneDNN's convolution of channels_last is four times as far from float64 as that of contiguous
    tensors, in fx_fuser's op, in Inductor's graph and in eager mode."""
    torch.manual_seed(0)
    conv = nn.Conv2d(512, 512, 3, padding=1, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(512), nn.ReLU()).eval()
    options = {"cpu_ops": True, "plan": "always", "strict": True, **FIRST}
    with torch.no_grad():
        torch.compile(model, backend="fx_fuser", options=options)(torch.randn(2, 512, 2, 2))
    assert sites() == {"auto_conv2d_batchnorm": 1} and not counters["fx_fuser_wrong"]


@pytest.mark.slow
def test_a_wrong_folded_convolution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(512, 512, 3, padding=1, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(512), nn.ReLU()).eval()
    options = {"cpu_ops": True, "plan": "always", "strict": False, **FIRST}
    relu = Tensor.relu
    monkeypatch.setattr(Tensor, "relu", lambda t: relu(t) * (1 + 4e-6))
    with torch.no_grad(), _told() as told:
        torch.compile(model, backend="fx_fuser", options=options)(torch.randn(2, 512, 2, 2))
    assert sites() == {} and len(told) == 1
