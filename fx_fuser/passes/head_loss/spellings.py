"""Other spellings of a head, as `fx_fuser.graph.read.heads` reads them: in pieces, with logits that
are scaled in place, with the classes in the second dimension, and with labels as an index.

    logits.div_(0.7)  →  logits / 0.7
    likely[torch.arange(n), labels]  →  likely.gather(-1, labels[:, None]).squeeze(-1)
    F.cross_entropy(logits.mT, labels)  →  F.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read.expr import is_number
from fx_fuser.graph.read.heads import is_indexed, read_head, value_of
from fx_fuser.graph.read.nodes import argument_of, inputs_of, is_torchs, storages
from fx_fuser.graph.read.source import called_name, op_of
from fx_fuser.graph.read.view import View
from fx_fuser.passes.head_loss import pieces
from fx_fuser.passes.head_loss.edits import Edit, Maker, edit

log = logging.getLogger("fx_fuser.passes.head_loss")
# In-place operations by a number, and what makes a new tensor instead.
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "div_": torch.div,
    "mul_": torch.mul,
    "itruediv": operator.truediv,
    "imul": operator.mul,
}
_MOVES = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"}


def respell(graph: Graph, kind: str, strict: bool) -> list[Edit]:
    """Edits the graph, where that is proven to compute the same. kind: of the device."""
    edits: list[Edit] = []
    for is_one, respelled in _SPELLINGS:
        view: View | None = None
        for node in [n for n in graph.nodes if is_one(n) and pieces.is_plain(n)]:
            if value_of(node).device.type != kind:
                continue
            view = view or View(graph)
            try:
                made = respelled(view, node)
            except Exception as error:
                if strict:
                    raise
                log.info("%s is left as it is", node, exc_info=error)
                continue
            if made is not None:
                edits.append(made)
                view = None  # the graph has changed
    return edits


# ---- logits that are scaled in place -------------------------------------------------------------


def _is_in_place(node: Node) -> bool:
    return op_of(node) in _IN_PLACE and is_torchs(node)


def _out_of_place(view: View, node: Node) -> Edit | None:
    """Of logits of which nothing else reads another value, neither before nor afterwards."""
    first, *numbers = node.args
    memory = storages((node,))
    if node.kwargs or not isinstance(first, Node) or not all(map(is_number, numbers)):
        return None
    if memory != storages((first,)) or None in memory or read_head(view, node) is None:
        return None
    at = view.order[node]
    for reader in view.nodes:
        for name in inputs_of(reader):
            if storages((name,)).isdisjoint(memory):
                continue
            seen = view.order[view.value(reader, name)]
            is_view = not storages((reader,)).isdisjoint(memory)
            if (seen < at) if view.order[reader] > at else not is_view:
                return None
    maker = Maker(view, node)
    new = maker("call_function", _IN_PLACE[op_of(node)], node.args, {}, node)
    # Later views of it seem to be in that memory, and in a way are: nothing else reads it.
    new.meta["example_value"] = value_of(node)
    for reader in view.nodes[at + 1 :]:
        for name in inputs_of(reader):
            if view.order[name] <= at and not storages((name,)).isdisjoint(memory):
                reader.replace_input_with(name, new)
    return edit(view, node, maker.made, [node])


# ---- classes in the second dimension -------------------------------------------------------------


def _has_classes_second(node: Node) -> bool:
    logits = argument_of(node, 0, "input") if node.target is F.cross_entropy else None
    return pieces.is_plain(logits) and called_name(logits) in _MOVES and is_torchs(logits)


def _rows_of_classes(view: View, node: Node) -> Edit | None:
    moved, labels = (argument_of(node, i, n) for i, n in enumerate(("input", "target")))
    logits = moved.args[0] if moved.args else None
    if not (pieces.is_plain(logits) and pieces.is_plain(labels)):
        return None
    value, target = value_of(logits), value_of(labels)
    if target.dtype is not torch.int64 or value.ndim < 3 or target.ndim != value.ndim - 1:
        return None
    if not _is_same_view(value_of(moved), value.movedim(-1, 1)):
        return None
    maker = Maker(view, node)
    rows = maker("call_method", "flatten", (logits, 0, -2), {}, moved)
    ordered = maker("call_method", "flatten", (labels,), {}, labels)
    named = {k: v for k, v in node.kwargs.items() if k not in ("input", "target")}
    loss = maker("call_function", node.target, (rows, ordered, *node.args[2:]), named, node)
    if value_of(loss).ndim:  # one for each row
        maker("call_method", "view_as", (loss, labels), {}, node)
    return edit(view, node, maker.made, [node], [moved])


# ---- labels as an index --------------------------------------------------------------------------


def _gathered(view: View, node: Node) -> Edit | None:
    """Of all rows in their order. As an index, a label below 0 counts from the end."""
    likely, (rows, labels) = node.args  # type: ignore[misc, str-unpack]
    if not (pieces.is_plain(likely) and pieces.is_plain(labels)) or value_of(likely).ndim != 2:
        return None
    if called_name(likely) != "log_softmax" and read_head(view, likely) is None:
        return None
    value, target = value_of(likely), value_of(labels)
    count, classes = value.shape
    if (target.dtype, target.device, target.ndim) != (torch.int64, value.device, 1):
        return None
    if not statically_known_true(target.shape[0] == count) or not _counts(rows, count):
        return None
    maker = Maker(view, node)
    from_end = maker("call_function", torch.add, (labels, classes), {}, labels)
    below = maker("call_function", torch.lt, (labels, 0), {}, labels, torch.bool)
    index = maker("call_function", torch.where, (below, from_end, labels), {}, labels)
    column = maker("call_method", "unsqueeze", (index, -1), {}, labels)
    picked = maker("call_method", "gather", (likely, -1, column), {}, node)
    maker("call_method", "squeeze", (picked, -1), {}, node)
    return edit(view, node, maker.made, [node])


def _counts(node: Any, count: Any) -> bool:
    """Is it `torch.arange(count)`?"""
    value = value_of(node)
    if node.target is not torch.arange or value.dtype is not torch.int64:
        return False
    is_short = len(node.args) == 1 and not node.kwargs.keys() & {"start", "end", "step"}
    begin, step = argument_of(node, 0, "start"), argument_of(node, 2, "step")
    from_0 = is_short or (begin in (None, 0) and step in (None, 1))
    return from_0 and statically_known_true(value.shape[0] == count)


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are they of the same elements, in the same order?"""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or one.ndim != other.ndim:
        return False
    ours = (*one.shape, *one.stride(), one.storage_offset())
    theirs = (*other.shape, *other.stride(), other.storage_offset())
    return all(statically_known_true(a == b) for a, b in zip(ours, theirs))


_SPELLINGS: tuple[tuple[Callable[[Node], bool], Callable[[View, Node], Edit | None]], ...] = (
    (_is_in_place, _out_of_place),
    (_has_classes_second, _rows_of_classes),
    (is_indexed, _gathered),
    (pieces.puts_together, pieces.join),
)
