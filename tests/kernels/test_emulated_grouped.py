"""The grouped convolution on the CPU emulator, by the checks that are written for a GPU."""

from __future__ import annotations

import dataclasses

import checks
import conv_checks
import emulator
import grouped_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_emulated_attention_calls import called

from benchmarks import conv_sm90, grouped, sm90
from benchmarks.grouped import Form, Layer
from fx_fuser.kernels import grouped as of_kernels
from fx_fuser.kernels.grouped import spec_of, weight_spec_of
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.grouped import FORWARD, OF_INPUT, OF_WEIGHT

BF16 = torch.bfloat16
EMULATED = torch._C.DispatchKey.PrivateUse1  # the shim's host code of the emulated device
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
MODULES = (checks, conv_checks, conv_sm90, grouped, grouped_checks)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 90), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, MODULES)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [1, 2, 3, 4])
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_random_sizes_and_operands(gpu: EmulatedGpu, tiles: int) -> None:
    few = [one for one in grouped_checks.EXAMPLES if one[1].tiles == tiles][::2]
    gpu.prepare([grouped.spec_of(*one) for one in few])
    passes(grouped_checks.sweep, 12, gpu.capability, side=9, examples=few)


@pytest.mark.slow
@pytest.mark.each_once
def test_groups_of_every_divisor(gpu: EmulatedGpu) -> None:
    passes(grouped_checks.divisors, 240, 5)


@pytest.mark.slow
def test_tiles_do_not_matter(gpu: EmulatedGpu) -> None:
    passes(grouped_checks.tiles, 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_gradients(gpu: EmulatedGpu) -> None:
    passes(grouped_checks.gradients, 30, gpu.capability, side=9)


HALVES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_special_values(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(grouped_checks.special_values, dtype)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(grouped_checks.refusals)


@pytest.mark.slow
@pytest.mark.parametrize("save", [False, True])
def test_the_op_that_graphs_call(gpu: EmulatedGpu, save: bool) -> None:
    """Its leaves are in the kernel's order, its results in the layout of x."""
    timed = grouped.Timed(Layer(48, 2, 9, 2), torch.device("cpu"), samples=2)
    specs = timed.specs()
    for spec in specs:
        gpu.handle_of(spec)
    call = timed.call("grouped")
    arguments = (*timed.operands().values(), *call.config.values())
    tail = (call.epilogue.text, [], [], [spec.name for spec in specs], torch.bfloat16, save)
    given = run.arguments("conv2d_batchnorm", (*arguments, *tail))
    launches = emulator.ops.launches.default()
    with emulator.memory():
        y, *saved = (v.clone() for v in run.MANY._op_dk(EMULATED, *given))
    assert emulator.ops.launches.default() == launches + 1
    assert y.stride() == timed.out.stride()
    assert sm90.relative(y, timed.exact()) <= conv_sm90.ROUNDED[torch.bfloat16]
    assert len(saved) == save
    for c in saved:
        exact = grouped_checks.convolve(
            timed.x.double(), timed.weight.double(), timed.window, timed.layer.groups
        )
        assert c.stride() == timed.out.stride()
        assert sm90.relative(c, exact) <= conv_sm90.ROUNDED[torch.bfloat16]


def test_forms() -> None:
    assert Form.of(24, 24, 4) == Form(3, False, 4)
    assert Form.of(4, 4, 0) == Form(1, True, 0)
    assert Form.of(40, 40, 0) == Form(3, False, 0)
    assert Form.of(64, 64, 0) == Form(4, False, 0)


# ---- as Inductor's graphs call it ----------------------------------------------------------------


def calls(forward: str, of_input: str, of_weight: str) -> list[tuple[str, tuple[object, ...]]]:
    """Functions and their arguments, with kernels of these names."""
    torch.manual_seed(0)
    x, dz = (
        torch.randn(2, 16, side, side).to(BF16, memory_format=torch.channels_last)
        for side in (9, 5)
    )
    weight = torch.randn(16, 8, 3, 3).to(BF16)
    numbers = [2, 2], [1, 1], [1, 1], 2
    return [
        (FORWARD, (x, weight, forward, *numbers)),
        (OF_INPUT, (dz, weight, of_input, *numbers, [9, 9])),
        (OF_WEIGHT, (x, dz, of_weight, *numbers, [3, 3], True)),
        (OF_WEIGHT, (x, dz, of_weight, *numbers, [3, 3], False)),
    ]


LAUNCHES = {FORWARD: 1, OF_INPUT: 4, OF_WEIGHT: 2}


def test_as_graphs_call_it(gpu: EmulatedGpu) -> None:
    specs = [kind(8, 8, BF16) for kind in (spec_of, spec_of, weight_spec_of)]
    for spec in specs:
        gpu.handle_of(spec)
    for function, given in calls(*(spec.name for spec in specs)):
        (found,), launches = called(function, *given)
        (wanted,) = run.IN_TORCH(*run.arguments(function, given))
        assert launches == LAUNCHES[function]
        assert found.stride() == wanted.stride() and sm90.relative(found, wanted.double()) < 2**-7


def test_a_kernel_that_nobody_has_loaded_is_loaded(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the op's own call, as where Inductor's cache has the graph."""
    spec = dataclasses.replace(spec_of(8, 8, BF16), use="of this test")
    monkeypatch.setattr(of_kernels, "offered", lambda: [spec])
    asked: list[KernelSpec] = []

    def prepare(specs: list[KernelSpec], _device: torch.device) -> None:
        asked.extend(specs)
        gpu.handle_of(specs[0])

    monkeypatch.setattr(load, "prepare", prepare)
    function, given = calls(spec.name, "", "")[0]
    _, launches = called(function, *given)
    assert asked == [spec] and launches == 1


def test_the_library_runs_where_there_is_no_kernel(gpu: EmulatedGpu) -> None:
    with pytest.warns(UserWarning, match="leaves a grouped convolution to the library"):
        for function, given in calls("no grouped kernel", "nor this one", "nor that one"):
            (found,), launches = called(function, *given)
            (wanted,) = run.IN_TORCH(*run.arguments(function, given))
            assert launches == 0 and torch.equal(found, wanted)
