"""The library's gemm or convolution, and then a pass with only the epilogue, at any site.

kernels_cu/pointwise/pointwise.cuh, launched by kernels_cu/host/pointwise.h.
"""

from __future__ import annotations

import torch

from fx_fuser.anchors.base import LIBRARY
from fx_fuser.kernels.base import FLOATS, Case, Kernel, example
from fx_fuser.native.kernel_spec import POINTWISE, KernelSpec


class Library(Kernel):
    name = LIBRARY
    sites = "the tail after the library's gemm or convolution"

    def takes(self, case: Case) -> bool:
        return True

    def examples(self, arch: str) -> list[KernelSpec]:
        specs = []
        for value in (*FLOATS, torch.float64):
            acc = torch.float64 if value is torch.float64 else torch.float32
            specs += [
                example(POINTWISE, "Swish", 1, acc, value, value),
                example(POINTWISE, "BatchNormMul", 1, acc, value, *[value] * 6),
                example(POINTWISE, "EveryFunction", 2, acc, value, value, value),
            ]
        integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        for mask, y in zip(integers[::2], integers[1::2], strict=True):
            gate = (torch.float32, torch.bfloat16, torch.float32, mask, y)
            specs.append(example(POINTWISE, "Gate", 0, *gate))
        return specs
