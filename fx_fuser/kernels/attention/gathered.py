"""Gathers along 16-bit rows, by an index that batches share, and their gradient: how attention
reads scores of relative positions.

kernels_cu/attention/gather_rows.cuh, launched by kernels_cu/host/gather_rows.h.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.attention.bias import DTYPES
from fx_fuser.native.kernel_spec import Family, KernelSpec

# kGatherPlaces and kGatherColumns: the contract of kernels_cu/host/contract.h compares them. A call
# with more runs by torch's operations.
PLACES, COLUMNS = 8192, 65535
_FAMILY = Family("attention/gather_rows.cuh", "FX_FUSER_GATHER_ROWS", "gather_rows")


@functools.cache
def spec_of(dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, _FAMILY)


def offered() -> list[KernelSpec]:
    return [spec_of(dtype) for dtype in DTYPES]
