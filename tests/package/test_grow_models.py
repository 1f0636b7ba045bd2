"""Whole models with grown tails: every Linear and every convolution runs fused, and right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compare import (
    CONV,
    MUL_ADD,
    MUL_MUL,
    ThreePatterns,
    assert_close_to_exact,
    assert_same_as_eager,
    fresh,  # noqa: F401
    fused_compile,
    images,
    sites,
)
from test_models import GATES, LAYERS, TriangleMultiplication, _llama, _step
from test_models_conv import CONVS, _resnet
from torch import nn

GROWN = {"auto": None}  # the default: named patterns first, then growth


def _count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(m, kind) for m in model.modules())


def _with_grown(model: nn.Module, named: dict[str, int]) -> dict[str, int]:
    """One site a Linear, and one a convolution."""
    norms = _count(model, nn.BatchNorm2d)
    counts = {
        "auto_linear": _count(model, nn.Linear) - named.get(MUL_MUL, 0) - named.get(MUL_ADD, 0),
        "auto_conv2d_batchnorm": norms - named.get(CONV, 0),
        "auto_conv2d": _count(model, nn.Conv2d) - norms,
        "auto_bmm": isinstance(model, TriangleMultiplication),  # its einsum
    }
    return named | {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("module", "named", "inputs"),
    [
        pytest.param(
            *case,
            id=case[0].__name__,
            marks=[] if case[0].__name__ in ("LlamaMLP", "GRUCell") else [pytest.mark.slow],
        )
        for case in GATES
    ],
)
def test_gates(module: Any, named: dict[str, int], inputs: Any) -> None:
    tensors = tuple(t.requires_grad_() for t in inputs())
    model = module()
    assert_same_as_eager(model, tensors, _with_grown(model, named), **GROWN)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("module", "named", "inputs"), CONVS, ids=[case[0].__name__ for case in CONVS]
)
def test_conv_blocks(module: Any, named: dict[str, int], inputs: Any, training: bool) -> None:
    first, *rest = inputs()
    model = module().train(training)
    # A bias in front of a training BatchNorm has gradient zero.
    zero = ("grad conv.bias",) if training and model.conv.bias is not None else ()
    counts = _with_grown(model, named)
    assert_same_as_eager(model, (first.requires_grad_(), *rest), counts, no_bound=zero, **GROWN)


@pytest.mark.slow
def test_through_inductor() -> None:
    model = ThreePatterns().eval()
    counts = {MUL_MUL: 1, MUL_ADD: 1, CONV: 1, "auto_linear": 1}
    given = (images().requires_grad_(),)
    assert_same_as_eager(
        model, given, counts, inner="inductor", peers=(torch.compile,), slack=2.0, **GROWN
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "training", [pytest.param(True, marks=pytest.mark.slow), False], ids=["train", "eval"]
)
def test_a_resnet(training: bool) -> None:
    model = _resnet().train(training)
    assert_same_as_eager(model, (images(),), _with_grown(model, {}), slack=2.0, **GROWN)


@pytest.mark.slow
def test_a_llama_training_step() -> None:
    model = _llama()
    tokens = torch.randint(0, 64, (2, 12))
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fused = _step(model, fused_compile(model, **GROWN), tokens)
    assert sites() == {MUL_MUL: LAYERS, "auto_linear": 6 * LAYERS + 1}
    assert_close_to_exact(
        fused, _step(eager, eager, tokens), _step(exact, exact, tokens), slack=2.0
    )
