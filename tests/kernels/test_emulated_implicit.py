"""The implicit gemm on the CPU emulator, by the checks that are written for a GPU."""

from __future__ import annotations

import checks
import conv_checks
import emulator
import implicit_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

from benchmarks import conv_sm90, implicit, sm90
from benchmarks.conv_layers import Layer
from fx_fuser.ops import run

EMULATED = torch._C.DispatchKey.PrivateUse1  # the shim's host code of the emulated device
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
MODULES = (checks, conv_checks, conv_sm90, implicit, implicit_checks)

GPUS = [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 100, 120))]


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """They differ in shared memory, so in how many of the weights a block keeps."""
    made = EmulatedGpu(getattr(request, "param", 90), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, MODULES)
    return made


def check(gpu: EmulatedGpu, cases: int, side: int) -> None:
    gpu.prepare([implicit.spec_of(*one) for one in implicit_checks.EXAMPLES])
    passes(implicit_checks.sweep, cases, gpu.capability, side=side)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, indirect=True)
def test_random_sizes_and_operands(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers of columns, with and without a window, each kind of operand, and leaves."""
    few = [one for one in implicit_checks.EXAMPLES if one[1].columns in (32, 96)][::3]
    assert {form.is_window for _, form in few} == {False, True}
    monkeypatch.setattr(implicit_checks, "EXAMPLES", few)
    check(gpu, 12, 9)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("gpu", [80, 90, 100, 120], indirect=True)
def test_every_kernel(gpu: EmulatedGpu) -> None:
    check(gpu, 100, 20)


HALVES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_special_values(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(implicit_checks.special_values, dtype)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(implicit_checks.refusals)


@pytest.mark.slow
@pytest.mark.parametrize("save", [False, True])
def test_the_op_that_graphs_call(gpu: EmulatedGpu, save: bool) -> None:
    """Its leaves and operands are in the kernel's order, its results in the layout of x."""
    layer = Layer(16, 40, 7, 3, 2, "add, relu")
    timed = implicit.Timed(layer, torch.device("cpu"), samples=2)
    specs = timed.specs()
    for spec in specs:
        gpu.handle_of(spec)
    call = timed.call("implicit")
    arguments = (*timed.operands().values(), *call.config.values())
    tail = (call.epilogue.text, timed.t, [], [spec.name for spec in specs], torch.bfloat16, save)
    given = run.arguments("conv2d_batchnorm", (*arguments, *tail))
    launches = emulator.ops.launches.default()
    with emulator.memory():
        y, *saved = (v.clone() for v in run.MANY._op_dk(EMULATED, *given))
    assert emulator.ops.launches.default() == launches + 1
    for _ in range(2):  # the text is read, then known
        with emulator.memory():
            assert torch.equal(run.ONE._op_dk(EMULATED, *given), y)
    assert emulator.ops.launches.default() == launches + 3
    assert y.stride() == timed.out.stride()
    assert sm90.relative(y, timed.exact()) <= conv_sm90.ROUNDED[torch.bfloat16]
    assert len(saved) == save
    for c in saved:
        exact = timed.window.convolve(timed.x.double(), timed.weight.double())
        assert c.stride() == timed.out.stride()
        assert sm90.relative(c, exact) <= conv_sm90.ROUNDED[torch.bfloat16]


BATCHED = "bmm t t s7:library s0: b0 s0: #0 #0 #0 dfloat b0"


@pytest.mark.parametrize(
    "program, tensors",
    [
        ("", 2),
        ("softmax t t", 2),
        (BATCHED.removesuffix(" b0"), 2),  # an argument too few
        (f"{BATCHED} b0", 2),
        (BATCHED.replace("s7:", "s700:"), 2),
        (BATCHED.replace("s7:library", "i7"), 2),
        (BATCHED.replace("s7:library", "n"), 2),
        (BATCHED.replace("#0 dfloat", "#x dfloat"), 2),
        (BATCHED.replace("dfloat", "dfloaty"), 2),
        (BATCHED, 1),
        (BATCHED, 3),
    ],
)
def test_programs_that_run_refuses(gpu: EmulatedGpu, program: str, tensors: int) -> None:
    """With a message of ours, before anything is launched."""
    t = [torch.randn(1, 2, 2)] * tensors
    with emulator.memory():
        launches = emulator.ops.launches.default()
        with pytest.raises(RuntimeError, match="fx_fuser: "):
            run.ONE._op_dk(EMULATED, t, program)
        assert emulator.ops.launches.default() == launches
