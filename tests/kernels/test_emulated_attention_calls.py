"""fp32 attention as graphs call it, through the shim's host code, on the CPU emulator: results and
gradients, with a kernel that is not loaded yet, and torch's where there is no kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import pytest
import torch
from attention_checks import exact
from emulator.device import EmulatedGpu, in_place_of_cuda
from torch import Tensor

from benchmarks.sm90 import relative
from fx_fuser.kernels import attention
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.attention_split import BACKWARD, FORWARD, NO_DROPOUT

EMULATED = torch._C.DispatchKey.PrivateUse1  # the shim's host code of the emulated device
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
NEAR = 2e-6  # the checks' bound for few results


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, ())
    monkeypatch.setattr("attention_checks.CUDA", torch.device("cpu"))
    return made


def called(function: str, *arguments: Any) -> tuple[list[Tensor], int]:
    """All results, and how many kernels were launched."""
    before = emulator.ops.launches.default()
    with emulator.memory():
        given = run.arguments(function, arguments)
        found = [one.clone() for one in run.MANY._op_dk(EMULATED, *given)]
    return found, emulator.ops.launches.default() - before


def heads(count: int, rows: int, d: int) -> Tensor:
    return torch.randn(2, rows, count, d).transpose(1, 2)


# A head of keys may serve several of queries; d may be less than the kernel's.
SIZES = [(40, 3, 1), pytest.param(64, 4, 2, marks=pytest.mark.slow),
         pytest.param(128, 2, 2, marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("d, count, of_keys", SIZES)
def test_results_and_gradients(gpu: EmulatedGpu, d: int, count: int, of_keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = heads(count, 37, d), *(heads(of_keys, 21, d) for _ in range(2))
    d_out, scale = heads(count, 37, d), d**-0.5
    forward, backward = attention.spec_for(d), attention.spec_for(d, backward=True)
    assert forward is not None and backward is not None
    gpu.prepare([forward, backward])
    for spec in (forward, backward):
        gpu.handle_of(spec)
    (out, lse), launched = called(FORWARD, q, k, v, forward.name, scale, True, True, *NO_DROPOUT)
    assert launched == 1 and out.stride() == q.stride()
    leaves = [
        t.double().requires_grad_()
        for t in (q, *(t.repeat_interleave(count // of_keys, 1) for t in (k, v)))
    ]
    wanted, sums = exact(*leaves, scale, True)
    assert relative(out, wanted.detach()) < NEAR
    assert relative(lse[..., :37], sums.detach()) < NEAR and bool(lse[..., 37:].isposinf().all())
    given = d_out, q, k, v, out, lse, backward.name, scale, True, *NO_DROPOUT
    found, launched = called(BACKWARD, *given)
    assert launched == (4 if d > 64 else 3)
    for value, right in zip(found, torch.autograd.grad(wanted, leaves, d_out.double())):
        assert value.shape == right.shape and relative(value, right) < NEAR


def test_what_the_kernel_does_not_take_is_torchs(gpu: EmulatedGpu) -> None:
    q = heads(2, 5, 64)
    spec = attention.spec_for(64)
    assert spec is not None
    gpu.handle_of(spec)
    for k in (torch.randn(2, 2, 5, 65)[..., :64], torch.randn(2, 2, 64, 5).mT):
        (out,), launched = called(FORWARD, q, k, k, spec.name, 0.125, False, False, *NO_DROPOUT)
        assert launched == 0
        torch.testing.assert_close(out, (q @ k.mT * 0.125).softmax(-1) @ k)


def test_a_scale_that_is_infinite_by_log2_of_e_is_torchs(gpu: EmulatedGpu) -> None:
    """The kernel's logits would be 0 times infinity."""
    q, k = torch.zeros(1, 1, 5, 64), heads(1, 5, 64)[:1]
    spec = attention.spec_for(64)
    assert spec is not None
    gpu.handle_of(spec)
    (out,), launched = called(FORWARD, q, k, k, spec.name, 3e38, False, False, *NO_DROPOUT)
    assert launched == 0
    torch.testing.assert_close(out, k.mean(-2, keepdim=True).expand_as(out))


def not_loaded(use: str, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """A kernel that no other test has loaded: they stay loaded until the process ends."""
    spec = attention.spec_for(64)
    assert spec is not None
    spec = dataclasses.replace(spec, use=use)
    monkeypatch.setattr(attention, "offered", lambda: [spec])
    return spec


def test_a_kernel_that_nobody_loaded_is_loaded(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Inductor's cache had the graph, no pass has run."""
    asked: list[str] = []

    def prepare(specs: Any, _: torch.device) -> None:
        asked.extend(spec.name for spec in specs)
        for spec in specs:
            gpu.handle_of(spec)

    monkeypatch.setattr(load, "prepare", prepare)
    spec = not_loaded("never before", monkeypatch)
    q = heads(1, 5, 64)
    for _ in range(2):
        assert called(FORWARD, q, q, q, spec.name, 0.125, False, False, *NO_DROPOUT)[1] == 1
    assert asked == [spec.name]


def test_a_kernel_that_does_not_build_is_asked_for_once(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def prepare(specs: object, _: torch.device) -> None:
        asked.append(specs)
        raise OSError("the disk is full")

    monkeypatch.setattr(load, "prepare", prepare)
    q = heads(1, 5, 64)
    spec = not_loaded("never", monkeypatch)
    with pytest.warns(
        UserWarning, match="leaves an attention to the library: OSError: the disk is full"
    ):
        for _ in range(3):
            (out,), launched = called(FORWARD, q, q, q, spec.name, 0.1, False, False, *NO_DROPOUT)
            assert launched == 0
            torch.testing.assert_close(out, (q @ q.mT * 0.1).softmax(-1) @ q)
    assert len(asked) == 1
