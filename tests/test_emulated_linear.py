"""The split product by mma.sync on the CPU emulator, in the forms of every architecture."""

from __future__ import annotations

import random

import emulator
import pytest
import torch
from emulator.device import EmulatedGpu, in_place_of_cuda

from benchmarks import linear_mma, linear_sm90, narrow_sm90, sm90, split_planes_sm90

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
CAPABILITIES = (80, 86, 90, 120)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 80), multiprocessors=3)
    in_place_of_cuda(made, monkeypatch, (linear_mma, linear_sm90, narrow_sm90, sm90, split_planes_sm90))
    return made


def small(choose: random.Random) -> tuple[int, int, int]:
    return choose.randint(1, 150), choose.randint(1, 150), choose.choice((choose.randint(1, 40), 97, 172))


@pytest.mark.parametrize("gpu", CAPABILITIES, indirect=True)
def test_special(gpu) -> None:
    failures: list[str] = []
    linear_sm90.special_values(failures, sizes=(70, 40, 108))
    assert not failures


@pytest.mark.parametrize("gpu", CAPABILITIES, indirect=True)
def test_small_planes(gpu) -> None:
    failures: list[str] = []
    split_planes_sm90.sweep(6, 0, failures, small)
    assert not failures
