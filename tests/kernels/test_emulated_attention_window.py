"""Attention of windows on the CPU emulator: by the checks that are written for a GPU, as graphs
call it, through the shim's host code."""

from __future__ import annotations

from typing import Any

import attention_window_checks
import emulator
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu
from test_emulated_attention_calls import called
from torch import Tensor

from fx_fuser.kernels.attention import window

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
shapes = pytest.mark.parametrize("shape", range(len(window.SHAPES)))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_window_checks, "CUDA", "cpu")


@pytest.fixture(params=[pytest.param(80, marks=pytest.mark.slow), 90])
def call(request: pytest.FixtureRequest) -> Any:
    """A function by two schedules, which must agree bit for bit."""
    gpu = EmulatedGpu(request.param, multiprocessors=2)
    names = {spec.name: spec for spec in window.offered()}

    def run(function: str, *arguments: Any) -> list[Tensor]:
        gpu.handle_of(names[next(a for a in arguments if isinstance(a, str))])
        found: list[list[Tensor]] = []
        for settings in gpu.schedules():
            settings.use()
            made, launched = called(function, *arguments)
            assert launched > 0, "the kernel does not take this"
            found.append(made)
        for first, second in zip(*found):
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
        return found[0]

    return run


@pytest.mark.slow
@shapes
def test_random_sizes_and_strides(call: Any, shape: int) -> None:
    passes(attention_window_checks.sweep, call, shape, 4, shape)


@pytest.mark.slow
@shapes
def test_masks(call: Any, shape: int) -> None:
    passes(attention_window_checks.hidden_keys, call, shape)


@shapes
def test_rows_that_see_nothing(call: Any, shape: int) -> None:
    passes(attention_window_checks.safe_rows, call, shape)


@pytest.mark.slow
@shapes
def test_not_numbers(call: Any, shape: int) -> None:
    passes(attention_window_checks.not_numbers, call, shape)


@pytest.mark.slow
@shapes
def test_the_gradient_of_a_bias_that_blocks_share(call: Any, shape: int) -> None:
    passes(attention_window_checks.same_bits, call, shape)


def test_a_bias_without_a_gradient(call: Any) -> None:
    passes(attention_window_checks.without_gradient_of_bias, call)
