"""Dropout in attention by fp16 halves, on the CPU emulator: by the checks that are written for a
GPU, and as graphs call it."""

from __future__ import annotations

from typing import Any

import attention_checks
import attention_dropout_checks
import checks
import emulator
import pytest
import torch
from attention_dropout_checks import BACKWARD, FORWARD, expected, factors_of, seed_of
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_emulated_attention_calls import NEAR, called, heads

from benchmarks import kernels
from benchmarks.sm90 import relative
from fx_fuser.kernels import attention
from fx_fuser.ops import attention_split

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (checks, attention_checks, attention_dropout_checks))
    return made


@pytest.mark.slow
def test_random_sizes_and_strides(gpu: EmulatedGpu) -> None:
    passes(attention_dropout_checks.sweep, 6, 0, 260)


@pytest.mark.slow
def test_lengths(gpu: EmulatedGpu) -> None:
    passes(attention_dropout_checks.lengths)


@pytest.mark.slow
def test_repaired(gpu: EmulatedGpu) -> None:
    passes(attention_dropout_checks.repaired)


@pytest.mark.slow
def test_one_key(gpu: EmulatedGpu) -> None:
    passes(attention_dropout_checks.one_key)


def test_dropped_queries(gpu: EmulatedGpu) -> None:
    passes(attention_dropout_checks.dropped_queries)


def test_refusals(gpu: EmulatedGpu) -> None:
    passes(attention_dropout_checks.refusals)


@pytest.mark.parametrize(
    "spec, seed, share, said",
    [
        (FORWARD, None, 0.1, "has no seed"),
        (FORWARD, torch.tensor([1.0]), 0.1, "not one number of int64"),
        (FORWARD, torch.tensor([1, 2]), 0.1, "not one number of int64"),
        (FORWARD, torch.tensor([1]), 0.0, "for which this kernel was not compiled"),
        (attention.spec_of(0), torch.tensor([1]), 0.1, "for which this kernel was not compiled"),
    ],
)
def test_what_is_no_dropout(
    gpu: EmulatedGpu, spec: Any, seed: torch.Tensor | None, share: float, said: str
) -> None:
    q = torch.zeros(1, 1, 5, 64)
    with pytest.raises(RuntimeError, match=said):
        kernels.attention_split(spec, q, q, q, q.clone(), None, 0.1, False, seed, share)


def test_as_graphs_call_it(gpu: EmulatedGpu) -> None:
    """Results equal torch's operations' for the same seed, which kernels read as they run."""
    torch.manual_seed(0)
    q, d_out = heads(2, 37, 40), heads(2, 37, 40)
    k, v = (heads(1, 21, 40) for _ in range(2))
    scale = 40**-0.5
    specs = [attention.spec_for(40, backward, 0.1) for backward in (False, True)]
    assert specs == [FORWARD, BACKWARD]
    gpu.prepare([FORWARD, BACKWARD])
    for spec in (FORWARD, BACKWARD):
        gpu.handle_of(spec)
    for number in (7, -7):
        dropout = seed_of(number), 0.1
        given = scale, True, True, *dropout
        (out, lse), launched = called(attention_split.FORWARD, q, k, v, FORWARD.name, *given)
        assert launched == 1
        wanted = expected([q, k, v, d_out], scale, True, factors_of(q, k, *dropout), True)
        given = BACKWARD.name, scale, True, *dropout
        found, launched = called(attention_split.BACKWARD, d_out, q, k, v, out, lse, *given)
        assert launched == 3
        for value, right in zip([out, *found], wanted):
            assert relative(value, right) < NEAR


def test_a_share_that_kernels_do_not_drop_is_torchs(gpu: EmulatedGpu) -> None:
    torch.manual_seed(0)
    q, d_out = heads(2, 9, 64) / 4, heads(2, 9, 64)  # so that no weight is nearly 1
    gpu.prepare([FORWARD, BACKWARD])
    for spec in (FORWARD, BACKWARD):
        gpu.handle_of(spec)
    dropout = seed_of(7), 0.98
    given = FORWARD.name, 0.125, False, True, *dropout
    (out, lse), launched = called(attention_split.FORWARD, q, q, q, *given)
    assert launched == 0
    given = BACKWARD.name, 0.125, False, *dropout
    found, launched = called(attention_split.BACKWARD, d_out, q, q, q, out, lse, *given)
    assert launched == 0
    factors = factors_of(q, q, *dropout)
    for value, right in zip([out, *found], expected([q, q, q, d_out], 0.125, False, factors, True)):
        assert relative(value, right) < NEAR
