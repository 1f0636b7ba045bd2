"""The 1 x 1 convolution with the statistics of its result, on the CPU emulator, by the checks that
are written for a GPU, as graphs call it."""

from __future__ import annotations

import dataclasses

import checks
import emulator
import pixels_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from pixels_checks import Sizes
from test_emulated_attention_calls import called

from fx_fuser.kernels import pixels
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.pixels import MOMENTS

BF16, F16 = pixels.DTYPES
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=3)
    in_place_of_cuda(made, monkeypatch, (checks, pixels_checks))
    for spec in pixels.offered():
        made.handle_of(spec)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_sizes(seed: int) -> None:
    passes(pixels_checks.sweep, called, 8, seed, 900, 400)


@pytest.mark.slow
def test_families() -> None:
    passes(pixels_checks.families, called, range(len(pixels.SHAPES)), 40, 72)


@pytest.mark.slow
def test_more_rounds_than_stages() -> None:
    """A worker has several tiles of several stages each, and of more than one tile of channels."""
    failures: list[str] = []
    for shape, of_shape in enumerate((Sizes(40, 5, 7, 200, 520), Sizes(40, 5, 7, 400, 264))):
        x, weight = pixels_checks.operands(of_shape, BF16)
        pixels_checks.check(failures, called, of_shape, x, weight, shape)
    assert not failures, "\n".join(failures)


def test_a_small_convolution() -> None:
    failures: list[str] = []
    sizes = Sizes(3, 5, 7, 72, 80)
    x, weight = pixels_checks.operands(sizes, BF16)
    for shape in (1, 3):
        pixels_checks.check(failures, called, sizes, x, weight, shape)
    assert not failures, "\n".join(failures)


def test_refusals() -> None:
    passes(pixels_checks.refusals, called)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("copies", ["at once", "late"])
def test_schedules(order: str, copies: str) -> None:
    emulator.Settings(order, copies, seed=3).use()
    failures: list[str] = []
    sizes = Sizes(11, 5, 7, 136, 200)
    for shape in range(len(pixels.SHAPES)):
        x, weight = pixels_checks.operands(sizes, F16)
        pixels_checks.check(failures, called, sizes, x, weight, shape)
    assert not failures, "\n".join(failures)


def test_a_kernel_that_nobody_has_loaded_is_loaded(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the op's own call, as where Inductor's cache has the graph."""
    spec = dataclasses.replace(pixels.spec_of(BF16), use="of this test")
    monkeypatch.setattr(pixels, "offered", lambda: [spec])
    asked: list[KernelSpec] = []

    def prepare(specs: list[KernelSpec], _device: torch.device) -> None:
        asked.extend(specs)
        gpu.handle_of(specs[0])

    monkeypatch.setattr(load, "prepare", prepare)
    x, weight = pixels_checks.operands(Sizes(1, 3, 5, 16, 8), BF16)
    _, launches = called(MOMENTS, x, weight, spec.name, 1)
    assert asked == [spec] and launches == pixels_checks.LAUNCHES


def test_the_library_runs_where_there_is_no_kernel() -> None:
    x, weight = pixels_checks.operands(Sizes(1, 3, 5, 16, 8), BF16)
    with pytest.warns(UserWarning, match="leaves a convolution to the library"):
        found, launches = called(MOMENTS, x, weight, "no kernel of pixels", 1)
    wanted = run.IN_TORCH(*run.arguments(MOMENTS, (x, weight, "no kernel of pixels", 1)))
    assert launches == 0 and all(map(torch.equal, found, wanted))
