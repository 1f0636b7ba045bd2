"""The gemm of unaligned operands, on the CPU emulator, by the checks that are written
for a GPU. An inaccessible page lies directly after each tensor, or directly before it."""

from __future__ import annotations

import checks
import emulator
import pytest
import unaligned_checks
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 90), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, unaligned_checks))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("guard_ahead", [False, True])
def test_random_sizes_strides_and_operands(gpu: EmulatedGpu, guard_ahead: bool) -> None:
    emulator.Settings(guard_ahead=guard_ahead).use()
    passes(unaligned_checks.sweep, 60, 1 + guard_ahead, 15, 140, 150)


@pytest.mark.slow
def test_special_values(gpu: EmulatedGpu) -> None:
    passes(unaligned_checks.special_values)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(unaligned_checks.refusals)
