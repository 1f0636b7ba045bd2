"""The backward of attention by fp16 halves, on the CPU emulator, by the checks that are written for
a GPU. An inaccessible page lies directly after each tensor, or directly before it."""

from __future__ import annotations

import attention_backward_checks
import attention_checks
import checks
import emulator
import pytest
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
# By default one shape; the other two differ from each other only in slots.
FEW = [0, *(pytest.param(s, marks=pytest.mark.slow) for s in attention_backward_checks.SHAPES[1:])]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, attention_checks, attention_backward_checks))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_backward_checks.SHAPES)
def test_random_sizes_and_strides(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_backward_checks.sweep, 5, shape, shape, 260)


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_backward_checks.SHAPES)
def test_hard_values(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_backward_checks.hard_values, shape, keys=130)


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_backward_checks.SHAPES)
def test_special_values(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_backward_checks.special_values, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_backward_checks.SHAPES)
def test_few_last_lines(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_backward_checks.few_last_lines, shape)


@pytest.mark.parametrize("shape", FEW)
def test_rounding_of_lse(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_backward_checks.rounding_of_lse, shape)


@pytest.mark.parametrize("shape", FEW)
def test_lengths(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_backward_checks.lengths, shape)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(attention_backward_checks.refusals)
