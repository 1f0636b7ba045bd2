"""What a GPU can do, as far as it is modelled and not measured.

Whatever can be timed is timed on the GPU itself (`fx_fuser.planning.timing`). These numbers decide
what is worth a measurement, and weigh bytes that no kernel of ours moves.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Limits:
    """multiprocessors: how many. bandwidth: bytes/s that a pointwise kernel beside others gets.

    copy, fp32: bytes/s and FLOP/s that the library's fp32 gemm may reach at best, so that none of a
    size takes less time than they say.
    """

    multiprocessors: int
    bandwidth: float
    copy: float
    fp32: float


H200 = Limits(multiprocessors=132, bandwidth=3e12, copy=4e12, fp32=50e12)


@functools.cache
def of(device: torch.device) -> Limits:
    """Those of a CUDA device; its rates are an H200's, whichever it is. Without CUDA an H200's."""
    if not torch.cuda.is_available():
        return H200
    return replace(
        H200, multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count
    )
