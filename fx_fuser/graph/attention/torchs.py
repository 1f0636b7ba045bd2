"""`scaled_dot_product_attention`, one more spelling of an attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.graph.attention.axes import Axes, Dim
from fx_fuser.graph.attention.calls import ATTENTION_ARGUMENTS
from fx_fuser.graph.attention.read_through import numbered, origin, summed
from fx_fuser.graph.attention.site import SCORE, AttentionSite, Operand, RefusedError, Step
from fx_fuser.graph.prepare.reindex import Size, is_same
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.nodes import argument_of, meta_tensor
from fx_fuser.graph.read.view import View


def torchs_attention(view: View, node: Node) -> AttentionSite:
    """What the call computes, by its formula: fp32 between 16-bit operands and result.

    Raises:
        RefusedError: an argument changes from call to call, or a size is not known to fit.
    """
    given = [argument_of(node, i, name) for i, (name, _) in enumerate(ATTENTION_ARGUMENTS)]
    given = [d if g is None else g for g, (_, d) in zip(given, ATTENTION_ARGUMENTS)]
    q, k, v, mask = view.resolve(node, tuple(given[:4]))
    dropout, causal, scale, gqa = given[4:]
    made, tensors = meta_tensor(node), [_tensor(node, n) for n in (q, k, v)]
    if made is None or type(causal) is not bool or type(gqa) is not bool:
        raise RefusedError(node, "an argument changes from call to call")
    head = tensors[0].shape[-1]
    if scale is None and isinstance(head, int) and head:
        scale = 1 / math.sqrt(head)
    if not is_number(scale) or not is_number(dropout):
        raise RefusedError(node, "an argument changes from call to call")
    axes = Axes()
    batch = [axes.new(size) for size in made.shape[:-2]]
    rows, keys = (axes.new(tensor.shape[-2]) for tensor in tensors[:2])
    inner, columns = (axes.new(tensor.shape[-1]) for tensor in tensors[1:])
    ends = (rows, inner), (keys, inner), (keys, columns)
    q, k, v = (
        Operand(n, (*_batch_of(node, axes, batch, t.shape[:-2], gqa and i > 0), *end))
        for i, (n, t, end) in enumerate(zip((q, k, v), tensors, ends))
    )
    wide = torch.promote_types(made.dtype, torch.float32)
    tail = [Step("mul", (SCORE, float(scale)), wide)]
    if causal:
        tail.append(Step("causal", (SCORE,), wide))
    if mask is not None:
        shape = (*made.shape[:-2], *(tensor.shape[-2] for tensor in tensors[:2]))
        of = origin(view, axes, _mask_of(node, axes, [*batch, rows, keys], shape, mask), node)
        of = summed(view, axes, of, node)
        tail.append(_masked(view, node, of, made.dtype, wide))
    post = (Step("dropout", (SCORE, float(dropout)), wide),) if dropout else ()
    q, k, v = (replace(origin(view, axes, o, node), dtype=made.dtype) for o in (q, k, v))
    site = AttentionSite(
        node=node, nodes=(node,), views=(), result=Operand(node, (*batch, rows, columns)),
        sizes=(), batch=(), rows=rows, keys=keys, inner=inner, columns=columns, q=q, k=k, v=v,
        scores=wide, tail=tuple(tail), weights=wide, post=post, values=wide, dtype=made.dtype,
        is_safe=True,
    )  # fmt: skip
    return numbered(axes, site)


def _tensor(node: Node, operand: Any) -> torch.Tensor:
    tensor = meta_tensor(operand) if isinstance(operand, Node) else None
    if tensor is None or tensor.ndim < 2:
        raise RefusedError(node, "an operand is not a tensor of two or more dimensions")
    return tensor


def _batch_of(
    node: Node, axes: Axes, batch: Sequence[Dim], sizes: Sequence[Size], shared: bool
) -> list[Dim]:
    """The axes of an operand's batch. shared: several query heads may share one of its heads."""
    found: list[Dim] = []
    for i, (dim, size) in enumerate(zip(batch[len(batch) - len(sizes) :], sizes)):
        whole = axes.size(dim[0])
        if is_same(size, whole):
            found.append(dim)
        elif is_same(size, 1):
            found.append(())
        elif shared and i == len(sizes) - 1 and isinstance(size, int) and isinstance(whole, int):
            parts = axes.arrange(dim, [size, whole // size])
            if parts is None:
                raise RefusedError(node, "its heads are not known to fit")
            found.append(parts[0])
        else:
            raise RefusedError(node, "its batches are not known to be equal")
    return found


def _mask_of(
    node: Node, axes: Axes, dims: Sequence[Dim], shape: Sequence[Size], mask: Any
) -> Operand:
    tensor = meta_tensor(mask) if isinstance(mask, Node) else None
    found = None if tensor is None else axes.spread(tensor.shape, dims, shape)
    if found is None:
        raise RefusedError(node, "its mask is not known to fit")
    return Operand(mask, tuple(found))


def _masked(view: View, node: Node, mask: Operand, dtype: torch.dtype, wide: torch.dtype) -> Step:
    """Autocast rounds a numeric mask as it does q, k and v."""
    tensor = mask.node.meta["example_value"]
    if tensor.dtype is torch.bool:
        return Step("where", (mask, SCORE, -math.inf), wide)
    with view.region[node].autocast():
        is_cast = torch.is_autocast_enabled(tensor.device.type)
    return Step("add", (SCORE, replace(mask, dtype=dtype) if is_cast else mask), wide)
