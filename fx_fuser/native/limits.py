"""A GPU's limits, as far as they are modelled and not measured.

Whatever can be timed is timed on the GPU itself (`fx_fuser.planning.timing`). These numbers decide
what is worth timing, and convert bytes that no timed kernel moves into time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Limits:
    """multiprocessors: how many. bandwidth: bytes/s of a pointwise kernel among others.

    copy, fp32: bytes/s and FLOP/s that the library's fp32 gemm reaches at best: upper bounds.
    balance: 16-bit FLOP of its tensor cores a byte of its memory, by an H200's.
    """

    multiprocessors: int
    bandwidth: float
    copy: float
    fp32: float
    balance: float = 1.0


H200 = Limits(multiprocessors=132, bandwidth=3e12, copy=4e12, fp32=50e12)

# What datasheets say of an H200, and of GPUs that were not measured; their rates are an H200's in
# the same proportion. fp32: lanes of a multiprocessor times GHz; memory: bytes/s, the fastest GPU's
# of its compute capability; tensor: a GPU's dense 16-bit FLOP/s, with fp32 sums.
_LANES_GHZ, _MEMORY, _TENSOR = 128 * 1.83, 4.8e12, 989e12
_OTHERS = {
    (8, 0): (64 * 1.41, 2.0e12, 312e12),  # A100
    (8, 6): (128 * 1.7, 0.94e12, 125e12),  # A10, RTX 3090
    (8, 9): (128 * 2.5, 1.0e12, 362e12),  # L40S, RTX 4090
    (10, 0): (128 * 1.96, 8.0e12, 2250e12),  # B200
    (12, 0): (128 * 2.4, 1.8e12, 209e12),  # RTX 5090
}


@functools.cache
def of(device: torch.device) -> Limits:
    """The limits of a CUDA device; without CUDA, and on Hopper but for its size, an H200's."""
    if not torch.cuda.is_available():
        return H200
    count = torch.cuda.get_device_properties(device).multi_processor_count
    here = replace(H200, multiprocessors=count)
    published = _OTHERS.get(torch.cuda.get_device_capability(device))
    if published is None:
        return here
    lanes_ghz, memory, tensor = published
    return replace(
        here,
        bandwidth=H200.bandwidth * memory / _MEMORY,
        copy=H200.copy * memory / _MEMORY,
        fp32=H200.fp32 * lanes_ghz / _LANES_GHZ * count / H200.multiprocessors,
        balance=(tensor / memory) / (_TENSOR / _MEMORY),
    )
