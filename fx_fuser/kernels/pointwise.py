"""The epilogue alone: the pass behind the library's gemm or convolution, at any site.

kernels_cu/pointwise/pointwise.cuh, launched by kernels_cu/host/pointwise.h.
"""

from __future__ import annotations

import torch

from fx_fuser.kernels.base import HALVES, example
from fx_fuser.native.kernel_spec import POINTWISE, KernelSpec

_FLOATS = (torch.float32, torch.float64, *reversed(HALVES))


def examples() -> list[KernelSpec]:
    specs = []
    for value in _FLOATS:
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
