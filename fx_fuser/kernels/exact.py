"""An fp32 gemm of two operands that were cast up from 16 bits, on Hopper.

The products of two such values are exact in fp32, unless they over- or underflow, so one gemm on
the tensor cores is enough. No site is found for it: `fx_fuser.passes.provenance` puts it into
Inductor's graphs, and `fx_fuser.ops.head_wide` calls it.
kernels_cu/linear/linear_exact_sm90.cuh.
"""

from __future__ import annotations

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import SIXTEEN_BITS, Case, Kernel, example
from fx_fuser.native.kernel_spec import Family, KernelSpec

EXACT = "exact"
LINEAR_EXACT = Family(
    "linear/linear_exact_sm90.cuh", "FX_FUSER_LINEAR_EXACT", "linear_exact", "sm_90a"
)
EXACT_GEMMS = {
    dtype: kernel_spec(Epilogue(), {"z": dtype}, (), torch.float32, LINEAR_EXACT)
    for dtype in SIXTEEN_BITS
}


class Exact(Kernel):
    name = EXACT
    sites = "fp32 gemms of operands cast up from 16 bits"
    arch = LINEAR_EXACT.arch

    def takes(self, case: Case) -> bool:
        return False

    def examples(self, arch: str) -> list[KernelSpec]:
        if arch != self.arch:
            return []
        of_all = ("Identity", 0, torch.float32, torch.float32)
        return [example(LINEAR_EXACT, *of_all, value) for value in SIXTEEN_BITS]
