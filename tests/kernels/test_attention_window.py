"""Attention of windows on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import attention_window_checks
import pytest
import torch
from checks import passes
from sm90 import gpu_from_sm80
from torch import Tensor

from benchmarks.sm90 import CUDA
from fx_fuser.kernels.attention import window
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.attention_bias.window import BACKWARD, FORWARD

shapes = pytest.mark.parametrize("shape", range(len(window.SHAPES)))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function, by the kernels alone."""

    def refused(*_: object) -> list[Tensor]:
        raise AssertionError("the kernel does not take this")

    for name in (FORWARD, BACKWARD):
        known = run._functions[name]
        monkeypatch.setitem(run._functions, name, dataclasses.replace(known, in_torch=refused))
    load.prepare(window.offered(), CUDA)
    return lambda name, *given: run.MANY(*run.arguments(name, given))


@gpu_from_sm80
@shapes
def test_random_sizes_and_strides(call: Any, shape: int) -> None:
    passes(attention_window_checks.sweep, call, shape, 60, shape)


@gpu_from_sm80
@shapes
@pytest.mark.parametrize(
    "check",
    [
        attention_window_checks.hidden_keys,
        attention_window_checks.safe_rows,
        attention_window_checks.not_numbers,
        attention_window_checks.same_bits,
    ],
)
def test_checks(check: Any, call: Any, shape: int) -> None:
    passes(check, call, shape)


@gpu_from_sm80
def test_a_bias_without_a_gradient(call: Any) -> None:
    passes(attention_window_checks.without_gradient_of_bias, call)


@gpu_from_sm80
@shapes
def test_many_batches_of_a_block(call: Any, shape: int) -> None:
    """Of Swin's first stage: each block goes through many windows, two of which are under way."""
    torch.manual_seed(0)
    sizes = attention_window_checks.Sizes(256, 4, 3, 49, 49, window.SHAPES[shape])
    for dtype in (torch.bfloat16, torch.float16):
        tensors = attention_window_checks.operands(sizes, dtype, packed=True)
        passes(attention_window_checks.judge, f"{dtype}", call, tensors, sizes.scale)
