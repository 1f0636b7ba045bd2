"""Attention of 16-bit operands with an additive bias of the score.

kernels_cu/attention/attention_bias_sm90.cuh and attention_bias_backward_sm90.cuh, launched by
kernels_cu/host/attention_bias.h and attention_bias_backward.h.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.native.kernel_spec import Family, KernelSpec

# Of kBiasShapes: the largest head, a block's rows and the keys of a forward's tile. The contract of
# kernels_cu/host/contract.h compares them when the shim is loaded.
SHAPES = ((64, 128, 128), (128, 128, 128))
DTYPES = torch.bfloat16, torch.float16


@functools.cache
def attention_bias(shape: int) -> Family:
    """shape: of SHAPES."""
    header = "attention/attention_bias_sm90.cuh"
    return Family(header, "FX_FUSER_ATTENTION_BIAS", "attention_bias", "sm_90a", sizes=(shape,))


@functools.cache
def spec_of(shape: int, dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, attention_bias(shape))


def spec_for(d: int, dtype: torch.dtype) -> KernelSpec | None:
    """The kernel for heads of so many elements; None where there is none."""
    if dtype not in DTYPES or d % 8 != 0:
        return None
    fits = (shape for shape, (most, *_) in enumerate(SHAPES) if 0 < d <= most)
    return next((spec_of(shape, dtype) for shape in fits), None)


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for an architecture."""
    if arch != "sm_90a":
        return []
    return [spec_of(shape, dtype) for shape in range(len(SHAPES)) for dtype in DTYPES]
