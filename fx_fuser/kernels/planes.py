"""fp32 products with TF32's accuracy at the speed of 16 bits: the library's gemm of planes in fp16.

kernels_cu/linear/linear_planes.cuh makes planes, linear_planes_repair.cuh computes again what they
do not hold; kernels_cu/host/planes.h launches both and calls the library.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.graph.read.nodes import hint_of
from fx_fuser.kernels.precision import TF32_LIBRARY, asked_precision
from fx_fuser.native.kernel_spec import Family, KernelSpec
from fx_fuser.options import Options

# Are fp32 gemms offered planes where torch's settings, or option "fp32", ask for TF32? Not before
# a GPU has shown that it pays and keeps the contract (issue 44).
OFFERED = False

PLANES = kernel_spec(
    Epilogue(),
    {"z": torch.float32},
    (),
    torch.float32,
    Family("linear/linear_planes_repair.cuh", "FX_FUSER_PLANES", "planes"),
)
# Of kernels_cu/linear/linear_planes_args.h.
WIDTH = 8  # kPlaneWidth: lines of a plane are so many elements, times a number
MOST_BLOCKS = 2048
FACT_WORDS = 2 + 2 * MOST_BLOCKS  # exponent, blocks, what each has lost, and the largest it found
TOP = 14  # the largest value comes to between 2^TOP and twice that
LEAST_SUM = 2.0  # times the root of k: scaled sums below it are small
LEAST_NORMAL = 2.0**-14  # of fp16: values below it are lost


def is_asked(options: Options) -> bool:
    return OFFERED and asked_precision(options) == "tf32" and options.fp32 != TF32_LIBRARY


def order_of(tensor: Tensor) -> list[int] | None:
    """The tensor's dimensions from the inner to the outer, if it is lines of adjacent elements that
    follow each other at one distance; None if it has no plane, as an expanded one has none."""
    if tensor.dtype != torch.float32 or tensor.ndim == 0 or tensor.layout != torch.strided:
        return None
    strides = [hint_of(stride) for stride in tensor.stride()]
    if None in strides or any(hint_of(size) in (None, 0) for size in tensor.shape):
        return None
    # Where strides are the same, one size is 1: that is the inner dimension.
    inner_first = [(strides[d], hint_of(tensor.shape[d]), d) for d in range(tensor.ndim)]
    order = [d for _, _, d in sorted(inner_first, key=lambda one: (one[0], one[1], -one[2]))]
    lines = [d for d in order if not _is(tensor.shape[d], 1)]
    if not lines:
        return order
    if not _is(tensor.stride(lines[0]), 1) or any(strides[d] == 0 for d in lines):
        return None
    for inner, outer in itertools.pairwise(lines[1:]):
        if not _is(tensor.stride(outer), tensor.stride(inner) * tensor.shape[inner]):
            return None
    return [*lines[:1], *(d for d in order if d != lines[0])]


def _is(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def plane_strides(tensor: Tensor, order: Sequence[int]) -> list[Any]:
    """Of a tensor's plane: its lines are whole vectors."""
    strides: list[Any] = [1] * tensor.ndim
    step = -(-tensor.shape[order[0]] // WIDTH) * WIDTH
    for d in order[1:]:
        strides[d] = step
        step = step * tensor.shape[d]
    return strides


def doubted(sums: Tensor) -> Tensor:
    """Which results are computed again where a plane has lost values: small ones, with the scales
    in them, beside a small one in the same row or column, in pairs. sums: [*, m, n], over the root
    of k."""
    small = sums.abs() < LEAST_SUM
    m, n = small.shape[-2:]
    padded = F.pad(small, (0, n % 2, 0, m % 2), value=True)
    beside = padded.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    across = padded.unflatten(-2, (-1, 2)).flip(-2).flatten(-3, -2)
    return small & (beside | across)[..., :m, :n]


def examples() -> list[KernelSpec]:
    """What CI compiles."""
    return [PLANES]
