"""Attention of windows: 16-bit operands of at most 64 queries and keys, with an additive bias.

kernels_cu/attention/attention_window.cuh and attention_window_backward.cuh, launched by
kernels_cu/host/attention_window.h.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.attention.bias import DTYPES
from fx_fuser.native.kernel_spec import Family, KernelSpec

# Of kWindowShapes: the largest head. The contract of kernels_cu/host/contract.h compares them, and
# ROWS with kWindowRows, when the shim is loaded.
SHAPES = (32, 64)
ROWS = 64  # queries, and keys, at most


@functools.cache
def attention_window(shape: int) -> Family:
    """shape: of SHAPES."""
    header, macro = "attention/attention_window.cuh", "FX_FUSER_ATTENTION_WINDOW"
    return Family(header, macro, "attention_window", sizes=(shape,))


@functools.cache
def attention_window_backward(shape: int) -> Family:
    """shape: of SHAPES."""
    header = "attention/attention_window_backward.cuh"
    macro = "FX_FUSER_ATTENTION_WINDOW_BACKWARD"
    return Family(header, macro, "attention_window_backward", sizes=(shape,))


@functools.cache
def spec_of(shape: int, dtype: torch.dtype, backward: bool = False) -> KernelSpec:
    family = attention_window_backward(shape) if backward else attention_window(shape)
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, family)


def spec_for(
    d: int, dtype: torch.dtype, lengths: tuple[int, int], backward: bool = False
) -> KernelSpec | None:
    """The kernel for heads of so many elements; None where there is none. lengths: of queries and
    of keys."""
    if dtype not in DTYPES or d % 8 != 0 or not all(0 < n <= ROWS for n in lengths):
        return None
    fits = (shape for shape, most in enumerate(SHAPES) if 0 < d <= most)
    return next((spec_of(shape, dtype, backward) for shape in fits), None)


def offered() -> list[KernelSpec]:
    """All that `spec_for` gives."""
    of = [(shape, dtype) for shape in range(len(SHAPES)) for dtype in DTYPES]
    return [spec_of(*one, backward) for backward in (False, True) for one in of]
