"""A first layer's strided convolution of few channels, in 16 bits and TF32, in inference.

kernels_cu/conv/stem.cuh, launched by kernels_cu/host/stem.h.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fx_fuser.anchors.base import Config, Operands
from fx_fuser.kernels.base import (
    CONVOLUTION_KINDS,
    Case,
    Kernel,
    example,
    is_float64,
    known_sizes,
    spec_of_site,
)
from fx_fuser.kernels.precision import may_be_tf32
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import Family, KernelSpec


@functools.cache
def stem(channels: int, kernel_h: int, kernel_w: int, stride: int, outputs: int) -> Family:
    """The convolution of a first layer with these sizes; `stem_cut` says whether it exists."""
    sizes = (channels, kernel_h, kernel_w, stride, outputs)
    return Family("conv/stem.cuh", "FX_FUSER_STEM", "stem", sizes=sizes)


def stem_cut(sizes: Sequence[int], x_bytes: int, operands: int = 0) -> list[int]:
    """How `stem` divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/stem.h.

    Args:
        sizes: input channels, the filter's height and width, stride, output channels.
        x_bytes: size of an element of x and weight.
        operands: number of the epilogue's tensors.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    cut: list[int] = torch.ops.fx_fuser_native.stem_cut.default(sizes, x_bytes, operands)
    return cut


class Stem(Kernel):
    """It multiplies fp32 in TF32, so it takes fp32 where torch lets the library do so."""

    name = "stem"
    sites = "Conv2d of a first layer with a stride, in inference"
    kinds = CONVOLUTION_KINDS
    grows = True
    for_inference = True
    in_tf32 = True
    any_layout = True

    def takes(self, case: Case) -> bool:
        c, weight = case.tensors[0], case.operand("weight")
        if is_float64(case) or c.dtype not in self.dtypes or case.out not in self.dtypes:
            return False
        may = may_be_tf32(c) and case.options.fp32 in ("follow", "tf32")
        may = may and not case.options.exported  # a file does not keep torch's settings
        if c.dtype == torch.float32 and not may:
            return False
        # Without cuDNN, results of channels_last inputs are contiguous.
        if not torch.backends.cudnn.enabled:
            return False
        if case.site.attrs.get("training") or known_sizes(case.operand("x"), weight) is None:
            return False
        config = case.config
        if {*config["dilation"], config["groups"]} != {1} or len({*config["stride"]}) != 1:
            return False
        spec = spec_of_site(case, self.name)
        return bool(stem_cut(spec.family.sizes, c.dtype.itemsize, len(spec.inputs) - 1))

    def family(self, operands: Operands, config: Config) -> Family:
        outputs, channels, *size = map(int, operands["weight"].shape)
        return stem(channels, *size, config["stride"][0], outputs)

    def examples(self, arch: str) -> list[KernelSpec]:
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        of_norm = ("BatchNormMul", 1, f32)
        return [
            example(stem(3, 7, 7, 2, 64), *of_norm, bf16, bf16, *[f32] * 5),
            example(stem(3, 7, 7, 2, 64), *of_norm, f32, f32, *[f32] * 5),
            example(stem(3, 3, 3, 2, 32), "Swish", 1, f32, f16, f16),
            example(stem(4, 7, 7, 4, 96), "Swish", 1, f32, f16, f32),
        ]
