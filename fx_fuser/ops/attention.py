"""Attention in a form that torch's fused kernels take, as an op that autograd sees through.

If no kernel takes its arguments, `scaled_dot_product_attention` runs as its formula: two fp32 gemms
without tensor cores and a softmax between them. In ViT-B (6 layers, 64 images, bf16) these take
2.8 ms, cuDNN's kernel 0.26 (H100, torch 2.11, 2026-11-26). Often only the form is in the way: a
mask whose last dimension is expanded or is not the last in memory, three or five dimensions, heads
whose size is not a multiple of 8.

Some rows of a mask are not given to a kernel as they are. By their largest number m:

- m = -inf, or a bool mask shows no key. The formula's result is 0. torch does not promise that for
  any kernel: the keys are shown, and the result is set to 0.
- |m| > 2^10. What a kernel keeps for backward is m + log(S), in which log(S) loses digits. softmax
  does not change with m, so m is subtracted. In 16 bits that is exact from m to 2 m, or to m / 2;
  a key beyond has a score of 512 less.
- m finite and |m| >= 2^43. Added to m, scores are lost, in fp32 and in float64: the keys that have
  m share the row evenly. An example is `finfo.min` that hides all keys. A kernel may make NaN of it
  (https://github.com/pytorch/pytorch/issues/110213), and torch's CPU backward takes each
  probability for 1. m is subtracted, and in such a row q is 0. In training q and k still need
  gradients, which a kernel does not give for a q of 0. So heads are twice as large,
  [q - q, q] · [k, k - k], where autograd takes each difference for q or k alone.
- m is NaN or +inf: the result is NaN, whatever the kernel computed.

torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp says what kernels take (torch 2.11 to
2.15). `why_formula` says when neither flash nor the memory-efficient kernel takes the call; what
cuDNN takes, one of these takes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LANES = 8  # a head's size and a mask's pitch must be multiples
_LARGEST_HEAD = 256  # flash's
_FAR = 2.0**10  # the largest row maximum that log(S) may be added to
_ABSORBING = 2.0**43  # next to it fp32 resolves 2^20, float64 2^-9


@dataclass(frozen=True)
class Attention:
    """The arguments of an attention: tensors, or nodes of a graph that have them."""

    query: Any  # [*, L, D]
    key: Any  # [*, S, D]
    value: Any  # [*, S, E]
    # bool, or numbers in the query's dtype; [L, S], or what broadcasts to [*, L, S].
    mask: Any = None
    dropout: Any = 0.0
    causal: Any = False
    scale: Any = None
    gqa: Any = False
    absorbs: bool = True  # may a row of the mask have a largest number that is not `moderate`?
    rows: Any = None  # of the mask, as `attention_rows` returns them, if `attention_mask` made it

    def run(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, self.mask, self.dropout, self.causal,
            scale=self.scale, enable_gqa=self.gqa,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        """The op's arguments."""
        parts = self.query, self.key, self.value, self.mask
        flags = self.dropout, self.causal, self.scale, self.gqa, self.absorbs
        return *parts, *flags, self.rows


@dataclass(frozen=True)
class Rows:
    """[*, L, 1] of bool. shown: the rows of a result that count; the others are 0. broken: those
    that are NaN."""

    shown: Tensor
    broken: Tensor | None = None

    def settled(self, made: Tensor) -> Tensor:
        # Not masked_fill, whose gradient is contiguous whatever strides it is given.
        made = torch.where(self.shown, made, 0.0)
        if self.broken is None:
            return made
        # A sum: the gradient of such a row still meets the NaN of the mask.
        nan = torch.where(self.broken, made.new_full((), torch.nan), made.new_zeros(()))
        return made + nan


def moderate(number: float) -> bool:
    """Are scores that are added to it not lost?"""
    return abs(number) < _ABSORBING


def why_formula(call: Attention) -> str:
    """Why no fused kernel takes these 16-bit tensors; empty if one does."""
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
            return f"its head size {head} is not a multiple of {_LANES}"
    for name in ("query", "key", "value"):
        if _is_askew(tensors[name], call):
            return f"its {name} is not aligned to 16 bytes"
    return ""


def _is_askew(tensor: Tensor, call: Attention) -> bool:
    """For the memory-efficient kernel, the only one that takes a mask that needs a gradient. What
    autocast casts is a new, aligned tensor."""
    trained = call.mask is not None and call.mask.requires_grad
    return trained and tensor.itemsize == 2 and bool(tensor.storage_offset() % _LANES)


def _is_for_flash(call: Attention) -> bool:
    head = call.query.shape[-1]
    return call.mask is None and bool(head == call.value.shape[-1] and head <= _LARGEST_HEAD)


def fitted(call: Attention) -> tuple[Attention, Rows | None]:
    """The same attention in four dimensions, with whatever else kernels need; and what remains to
    be done to rows of its result, or None.

    Its heads may be larger, with zeros at the end; so is its result then.
    """
    q, k, v = call.query, call.key, call.value
    lead = lead_of(call)
    if lead is not None:
        q, k, v = (_of_four(t.expand(*lead, *t.shape[-2:])) for t in (q, k, v))
    batch = max(t.shape[0] for t in (q, k, v))
    q, k, v = (t.expand(batch, *t.shape[1:]) for t in (q, k, v))
    mask, rows = call.mask, None
    head, scale = q.shape[-1], call.scale
    if mask is not None:
        mask, largest = (mask, call.rows) if call.rows is not None else form(call)
        rows = _rows(largest)
        if mask.dtype is torch.bool:
            mask = None if mask.shape[-1] == 1 else mask
        elif call.absorbs and not moderate(torch.finfo(mask.dtype).max):
            absorbed = (largest.abs() >= _ABSORBING) & largest.isfinite()
            q, k = _without_scores(q, k, absorbed)
    call = replace(call, query=q, key=k, value=v, mask=mask)
    if not _is_for_flash(call) and (head % _LANES or v.shape[-1] % _LANES):
        q, k, v = (F.pad(t, (0, -t.shape[-1] % _LANES)) for t in (q, k, v))
    if q.shape[-1] != head and scale is None:
        scale = head**-0.5
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    q, k, v = (t.clone() if _is_askew(t, call) else t for t in (q, k, v))
    return replace(call, query=q, key=k, value=v, scale=scale), rows


def form(call: Attention) -> tuple[Tensor, Tensor]:
    """The mask as a kernel takes it, and its rows."""
    largest = rows_of(*arguments_of_rows(call))
    return mask_of(*arguments_of_rows(call), largest, call.key.shape[-2]), largest


def arguments_of_rows(call: Attention) -> tuple[Any, Any, Any]:
    """Those of `rows_of`, and the first ones of `mask_of`."""
    return call.mask, lead_of(call), _dtype_within(call.query)


def lead_of(call: Attention) -> list[int] | None:
    """The sizes before the last two, of an attention that does not have four dimensions."""
    parts = call.query, call.key, call.value
    return None if parts[0].ndim == 4 else [*torch.broadcast_shapes(*(t.shape[:-2] for t in parts))]


def _dtype_within(query: Tensor) -> torch.dtype:
    """The dtype of the query, and of a mask that adds numbers, within torch's attention."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _of_four(tensor: Tensor) -> Tensor:
    """[*, L, D] as [batch, heads, L, D]."""
    if tensor.ndim > 4:
        return tensor.flatten(0, tensor.ndim - 4)
    return tensor.unsqueeze(-3)[(None,) * (3 - tensor.ndim)]


def _mask_of_four(mask: Tensor, lead: Sequence[int] | None) -> Tensor:
    if lead is not None and mask.ndim > 2:
        mask = mask[(None,) * (len(lead) + 2 - mask.ndim)]
        if any(size != 1 for size in mask.shape[:-2]):
            mask = mask.expand(*lead, *mask.shape[-2:])
        mask = _of_four(mask)
    return mask[(None,) * (4 - mask.ndim)]


def _once(mask: Tensor) -> Tensor:
    """One slice of each dimension before the last that is expanded."""
    for dim in range(3):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    return mask


def _shows_all_or_nothing(few: Tensor) -> bool:
    """Does each row show all keys or none?"""
    return few.stride(-1) == 0 or few.shape[-1] == 1


def rows_of(mask: Tensor, lead: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """[*, L, 1]: for bool, whether a row shows any key; for numbers, a row's largest, in fp32."""
    few = _once(_mask_of_four(mask, lead))
    if few.dtype is torch.bool:
        return few[..., :1] if _shows_all_or_nothing(few) else few.any(-1, keepdim=True)
    # In fp32: the C++ that Inductor writes for several in 16 bits does not compile (torch 2.15).
    return few.to(dtype).detach().float().amax(-1, keepdim=True)


def mask_of(
    mask: Tensor, lead: Sequence[int] | None, dtype: torch.dtype, rows: Tensor, keys: int
) -> Tensor:
    """[*, L, S], the last dimension adjacent in memory. For bool, no row hides all; [*, L, 1] if
    each row shows all or nothing. For numbers, the pitch of rows is a multiple of 16 bytes and the
    largest of a row is near 0. What is expanded stays expanded.
    """
    whole = _mask_of_four(mask, lead)
    few = _once(whole)
    if few.dtype is not torch.bool:
        few = _fitting_bias(few.to(dtype), rows, keys)
    elif _shows_all_or_nothing(few):
        few = rows
    else:
        few = (few | ~rows).contiguous()
    return few.expand(*whole.shape[:-1], -1)


def _fitting_bias(few: Tensor, largest: Tensor, keys: int) -> Tensor:
    far = largest.masked_fill(largest.abs() <= _FAR, 0.0).to(few.dtype)
    few = few - far  # NaN where `far` is not finite
    few = few.masked_fill(largest == -torch.inf, 0.0)
    few = few.expand(*few.shape[:-1], keys).contiguous()
    if keys % _LANES:  # torch would do this, but here Inductor writes it once
        few = F.pad(few, (0, -keys % _LANES))[..., :keys]
    return few


def _rows(largest: Tensor) -> Rows:
    if largest.dtype is torch.bool:
        return Rows(largest)
    return Rows(largest != -torch.inf, ~(largest < torch.inf))


def _without_scores(q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products are 0 in these rows, with the gradients of q and k."""
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)):
        return q * torch.where(rows, 0.0, 1.0).to(q.dtype), k
    zero = q - q.detach()  # NaN if q is not finite, as its products would be
    q = torch.cat([torch.where(rows, zero, q), torch.where(rows, q, 0.0)], -1)
    return q, torch.cat([k, k - k.detach()], -1)


def _match_grad_strides(made: Tensor) -> None:
    """Gives its gradient the same strides before a kernel's backward reads it.

    torch 2.11 caches cuDNN's backward by the strides of q, k and v alone (`MHAParams` in
    aten/src/ATen/native/cudnn/MHA.cpp): a gradient with other strides than the first one had is
    read as if it had those, silently. A hook, not an op: a view of the result would hide from
    autograd that it is written to.
    """
    strides = made.stride()

    def matched(gradient: Tensor) -> Tensor | None:
        if gradient.stride() == strides:
            return None
        return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)

    made.register_hook(matched)


def _attention(*arguments: Any) -> Tensor:
    call = Attention(*arguments)
    fit, rows = fitted(call)
    made = fit.run()
    if made.requires_grad:
        _match_grad_strides(made)
    if made.shape[-1] != call.value.shape[-1]:
        made = made[..., : call.value.shape[-1]]
    if rows is not None:
        made = rows.settled(made)
    lead = lead_of(call)
    return made if lead is None else made.reshape(*lead, *made.shape[-2:])


_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


def _define(name: str, schema: str, function: Any) -> Any:
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.fx_fuser, name).default


# `scaled_dot_product_attention`, in a form that a fused kernel takes. The last two arguments are
# those of `Attention`.
ATTENTION = _define(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal, "
    "float? scale, bool gqa, bool absorbs=True, Tensor? rows=None) -> Tensor",
    _attention,
)
# What is made of a mask. Layers with the same mask share it: where there is no backward, Inductor
# would make it again in each of them.
ROWS = _define("attention_rows", "(Tensor mask, int[]? lead, ScalarType dtype) -> Tensor", rows_of)
MASK = _define(
    "attention_mask",
    "(Tensor mask, int[]? lead, ScalarType dtype, Tensor rows, int keys) -> Tensor",
    mask_of,
)
OPS = {ATTENTION: _attention, ROWS: rows_of, MASK: mask_of}  # op → what it runs
