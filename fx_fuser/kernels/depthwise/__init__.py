"""A depthwise convolution, compiled for each window and stride, in inference.

It computes in fp32 without tensor cores, so TF32's settings do not matter.
kernels_cu/conv/depthwise.cuh, launched by kernels_cu/host/depthwise.h.
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
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import Family, KernelSpec


@functools.cache
def depthwise(kernel_h: int, kernel_w: int, stride: int) -> Family:
    """The depthwise convolutions with this window."""
    return Family(
        "conv/depthwise.cuh",
        "FX_FUSER_DEPTHWISE",
        "depthwise",
        sizes=(kernel_h, kernel_w, stride),
    )


def depthwise_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    stride: int,
    operands: int = 0,
    x_bytes: int = 4,
    channels_last: bool = True,
    multiprocessors: int = limits.H200.multiprocessors,
) -> list[int]:
    """How the depthwise convolution divides images of these sizes; empty if it refuses them.

    Needs no GPU. The numbers are explained in kernels_cu/host/depthwise.h.

    Args:
        weight: [C, 1, kh, kw].
        padding: [left, right, top, bottom].
        operands: number of the epilogue's tensors.
        x_bytes: size of an element of x and weight.
        channels_last: is x in channels_last? Otherwise it is contiguous.
        multiprocessors: of the GPU.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    op = torch.ops.fx_fuser_native.depthwise_cut.default
    cut: list[int] = op(sizes, stride, x_bytes, channels_last, operands, multiprocessors)
    return cut


class Depthwise(Kernel):
    name = "depthwise"
    sites = "depthwise Conv2d, in inference"
    kinds = CONVOLUTION_KINDS
    grows = True
    for_inference = True
    any_layout = True

    def takes(self, case: Case) -> bool:
        c, config = case.tensors[0], case.config
        if is_float64(case) or c.dtype not in self.dtypes:
            return False
        stride, groups = config["stride"], config["groups"]
        if {*config["dilation"]} != {1} or stride[0] != stride[1] or config.get("training"):
            return False
        sizes = known_sizes(case.operand("x"), case.operand("weight"))
        if sizes is None or sizes[1][1] != 1 or sizes[0][1] != groups:
            return False
        cut = depthwise_cut(
            sizes[0],
            sizes[1],
            config["padding"],
            stride[0],
            operands=len(spec_of_site(case, self.name).inputs) - 1,
            x_bytes=c.dtype.itemsize,
            channels_last=case.is_channels_last,
            multiprocessors=limits.of(case.device).multiprocessors,
        )
        return bool(cut)

    def family(self, operands: Operands, config: Config) -> Family:
        kernel_h, kernel_w = map(int, operands["weight"].shape[2:])
        return depthwise(kernel_h, kernel_w, int(config["stride"][0]))

    def examples(self, arch: str) -> list[KernelSpec]:
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        operands = (f16, bf16, f32, bf16, torch.bool)
        specs = [example(depthwise(7, 3, 2), "ThreeOperands", 1, f32, *operands)]
        for window in ((3, 3, 1), (5, 5, 1), (5, 5, 2), (7, 7, 1), (7, 7, 2)):
            for value in (f32, bf16):
                norm = ("BatchNormMul", 1, f32, value, value, *[f32] * 5)
                specs.append(example(depthwise(*window), *norm))
        return specs
