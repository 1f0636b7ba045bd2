"""The convolution along one dimension and its gradients, on the CPU emulator, by the checks that
are written for a GPU."""

from __future__ import annotations

import random

import checks
import conv1d_checks
import emulator
import pytest
from checks import passes
from conv1d_checks import Sizes
from emulator.device import EmulatedGpu, in_place_of_cuda

from fx_fuser.kernels import conv1d

BF16, F16 = conv1d.DTYPES
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 90), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, conv1d_checks))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_random_sizes_and_strides(gpu: EmulatedGpu) -> None:
    passes(conv1d_checks.sweep, 10, gpu.capability, 150, 48)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [8, 24, 48, 64, 80, 128])
def test_channels(channels: int) -> None:
    failures: list[str] = []
    for taps, padding in ((33, 16), (1, 0), (18, 0)):
        sizes = Sizes(1, 70, 2, (channels, channels), taps, padding)
        conv1d_checks.check_forward(failures, sizes, BF16, random.Random(0))
        conv1d_checks.check_weight(failures, sizes, F16, random.Random(0))
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("taps", conv1d_checks.TAPS)
def test_taps(taps: int) -> None:
    failures: list[str] = []
    sizes = Sizes(1, 131, 1, (16, 8), taps, taps // 2)
    conv1d_checks.check_forward(failures, sizes, F16, random.Random(0))
    conv1d_checks.check_weight(failures, sizes, BF16, random.Random(0))
    conv1d_checks.gradient_by_x(failures, sizes, BF16)
    assert not failures, "\n".join(failures)


def test_a_small_convolution_and_its_gradients() -> None:
    failures: list[str] = []
    sizes = Sizes(2, 37, 2, (16, 8), 35, 17)
    conv1d_checks.check_forward(failures, sizes, BF16, random.Random(0))
    conv1d_checks.check_weight(failures, sizes, BF16, random.Random(0))
    conv1d_checks.gradient_by_x(failures, sizes, BF16)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_wav2vec2_for_one_group() -> None:
    failures: list[str] = []
    sizes = Sizes(2, 249, 1, (48, 48), 128, 64)
    conv1d_checks.check_forward(failures, sizes, BF16, random.Random(0))
    conv1d_checks.check_weight(failures, sizes, BF16, random.Random(0))
    conv1d_checks.gradient_by_x(failures, sizes, BF16)
    assert not failures, "\n".join(failures)


def test_infinities_and_nan() -> None:
    passes(conv1d_checks.not_numbers, Sizes(2, 70, 2, (8, 16), 19, 9), BF16)


def test_no_batch() -> None:
    passes(conv1d_checks.empty)


def test_refusals() -> None:
    passes(conv1d_checks.refusals)
