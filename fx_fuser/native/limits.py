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
    """

    multiprocessors: int
    bandwidth: float
    copy: float
    fp32: float


H200 = Limits(multiprocessors=132, bandwidth=3e12, copy=4e12, fp32=50e12)


@functools.cache
def of(device: torch.device) -> Limits:
    """The limits of a CUDA device. Rates are always an H200's; without CUDA, all is."""
    if not torch.cuda.is_available():
        return H200
    return replace(
        H200, multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count
    )
