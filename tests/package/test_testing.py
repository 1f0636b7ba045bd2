"""The kit for users' own suites: what it lets pass, what it fails, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CONV, MUL, OPTIONS, conv_program, leaf, linear_program
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser import backend
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.ops import apply, library
from fx_fuser.testing import assert_equivalent, assert_fused

train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


def _gate(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0


def _gate_and_z(m: Any, x: Tensor) -> Any:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0, z


def _statistics_read(m: Any, x: Tensor) -> Any:
    z = m.bn(m.conv(x))
    seen = m.bn.running_mean.clone()
    return z * 2.0, seen


@pytest.mark.slow
@train_eval
def test_fused(train: bool) -> None:
    assert_fused(linear_program(_gate), (leaf(4, 8),), {MUL: 1}, train, OPTIONS)
    assert_fused(linear_program(_gate), (leaf(4, 8),), {MUL: 1, CONV: 0}, train, OPTIONS)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("inputs", [lambda x: x, lambda x: (x,), lambda x: ((), {"x": x})])
def test_forms_of_inputs(inputs: Callable[[Tensor], Any]) -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": F.silu(self.lin(x)) * 2.0}

    assert_fused(Swish(), inputs(torch.randn(4, 8)), {MUL: 1}, options=OPTIONS)
    assert_equivalent(Swish(), inputs(torch.randn(4, 8)), train=True, options=OPTIONS)


def test_a_refusal_is_explained() -> None:
    message = rf"{MUL}: 0 fused, 1 expected\n(.|\n)*refused(.|\n)*is also\s+returned"
    with pytest.raises(AssertionError, match=message):
        assert_fused(linear_program(_gate_and_z), (leaf(4, 8),), {MUL: 1}, options=OPTIONS)


def test_more_than_expected() -> None:
    with pytest.raises(AssertionError, match=f"{MUL}: 1 fused, 0 expected"):
        assert_fused(linear_program(_gate), (leaf(4, 8),), {}, options=OPTIONS)


@pytest.mark.slow
def test_explained_in_the_mode_that_was_run() -> None:
    """In eval the same model fuses; the table must be the one of training."""
    model = conv_program(_statistics_read, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    x = torch.randn(3, 4, 8, 9)
    assert_fused(model, (x,), {CONV: 1}, options=OPTIONS)
    with pytest.raises(AssertionError, match=r"running\s+statistics"):
        assert_fused(model, (x,), {CONV: 1}, train=True, options=OPTIONS)


def test_a_site_left_alone_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(matches: Any, options: Any) -> list[Refusal]:
        return [Refusal(m.pattern, m.site, m.root, "nothing is gained") for m in matches]

    monkeypatch.setattr(backend.plan, "decide", leave)
    message = r"1 left to the inner compiler(.|\n)*nothing\s+is\s+gained"
    with pytest.raises(AssertionError, match=message):
        assert_fused(linear_program(_gate), (leaf(4, 8),), {MUL: 1}, options=OPTIONS)


def test_a_failure_of_ours_is_no_missing_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.calls, "graph_call", lambda *a, **k: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        assert_fused(linear_program(_gate), (leaf(4, 8),), {MUL: 1}, options={"inner": "eager"})


@pytest.mark.slow
def test_everything_is_left_as_it_was() -> None:
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    x, mean, state = leaf(3, 4, 8, 9), model.bn.running_mean.clone(), torch.get_rng_state()
    counters["fx_fuser"][MUL] = 5
    assert_fused(model.eval(), (x,), {CONV: 1}, train=True, options=OPTIONS)
    assert_equivalent(model, (x,), train=True, options=OPTIONS)
    assert not model.training and torch.equal(model.bn.running_mean, mean)
    assert x.grad is None and model.conv.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert counters["fx_fuser"] == {MUL: 5}


@train_eval
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equivalent(dtype: torch.dtype, train: bool) -> None:
    model = linear_program(_gate).to(dtype)
    assert_equivalent(model, (leaf(4, 8, dtype=dtype),), train, OPTIONS)


@pytest.mark.slow
def test_equivalent_through_inductor() -> None:
    assert_equivalent(linear_program(_gate), (leaf(4, 8),), train=True)


@pytest.mark.parametrize("only", ["values", "gradients"])
def test_a_wrong_kernel_is_caught(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in ten thousand: far inside what `allclose` would let pass."""
    if only == "values":
        right = apply.finish

        def finish(*args: Any) -> None:
            right(*args)
            args[-1].mul_(1.0001)

        monkeypatch.setattr(apply, "finish", finish)
    else:
        pull_back = library._pull_back
        monkeypatch.setattr(library, "_pull_back", lambda *a: [g * 1.0001 for g in pull_back(*a)])
    part = {"values": "output 0", "gradients": "gradient of lin.weight"}[only]
    with pytest.raises(AssertionError, match=f"{part}: error(.|\n)*allowed(.|\n)*fused"):
        assert_equivalent(linear_program(_gate), (leaf(4, 8),), train=True, options=OPTIONS)


def test_infinities_are_compared() -> None:
    model = linear_program(lambda m, x: (lambda z: z * torch.sigmoid(z) * float("inf"))(m.lin(x)))
    assert_equivalent(model, (leaf(4, 8),), options=OPTIONS)


def test_a_function_without_parameters() -> None:
    def swish(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(F.linear(x, weight)) * 2.0

    assert_fused(swish, (leaf(4, 8), leaf(6, 8)), {MUL: 1}, train=True, options=OPTIONS)
    assert_equivalent(swish, (leaf(4, 8), leaf(6, 8)), train=True, options=OPTIONS)


@pytest.mark.slow
def test_grown_tails_count_where_they_are_named() -> None:
    grows = {**OPTIONS, "auto": True}
    program = linear_program(lambda m, x: _gate(m, torch.relu(m.bare(x))[:, :1] + x))
    assert_fused(program, (leaf(4, 8),), {MUL: 1}, options=grows)
    assert_fused(program, (leaf(4, 8),), {MUL: 1, "auto_linear": 1}, options=grows)
    with pytest.raises(AssertionError, match="auto_linear: 1 fused, 2 expected"):
        assert_fused(program, (leaf(4, 8),), {MUL: 1, "auto_linear": 2}, options=grows)
