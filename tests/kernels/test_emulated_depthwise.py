"""The depthwise convolution in training and its gradients, on the CPU emulator, by the checks that
are written for a GPU."""

from __future__ import annotations

import dataclasses

import checks
import depthwise_gradient_checks
import emulator
import pytest
import torch
from checks import passes
from depthwise_gradient_checks import Sizes
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_emulated_attention_calls import called

from benchmarks.sm90 import relative
from fx_fuser.kernels.depthwise import training
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.depthwise import FORWARD, OF_INPUT, OF_WEIGHT

BF16, F16 = training.DTYPES
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 90), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, depthwise_gradient_checks))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_random_sizes(gpu: EmulatedGpu) -> None:
    passes(depthwise_gradient_checks.sweep, 12, gpu.capability, 25, training.WINDOWS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("stride", training.STRIDES)
@pytest.mark.parametrize("window", training.WINDOWS)
def test_windows(window: tuple[int, int], stride: int) -> None:
    """Of channels that are copied 16 bytes at a time, and of others; of more than a block has."""
    failures: list[str] = []
    side = window[0]
    for channels, padding, dtype in ((72, side // 2, BF16), (6, 0, F16), (40, side - 1, F16)):
        sizes = Sizes(2, channels, (side + 8, side + 6), window, (padding, padding), stride)
        depthwise_gradient_checks.check(failures, sizes, dtype)
    assert not failures, "\n".join(failures)


def test_a_small_convolution_and_its_gradients() -> None:
    failures: list[str] = []
    for channels in (6, 16):
        sizes = Sizes(2, channels, (9, 12), (3, 3), (1, 1), 2)
        depthwise_gradient_checks.check(failures, sizes, BF16)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_not_numbers() -> None:
    passes(depthwise_gradient_checks.not_numbers)


@pytest.mark.slow
def test_refusals() -> None:
    passes(depthwise_gradient_checks.refusals)


# ---- as graphs call it ---------------------------------------------------------------------------


def calls(forward: str, of_input: str, of_weight: str) -> list[tuple[str, tuple[object, ...]]]:
    """Functions and their arguments, with kernels of these names."""
    torch.manual_seed(0)
    x, dz = (
        torch.randn(2, 8, side, side).to(BF16, memory_format=torch.channels_last) for side in (9, 5)
    )
    weight, pair = torch.randn(8, 1, 3, 3).to(BF16), [1, 1]
    return [
        (FORWARD, (x, weight, forward, pair, 2, False)),
        (OF_INPUT, (dz, weight, of_input, pair, [9, 9])),
        (OF_WEIGHT, (x, dz, of_weight, pair, [3, 3], 2)),
    ]


KINDS = training.spec_of, training.input_spec_of, training.weight_spec_of


def test_as_graphs_call_it(gpu: EmulatedGpu) -> None:
    specs = [kind((3, 3), 2, BF16) for kind in KINDS]
    for spec in specs:
        gpu.handle_of(spec)
    for function, given in calls(*(spec.name for spec in specs)):
        (found,), launches = called(function, *given)
        (wanted,) = run.IN_TORCH(*run.arguments(function, given))
        assert launches == (2 if function == OF_WEIGHT else 1)
        assert found.stride() == wanted.stride() and relative(found, wanted.double()) < 2**-7


def test_a_kernel_that_nobody_has_loaded_is_loaded(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the op's own call, as where Inductor's cache has the graph. A window reversed."""
    spec = dataclasses.replace(training.input_spec_of((3, 3), 1, F16), use="of this test")
    monkeypatch.setattr(training, "offered", lambda: [spec])
    asked: list[KernelSpec] = []

    def prepare(specs: list[KernelSpec], _device: torch.device) -> None:
        asked.extend(specs)
        gpu.handle_of(specs[0])

    monkeypatch.setattr(load, "prepare", prepare)
    dz = torch.randn(1, 8, 9, 9).to(F16, memory_format=torch.channels_last)
    given = dz, torch.randn(8, 1, 3, 3).to(F16), spec.name, [1, 1], 1, True
    (found,), launches = called(FORWARD, *given)
    assert asked == [spec] and launches == 1
    (wanted,) = run.IN_TORCH(*run.arguments(FORWARD, given))
    assert relative(found, wanted.double()) < 2**-10


def test_the_library_runs_where_there_is_no_kernel() -> None:
    with pytest.warns(UserWarning, match="leaves a depthwise convolution to the library"):
        for function, given in calls("no kernel", "nor this", "nor that"):
            (found,), launches = called(function, *given)
            (wanted,) = run.IN_TORCH(*run.arguments(function, given))
            assert launches == 0 and torch.equal(found, wanted)
