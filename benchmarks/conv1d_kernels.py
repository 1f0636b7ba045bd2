"""The kernels of the convolution along one dimension as Python functions, as `benchmarks.kernels`
has those of gemms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight as conv1d_weight_of_torch

from benchmarks import kernels
from fx_fuser.native.kernel_spec import KernelSpec


def conv1d(
    spec: KernelSpec, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, padding: int
) -> bool:
    """z = the convolution of x and weight, in groups, + bias.

    Args:
        spec: a kernel of `fx_fuser.kernels.conv1d.spec_of`; all tensors are of its dtype.
        x: [batch, frame, channel]; channels adjacent, other strides multiples of 8.
        weight: [group, tap, out channel, in channel], contiguous; both multiples of 8.
        bias: one number per channel, contiguous.
        z: [batch, frame, channel], contiguous. Shares memory with no other tensor here.

    Returns, raises: as `benchmarks.kernels.linear_split`.
    """
    return kernels.taken("conv1d", spec, z, x, weight, bias, z, padding)


def conv1d_weight(spec: KernelSpec, x: Tensor, dz: Tensor, dw: Tensor, padding: int) -> bool:
    """dw = the gradient of `conv1d`'s weight by dz, of the strides of x.

    spec: of `fx_fuser.kernels.conv1d.weight_spec_of`. dw: as the weight.
    """
    return kernels.taken("conv1d_weight", spec, dw, x, dz, dw, padding)


def in_taps(weight: Tensor, groups: int) -> Tensor:
    """[out channel, in channel of a group, tap] as the kernels want it."""
    return weight.unflatten(0, (groups, -1)).permute(0, 3, 1, 2).contiguous()


def from_taps(weight: Tensor) -> Tensor:
    """The inverse."""
    return weight.permute(0, 2, 3, 1).flatten(0, 1).contiguous()


def turned(weight: Tensor) -> Tensor:
    """Of weights in taps those of the gradient of x, whose padding is taps - 1 - padding."""
    return weight.flip(1).transpose(2, 3).contiguous()


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """By torch, of tensors as `conv1d` has them."""
    groups = weight.shape[0]
    return F.conv1d(x.mT, from_taps(weight), bias, padding=padding, groups=groups).mT


def gradient_of_weight(x: Tensor, dz: Tensor, groups: int, taps: int, padding: int) -> Tensor:
    """By torch, of tensors as `conv1d_weight` has them."""
    sizes = dz.shape[-1], x.shape[-1] // groups, taps
    made = conv1d_weight_of_torch(x.mT, sizes, dz.mT, padding=padding, groups=groups)
    return in_taps(made, groups)
