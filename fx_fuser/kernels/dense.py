"""A 16-bit gemm, or an fp32 one in TF32, with its epilogue, on Hopper.

kernels_cu/linear/linear_dense_sm90.cuh, launched by kernels_cu/host/linear_dense.h.
"""

from __future__ import annotations

import torch

from fx_fuser.anchors.base import Config, Operands
from fx_fuser.kernels.base import FLOATS, Case, Kernel, example, is_float64
from fx_fuser.kernels.precision import asked_precision
from fx_fuser.native.kernel_spec import Family, KernelSpec

LINEAR_DENSE = Family(
    "linear/linear_dense_sm90.cuh", "FX_FUSER_LINEAR_DENSE", "linear_dense", "sm_90a"
)


class Dense(Kernel):
    name = "dense"
    sites = "16-bit and TF32 Linear, in named patterns"
    arch = LINEAR_DENSE.arch
    kinds = frozenset({"linear"})  # both operands must be K-major
    in_tf32 = True
    grows = False  # the library's gemm of many rows is as fast (kernels_cu/NOTES.md)

    def takes(self, case: Case) -> bool:
        c = case.tensors[0]
        if c.dtype not in self.dtypes or not c.is_contiguous() or is_float64(case):
            return False
        return c.dtype != torch.float32 or asked_precision(case.options) == "tf32"

    def family(self, operands: Operands, config: Config) -> Family:
        return LINEAR_DENSE

    def examples(self, arch: str) -> list[KernelSpec]:
        f32 = torch.float32
        specs = []
        for value in FLOATS if arch == self.arch else ():
            specs += [
                example(LINEAR_DENSE, "Swish", 1, f32, value, value),
                example(LINEAR_DENSE, "BatchNormMul", 1, f32, value, *[value] * 6),
            ]
        return specs
