"""The convolution along one dimension and its gradients, on the CPU emulator, by the checks that
are written for a GPU."""

from __future__ import annotations

import dataclasses
import random

import checks
import conv1d_checks
import emulator
import pytest
import torch
from checks import passes
from conv1d_checks import Sizes
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_emulated_attention_calls import called

from benchmarks.sm90 import relative
from fx_fuser.kernels import conv1d
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.conv1d import FORWARD, OF_WEIGHT

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


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [120], indirect=True)
def test_two_stages_where_three_do_not_fit(gpu: EmulatedGpu) -> None:
    failures: list[str] = []
    sizes = Sizes(1, 70, 1, (64, 64), 128, 64)
    conv1d_checks.check_forward(failures, sizes, BF16, random.Random(0))
    assert not failures, "\n".join(failures)


def test_infinities_and_nan() -> None:
    passes(conv1d_checks.not_numbers, Sizes(2, 70, 2, (8, 16), 19, 9), BF16)


def test_no_batch() -> None:
    passes(conv1d_checks.empty)


def test_refusals() -> None:
    passes(conv1d_checks.refusals)


# ---- as graphs call it ---------------------------------------------------------------------------


def calls(spec: str, of_weight: str) -> dict[str, tuple[object, ...]]:
    """Function → its arguments, with kernels of these names."""
    torch.manual_seed(0)
    x, dz = torch.randn(2, 30, 32, dtype=BF16), torch.randn(2, 31, 16, dtype=BF16)
    weight, bias = torch.randn(2, 20, 8, 16, dtype=BF16), torch.randn(16, dtype=BF16)
    given = x, dz, of_weight, 2, 10
    return {FORWARD: (x, weight, bias, spec, 10), OF_WEIGHT: given}


def test_as_graphs_call_it(gpu: EmulatedGpu) -> None:
    specs = conv1d.spec_of(8, BF16), conv1d.weight_spec_of(8, 16, BF16)
    for spec in specs:
        gpu.handle_of(spec)
    for function, given in calls(*(spec.name for spec in specs)).items():
        (found,), launches = called(function, *given)
        (wanted,) = run.IN_TORCH(*run.arguments(function, given))
        assert launches == 1 and found.stride() == wanted.stride()
        assert relative(found, wanted.double()) < 2**-7


def test_a_kernel_that_nobody_has_loaded_is_loaded(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the op's own call, as where Inductor's cache has the graph."""
    spec = dataclasses.replace(conv1d.spec_of(24, BF16), use="of this test")
    monkeypatch.setattr(conv1d, "offered", lambda: [spec])
    asked: list[KernelSpec] = []

    def prepare(specs: list[KernelSpec], _device: torch.device) -> None:
        asked.extend(specs)
        gpu.handle_of(specs[0])

    monkeypatch.setattr(load, "prepare", prepare)
    given = torch.randn(1, 30, 16, dtype=BF16), torch.randn(2, 17, 24, 8, dtype=BF16)
    (found,), launches = called(FORWARD, *given, None, spec.name, 8)
    assert asked == [spec] and launches == 1
    (wanted,) = run.IN_TORCH(*run.arguments(FORWARD, (*given, None, spec.name, 8)))
    assert relative(found, wanted.double()) < 2**-7


def test_the_library_runs_where_there_is_no_kernel(gpu: EmulatedGpu) -> None:
    """One warning, then no more; and what a kernel does not take."""
    with pytest.warns(UserWarning, match="leaves a convolution to the library"):
        for function, given in calls("no kernel", "no kernel either").items():
            (found,), launches = called(function, *given)
            (wanted,) = run.IN_TORCH(*run.arguments(function, given))
            assert launches == 0 and torch.equal(found, wanted)
    spec = conv1d.spec_of(8, BF16)
    gpu.handle_of(spec)
    x, *rest = calls(spec.name, "")[FORWARD]
    assert isinstance(x, torch.Tensor)
    (_,), launches = called(FORWARD, x.mT.contiguous().mT, *rest)
    assert launches == 0
