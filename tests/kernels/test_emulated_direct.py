"""The direct convolution of Hopper on the CPU emulator, forward and backward, by the checks that it
passes on a GPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import checks
import conv_backward_checks
import conv_checks
import conv_direct_checks
import emulator
import pytest
import torch
from checks import passes
from conv_checks import small_case
from emulator.device import EmulatedGpu, in_place_of_cuda
from torch import Tensor

from benchmarks import conv_backward_sm90, conv_sm90
from benchmarks.conv_cases import Padding
from benchmarks.conv_sm90 import DTYPES, IDENTITY, NORM, Example, of_dtype
from benchmarks.measure import float32_settings
from fx_fuser.kernels.direct import conv_direct_backward_cut, conv_direct_cut
from fx_fuser.native.kernel_spec import KernelSpec

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
MODULES = (
    checks, conv_checks, conv_sm90, conv_direct_checks, conv_backward_sm90, conv_backward_checks
)  # fmt: skip
MULTIPROCESSORS = 3
# The default run has 16 bits alone: fp32's kernels take g++ a minute. With any operands, and none:
# with those of a channel alone storing is only copying, and random ones are seldom all such.
FORWARD = (of_dtype(NORM, torch.bfloat16), of_dtype(IDENTITY, torch.bfloat16))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def of_backward(dtypes: Sequence[torch.dtype]) -> list[KernelSpec]:
    kinds = (conv_backward_sm90.IDENTITY, conv_backward_sm90.SCALED)
    return [of_kind[dtype] for of_kind in kinds for dtype in dtypes]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The default run's kernels, compiled at once."""
    specs = [example.spec for example in FORWARD] + of_backward([torch.bfloat16])
    emulator.build([(spec, 90) for spec in specs])


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, getattr(request, "param", MULTIPROCESSORS))
    in_place_of_cuda(made, monkeypatch, MODULES)
    return made


def check_forward(cases: int, seed: int, examples: Sequence[Example]) -> None:
    passes(conv_direct_checks.sweep, cases, seed, small_case, examples)


def check_backward(cases: int, seed: int, dtypes: Sequence[torch.dtype]) -> None:
    with float32_settings("fp32"):
        passes(conv_backward_checks.sweep, cases, seed, small_case, dtypes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [*FORWARD, pytest.param(IDENTITY, marks=pytest.mark.slow)],
    ids=lambda e: f"{e.name}-{e.x}",
)
def test_forward_and_statistics(gpu: EmulatedGpu, example: Example) -> None:
    check_forward(4, 0, (example,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)],
    ids=str,
)
def test_backward(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    check_backward(3, 1, (dtype,))


@pytest.mark.slow
def test_forward_of_every_epilogue(gpu: EmulatedGpu) -> None:
    examples = (*conv_direct_checks.EXAMPLES, *conv_direct_checks.HALF_EXAMPLES)
    gpu.prepare([example.spec for example in examples])
    check_forward(20, 1, examples)


@pytest.mark.slow
def test_backward_of_every_dtype(gpu: EmulatedGpu) -> None:
    gpu.prepare(of_backward(DTYPES))
    check_backward(12, 2, DTYPES)


def long_case(_: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Padding]:
    """More units for one multiprocessor than a ring has slots."""
    sizes = (2, 3, 40, 40), (5, 3, 3, 3), (1, 1, 1, 1)
    units, _, _, _, _, slots, *_ = conv_direct_backward_cut(*sizes, True, 1, x_bytes=dtype.itemsize)
    assert units > 3 * slots
    return torch.randn(sizes[0]).to(dtype), torch.randn(sizes[1]).to(dtype), sizes[2]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [1], indirect=True)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_rings_that_are_used_again(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(conv_direct_checks.sweep, 2, 0, long_case, (of_dtype(IDENTITY, dtype),))
    with float32_settings("fp32"):
        passes(conv_backward_checks.sweep, 3, 0, long_case, (dtype,))


def wide_case(choose: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Padding]:
    """Cut into wide units of statistics or, in 16 bits, units that share slots."""
    out_bytes = choose.choice((0, 2)) if dtype.itemsize == 2 else 0
    images = 2 if out_bytes == 2 else 4
    sizes = (images, 8, 12, 20), (choose.choice((8, 72)), 8, 3, 3), (1, 1, 1, 1)
    cut = functools.partial(conv_direct_cut, *sizes, out_bytes, 0, dtype.itemsize)
    assert cut(2**20) != cut(MULTIPROCESSORS)
    return torch.randn(sizes[0]).to(dtype), torch.randn(sizes[1]).to(dtype), sizes[2]


@pytest.mark.slow
def test_wide_units(gpu: EmulatedGpu) -> None:
    passes(conv_direct_checks.sweep, 8, 2, wide_case, (IDENTITY, *FORWARD))


@pytest.mark.slow
@every_dtype
def test_special_values(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(conv_direct_checks.special_values, dtype, size=(21, 23), wide=(3, 8, 124, 124))


@pytest.mark.slow
@every_dtype
def test_special_gradients(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(conv_backward_checks.special_values, dtype, size=(12, 23))


@pytest.mark.each_once
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_extreme_factors(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(conv_backward_checks.extreme_factors, dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_extreme_variances(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(conv_backward_checks.extreme_variances, dtype)


@pytest.mark.slow
def test_refusals(gpu: EmulatedGpu) -> None:
    for check in (conv_direct_checks.refusals, conv_backward_checks.refusals):
        passes(check)
