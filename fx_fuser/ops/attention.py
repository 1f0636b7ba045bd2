"""Attention in a form that one of torch's fused kernels takes, as an op that autograd sees through.

Where no kernel takes its arguments, `scaled_dot_product_attention` is its formula: two fp32 gemms
without tensor cores and a softmax between them. In ViT-B (6 layers, 64 images, bf16) these take
2.8 ms, cuDNN's kernel 0.26 (H100, torch 2.11, 2026-11-26). Often only the form is in the way: a
mask whose last dimension is expanded, three or five dimensions, heads of a size that is no multiple
of 8.

The formula's result is 0 in a row whose keys are all hidden. torch promises that of no kernel, so
no kernel sees such a row: its keys are shown, and its result is set to 0. A mask that adds numbers
stays with the formula. A row that `finfo.min` hides is the mean of the values there; a kernel may
make NaN of it (https://github.com/pytorch/pytorch/issues/110213), and the backward of torch's for a
CPU takes each of its probabilities for 1, since beside that number log(S) is lost.

What kernels take is written in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch
2.11 to 2.15). `why_formula` says when neither flash's nor the memory-efficient kernel does; what
cuDNN takes, one of these takes as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LANES = 8  # a head's size is to be a multiple
_LARGEST_HEAD = 256  # of flash


@dataclass(frozen=True)
class Attention:
    """The arguments of an attention: tensors, or nodes of a graph that have them."""

    query: Any  # [*, L, D]
    key: Any  # [*, S, D]
    value: Any  # [*, S, E]
    mask: Any = None  # of bool for the op; [L, S], or what spreads to [*, L, S]; None
    dropout: Any = 0.0
    causal: Any = False
    scale: Any = None
    gqa: Any = False

    def run(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, self.mask, self.dropout, self.causal,
            scale=self.scale, enable_gqa=self.gqa,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        """Of the op."""
        parts = self.query, self.key, self.value, self.mask
        return *parts, self.dropout, self.causal, self.scale, self.gqa


def why_formula(call: Attention) -> str:
    """Why no fused kernel takes these tensors of 16 bits; empty if one does."""
    tensors = {"query": call.query, "key": call.key, "value": call.value, "mask": call.mask}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in tensors.items():
        if tensor.ndim != 4 and not (name == "mask" and tensor.ndim == 2):
            return f"its {name} has {tensor.ndim} dimensions"
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            return f"the last dimension of its {name} has a stride of {tensor.stride(-1)}"
    batches = [t.shape[0] for t in (call.query, call.key, call.value)]
    if len(set(batches)) > 1:
        return f"its batches are {', '.join(map(str, batches))}"
    heads = (call.query.shape[-1], call.value.shape[-1])
    for head in heads:
        if not _is_for_flash(call) and head % _LANES:
            return f"a head of size {head} is no multiple of {_LANES}"
    return ""


def _is_for_flash(call: Attention) -> bool:
    head = call.query.shape[-1]
    return call.mask is None and bool(head == call.value.shape[-1] and head <= _LARGEST_HEAD)


def fitted(call: Attention) -> tuple[Attention, Tensor | None]:
    """The same attention of four dimensions, with what else kernels ask for; and [*, L, 1], which
    rows of its result count, the others being 0. None: all do.

    Its heads may be larger, with zeros behind; so is its result.
    """
    q, k, v = call.query, call.key, call.value
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v))) if q.ndim != 4 else None
    if lead is not None:
        q, k, v = (_of_four(t.expand(*lead, *t.shape[-2:])) for t in (q, k, v))
    batch = max(t.shape[0] for t in (q, k, v))
    q, k, v = (t.expand(batch, *t.shape[1:]) for t in (q, k, v))
    mask, seen = _fitting_mask(call.mask, lead)
    call = replace(call, query=q, key=k, value=v, mask=mask)
    head = q.shape[-1]
    if not _is_for_flash(call) and (head % _LANES or v.shape[-1] % _LANES):
        q, k, v = (F.pad(t, (0, -t.shape[-1] % _LANES)) for t in (q, k, v))
        call = replace(call, scale=head**-0.5 if call.scale is None else call.scale)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return replace(call, query=q, key=k, value=v), seen


def _of_four(tensor: Tensor) -> Tensor:
    """[*, L, D] as [batch, heads, L, D]."""
    if tensor.ndim > 4:
        return tensor.flatten(0, tensor.ndim - 4)
    return tensor.unsqueeze(-3)[(None,) * (3 - tensor.ndim)]


def _fitting_mask(
    mask: Tensor | None, lead: torch.Size | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask in four dimensions, the last one adjacent in memory, without rows that hide all, and
    which rows these are not. What is expanded stays expanded.

    lead: the sizes before the last two of an attention that has not four dimensions.
    """
    if mask is None:
        return None, None
    if lead is not None and mask.ndim > 2:
        mask = mask[(None,) * (len(lead) + 2 - mask.ndim)]
        if any(size != 1 for size in mask.shape[:-2]):
            mask = mask.expand(*lead, *mask.shape[-2:])
        mask = _of_four(mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    few = mask
    for dim in range(3):
        few = few.narrow(dim, 0, 1) if few.stride(dim) == 0 else few
    if few.stride(-1) == 0 or few.shape[-1] == 1:  # a row shows all or nothing
        return None, few[..., :1]
    seen = few.any(-1, keepdim=True)
    return (few | ~seen).contiguous().expand(mask.shape), seen


def _attention(*arguments: Any) -> Tensor:
    call = Attention(*arguments)
    q, k, v = call.query, call.key, call.value
    form, seen = fitted(call)
    made = form.run()[..., : v.shape[-1]]
    if seen is not None:
        made = made.masked_fill(~seen, 0.0)
    if q.ndim == 4:
        return made
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)))
    return made.reshape(*lead, *made.shape[-2:])


_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
# `scaled_dot_product_attention`, in a form that a fused kernel takes.
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, "
    "float? scale, bool gqa) -> Tensor"
)
_LIBRARY.impl("attention", _attention, "CompositeImplicitAutograd")
ATTENTION = torch.ops.fx_fuser.attention.default
