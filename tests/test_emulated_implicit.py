"""The implicit gemm on the CPU emulator: as its tests on a GPU."""

from __future__ import annotations

import emulator
import pytest
from emulator.device import EmulatedGpu, in_place_of_cuda

from benchmarks import conv_cases, conv_sm90, implicit, sm90
from benchmarks.conv_sm90 import HALVES

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 90), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (conv_cases, conv_sm90, implicit, sm90))
    return made


@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_random_sizes_and_operands(gpu) -> None:
    failures: list[str] = []
    implicit.sweep(10, gpu.capability, failures, side=9)
    assert not failures


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_special_values(gpu, dtype) -> None:
    failures: list[str] = []
    implicit.special_values(failures, dtype)
    assert not failures


def test_refusals(gpu) -> None:
    failures: list[str] = []
    implicit.refusals(failures)
    assert not failures
