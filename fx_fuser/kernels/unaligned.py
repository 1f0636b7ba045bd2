"""A 16-bit gemm of unaligned operands: any pitch, any transposition, any address.

The library has fast kernels only for rows of a multiple of 16 bytes. No site is found for it:
`fx_fuser.passes.padding` puts it into Inductor's graphs. kernels_cu/linear/linear_unaligned.cuh,
launched by kernels_cu/host/linear_unaligned.h, is for gemms that are bandwidth-bound. For others
linear_combs_sm90.cuh uses TMA and wgmma on Hopper, launched by linear_combs.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import SIXTEEN_BITS, Case, Kernel, example, known_sizes
from fx_fuser.native.kernel_spec import Family, KernelSpec

UNALIGNED = "unaligned"
COMBS = "combs"
# A block's tile of the result, rows by columns: those of kUnalignedShapes, which the contract of
# kernels_cu/host/contract.h compares when the shim is loaded.
TILES = ((32, 32), (32, 64), (64, 32), (64, 64), (128, 128))
_LARGE = TILES.index((128, 128))
_SMALL = 128  # up to this many rows or columns, smaller tiles waste less
# Multiply-adds per element of operands and result. Above it the library, with copies that pad, was
# faster for all gemms that were measured (linear/NOTES.md).
MOST_PER_ELEMENT = 128
_VECTOR = 8  # elements of 16 bytes
# Bits of an operand's form: see linear_unaligned_args.h.
ALONG_K, ALIGNED = 1, 2


@functools.cache
def unaligned(shape: int, step_k: int, form_a: int, form_b: int) -> Family:
    """The main loop. shape: of TILES. step_k: k of a stage, 32 or 64."""
    return Family(
        "linear/linear_unaligned.cuh",
        "FX_FUSER_LINEAR_UNALIGNED",
        "linear_unaligned",
        sizes=(shape, step_k, form_a, form_b),
    )


_COMBS_LOADER = "linear_combs"
# Of kCombShapes: rows and columns of a block's tile.
COMB_TILES = ((128, 256), (128, 192), (256, 192), (128, 240))
_COMB_COUNT = 8  # combs of a matrix; each has every eighth line
_CLUSTER = 2  # blocks, whose tiles are below each other
_STAGE_K = 64
# By shape: cycles of a stage, and a tile's other cycles. From the times of six gemms on an H200
# (linear/NOTES.md).
_COMB_CYCLES = ((1140, 3760), (890, 1860), (1660, 5420), (1050, 3600))
_MOVES = 7 * 700  # cycles of a tile whose sums move between combs
# Multiply-adds per cycle of a multiprocessor's tensor cores. On unaligned operands the library's
# large gemms reach at most a sixth of that: nothing slower is built.
_RATE = 2048
_LEAST_SHARE = 1 / 6


def comb_takes(shape: int, along_a: int) -> bool:
    """CombShape::takes."""
    rows, columns = COMB_TILES[shape]
    return columns % 64 == 0 if along_a else rows == 128


@functools.cache
def combs(shape: int, along_a: int, along_b: int) -> Family:
    """With TMA and wgmma. shape: in COMB_TILES. along: are the operand's k adjacent, not rows?"""
    return Family(
        "linear/linear_combs_sm90.cuh",
        "FX_FUSER_LINEAR_COMBS",
        _COMBS_LOADER,
        "sm_90a",
        sizes=(shape, along_a, along_b),
    )


def is_by_combs(family: Family) -> bool:
    return family.loader == _COMBS_LOADER


def family_of_sizes(sizes: Sequence[int]) -> Family:
    """The one of the two families that has this many sizes."""
    return combs(*sizes) if len(sizes) == 3 else unaligned(*sizes)


def comb_family(
    multiprocessors: int, m: int, n: int, k: int, form_a: int, form_b: int
) -> Family | None:
    """The main loop of x weightᵀ into a new row-major result. None if the kernel does not take
    these operands (`set_factors` of the host's file), or would leave the tensor cores idle, as with
    fewer lines than combs."""
    along_a, along_b = form_a & ALONG_K, form_b & ALONG_K
    is_third_aligned = form_a & ALIGNED if along_b else n % _VECTOR == 0
    if not (form_b & ALIGNED and is_third_aligned) or along_a < along_b:
        return None
    cycles = {
        shape: _comb_cycles(multiprocessors, m, n, k, along_a, shape)
        for shape in range(len(COMB_TILES))
        if comb_takes(shape, along_a)
    }
    fastest = min(cycles, key=cycles.__getitem__)
    if m * n * k < _LEAST_SHARE * _RATE * multiprocessors * cycles[fastest]:
        return None
    return combs(fastest, along_a, along_b)


def _comb_cycles(multiprocessors: int, m: int, n: int, k: int, along_a: int, shape: int) -> int:
    """Modelled. The model finds the fastest shape of each measured gemm; only that is built."""
    rows, columns = COMB_TILES[shape]
    stage, beside = _COMB_CYCLES[shape]
    if along_a:
        height = _COMB_COUNT * _units(-(-m // _COMB_COUNT), rows)
        # A line is read from the aligned vector in which it begins.
        most = _VECTOR - 1
        width, stages = n + (most if n % _VECTOR else 0), -(-(k + most) // _STAGE_K)
    else:  # the result's transpose, whose columns are x's rows
        height, width, columns = _units(n, rows), m, columns - _VECTOR
        stages, beside = _COMB_COUNT * -(-k // (_COMB_COUNT * _STAGE_K)), beside + _MOVES
    units = height * -(-width // columns)
    return -(-units // (multiprocessors // _CLUSTER)) * (stages * stage + beside)


def _units(lines: int, rows: int) -> int:
    """How many clusters, with tiles below each other, cover the lines."""
    return -(-lines // (_CLUSTER * rows))


def shape_for(m: int, n: int) -> int:
    """The tile for a result of m rows and n columns, by its place in TILES."""
    if m > _SMALL and n > _SMALL:
        return _LARGE
    return TILES.index((64 if m > 32 else 32, 64 if n > 32 else 32))


def form_of(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> int | None:
    """[*, rows, K]. offset: of the first element from a multiple of 16 bytes, in elements. None:
    the kernel does not take it."""
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
    """The main loop of x weightᵀ, weight [*, N, K]; None if the kernel does not take them."""
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
    """The gemm without an epilogue."""
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, family)


def is_bandwidth_bound(m: int, n: int, k: int) -> bool:
    """Do the tensor cores wait for memory in a gemm of these sizes?"""
    return m * n * k <= MOST_PER_ELEMENT * (m * k + k * n + m * n)


class Unaligned(Kernel):
    name = UNALIGNED
    sites = "16-bit gemms of odd sizes"
    dtypes = SIXTEEN_BITS

    def takes(self, case: Case) -> bool:
        return False

    def examples(self, arch: str) -> Sequence[KernelSpec]:
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        operands = (f16, bf16, f32, bf16, torch.bool)
        # The last one needs FEW_REGISTERS.
        examples = [
            gemm_of(unaligned(_LARGE, 64, ALONG_K, ALONG_K), bf16),
            example(unaligned(0, 64, 0, 0), "Swish", 1, f32, f32, bf16),
            gemm_of(unaligned(1, 32, ALONG_K, ALIGNED), f16),
            gemm_of(unaligned(3, 64, ALIGNED, ALONG_K | ALIGNED), bf16),
            example(unaligned(_LARGE, 64, ALONG_K, ALIGNED), "ThreeOperands", 1, f32, *operands),
        ]
        # Left along k with an aligned result, left along k with an unaligned one, left along rows.
        by_combs = [
            gemm_of(combs(2, 1, 0), bf16),
            example(combs(0, 1, 1), "Swish", 1, f32, bf16, bf16),
            gemm_of(combs(3, 0, 0), f16),
        ]
        return [*examples, *(by_combs if arch == "sm_90a" else ())]
