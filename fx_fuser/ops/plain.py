"""Ops without an epilogue: gemms that passes call, a copy, an exact convolution."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.conv2d import library_convolution

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


def _split_product(a: Tensor, b: Tensor, kernel: str) -> Tensor:
    a, b = a.float(), b.float()
    return F.linear(a, b) if b.ndim == 2 else a @ b.mT


# a bᵀ in fp32; b is a matrix, or has a's leading sizes. kernel: the name of
# `kernels.split.SPLIT_GEMM` or, if one of the two has 16 bits, of one of `MIXED_GEMMS`.
_LIBRARY.define("split_product(Tensor a, Tensor b, str kernel) -> Tensor")
_LIBRARY.impl("split_product", _split_product, "CPU")
torch.library.register_fake("fx_fuser::split_product", _split_product, lib=_LIBRARY)


def _exact_product(a: Tensor, b: Tensor, kernel: str) -> Tensor:
    return F.linear(a.float(), b.float())


# a bᵀ in fp32; b is a matrix, and both have the same 16-bit dtype. kernel: the name of one of
# `kernels.exact.EXACT_GEMMS`.
_LIBRARY.define("exact_product(Tensor a, Tensor b, str kernel) -> Tensor")
_LIBRARY.impl("exact_product", _exact_product, "CPU")
torch.library.register_fake("fx_fuser::exact_product", _exact_product, lib=_LIBRARY)


def _unaligned_product(
    a: Tensor, b: Tensor, bias: Tensor | None, kernel: str, sizes: Sequence[int]
) -> Tensor:
    return F.linear(a, b, bias) if b.ndim == 2 else a @ b.mT


# a bᵀ + bias in a's dtype, of 16 bits. b is a matrix; or it has a's leading sizes, and then there
# is no bias. kernel: the name of `kernels.unaligned.gemm_of` a family of these sizes.
_LIBRARY.define(
    "unaligned_product(Tensor a, Tensor b, Tensor? bias, str kernel, int[] sizes) -> Tensor"
)
_LIBRARY.impl("unaligned_product", _unaligned_product, "CPU")
torch.library.register_fake(
    "fx_fuser::unaligned_product",
    lambda a, b, bias, kernel, sizes: a.new_empty((*a.shape[:-1], b.shape[-2])),
    lib=_LIBRARY,
)


# A copy that a partitioner does not recompute in backward, as it may a `clone`: the operand may
# have been written to by then.
_LIBRARY.define("kept(Tensor a) -> Tensor")
_LIBRARY.impl("kept", lambda a: a.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fx_fuser::kept", lambda a: a.clone(), lib=_LIBRARY)


# In fp32 without TF32, whatever cuDNN's setting says: it allows TF32 by default.
_LIBRARY.define(
    "exact_convolution(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, "
    "int groups) -> Tensor"
)
_LIBRARY.impl("exact_convolution", functools.partial(library_convolution, False), "CUDA")
