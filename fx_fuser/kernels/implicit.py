"""A convolution of channels_last 16-bit tensors as a gemm over pixels, in inference.

kernels_cu/conv/implicit.cuh, launched by kernels_cu/host/implicit.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fx_fuser.anchors.base import Config, Operands
from fx_fuser.anchors.conv2d import is_window, memory_format_of
from fx_fuser.kernels.base import (
    CONVOLUTION_KINDS,
    FLOATS,
    SIXTEEN_BITS,
    Case,
    Kernel,
    example,
    is_float64,
    known_sizes,
    spec_of_site,
)
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import Family, KernelSpec

IMPLICIT = "implicit"
# Arithmetic intensity: multiply-adds per byte of x, weight and result. Above it the library's
# convolution and a separate pass were faster for nearly all layers of three nets, on an H200
# (conv/NOTES.md). On a GPU with more multiply-adds per byte of bandwidth, more layers are
# memory-bound.
MOST_PER_BYTE = 90
_COLUMNS = (32, 64, 96, 128)  # the widths that a tile of implicit.cuh may have


@functools.cache
def implicit(outputs: int, is_window: bool, leaves: int) -> Family:
    """The convolution with this many output channels.

    is_window: is the kernel more than 1 × 1, or is there padding? leaves: how many of the
    epilogue's first tensors are one number per channel.
    """
    sizes = (implicit_columns(outputs), int(is_window), leaves)
    return Family("conv/implicit.cuh", "FX_FUSER_IMPLICIT", "implicit", sizes=sizes)


def implicit_columns(outputs: int) -> int:
    """The tile width, in output channels, that costs least: each tile costs its width, and another
    read of the pixels."""
    of_part = 48  # that read, in columns
    return min((-(-outputs // n) * (n + of_part), -(-outputs // n) * n, n) for n in _COLUMNS)[-1]


def implicit_cut(
    x: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    leaves: int = 0,
    operands: int | None = None,
    held: int = 0,
    columns: int | None = None,
    multiprocessors: int = limits.H200.multiprocessors,
    shared_bytes: int = 227 << 10,
) -> list[int]:
    """How the implicit gemm divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/implicit.h.

    Args:
        stride, dilation: down and across.
        padding: [left, right, top, bottom].
        leaves: number of the epilogue's tensors that are one number per channel and staged.
        operands: number of all of them; by default there are no others.
        held: pieces of operands that are in the ring at once.
        columns: of a tile; by default those that suit the weight.
        shared_bytes: shared memory that a block may have on the GPU.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    columns = columns or implicit_columns(weight[0])
    op = torch.ops.fx_fuser_native.implicit_cut.default
    count = leaves if operands is None else operands
    gpu = (multiprocessors, shared_bytes)
    cut: list[int] = op(sizes, stride, dilation, columns, leaves, count, held, *gpu)
    return cut


class Implicit(Kernel):
    name = IMPLICIT
    sites = "memory-bound 16-bit Conv2d, in inference"
    kinds = CONVOLUTION_KINDS
    grows = True
    for_inference = True
    any_layout = True
    weight_follows = True
    dtypes = SIXTEEN_BITS

    def takes(self, case: Case) -> bool:
        c, x, weight = case.tensors[0], case.operand("x"), case.operand("weight")
        if is_float64(case) or c.dtype not in self.dtypes or case.out not in FLOATS:
            return False
        # Without cuDNN, results of channels_last inputs are contiguous.
        if not torch.backends.cudnn.enabled:
            return False
        config = case.config
        if config["groups"] != 1 or config.get("training") or not case.is_channels_last:
            return False
        # If the graph is converted, so is the weight; otherwise it is as the user has it.
        is_given = memory_format_of(x) == torch.channels_last
        if case.options.exported and not is_given:  # an exported graph is not converted
            return False
        if memory_format_of(c) != memory_format_of(x):  # a torch without cuDNN
            return False
        if is_given and is_window(weight) and memory_format_of(weight) != torch.channels_last:
            return False
        sizes = known_sizes(x, weight, c)
        if sizes is None:
            return False
        of_x, of_weight, of_c = map(math.prod, sizes)
        moved = (of_x + of_weight + of_c) * c.dtype.itemsize
        per_byte = of_c * of_weight / sizes[1][0] / moved
        if per_byte > MOST_PER_BYTE * limits.of(case.device).balance:
            return False
        spec = spec_of_site(case, self.name)
        cut = implicit_cut(
            sizes[0],
            sizes[1],
            config["stride"],
            config["padding"],
            config["dilation"],
            leaves=spec.family.sizes[-1],
            operands=len(spec.inputs) - 1,
            multiprocessors=limits.of(case.device).multiprocessors,
            shared_bytes=limits.LEAST_SHARED,
        )
        return bool(cut)

    def family(self, operands: Operands, config: Config) -> Family:
        weight = operands["weight"]
        has_window = is_window(weight) or any(config["padding"])
        leaves = sum(v is not None for v in operands.values()) - 2  # x and weight are not leaves
        return implicit(int(weight.shape[0]), has_window, leaves)

    def examples(self, arch: str) -> list[KernelSpec]:
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        of_norm = ("BatchNormMul", 1, f32)
        operands = (f16, bf16, f32, bf16, torch.bool)
        specs = [
            example(implicit(128, True, 4), *of_norm, f32, f16, *[f32] * 5),
            example(implicit(128, True, 1), "ThreeOperands", 1, f32, *operands),
        ]
        for columns in _COLUMNS:
            for has_window in (False, True):
                family = implicit(columns, has_window, 4)
                specs.append(example(family, "NormSilu", 1, f32, bf16, bf16, *[f32] * 4))
                specs.append(example(family, *of_norm, bf16, bf16, *[f32] * 4, bf16))
        return specs
