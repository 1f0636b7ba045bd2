"""A direct convolution, for few channels, on Hopper, forward and often backward.

It splits fp32 into fp16, whatever `tf32` says; it multiplies 16-bit operands as they are.
kernels_cu/conv/conv_direct_sm90.cuh and conv_direct_backward_sm90.cuh, launched by
kernels_cu/host/conv_direct.h and conv_direct_backward.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fx_fuser.anchors.base import LIBRARY, Config, Operands
from fx_fuser.kernels.base import (
    CONVOLUTION_KINDS,
    FLOATS,
    Case,
    Kernel,
    example,
    is_float64,
    known_sizes,
    spec_of_site,
)
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import Family, KernelSpec

DIRECT = "direct"
CONV_DIRECT = Family(
    "conv/conv_direct_sm90.cuh",
    "FX_FUSER_CONV_DIRECT",
    "conv_direct",
    "sm_90a",
    common="FX_FUSER_CONV_DIRECT_COMMON",
)
CONV_DIRECT_BACKWARD = Family(
    "conv/conv_direct_backward_sm90.cuh",
    "FX_FUSER_CONV_DIRECT_BACKWARD",
    "conv_direct_backward",
    "sm_90a",
)


def conv_direct_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    out_bytes: int,
    operands: int = 0,
    x_bytes: int = 4,
    multiprocessors: int = limits.H200.multiprocessors,
) -> list[int]:
    """How the forward divides a convolution of these sizes into units; empty if it refuses it.

    Needs no GPU. The numbers are explained in kernels_cu/host/conv_direct.h.

    Args:
        padding: [left, right, top, bottom].
        out_bytes: size of an element of the result; 0: only the batch's statistics.
        operands: number of the epilogue's tensors.
        x_bytes: size of an element of x and weight.
        multiprocessors: of the GPU; the units of statistics and 16-bit results depend on it.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    cut_of = torch.ops.fx_fuser_native.conv_direct_cut.default
    cut: list[int] = cut_of(sizes, x_bytes, out_bytes, operands, multiprocessors)
    return cut


def conv_direct_backward_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    with_input: bool,
    multiprocessors: int = limits.H200.multiprocessors,
    x_bytes: int = 4,
) -> list[int]:
    """How the backward divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/conv_direct_backward.h.

    Args:
        padding: [left, right, top, bottom].
        with_input: is the input's gradient needed?
        multiprocessors: of the GPU.
        x_bytes: size of an element of x and weight.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    op = torch.ops.fx_fuser_native.conv_direct_backward_cut.default
    cut: list[int] = op(sizes, x_bytes, with_input, multiprocessors)
    return cut


class Direct(Kernel):
    name = DIRECT
    sites = "Conv2d of at most 8 channels, also in training"
    arch = CONV_DIRECT.arch
    kinds = CONVOLUTION_KINDS
    grows = True
    backward_family = CONV_DIRECT_BACKWARD

    def takes(self, case: Case) -> bool:
        c, x, weight = case.tensors[0], case.operand("x"), case.operand("weight")
        if is_float64(case) or c.dtype not in self.dtypes:
            return False
        if not all(t.is_contiguous() for t in (c, x, weight)):
            return False
        if c.dtype == torch.float32 and case.options.fp32 == "ieee":
            return False
        config = case.config
        if {*config["stride"], *config["dilation"], config["groups"]} != {1}:
            return False
        sizes = known_sizes(x, weight)
        if sizes is None:
            return False
        cut = conv_direct_cut(
            sizes[0],
            sizes[1],
            config["padding"],
            case.out.itemsize,
            operands=len(spec_of_site(case, self.name).inputs) - 1,
            x_bytes=c.dtype.itemsize,
            multiprocessors=limits.of(case.device).multiprocessors,
        )
        return bool(cut)

    def backwards(self, case: Case) -> tuple[str, ...]:
        return (LIBRARY, DIRECT) if _takes_backward(case) else (LIBRARY,)

    def family(self, operands: Operands, config: Config) -> Family:
        return CONV_DIRECT

    def examples(self, arch: str) -> list[KernelSpec]:
        if arch != self.arch:
            return []
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        specs = [
            example(CONV_DIRECT, "Identity", 0, f32, f16, f32),
            example(CONV_DIRECT_BACKWARD, "Identity", 0, f32, f32, f32),
        ]
        for value in FLOATS:
            specs += [
                example(CONV_DIRECT, "BatchNormMul", 1, f32, value, value, *[f32] * 5),
                example(CONV_DIRECT_BACKWARD, "Scaled", 1, f32, value, value, f32, bf16),
            ]
        return specs


def _takes_backward(case: Case) -> bool:
    """Do the backward kernels make the gradients that are needed?"""
    needs = case.gradients()
    if not any(needs.values()) or not case.may_have_fused_backward(DIRECT):
        return False
    sizes = known_sizes(case.operand("x"), case.operand("weight"))
    cut = sizes and conv_direct_backward_cut(
        sizes[0],
        sizes[1],
        case.config["padding"],
        needs["x"],
        x_bytes=case.tensors[0].dtype.itemsize,
        multiprocessors=limits.of(case.device).multiprocessors,
    )
    return bool(cut)
