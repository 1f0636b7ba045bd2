"""The 16-bit dense gemm on the CPU emulator, which has no TF32, by the checks that it passes on
a GPU."""

from __future__ import annotations

import random

import checks
import emulator
import linear_dense_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

from benchmarks import linear_dense_sm90

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=4)
    in_place_of_cuda(made, monkeypatch, (checks, linear_dense_checks, linear_dense_sm90))
    monkeypatch.setattr(linear_dense_checks, "DTYPES", (torch.bfloat16, torch.float16))
    return made


def small(choose: random.Random) -> tuple[int, int, int]:
    return choose.choice((1, 17, 65, 150, 300)), choose.randint(1, 400), choose.randint(1, 200)


@pytest.mark.slow
def test_random_sizes_and_epilogues() -> None:
    passes(linear_dense_checks.sweep, 25, 0, small)


@pytest.mark.slow
def test_special_values() -> None:
    passes(linear_dense_checks.special_values)


@pytest.mark.slow
def test_refusals() -> None:
    passes(linear_dense_checks.refusals)
