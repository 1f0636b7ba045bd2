"""Attention with a bias, on the CPU emulator: by the checks that are written for a GPU, and as
graphs call it, through the shim's host code."""

from __future__ import annotations

import attention_bias_backward_checks
import attention_bias_checks
import checks
import emulator
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_emulated_attention_calls import called

from benchmarks.sm90 import relative
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.ops import run
from fx_fuser.ops.attention_bias import BACKWARD, FORWARD, NO_GRADIENT, SUMMED, WHOLE
from fx_fuser.ops.attention_split import NO_DROPOUT

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
shapes = pytest.mark.parametrize("shape", attention_bias_checks.SHAPES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, attention_bias_checks))
    return made


@pytest.mark.slow
@shapes
def test_random_sizes_and_strides(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_checks.sweep, 8, shape, shape, 260)


@pytest.mark.slow
@shapes
def test_hard_biases(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_checks.hard_biases, shape)


def test_masks_of_large_numbers(gpu: EmulatedGpu) -> None:
    passes(attention_bias_checks.far_below, 0)


@pytest.mark.slow
@shapes
def test_not_numbers(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_checks.not_numbers, shape)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(attention_bias_checks.refusals)


@pytest.mark.slow
@shapes
def test_random_gradients(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_backward_checks.sweep, 8, shape, shape, 260)


@pytest.mark.slow
@shapes
def test_gradients_of_what_is_hidden(gpu: EmulatedGpu, shape: int) -> None:
    passes(attention_bias_backward_checks.hidden, shape)


def test_refusals_of_the_backward(gpu: EmulatedGpu) -> None:
    passes(attention_bias_backward_checks.refusals)


# ---- as graphs call it, through the shim's host code --------------------------------------------


@pytest.mark.parametrize(
    "d, shared", [(40, (0,)), pytest.param(128, (0, 1), marks=pytest.mark.slow)]
)
def test_calls(gpu: EmulatedGpu, d: int, shared: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    sizes = attention_bias_checks.Sizes(2, 2, 37, 21, d, False, shared)
    q, k, v, bias = attention_bias_checks.operands(sizes, torch.bfloat16)
    d_out = torch.randn(2, 37, 2, d).bfloat16().transpose(1, 2)
    few = bias[tuple(slice(0, 1) if i in shared else slice(None) for i in range(2))]
    forward, backward = (attention_bias.spec_for(d, q.dtype, one) for one in (False, True))
    assert forward is not None and backward is not None
    for spec in (forward, backward):
        gpu.handle_of(spec)
    given = q, k, v, few
    (out, lse), launched = called(FORWARD, *given, forward.name, 0.2, False, True, *NO_DROPOUT)
    assert launched == 1
    wanted = run.IN_TORCH(*run.arguments(FORWARD, (*given, "", 0.2, False, True)))
    for mine, right in zip((out, lse), wanted):
        assert (mine.shape, mine.stride()) == (right.shape, right.stride())
    assert relative(out, wanted[0].double()) < 4e-3
    torch.testing.assert_close(lse, wanted[1])
    for of_bias in (NO_GRADIENT, SUMMED, WHOLE):
        tensors = d_out, *given, out, lse
        rest = 0.2, False, of_bias, *NO_DROPOUT
        found, launched = called(BACKWARD, *tensors, backward.name, *rest)
        assert launched == 3 + (of_bias != NO_GRADIENT)
        wanted = run.IN_TORCH(*run.arguments(BACKWARD, (*tensors, "", *rest)))
        assert len(found) == len(wanted)
        for mine, right in zip(found, wanted):
            assert mine.shape == right.shape
            assert relative(mine, right.double()) < 8e-3


def test_what_the_kernel_does_not_take_is_torchs(gpu: EmulatedGpu) -> None:
    q, k, v, _ = attention_bias_checks.operands(
        attention_bias_checks.Sizes(1, 1, 5, 21, 64), torch.bfloat16
    )
    spec = attention_bias.spec_for(64, q.dtype)
    assert spec is not None
    gpu.handle_of(spec)
    bias = torch.randn(1, 1, 5, 21).bfloat16()
    (out,), launched = called(FORWARD, q, k, v, bias, spec.name, 0.125, False, False, *NO_DROPOUT)
    assert launched == 0
    exact, _ = attention_bias_checks.exact(q, k, v, bias, 0.125, False)
    assert relative(out, exact) < 4e-3
