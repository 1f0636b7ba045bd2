"""Gathers along rows on the CPU emulator: as graphs call them, through the shim's host code."""

from __future__ import annotations

from typing import Any

import emulator
import gather_rows_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu
from test_emulated_attention_calls import called
from torch import Tensor

from fx_fuser.kernels.attention import gathered

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_rows_checks, "CUDA", "cpu")


@pytest.fixture(params=[pytest.param(80, marks=pytest.mark.slow), 90])
def call(request: pytest.FixtureRequest) -> Any:
    """A function by two schedules, which must agree bit for bit."""
    gpu = EmulatedGpu(request.param, multiprocessors=2)
    names = {spec.name: spec for spec in gathered.offered()}

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


def test_the_order_of_sums(call: Any) -> None:
    passes(gather_rows_checks.in_order, call)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_random_sizes(call: Any, seed: int) -> None:
    passes(gather_rows_checks.sweep, call, seed, 4)
