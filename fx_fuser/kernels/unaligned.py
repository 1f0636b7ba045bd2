"""A 16-bit gemm of operands that lie as they may: any pitch, any transposition, any address.

The library has fast kernels for rows of a multiple of 16 bytes only, and none that is fast for many
small matrices. No site is found for it: `fx_fuser.passes.padding` puts it into Inductor's graphs.
kernels_cu/linear/linear_unaligned.cuh, launched by kernels_cu/host/linear_unaligned.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import (
    SIXTEEN_BITS,
    Case,
    Kernel,
    example,
    known_sizes,
)
from fx_fuser.native.kernel_spec import Family, KernelSpec

UNALIGNED = "unaligned"
# A block's tile of the result, rows by columns: kUnalignedShapes of linear_unaligned_args.h.
TILES = ((32, 32), (32, 64), (64, 32), (64, 64), (128, 128), (64, 64))
_LARGE = TILES.index((128, 128))
_SMALL = 128  # rows or columns that small tiles cover better
_BATCHES, _SIDE = 64, 256  # from how many on, and up to which sizes, matrices are many and small
_VECTOR = 8  # elements of 16 bytes
# Bits of an operand's form: its k are adjacent in memory, not its rows; all lines of what is
# adjacent begin at multiples of 16 bytes.
ALONG_K, ALIGNED = 1, 2
FORMS = tuple(range(4))


@functools.cache
def unaligned(shape: int, step_k: int, form_a: int, form_b: int) -> Family:
    """The main loop. shape: of TILES. step_k: k of a stage, 32 or 64."""
    return Family(
        "linear/linear_unaligned.cuh",
        "FX_FUSER_LINEAR_UNALIGNED",
        "linear_unaligned",
        sizes=(shape, step_k, form_a, form_b),
    )


def shape_for(m: int, n: int) -> int:
    """The tile for a result of m rows and n columns, by its place in TILES."""
    if m > _SMALL and n > _SMALL:
        return _LARGE
    return TILES.index((64 if m > 32 else 32, 64 if n > 32 else 32))


def form_of(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> int | None:
    """[*, rows, K]. offset: in elements, of the first from a multiple of 16 bytes. None: the kernel
    does not take it."""
    rows = size[-2] if len(size) > 1 else 1
    if size[-1] == 1 or stride[-1] == 1:
        form, lines = ALONG_K, [*range(len(size) - 1)]
    elif rows == 1 or stride[-2] == 1:
        form, lines = 0, [*range(len(size) - 2), len(size) - 1]
    else:
        return None
    steps = (stride[d] for d in lines if size[d] != 1)
    return form | (ALIGNED if not any(step % _VECTOR for step in (*steps, offset)) else 0)


def family_of(x: Tensor, weight: Tensor) -> Family | None:
    """The main loop of x weightᵀ, weight [*, N, K]; None where the kernel does not take them."""
    sizes = known_sizes(x, weight)
    if sizes is None:
        return None
    forms = [form_of(s, t.stride(), int(t.storage_offset())) for s, t in zip(sizes, (x, weight))]
    if None in forms:
        return None
    m = sizes[0][-2] if weight.ndim > 2 else math.prod(sizes[0][:-1])
    return family_for(m, sizes[1][-2], sizes[1][-1], forms[0], forms[1])  # type: ignore[arg-type]


def family_for(m: int, n: int, k: int, form_a: int, form_b: int) -> Family:
    return unaligned(shape_for(m, n), 32 if k <= 32 else 64, form_a, form_b)


@functools.cache
def gemm_of(family: Family, dtype: torch.dtype) -> KernelSpec:
    """Without an epilogue."""
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, family)


def has_slow_library(m: int, n: int, k: int, batches: int) -> bool:
    """May the library be slow at a gemm of these sizes, or of batches of it?"""
    is_odd = any(size > 1 and size % _VECTOR for size in (m, n, k))
    return is_odd or has_many_small((batches, m, n))


def has_many_small(sizes: Sequence[Any]) -> bool:
    """Are these the sizes of a batch of many small matrices?"""
    if not all(isinstance(size, int) for size in sizes):
        return False
    *batches, m, n = sizes
    return math.prod(batches) >= _BATCHES and m <= _SIDE and n <= _SIDE


class Unaligned(Kernel):
    name = UNALIGNED
    sites = "16-bit gemms whose rows are no multiple of 16 bytes, or of many small matrices"
    dtypes = SIXTEEN_BITS

    def takes(self, case: Case) -> bool:
        return False

    def examples(self, arch: str) -> Sequence[KernelSpec]:
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        operands = (f16, bf16, f32, bf16, torch.bool)
        specs = [
            gemm_of(unaligned(_LARGE, 64, ALONG_K, ALONG_K), bf16),
            example(unaligned(_LARGE, 64, ALONG_K, ALIGNED), "ThreeOperands", 1, f32, *operands),
            example(unaligned(0, 64, 0, 0), "Swish", 1, f32, f32, bf16),
        ]
        for shape in range(len(TILES)):
            for form in FORMS:
                specs.append(gemm_of(unaligned(shape, 64, form, FORMS[~form]), f16))
                specs.append(gemm_of(unaligned(shape, 32, form, form), bf16))
        return specs
