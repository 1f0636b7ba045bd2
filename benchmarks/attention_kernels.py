"""Attention with a bias as Python functions that launch its kernels, like those of
`benchmarks.kernels` for gemms and convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import kernels
from fx_fuser.native.kernel_spec import KernelSpec


def attention_bias(
    spec: KernelSpec,
    tensors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    alone: bool = False,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> bool:
    """out = softmax(scale · q kᵀ + bias) v in 16 bits, with sums of fp32.

    Args:
        spec: a kernel of `fx_fuser.kernels.attention.bias.spec_of`.
        tensors: q [B, H, queries, D], k and v [B, H, keys, D], bias [B, H, queries, keys], all of
            the spec's dtype, D a multiple of 8. Elements are adjacent, other strides multiples of
            8; the first two of the bias may be 0.
        out: as q. Shares memory with no other tensor here.
        lse: [B, H, queries], float32, contiguous, receives log(sum(exp(...))) over keys. It may
            have rows up to a multiple of 32, which receive infinity.
        scale: None: 1 / sqrt(D).
        is_causal: query i sees keys 0...i.
        alone: blocks do not form clusters; otherwise they do where they share something.
        seed, dropout: of softmax's weights, as `benchmarks.kernels.attention_split` has them.

    Returns, raises: as `benchmarks.kernels.linear_split`.
    """
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else scale
    rest = scale, is_causal, alone, seed, dropout
    return kernels.taken("attention_bias", spec, out, [*tensors], out, lse, *rest)


def attention_bias_backward(
    spec: KernelSpec,
    tensors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    to: Sequence[Tensor],
    scale: float | None = None,
    is_causal: bool = False,
    alone: bool = False,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> bool:
    """The gradients of `attention_bias`'s out. Deterministic.

    Args:
        spec: a kernel of `fx_fuser.kernels.attention.bias.backward_spec_of`.
        tensors, out, lse, scale, is_causal, alone, seed, dropout: as `attention_bias` had them, or
            made them.
        d_out: the gradient of out, as q.
        to: receive the gradients: of q, k, v and, if wanted, of the bias: [B, H, queries, keys],
            keys adjacent. Where the bias is expanded over B, H or both it may have 1: the sum.

    Returns, raises: as `benchmarks.kernels.linear_split`.
    """
    q = tensors[0]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batches, heads, queries, _ = q.shape
    padded = -(-queries // 128) * 128
    of_queries = q.new_empty(batches, heads, padded, 2, dtype=torch.float32)
    rest = scale, is_causal, alone, seed, dropout
    given = [*tensors, out, lse, d_out, of_queries], [*to], *rest
    return kernels.taken("attention_bias_backward", spec, out, *given)
