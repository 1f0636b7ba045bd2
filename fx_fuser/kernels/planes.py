"""fp32 gemms with TF32's accuracy at the speed of 16 bits: the operands' planes in fp16, on Hopper.

Of no site yet: nothing offers it before a GPU has run it (issue 44). kernels_cu/linear/
linear_planes_sm90.cuh, launched by kernels_cu/host/linear_planes.h; linear_planes.cuh makes planes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import example
from fx_fuser.native.kernel_spec import Family, KernelSpec

PLANES = Family("linear/linear_planes.cuh", "FX_FUSER_PLANES", "planes")
MAKE_PLANE = kernel_spec(Epilogue(), {"z": torch.float32}, (), torch.float32, PLANES)


@functools.cache
def linear_planes(along_x: bool, along_weight: bool) -> Family:
    """Are k adjacent in memory, or rows?"""
    return Family(
        "linear/linear_planes_sm90.cuh",
        "FX_FUSER_LINEAR_PLANES",
        "linear_planes",
        "sm_90a",
        (int(along_x), int(along_weight)),
        "FX_FUSER_LINEAR_PLANES_COMMON",
    )


# By whether k are adjacent in a, and in b, of a bᵀ.
PLANES_GEMMS = {
    (along_a, along_b): kernel_spec(
        Epilogue(), {"z": torch.float32}, (), torch.float32, linear_planes(along_a, along_b)
    )
    for along_a in (True, False)
    for along_b in (True, False)
}
FACT_WORDS = 2 + 2048  # kPlaneFactWords of kernels_cu/host/planes.h


def is_along(matrix: Tensor) -> bool:
    """Are its columns adjacent, not its rows?"""
    return matrix.shape[1] == 1 or matrix.stride(1) == 1


def plane_elements(matrix: Tensor) -> int:
    """Of fp16: lines of whole vectors, and what is known of them."""
    lines, length = matrix.shape if is_along(matrix) else reversed(matrix.shape)
    return lines * (-(-length // 8) * 8) + 2 * FACT_WORDS


def has_plane(matrix: Tensor) -> bool:
    is_matrix = matrix.ndim == 2 and matrix.dtype == torch.float32
    return is_matrix and (is_along(matrix) or matrix.stride(0) == 1)


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for an architecture."""
    if arch != "sm_90a":
        return [MAKE_PLANE]
    f32 = torch.float32
    return [
        example(linear_planes(True, True), "Swish", 1, f32, f32, f32),
        MAKE_PLANE,
        PLANES_GEMMS[True, False],
        PLANES_GEMMS[False, False],
        example(linear_planes(False, True), "BatchNormMul", 1, f32, f32, *[f32] * 6),
    ]
