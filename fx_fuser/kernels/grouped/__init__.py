"""A convolution in groups of few channels, of channels_last 16-bit tensors, with a tail in
inference, and its gradients.

kernels_cu/conv/grouped.cuh and grouped_weight.cuh, launched by kernels_cu/host/grouped.h.
`fx_fuser.passes.grouped` puts the gradients, and convolutions without a tail, into Inductor's
graphs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fx_fuser.anchors.base import Config, Operands
from fx_fuser.anchors.conv2d import memory_format_of
from fx_fuser.graph.epilogue import Epilogue, kernel_spec
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

_VECTOR = 8  # channels
_MOST_OF_UNIT = 128  # channels


@functools.cache
def grouped(tiles: int, is_mixed: bool, leaves: int) -> Family:
    """The convolution with so many products side by side that have one unit's pixels.

    is_mixed: has a unit several groups? leaves: how many of the epilogue's first tensors are one
    number per channel.
    """
    sizes = (tiles, int(is_mixed), leaves)
    return Family("conv/grouped.cuh", "FX_FUSER_GROUPED", "grouped", sizes=sizes)


@functools.cache
def grouped_weight(tiles: int, is_mixed: bool) -> Family:
    """The gradient of the weight."""
    header, macro = "conv/grouped_weight.cuh", "FX_FUSER_GROUPED_WEIGHT"
    return Family(header, macro, "grouped_weight", sizes=(tiles, int(is_mixed)))


@functools.cache
def _spec(family: Family, dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, family)


def spec_of(inputs: int, outputs: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel without a tail, given the channels of a group. The gradient of x is the
    convolution from its outputs to its inputs."""
    groups = unit_of(inputs, outputs)
    return _spec(grouped(grouped_tiles(groups * outputs), groups > 1, 0), dtype)


def weight_spec_of(inputs: int, outputs: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel of the gradient of the weight, given the channels of a group."""
    groups = unit_of(inputs, outputs)
    return _spec(grouped_weight(grouped_tiles(groups * outputs), groups > 1), dtype)


def offered() -> list[KernelSpec]:
    """All that the two functions above give."""
    forms = [(tiles, is_mixed) for tiles in (1, 2, 3, 4) for is_mixed in (False, True)]
    families = [f for form in forms for f in (grouped(*form, 0), grouped_weight(*form))]
    return [_spec(family, dtype) for family in families for dtype in SIXTEEN_BITS]


def takes(inputs: int, outputs: int, groups: int) -> bool:
    """May there be kernels for so many channels of a group?"""
    fewest = unit_of(inputs, outputs)
    most = max(inputs, outputs) * fewest
    return groups > 1 and inputs > 1 and groups % fewest == 0 and most <= _MOST_OF_UNIT


def unit_of(inputs: int, outputs: int) -> int:
    """The fewest groups of so many channels that fill vectors of x and columns of products."""
    return _VECTOR // math.gcd(inputs, outputs, _VECTOR)


def grouped_tiles(outputs: int) -> int:
    """Products side by side, given a unit's output channels: the fewest in all, then the most."""
    tiles = outputs // _VECTOR
    if tiles <= 2:
        return tiles
    return min((3, 4), key=lambda n: (-(-tiles // n) * n, -n))


def grouped_cut(
    x: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    leaves: int = 0,
    operands: int | None = None,
    multiprocessors: int = limits.H200.multiprocessors,
    shared_bytes: int = 227 << 10,
    of_weight: bool = False,
) -> list[int]:
    """How the kernel divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/grouped.h.

    Args:
        weight: [O, C/groups, kh, kw].
        stride, dilation: down and across.
        padding: [left, right, top, bottom].
        leaves: number of the epilogue's tensors that are one number per channel.
        operands: number of all of them; by default there are no others.
        shared_bytes: shared memory that a block may have on the GPU.
        of_weight: of the gradient of the weight.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    inputs, outputs = weight[1], weight[0] // groups
    if x[1] != inputs * groups or weight[0] % groups or not outputs or not inputs:
        return []
    sizes = [*x, weight[0], *weight[2:], *padding]
    tiles = grouped_tiles(unit_of(inputs, outputs) * outputs)
    op = torch.ops.fx_fuser_native.grouped_cut.default
    count = leaves if operands is None else operands
    gpu = (multiprocessors, shared_bytes, of_weight)
    cut: list[int] = op(sizes, stride, dilation, groups, tiles, leaves, count, *gpu)
    return cut


class Grouped(Kernel):
    name = "grouped"
    sites = "16-bit Conv2d in groups of few channels, in inference"
    kinds = CONVOLUTION_KINDS
    grows = True
    for_inference = True
    any_layout = True
    dtypes = SIXTEEN_BITS

    def takes(self, case: Case) -> bool:
        c, x, weight = case.tensors[0], case.operand("x"), case.operand("weight")
        if is_float64(case) or c.dtype not in self.dtypes or case.out not in FLOATS:
            return False
        # Without cuDNN, results of channels_last inputs are contiguous.
        if not torch.backends.cudnn.enabled:
            return False
        config = case.config
        if config["groups"] == 1 or config.get("training") or not case.is_channels_last:
            return False
        if weight.shape[1] == 1:  # depthwise
            return False
        is_given = memory_format_of(x) == torch.channels_last
        if case.options.exported and not is_given:  # an exported graph is not converted
            return False
        if memory_format_of(c) != memory_format_of(x):  # a torch without cuDNN
            return False
        sizes = known_sizes(x, weight)
        if sizes is None:
            return False
        spec = spec_of_site(case, self.name)
        cut = grouped_cut(
            sizes[0],
            sizes[1],
            config["stride"],
            config["padding"],
            config["dilation"],
            config["groups"],
            leaves=spec.family.sizes[-1],
            operands=len(spec.inputs) - 1,
            multiprocessors=limits.of(case.device).multiprocessors,
            shared_bytes=limits.LEAST_SHARED,
        )
        return bool(cut)

    def family(self, operands: Operands, config: Config) -> Family:
        weight = operands["weight"]
        outputs, inputs = int(weight.shape[0]) // config["groups"], int(weight.shape[1])
        groups = unit_of(inputs, outputs)
        leaves = sum(v is not None for v in operands.values()) - 2  # x and weight are not leaves
        return grouped(grouped_tiles(groups * outputs), groups > 1, leaves)

    def examples(self, arch: str) -> list[KernelSpec]:
        f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
        of_norm = ("BatchNormMul", 1, f32)
        operands = (f16, bf16, f32, bf16, torch.bool)
        specs = [
            example(grouped(3, False, 4), "NormSilu", 1, f32, bf16, bf16, *[f32] * 4),
            example(grouped(3, True, 1), "ThreeOperands", 1, f32, *operands),
            example(grouped(4, False, 4), *of_norm, f32, f16, *[f32] * 5),
        ]
        for tiles in (1, 2, 3, 4):
            for is_mixed in (False, True):
                family = grouped(tiles, is_mixed, 4)
                specs.append(example(family, *of_norm, bf16, bf16, *[f32] * 4, bf16))
                specs.append(_spec(grouped_weight(tiles, is_mixed), bf16))
        specs.append(_spec(grouped_weight(4, False), f16))
        return specs


__all__ = [
    "Grouped",
    "grouped",
    "grouped_cut",
    "grouped_tiles",
    "grouped_weight",
    "offered",
    "spec_of",
    "takes",
    "unit_of",
    "weight_spec_of",
]
