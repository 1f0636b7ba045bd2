"""Attention with a bias, on the CPU emulator, by the checks that are written for a GPU."""

from __future__ import annotations

import attention_bias_backward_checks
import attention_bias_checks
import checks
import emulator
import pytest
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
shapes = pytest.mark.parametrize("shape", attention_bias_checks.SHAPES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, attention_bias_checks))
    return made


@pytest.mark.slow
@shapes
def test_random_sizes_and_strides(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_checks.sweep, 8, shape, shape, 260)


@pytest.mark.slow
@shapes
def test_hard_biases(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_checks.hard_biases, shape)


@pytest.mark.slow
@shapes
def test_not_numbers(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_checks.not_numbers, shape)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(attention_bias_checks.refusals)


@pytest.mark.slow
@shapes
def test_random_gradients(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_backward_checks.sweep, 8, shape, shape, 260)


@pytest.mark.slow
@shapes
def test_gradients_of_what_is_hidden(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_backward_checks.hidden, shape)


def test_refusals_of_the_backward(gpu: EmulatedGpu) -> None:
    passes(attention_bias_backward_checks.refusals)
