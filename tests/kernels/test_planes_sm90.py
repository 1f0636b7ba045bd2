"""Planes in fp16 and products from them on a GPU: what passes on the emulator, and more of it."""

from __future__ import annotations

import planes_checks
import pytest
from checks import passes
from sm90 import gpu

from benchmarks.sm90 import CUDA
from fx_fuser.kernels.planes import PLANES
from fx_fuser.native import load


@pytest.fixture(autouse=True)
def built() -> None:
    load.prepare([PLANES], CUDA)


@gpu
def test_planes() -> None:
    passes(planes_checks.planes)


@gpu
@pytest.mark.parametrize("k", [64, 1024, 8192, 65536])
def test_the_contract(k: int) -> None:
    passes(planes_checks.contract, 256, 256, k)


@gpu
def test_products() -> None:
    passes(planes_checks.products, 700, 900, 2000)


@gpu
def test_repairs() -> None:
    passes(planes_checks.repairs)


@gpu
def test_special_values() -> None:
    passes(planes_checks.special_values)


@gpu
def test_repeats() -> None:
    passes(planes_checks.repeats)
