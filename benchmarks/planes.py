"""Planes in fp16 of fp32 matrices, and gemms from them, like the others in `benchmarks.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels import taken
from fx_fuser.kernels.planes import FACT_WORDS
from fx_fuser.native.kernel_spec import KernelSpec


@dataclass(frozen=True)
class Plane:
    """A matrix in fp16 times a power of two, in its own memory order; see kernels_cu/linear.

    values: [lines, pitch]. facts: the exponent and whether values were lost, then workspace.
    """

    matrix: Tensor
    values: Tensor
    facts: Tensor

    @classmethod
    def room(cls, matrix: Tensor) -> Plane:
        """Room for the plane of a matrix whose rows or columns are adjacent."""
        lines, length = matrix.shape if matrix.stride(1) == 1 else reversed(matrix.shape)
        pitch = -(-length // 8) * 8
        values = matrix.new_empty((lines, pitch), dtype=torch.float16)
        return cls(matrix, values, matrix.new_empty(FACT_WORDS, dtype=torch.int32))

    def turned(self) -> Plane:
        """The plane of the transposed matrix, in the same memory."""
        return Plane(self.matrix.mT, self.values, self.facts)

    def fp16(self) -> Tensor:
        """The plane in the matrix's layout, without the padding of its lines."""
        rows, columns = self.matrix.shape
        if self.matrix.stride(1) == 1:
            return self.values[:, :columns]
        return self.values[:, :rows].mT

    @property
    def exponent(self) -> int:
        return int(self.facts[0])

    @property
    def has_lost(self) -> bool:
        return bool(self.facts[1] != 0)


def make_plane(spec: KernelSpec, plane: Plane) -> bool:
    """Makes the plane and its facts of the matrix.

    Args:
        spec: `fx_fuser.kernels.planes.MAKE_PLANE`.

    Returns, raises: as `linear_split`.
    """
    return taken("make_plane", spec, plane.values, plane.matrix, plane.values, plane.facts)


def linear_planes(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    chunks: int = 0,
) -> bool:
    """Like `linear_split`, in fp32 and as exact as TF32. Makes both planes.

    Args:
        spec: a kernel of `fx_fuser.kernels.planes.linear_planes`, see
            kernels_cu/linear/linear_planes_sm90.cuh. Its family says whether k or rows are
            adjacent, of x and of the weight.
        x: [*, K]. weight: [N, K].
        bias, out, z, operands, scalars: as `linear_split`'s; columns of out and z are adjacent.
        chunks: as `linear_split`'s.

    Returns, raises: as `linear_split`.
    """
    return taken("linear_planes", spec, out, x, weight, bias, out, z, operands, scalars, chunks)


def multiply_planes(spec: KernelSpec, x: Plane, weight: Plane, out: Tensor) -> bool:
    """Like `linear_planes`, with an epilogue without operands, from planes that exist."""
    left, right = ([p.matrix, p.values, p.facts] for p in (x, weight))
    return taken("multiply_planes", spec, out, left, right, out)
