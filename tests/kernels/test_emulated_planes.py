"""Planes on the CPU emulator, by the checks that are written for a GPU."""

from __future__ import annotations

import checks
import emulator
import planes_checks
import pytest
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=4)
    in_place_of_cuda(made, monkeypatch, (checks, planes_checks))
    return made


def test_planes() -> None:
    passes(planes_checks.planes)
