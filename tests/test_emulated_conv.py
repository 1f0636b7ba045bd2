"""The depthwise, first layers' and folding kernels on the CPU emulator: as their tests on a GPU."""

from __future__ import annotations

import emulator
import pytest
import torch
from emulator.device import EmulatedGpu, in_place_of_cuda

from benchmarks import conv_cases, conv_sm90, depthwise, sm90, stem
from benchmarks.measure import float32_settings
from fx_fuser.ops import folded

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 80), multiprocessors=3)
    in_place_of_cuda(made, monkeypatch, (conv_cases, conv_sm90, depthwise, sm90, stem))
    return made


def test_depthwise_sweep(gpu) -> None:
    failures: list[str] = []
    depthwise.sweep(20, 0, failures, side=20)
    assert not failures

@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
def test_depthwise_special(gpu, dtype) -> None:
    failures: list[str] = []
    depthwise.special_values(failures, dtype)
    assert not failures

def test_stem_sweep(gpu) -> None:
    failures: list[str] = []
    stem.sweep(10, 0, failures, side=30)
    assert not failures

@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
def test_stem_special(gpu, dtype) -> None:
    failures: list[str] = []
    stem.special_values(failures, dtype)
    assert not failures
