"""What an `AttentionSite` computes, from its description alone, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fx_fuser.graph.attention.axes import Dim
from fx_fuser.graph.attention.site import SCORE, AttentionSite, Operand, Step
from fx_fuser.graph.read.operations import OPS


def reference(site: AttentionSite, values: Mapping[Node, Tensor]) -> Tensor:
    """The value of `site.result`, in its shape and dtype. values: an operand's node → its tensor.

    As exact as eager mode: each step is rounded to its own dtype. Differentiable.
    """
    sizes = _sizes(site, values)
    batch, rows, keys = site.batch, site.rows, site.keys

    def seen(operand: Operand, order: Dim) -> Tensor:
        tensor = values[operand.node]
        tensor = tensor if operand.dtype is None else tensor.to(operand.dtype)
        return operand.seen(tensor, sizes, order)

    def matrix(operand: Operand, left: Dim, right: Dim) -> Tensor:
        """[*batch, left, right], the last two dimensions not broadcast."""
        tensor = seen(operand, (*batch, *left, *right))
        here = [*tensor.shape[: len(batch)], *(sizes[axis] for axis in (*left, *right))]
        shape = [math.prod(sizes[axis] for axis in part) for part in (left, right)]
        return tensor.expand(here).reshape(*tensor.shape[: len(batch)], *shape)

    q, k = matrix(site.q, rows, site.inner), matrix(site.k, keys, site.inner)
    s = q.to(site.scores) @ k.to(site.scores).mT
    outer = s.shape[:-2]
    s = s.reshape(*outer, *(sizes[axis] for axis in (*rows, *keys)))
    order = (*batch, *rows, *keys)
    for step in site.tail:
        s = _applied(step, [seen(a, order) if isinstance(a, Operand) else a for a in step.args], s)
    s = s.reshape(*outer, *(math.prod(sizes[axis] for axis in part) for part in (rows, keys)))
    hidden = (s == -math.inf).all(-1, keepdim=True)
    if site.is_safe:
        s = s.masked_fill(hidden, 0.0)
    p = F.softmax(s, -1, dtype=site.weights)
    p = p.masked_fill(hidden, 0.0) if site.is_safe else p
    for step in site.post:
        p = _applied(step, step.args, p)
    v = matrix(site.v, keys, site.columns)
    o = (p.to(site.values) @ v.to(site.values)).to(site.dtype)
    return _laid_out(site, o, sizes)


def _applied(step: Step, given: Sequence[Any], score: Tensor) -> Tensor:
    args = [score if a is SCORE else a for a in given]
    if step.op == "causal":
        hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        return score.masked_fill(hidden, -math.inf)
    if step.op == "dropout":
        return F.dropout(score, step.args[1])  # type: ignore[arg-type]
    made: Tensor = score if step.op == "cast" else OPS[step.op].torch(*args)
    return made.to(step.dtype)


def _laid_out(site: AttentionSite, o: Tensor, sizes: list[int]) -> Tensor:
    """[*batch, rows, columns] → the dimensions of the result."""
    order = (*site.batch, *site.rows, *site.columns)
    lead = [sizes[axis] for axis in site.batch]
    o = o.expand(*lead, *o.shape[-2:]).reshape([sizes[axis] for axis in order])
    mine = [axis for dim in site.result.dims for axis in dim]
    lost = [axis for axis in order if axis not in mine]  # of size 1
    o = o.permute([order.index(axis) for axis in (*mine, *lost)])
    return o.reshape([math.prod(sizes[axis] for axis in dim) for dim in site.result.dims])


def _sizes(site: AttentionSite, values: Mapping[Node, Tensor]) -> list[int]:
    """The sizes of the axes. One that changes from call to call is read from the tensors."""
    sizes: list[int | None] = [n if isinstance(n, int) else None for n in site.sizes]
    found = [(dim, n) for o in site.operands for dim, n in zip(o.dims, values[o.node].shape)]
    while None in sizes:
        unknown = {dim: [a for a in dim if sizes[a] is None] for dim, _ in found}
        dim, n = next((dim, n) for dim, n in found if len(unknown[dim]) == 1)
        sizes[unknown[dim][0]] = n // math.prod(sizes[a] for a in dim if sizes[a] is not None)  # type: ignore[misc]
    return sizes  # type: ignore[return-value]
