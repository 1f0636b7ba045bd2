"""The kernels of the depthwise convolution in training as Python functions, as
`benchmarks.kernels` has those of gemms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernels
from fx_fuser.native.kernel_spec import KernelSpec

Pair = Sequence[int]  # down, across


def around(padding: Pair) -> list[int]:
    """[left, right, top, bottom]."""
    return [padding[1], padding[1], padding[0], padding[0]]


def forward(spec: KernelSpec, x: Tensor, weight: Tensor, padding: Pair, z: Tensor) -> bool:
    """z = the depthwise convolution of x and weight.

    Args:
        spec: of `fx_fuser.kernels.depthwise.training.spec_of`; all tensors are of its dtype.
        x: [N, C, H, W], dense in channels_last, of an even C; so is z.
        weight: [C, 1, kh, kw], contiguous.

    Returns, raises: as `benchmarks.kernels.linear_split`.
    """
    return kernels.taken("depthwise", spec, z, x, weight, around(padding), z, None, [], [])


def by_input(
    spec: KernelSpec, dz: Tensor, weight: Tensor, padding: Pair, stride: int, dx: Tensor
) -> bool:
    """dx = the gradient of `forward` by x. spec: of `training.input_spec_of`."""
    if stride == 1:
        turned = around([k - 1 - p for k, p in zip(weight.shape[2:], padding)])
        return kernels.taken("depthwise_turned", spec, dx, dz, weight, turned, dx)
    return kernels.taken("depthwise_input", spec, dx, dz, weight, padding, dx)


def by_weight(spec: KernelSpec, x: Tensor, dz: Tensor, padding: Pair, dw: Tensor) -> bool:
    """dw = the gradient of `forward` by the weight. spec: of `training.weight_spec_of`."""
    return kernels.taken("depthwise_weight", spec, dw, x, dz, padding, dw)


def convolution(x: Tensor, weight: Tensor, padding: Pair, stride: int) -> Tensor:
    """By torch."""
    return F.conv2d(x, weight, None, stride, tuple(padding), 1, x.shape[1])


def gradients(
    dz: Tensor, x: Tensor, weight: Tensor, padding: Pair, stride: int, asked: Sequence[bool]
) -> list[Tensor]:
    """By torch: those by x and by the weight that are asked for."""
    numbers = [stride] * 2, [*padding], [1, 1], False, [0, 0], x.shape[1]
    mask = [*asked, False]
    made = torch.ops.aten.convolution_backward(dz, x, weight, None, *numbers, mask)
    return [grad for grad, is_asked in zip(made, asked) if is_asked]
