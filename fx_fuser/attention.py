"""Attention in fp32 by split products: the ops, their kernels and what they are in torch.

    out = softmax(scale q kᵀ + bias) v        q: [B, H, M, D], k: [B, H, N, D], v: [B, H, N, Dv]

`fx_fuser.attention_pass` puts them in place of ATen's memory-efficient attention, whose results
they have: out [B, H, M, Dv] in the memory of [B, M, H, Dv]; lse, the logarithm of a row's sum, as
[B, H, M rounded up to 32] with inf behind M, or without rows where it is not wanted. A row that
sees no key is 0 and has lse 0. causal: row m sees the keys up to m. bias broadcasts to
[B, H, M, N] and gets no gradient. kernels: on CUDA the names of `forward_specs` or
`backward_specs`. wanted: which of dq, dk and dv, by number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser import build, native
from fx_fuser.anchors.linear import PRODUCT_ALONE
from fx_fuser.epilogue import kernel_spec, parse
from fx_fuser.kernel_spec import LINEAR_SPLIT, KernelSpec

OPS = ("attention", "attention_backward")
LSE_PADDING = 32
_aten = torch.ops.aten
_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


# ---- the kernels --------------------------------------------------------------------------------


def _spec(steps: Sequence[str], tensors: int, numbers: int) -> KernelSpec:
    """Of steps whose tensors, of float32, are t0… and numbers s0…"""
    epilogue = parse("; ".join(f"v{i} = {step}" for i, step in enumerate(steps)))
    dtypes = dict.fromkeys(("z", *(f"t{i}" for i in range(tensors))), torch.float32)
    names = [f"s{i}" for i in range(numbers)]
    return kernel_spec(epilogue, dtypes, names, torch.float32, LINEAR_SPLIT)


def _scores(with_bias: bool) -> list[str]:
    return ["mul(z, s0)", *(["add(v0, t0)"] if with_bias else [])]


def forward_specs(with_bias: bool) -> list[KernelSpec]:
    return [_spec(_scores(with_bias), int(with_bias), 1), PRODUCT_ALONE]


def backward_specs(with_bias: bool, causal: bool) -> list[KernelSpec]:
    """P from the scores and lse, dS from dout vᵀ, and the product alone.

    A causal mask is no operand of [M, N], which would be read for each plane: how many keys a row
    sees is a column, the number of a key is a row, and what is left is not positive where the mask
    hides the key.
    """
    steps, lse = _scores(with_bias), int(with_bias)
    last = len(steps) - 1
    steps += [f"sub(v{last}, t{lse})", f"exp(v{last + 1})"]
    if causal:
        steps += [f"sub(t{lse + 1}, t{lse + 2})", f"relu(v{last + 3})"]
        steps += [f"where(v{last + 4}, v{last + 2}, s1)"]
    probability = _spec(steps, lse + (3 if causal else 1), 2 if causal else 1)
    gradient = _spec(["sub(z, t1)", "mul(t0, v0)", "mul(v1, s0)"], 2, 1)
    return [probability, gradient, PRODUCT_ALONE]


def all_specs() -> list[KernelSpec]:
    flags = (False, True)
    found = [spec for bias in flags for spec in forward_specs(bias)]
    return found + [spec for b in flags for c in flags for spec in backward_specs(b, c)]


_loaded: set[int] = set()  # indices of devices that have the kernels of attention.cu


def prepare(specs: Sequence[KernelSpec], device: torch.device) -> None:
    """Builds and loads these kernels and those between products, ahead of their use.

    Raises:
        BuildError: they do not compile or load.
    """
    native.prepare(specs, device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _loaded:
        native.load_source("load_attention", build.attention_source(), device)
        _loaded.add(index)


def _load(like: Tensor, kernels: Sequence[str]) -> list[Tensor]:
    """What a graph names that came out of Inductor's cache: nobody has planned it here."""
    known = {spec.name: spec for spec in all_specs()}
    prepare([known[name] for name in kernels], like.device)
    return []


# ---- in torch -----------------------------------------------------------------------------------


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    return q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)


def _masked_scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(_hidden(q, k), -torch.inf) if causal else scores


def _new_heads(like: Tensor, rows: int, columns: int) -> Tensor:
    batches, heads = like.shape[:2]
    return like.new_empty(batches, rows, heads, columns).transpose(1, 2)


def _new_lse(q: Tensor, with_lse: bool) -> Tensor:
    padded = math.ceil(q.shape[2] / LSE_PADDING) * LSE_PADDING  # a SymInt's text as ATen has it
    return q.new_full((*q.shape[:2], padded if with_lse else 0), torch.inf)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    with_lse: bool,
    kernels: Sequence[str],
) -> tuple[Tensor, Tensor]:
    scores = _masked_scores(q, k, bias, causal, scale)
    largest = scores.new_full(scores.shape[:-1], -torch.inf)
    if k.shape[2]:
        largest = scores.amax(-1)
    shift = largest.masked_fill(largest == -torch.inf, 0)
    exponentials = (scores - shift[..., None]).exp()
    sums = exponentials.sum(-1)
    sums = sums.masked_fill(sums == 0, 1)
    out = _new_heads(q, q.shape[2], v.shape[3])
    out.copy_(exponentials / sums[..., None] @ v)
    lse = _new_lse(q, with_lse)
    if with_lse:
        lse[..., : q.shape[2]] = shift + sums.log()
    return out, lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, with_lse, _ = rest
    return _new_heads(q, q.shape[2], v.shape[3]), _new_lse(q, with_lse)


def _forward_by_library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    with_lse: bool,
    kernels: Sequence[str],
) -> list[Tensor]:
    """On CUDA, for what our kernels leave: data that splits hold badly, sizes out of reach."""
    if 0 in (*q.shape, *k.shape, *v.shape):
        return [*_forward(q, k, v, bias, causal, scale, with_lse, kernels)]
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    op = _aten._scaled_dot_product_efficient_attention.default
    out, lse, _, _ = op(q, k, v, bias, with_lse, 0.0, causal, scale=scale)
    return [out, lse]


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    wanted: Sequence[int],
    kernels: Sequence[str],
) -> list[Tensor]:
    scores = _masked_scores(q, k, bias, causal, scale)
    p = (scores - lse[..., : q.shape[2], None]).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    gradients = (lambda: ds @ k, lambda: ds.mT @ q, lambda: p.mT @ dout)
    found = _backward_fake(dout, q, k, v, bias, out, lse, causal, scale, wanted, kernels)
    for place, result in zip(wanted, found):
        result.copy_(gradients[place]())
    return found


def _backward_fake(dout: Tensor, *rest: Any) -> list[Tensor]:
    *_, wanted, _ = rest
    return [_new_heads(t, t.shape[2], t.shape[3]) for t in (rest[i] for i in wanted)]


def _backward_by_library(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    wanted: Sequence[int],
    kernels: Sequence[str],
) -> list[Tensor]:
    if 0 in (*q.shape, *k.shape, *v.shape):
        return _backward(dout, q, k, v, bias, out, lse, causal, scale, wanted, kernels)
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    random = q.new_zeros((), dtype=torch.int64)  # seed and offset of a dropout that there is not
    mask = [i in wanted for i in range(3)] + [False]
    op = _aten._scaled_dot_product_efficient_attention_backward.default
    found = op(dout, q, k, v, bias, out, lse, random, random, 0.0, mask, causal, scale=scale)
    return [found[i] for i in wanted]


# ---- the ops ------------------------------------------------------------------------------------

_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale, bool with_lse, "
    "str[] kernels)"
)
_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, "
    "bool causal, float scale, int[] wanted, str[] kernels) -> Tensor[]"
)
# Those on CUDA are in kernels_cu/shim_attention.h and shim_attention_backward.h, which call the
# three that follow.
_LIBRARY.define(f"attention{_FORWARD} -> (Tensor out, Tensor lse)")
_LIBRARY.impl("attention", _forward, "CPU")
torch.library.register_fake("fx_fuser::attention", _forward_fake, lib=_LIBRARY)
_LIBRARY.define(f"attention_backward{_BACKWARD}")
_LIBRARY.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("fx_fuser::attention_backward", _backward_fake, lib=_LIBRARY)

_LIBRARY.define(f"attention_in_torch{_FORWARD} -> Tensor[]")
_LIBRARY.impl("attention_in_torch", _forward_by_library, "CUDA")
_LIBRARY.define(f"attention_backward_in_torch{_BACKWARD}")
_LIBRARY.impl("attention_backward_in_torch", _backward_by_library, "CUDA")
_LIBRARY.define("load_attention(Tensor like, str[] kernels) -> Tensor[]")
_LIBRARY.impl("load_attention", _load, "CUDA")
