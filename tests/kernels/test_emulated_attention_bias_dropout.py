"""Dropout in attention with a bias, on the CPU emulator: by the checks that are written for a GPU,
and as graphs call it."""

from __future__ import annotations

from typing import Any

import attention_bias_checks
import attention_bias_dropout_checks as dropout_checks
import attention_dropout_checks
import checks
import emulator
import pytest
import torch
from attention_bias_checks import Sizes, operands
from attention_dropout_checks import factors_of, seed_of
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_emulated_attention_calls import called

from benchmarks import attention_kernels
from benchmarks.sm90 import relative
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.ops.attention_bias import BACKWARD, FORWARD, SUMMED

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    of_cuda = checks, attention_bias_checks, attention_dropout_checks
    in_place_of_cuda(made, monkeypatch, of_cuda)
    return made


@pytest.mark.slow
def test_random_sizes_and_strides(gpu: EmulatedGpu) -> None:
    passes(dropout_checks.sweep, 8, 0, 260)


def test_which_weights_are_dropped(gpu: EmulatedGpu) -> None:
    passes(dropout_checks.which)


@pytest.mark.slow
def test_hidden(gpu: EmulatedGpu) -> None:
    passes(dropout_checks.hidden)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(dropout_checks.refusals)


@pytest.mark.parametrize(
    "dropping, seed, share, said",
    [
        (True, None, 0.1, "has no seed"),
        (True, torch.tensor([1.0]), 0.1, "not one number of int64"),
        (True, torch.tensor([1]), 0.0, "for which this kernel was not compiled"),
        (False, torch.tensor([1]), 0.1, "for which this kernel was not compiled"),
    ],
)
def test_what_is_no_dropout(
    gpu: EmulatedGpu, dropping: bool, seed: torch.Tensor | None, share: float, said: str
) -> None:
    tensors = operands(Sizes(1, 1, 8, 8, 64), torch.bfloat16)
    spec = attention_bias.spec_for(64, torch.bfloat16, False, 0.1 if dropping else 0.0)
    out = tensors[0].clone()
    with pytest.raises(RuntimeError, match=said):
        attention_kernels.attention_bias(spec, tensors, out, None, 0.1, False, False, seed, share)


def test_as_graphs_call_it(gpu: EmulatedGpu) -> None:
    """The kernels' results equal those of torch's formula for the same seed; a probability for
    which there is no kernel goes to torch."""
    torch.manual_seed(0)
    *of_heads, bias = operands(Sizes(2, 2, 37, 21, 40), torch.bfloat16)
    d_out = torch.randn(2, 37, 2, 40).bfloat16().transpose(1, 2)
    few = bias[:1]
    specs: list[Any] = [
        attention_bias.spec_for(40, torch.bfloat16, backward, 0.1) for backward in (False, True)
    ]
    for spec in specs:
        gpu.handle_of(spec)
    for share, launches in ((0.1, (1, 4)), (0.98, (0, 0))):
        dropout = seed_of(-7), share
        given = *of_heads, few, specs[0].name, 0.2, True, True, *dropout
        (out, lse), launched = called(FORWARD, *given)
        assert launched == launches[0]
        tensors = d_out, *of_heads, few, out, lse
        found, launched = called(BACKWARD, *tensors, specs[1].name, 0.2, True, SUMMED, *dropout)
        assert launched == launches[1]
        kept = factors_of(of_heads[0], of_heads[1], *dropout)
        wanted = dropout_checks.exact((*of_heads, bias), d_out, 0.2, True, kept, few.shape)
        for value, right in zip([out, *found], wanted, strict=True):
            assert value.shape == right.shape
            assert relative(value, right) < 1e-2
