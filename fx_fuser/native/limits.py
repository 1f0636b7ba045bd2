"""A GPU's limits, as far as they are modelled rather than measured.

Whatever can be timed is timed on the GPU itself (`fx_fuser.planning.timing`). These numbers decide
what is worth timing, and convert bytes that no timed kernel moves into time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Limits:
    """multiprocessors: how many. bandwidth: bytes/s of a pointwise kernel among others.

    copy, fp32: bytes/s and FLOP/s that the library's fp32 gemm reaches at best: upper bounds.
    balance: its tensor cores' 16-bit FLOP per byte of memory traffic, relative to an H200's.
    """

    multiprocessors: int
    bandwidth: float
    copy: float
    fp32: float
    balance: float = 1.0


LEAST_SHARED = 99 << 10  # bytes that a block may have on every GPU from sm_80 on
H200 = Limits(multiprocessors=132, bandwidth=3e12, copy=4e12, fp32=50e12)


@dataclass(frozen=True)
class Architecture:
    """What is known about a compute capability: data-sheet numbers of its fastest GPU.

    lanes: fp32 lanes of a multiprocessor. clock: Hz. memory: bytes/s. tensor: dense 16-bit FLOP/s,
    with fp32 sums. stage: cycles of a split gemm's stage with mma.sync, predicted (docs/gpus.md).
    """

    lanes: int
    clock: float
    memory: float
    tensor: float
    stage: int


_HOPPER = Architecture(128, 1.83e9, 4.8e12, 989e12, 0)  # an H200, which was measured
_OTHERS = {
    (8, 0): Architecture(64, 1.41e9, 2.0e12, 312e12, 1900),  # A100
    (8, 6): Architecture(128, 1.7e9, 0.94e12, 125e12, 3600),  # A10, RTX 3090
    (8, 9): Architecture(128, 2.5e9, 1.0e12, 362e12, 3600),  # L40S, RTX 4090
    (10, 0): Architecture(128, 1.96e9, 8.0e12, 2250e12, 1900),  # B200
    (12, 0): Architecture(128, 2.4e9, 1.8e12, 209e12, 3600),  # RTX 5090
}


@functools.cache
def of(device: torch.device) -> Limits:
    """The limits of a CUDA device; without CUDA, and on Hopper except for its size, an H200's."""
    if not torch.cuda.is_available():
        return H200
    count = torch.cuda.get_device_properties(device).multi_processor_count
    here = _OTHERS.get(torch.cuda.get_device_capability(device))
    if here is None:
        return replace(H200, multiprocessors=count)
    return _in_proportion(here, count, here.clock, here.memory)


def _in_proportion(here: Architecture, count: int, clock: float, memory: float) -> Limits:
    """An H200's rates, scaled by the ratio of these figures to its own."""
    wider = memory / _HOPPER.memory
    faster = here.lanes * count * clock / (_HOPPER.lanes * H200.multiprocessors * _HOPPER.clock)
    return Limits(
        multiprocessors=count,
        bandwidth=H200.bandwidth * wider,
        copy=H200.copy * wider,
        fp32=H200.fp32 * faster,
        balance=here.tensor / _HOPPER.tensor / wider,
    )


def split_rates(capability: tuple[int, int], figures: Sequence[int]) -> list[float]:
    """`SplitRates` of kernels_cu/host/split_plan.h, which says what they are.

    An H200's were measured (kernels_cu/linear/NOTES.md). Elsewhere a stage is one of mma.sync, with
    half as much of k. GeForce's tensor cores are half as fast as those of other GPUs of their
    capability, which no figure shows.

    figures: as the driver gives them, 0 if it does not: multiprocessors, kHz, and the memory's kHz
    and bus width in bits, at two transfers per pin and cycle.
    """
    count, khz, memory_khz, bits = figures
    stage, overhead, gpu = 1.2e-6, 3e-6, replace(H200, multiprocessors=count)
    if capability[0] != 9:
        same = [known for known in _OTHERS if known <= capability and known[0] == capability[0]]
        here = _OTHERS[max(same, default=(12, 0))]
        clock = 1e3 * khz or _HOPPER.clock
        gpu = _in_proportion(here, count, clock, 250 * memory_khz * bits or _HOPPER.memory)
        stage, overhead = 2 * here.stage / clock, overhead * _HOPPER.clock / clock
    # Large fp32 gemms of cuBLAS sustain 48 of the 50 TFLOP/s that it reaches at best.
    return [count, stage, overhead, gpu.bandwidth, 0.96 * gpu.fp32, gpu.copy]
