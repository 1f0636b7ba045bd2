"""The split product by mma.sync on the CPU emulator, in the forms of every architecture, by the
checks that it passes on Hopper."""

from __future__ import annotations

import random
from ctypes import CDLL

import checks
import emulator
import linear_split_checks
import narrow_checks
import pytest
import split_planes_checks
import torch
from checks import misleading, passes
from emulator.device import EmulatedGpu, emulated, in_place_of_cuda

from benchmarks import linear_sm90, narrow_sm90
from benchmarks.linear_sm90 import IDENTITY
from benchmarks.sm90 import FLOOR, n_major, relative

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
MODULES = (checks, linear_sm90, linear_split_checks, narrow_checks, split_planes_checks)
SLOW = {"marks": pytest.mark.slow}
COMBINATION = {"marks": (pytest.mark.slow, pytest.mark.combination)}
# Stages in shared memory are 4, 2, 2, 6, 6 and 2; from 90 on there are clusters, and on 90 and 100
# a stage's first operands are read early. The form of 90 has run on a GPU.
CAPABILITIES = (80, 86, *(pytest.param(c, **SLOW) for c in (89, 90, 100)), 120)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 80), multiprocessors=3)
    in_place_of_cuda(made, monkeypatch, MODULES)
    return made


every_gpu = pytest.mark.parametrize("gpu", CAPABILITIES, indirect=True)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The default run's forms, compiled at once."""
    emulator.build([(emulated(IDENTITY.spec), capability) for capability in (80, 120)])


@pytest.mark.slow
@every_gpu
def test_tiles_and_layouts(gpu: EmulatedGpu) -> None:
    """Edges in all dimensions, more tiles than blocks, k of few and of many stages."""
    for m, n, k in ((130, 257, 36), (260, 150, 97), (5, 3, 420)):
        x, weight = torch.randn(m, k), torch.randn(n, k)
        exact = x.double() @ weight.double().T
        # Between these rows, and between the columns of their transpose, is NaN.
        gaps = narrow_checks.in_aligned_rows(weight), narrow_checks.in_aligned_rows(weight.T).T
        for b in (*gaps, weight):
            assert relative(linear_sm90.run(IDENTITY, x, b, chunks=1, first="x"), exact) <= FLOOR


def small(choose: random.Random) -> tuple[int, int, int]:
    m, n = choose.randint(1, 150), choose.randint(1, 150)
    return m, n, choose.choice((choose.randint(1, 40), 97, 172))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80], indirect=True)
def test_batches_and_chunks(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_planes_checks, "EXAMPLES", (IDENTITY,))
    passes(split_planes_checks.sweep, 6, 0, small)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gpu", [80], indirect=True)
def test_chunks_are_of_the_library_that_all_tails_have(gpu: EmulatedGpu) -> None:
    x, weight = torch.randn(40, 300), torch.randn(50, 300)
    exact = x.double() @ weight.double().T
    for b in (weight, n_major(weight)):
        assert relative(linear_sm90.run(IDENTITY, x, b, first="x", chunks=3), exact) <= FLOOR
    ((own, common),) = emulator.build([(emulated(IDENTITY.spec), gpu.capability)])
    for kernel in ("chunk", "chunk_n_major", "rows", "columns"):
        has = [
            hasattr(CDLL(str(p)), f"emulated_fx_fuser_linear_split_{kernel}") for p in (own, common)
        ]
        assert has == [False, True], kernel


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_every_epilogue(gpu: EmulatedGpu) -> None:
    passes(split_planes_checks.sweep, 15, 1, small)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu", (86, *(pytest.param(c, **SLOW) for c in (80, 90, 120))), indirect=True
)
def test_special_values(gpu: EmulatedGpu) -> None:
    passes(linear_split_checks.special_values, sizes=(70, 40, 108))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "first"),
    [
        pytest.param(86, "weight"),
        pytest.param(90, "x"),
        pytest.param(80, "x", **COMBINATION),
        pytest.param(120, "weight", **COMBINATION),
    ],
    indirect=["gpu"],
)
def test_wrong_guesses(gpu: EmulatedGpu, first: linear_sm90.First) -> None:
    """Tiles that are computed again: one, some and all of a block's."""
    m, n, k = 150, 300, 300
    x = torch.randn(m, k)
    for what, weight in misleading(n, k):
        exact = x.double() @ weight.double().T
        for b in (weight, n_major(weight)):
            a, b = (x, b) if first == "x" else (b, x)
            found = linear_sm90.run(IDENTITY, a, b, first=first, chunks=1)
            found = found if first == "x" else found.T
            assert relative(found, exact) <= FLOOR, what


@pytest.mark.slow
def test_more_k_than_one_sum_takes(gpu: EmulatedGpu) -> None:
    x, weight = torch.randn(3, 65536 + 36), torch.randn(2, 65536 + 36)
    exact = x.double() @ weight.double().T
    assert relative(linear_sm90.run(IDENTITY, x, weight, first="x", chunks=1), exact) <= FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 120], indirect=True)
def test_one_operand_of_16_bits(gpu: EmulatedGpu) -> None:
    for way in ("mixed x", "mixed weight"):
        for dtype in narrow_sm90.DTYPES:
            x, weight = narrow_sm90.cast(way, dtype, torch.randn(140, 200), torch.randn(70, 200))
            exact = x.double() @ weight.double().T
            for chunks in (1, 3):
                found = narrow_sm90.by_kernel(way, dtype, x, weight, None, chunks)
                assert relative(found, exact) <= FLOOR, (way, dtype, chunks)
