"""Ops without an epilogue: gemms that passes call, a copy, an exact convolution."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.conv2d import library_convolution
from fx_fuser.kernels.planes import FACT_WORDS, LEAST_NORMAL, TOP, doubted, plane_strides

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


# ---- fp32 products from planes: on a CPU what kernels_cu/host/planes.h makes ---------------------


def _plane(
    tensor: Tensor, largest: Tensor | None, order: Sequence[int], kernel: str
) -> tuple[Tensor, Tensor]:
    values, facts = _room_of_plane(tensor, largest, order, kernel)
    found = tensor.abs() if largest is None else largest
    top = torch.where(found.isfinite(), found, 0.0).double().max() if found.numel() else found.sum()
    exponent = TOP + 1 - int(torch.frexp(top)[1]) if top > 0 else 0
    scaled = tensor.double() * 2.0**exponent
    values.copy_(scaled.float())
    lost = (scaled != 0) & (scaled.abs() < LEAST_NORMAL)
    facts[:3] = torch.tensor([exponent, 1, int(lost.any())], dtype=torch.int32)
    return values, facts


def _room_of_plane(
    tensor: Tensor, largest: Tensor | None, order: Sequence[int], kernel: str
) -> tuple[Tensor, Tensor]:
    strides = plane_strides(tensor, order)
    values = tensor.new_empty_strided(tensor.shape, strides, dtype=torch.float16)
    return values, tensor.new_empty(FACT_WORDS, dtype=torch.int32)


# An fp32 tensor's plane and what is known of it, for products that share it. largest: the tensor's
# largest finite value is the largest of these. order: `kernels.planes.order_of` the tensor. kernel:
# the name of `kernels.planes.PLANES`.
_LIBRARY.define(
    "plane(Tensor tensor, Tensor? largest, int[] order, str kernel) -> (Tensor, Tensor)"
)
_LIBRARY.impl("plane", _plane, "CPU")
torch.library.register_fake("fx_fuser::plane", _room_of_plane, lib=_LIBRARY)


def _planes_product(
    a: Tensor,
    b: Tensor,
    a_values: Tensor,
    b_values: Tensor,
    a_facts: Tensor,
    b_facts: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    exponent = int(a_facts[0] + b_facts[0])
    sums = (a_values.double() @ b_values.double()).float()
    if a_facts[2] or b_facts[2]:
        again = (a.double() @ b.double() * 2.0**exponent).float()
        sums = torch.where(doubted(sums * a.shape[-1] ** -0.5), again, sums)
    unscale = max(-exponent, -252)
    half = int(unscale / 2)
    factors = [2.0**half, 2.0 ** (unscale - half)]
    return sums, torch.tensor(factors, dtype=torch.float32)


# a b of fp32 matrices, or of batches of them, with TF32's accuracy, and two factors: the product is
# their product's. a_values, a_facts: of a's plane, the values seen as a is. kernel: as in `plane`.
_LIBRARY.define(
    "planes_product(Tensor a, Tensor b, Tensor a_values, Tensor b_values, Tensor a_facts, "
    "Tensor b_facts, str kernel) -> (Tensor, Tensor)"
)
_LIBRARY.impl("planes_product", _planes_product, "CPU")
torch.library.register_fake(
    "fx_fuser::planes_product",
    lambda a, b, *_: (a.new_empty((*a.shape[:-1], b.shape[-1])), a.new_empty(2)),
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
