"""Planes on the CPU emulator, by the checks that are written for a GPU."""

from __future__ import annotations

import random

import checks
import emulator
import planes_checks
import pytest
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

from benchmarks import linear_sm90, sm90

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=4)
    in_place_of_cuda(made, monkeypatch, (checks, linear_sm90, planes_checks, sm90))
    return made


def test_planes() -> None:
    passes(planes_checks.planes)


def small(choose: random.Random) -> tuple[int, int, int]:
    return choose.randint(1, 300), choose.randint(1, 300), choose.randint(1, 200)


@pytest.mark.slow
def test_products_of_planes() -> None:
    passes(planes_checks.products, 70, 90, 200)


@pytest.mark.slow
@pytest.mark.parametrize("form", planes_checks.FORMS)
def test_random_sizes_and_epilogues(form: tuple[bool, bool]) -> None:
    passes(planes_checks.sweep, 12, 0, small, planes_checks.EXAMPLES, (form,))


@pytest.mark.slow
def test_several_tiles_of_a_block() -> None:
    passes(planes_checks.sweep, 4, 1, lambda choose: (choose.randint(500, 700), 530, 40))


@pytest.mark.slow
def test_the_contract_on_data_that_breaks_planes() -> None:
    passes(planes_checks.contract, 40, 48, 64)


@pytest.mark.slow
def test_the_contract_on_more_k() -> None:
    passes(planes_checks.contract, 40, 48, 1024)


@pytest.mark.slow
def test_repairs() -> None:
    passes(planes_checks.repairs)


@pytest.mark.slow
def test_special_values() -> None:
    passes(planes_checks.special_values)
