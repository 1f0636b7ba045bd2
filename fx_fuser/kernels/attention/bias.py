"""Attention of 16-bit operands with an additive bias of the score.

kernels_cu/attention/attention_bias_sm90.cuh and attention_bias_backward_sm90.cuh, launched by
kernels_cu/host/attention_bias.h and attention_bias_backward.h.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.attention import MOST_DROPPED, steps_of
from fx_fuser.native.kernel_spec import Family, KernelSpec

# Of kBiasShapes: the largest head, a block's rows and the keys of a forward's tile. The contract of
# kernels_cu/host/contract.h compares them when the shim is loaded.
SHAPES = ((64, 128, 128), (128, 128, 128), (64, 128, 128))
PLAIN, DROPPING = (0, 1), (2,)  # of these; the others drop weights
DTYPES = torch.bfloat16, torch.float16


@functools.cache
def attention_bias(shape: int) -> Family:
    """shape: index in SHAPES."""
    header = "attention/attention_bias_sm90.cuh"
    return Family(header, "FX_FUSER_ATTENTION_BIAS", "attention_bias", "sm_90a", sizes=(shape,))


@functools.cache
def spec_of(shape: int, dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, attention_bias(shape))


@functools.cache
def attention_bias_backward(shape: int) -> Family:
    """shape: index in SHAPES."""
    header, macro = "attention/attention_bias_backward_sm90.cuh", "FX_FUSER_ATTENTION_BIAS_BACKWARD"
    return Family(header, macro, "attention_bias_backward", "sm_90a", sizes=(shape,))


@functools.cache
def backward_spec_of(shape: int, dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, attention_bias_backward(shape))


def spec_for(
    d: int, dtype: torch.dtype, backward: bool = False, dropout: float = 0.0
) -> KernelSpec | None:
    """The kernel for heads of this size; None if there is none."""
    if dtype not in DTYPES or d % 8 != 0:
        return None
    shapes: tuple[int, ...] = PLAIN
    if dropout != 0:
        shapes = DROPPING if 0 < steps_of(dropout) <= MOST_DROPPED else ()
    fits = (shape for shape in shapes if 0 < d <= SHAPES[shape][0])
    made = backward_spec_of if backward else spec_of
    return next((made(shape, dtype) for shape in fits), None)


def offered() -> list[KernelSpec]:
    """All kernels that `spec_for` returns."""
    of = [(shape, dtype) for shape in range(len(SHAPES)) for dtype in DTYPES]
    return [made(*one) for made in (spec_of, backward_spec_of) for one in of]


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for an architecture."""
    if arch != "sm_90a":
        return []
    return offered()
