"""Attention by fp16 halves, on the CPU emulator, by the checks that are written for a GPU. An
inaccessible page lies directly after each tensor, or directly before it."""

from __future__ import annotations

import attention_checks
import checks
import emulator
import pytest
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, attention_checks))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_random_sizes_and_strides(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_checks.sweep, 6, shape, shape, 260)


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_hard_values(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_checks.hard_values, shape)


@pytest.mark.parametrize(  # by default the shape whose queries' lo is in shared memory
    "shape",
    [s if s == 1 else pytest.param(s, marks=pytest.mark.slow) for s in attention_checks.SHAPES],
)
def test_one_key(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_checks.one_key, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_special_values(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_checks.special_values, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_few_last_keys(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_checks.few_last_keys, shape)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(attention_checks.refusals)
