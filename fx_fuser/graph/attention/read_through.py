"""Views of a tensor, and what they are views of: operands without the copies that views make."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from fx_fuser.graph.attention.axes import Axes, Dim
from fx_fuser.graph.attention.site import AttentionSite, Operand, Step
from fx_fuser.graph.prepare import reindex
from fx_fuser.graph.prepare.reindex import Size
from fx_fuser.graph.read.nodes import (
    argument_of,
    input_of,
    inputs_of,
    is_torchs,
    meta_tensor,
    storages,
)
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

_COPIES = frozenset({"contiguous", "clone"})


def moved(view: View, node: Node) -> tuple[Node, reindex.Step | None] | None:
    """(what it is a view or a copy of, what it does to dimensions), for a node that changes no
    value and repeats none. A step of None moves nothing."""
    source = input_of(node)
    if not isinstance(source, Node) or not is_torchs(node):
        return None
    if called_name(node) in _COPIES:
        return view.value(node, source), None
    step = reindex.step_of(node, source)
    return None if step is None else (view.value(node, source), step)


def origin(view: View, axes: Axes, operand: Operand, end: Node) -> Operand:
    """The tensor behind the operand's views, copies and repetitions, if nothing later in the graph
    writes to it: a backward reads it, too. A key head that several query heads share is one head
    there."""
    while (found := _before(view, axes, operand.node, operand.dims)) is not None:
        source, dims = found
        # A view that is taken under no_grad has no gradient.
        if view.region[operand.node] != view.region[end]:
            break
        if is_written(view, source, source, view.nodes[-1]):
            break
        operand = replace(operand, node=source, dims=tuple(dims))
    return operand


def summed(view: View, axes: Axes, operand: Operand, end: Node) -> Operand:
    """The operand with what it is the sum of, if that is two tensors that nothing later in the
    graph writes to, and if adding them anew rounds as it did."""
    node = operand.node
    written = view.written(node)
    if written is None or written.op != "add" or len(written.args) != 2:
        return operand
    whole = meta_tensor(node)
    nodes = [a for a in written.args if isinstance(a, Node)]
    if len(nodes) != 2:
        return operand
    first, second = map(meta_tensor, nodes)
    if whole is None or first is None or second is None or not (first.ndim and second.ndim):
        return operand
    if not first.device == second.device == whole.device:
        return operand
    if torch.promote_types(first.dtype, second.dtype) != whole.dtype:
        return operand
    if view.region[node] != view.region[end]:
        return operand
    parts: list[Operand] = []
    for given, tensor in zip(nodes, (first, second)):
        spread = axes.spread(tensor.shape, operand.dims, whole.shape)
        if spread is None or is_written(view, given, given, view.nodes[-1]):
            return operand
        part = origin(view, axes, Operand(given, tuple(spread)), end)
        parts.append(summed(view, axes, part, end))
    return replace(operand, parts=tuple(parts))


def is_written(view: View, node: Node, after: Node, end: Node) -> bool:
    """May something between two nodes, or the second one, write to memory of this one?"""
    order = view.order
    for memory in (*storages((node,)), None):
        places = view.written_at.get(memory, ())
        i = bisect.bisect_right(places, order[after])
        if i < len(places) and places[i] <= order[end]:
            return True
    return False


def _before(
    view: View, axes: Axes, node: Node, dims: Sequence[Dim]
) -> tuple[Node, list[Dim]] | None:
    found = moved(view, node)
    if found is not None:
        source, step = found
        seen = [*dims] if step is None else axes.unseen(dims, step)
        return None if seen is None else (source, seen)
    source = input_of(node)
    if not isinstance(source, Node) or not is_torchs(node):
        return None
    x, y = meta_tensor(source), meta_tensor(node)
    if x is None or y is None or x.dtype != y.dtype:
        return None
    source, name = view.value(node, source), called_name(node)
    if name in ("expand", "expand_as", "broadcast_to"):
        mine = axes.spread(x.shape, dims, y.shape)
    elif name == "repeat" and node.op == "call_method":
        mine = _repeated(axes, x.shape, y.shape, dims, inner=False)
    elif name == "repeat_interleave" and _is_by_number(node):
        mine = _repeated(axes, x.shape, y.shape, dims, inner=True)
    else:
        return None
    return None if mine is None else (source, mine)


def _is_by_number(node: Node) -> bool:
    return type(argument_of(node, 1, "repeats")) is int and len(inputs_of(node)) == 1


def _repeated(
    axes: Axes, sizes: Sequence[Size], to: Sequence[Size], dims: Sequence[Dim], inner: bool
) -> list[Dim] | None:
    """The dimensions before a repetition. inner: of each element, not of the whole dimension."""
    if len(sizes) != len(to) or not all(isinstance(n, int) and n for n in (*sizes, *to)):
        return None
    found: list[Dim] = []
    for size, larger, dim in zip(sizes, to, dims):
        if size == larger:
            found.append(dim)
            continue
        times = larger // size
        parts = axes.arrange(dim, [size, times] if inner else [times, size])
        if parts is None:
            return None
        found.append(parts[0 if inner else 1])
    return found


def numbered(axes: Axes, site: AttentionSite) -> AttentionSite:
    """The site with its axes as finally split, numbered from 0, and their sizes."""
    ends = [axes.leaves(part) for part in (site.rows, site.keys, site.inner, site.columns)]
    known = {axis for part in ends for axis in part}
    lie = [axes.flat(operand.dims) for operand in (site.result, *site.operands)]
    batch = tuple(dict.fromkeys(axis for dims in lie for axis in dims if axis not in known))
    order = [axis for part in (batch, *ends) for axis in part]
    number = {axis: i for i, axis in enumerate(order)}

    def of(dim: Dim) -> Dim:
        return tuple(number[axis] for axis in axes.leaves(dim))

    def operand(one: Operand) -> Operand:
        parts = tuple(map(operand, one.parts))
        return replace(one, dims=tuple(map(of, one.dims)), parts=parts)

    def step(one: Step) -> Step:
        args = (operand(a) if isinstance(a, Operand) else a for a in one.args)
        return replace(one, args=tuple(args))

    batch, rows, keys, inner, columns = map(of, (batch, *ends))
    return replace(
        site, sizes=tuple(map(axes.size, order)), batch=batch, rows=rows, keys=keys, inner=inner,
        columns=columns, q=operand(site.q), k=operand(site.k), v=operand(site.v),
        result=operand(site.result), tail=tuple(map(step, site.tail)),
    )  # fmt: skip
