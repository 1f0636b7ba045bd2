"""The gemm of unaligned operands by TMA, on the CPU emulator, by the checks that are written for a
GPU. An inaccessible page lies directly after each tensor, or directly before it."""

from __future__ import annotations

import checks
import combs_checks
import emulator
import pytest
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=4)
    in_place_of_cuda(made, monkeypatch, (checks, combs_checks))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shape", range(4))
def test_random_sizes_and_pitches(gpu: EmulatedGpu, shape: int) -> None:
    passes(combs_checks.sweep, 12, shape, (shape,), 700, 260)


@pytest.mark.slow
def test_several_tiles_of_a_comb(gpu: EmulatedGpu) -> None:
    passes(combs_checks.sweep, 4, 1, (0, 1), 300, 90, 2100)


@pytest.mark.slow
def test_special_values(gpu: EmulatedGpu) -> None:
    passes(combs_checks.special_values)


@pytest.mark.slow
def test_the_last_lines(gpu: EmulatedGpu) -> None:
    passes(combs_checks.last_lines, 72, 57)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(combs_checks.refusals)
