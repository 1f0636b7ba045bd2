"""Losses and log-sum-exps that are computed piece by piece, as trainers for reinforcement learning
write them, computed at once.

    torch.stack([torch.logsumexp(row, dim=-1) for row in logits])        → logits.logsumexp(-1)
    torch.stack([row.log_softmax(-1).gather(-1, i) for row, i in zip(logits, index)])
    torch.cat([F.cross_entropy(l, y, reduction="none") for l, y in zip(logits.split(128), …)])
    out = torch.zeros(n);  out[0:128] = logits[0:128].logsumexp(-1);  …

All rows, in order, each by the same operations on that row alone: then nothing but the number of
calls tells the two apart.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, cast

import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.read.expr import is_number
from fx_fuser.graph.read.heads import is_log_sum_exp, is_loss, value_of
from fx_fuser.graph.read.nodes import argument_of, called_in_place, inputs_of, is_torchs, storages
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.passes.head_loss.edits import Edit, Maker, edit

_EMPTY = {"zeros", "empty", "zeros_like", "empty_like", "new_zeros", "new_empty"}
_CASTS = {"float", "half", "bfloat16", "to", "type", "contiguous"}
_SCALES = {"mul", "div", "truediv", "neg", "tanh"}
_SPLITS = {"split": 2, "chunk": 2, "tensor_split": 2, "unbind": 1}  # → the place of `dim`


class _Span(NamedTuple):
    """Some of a tensor's rows: of a dimension, from start to stop. keeps: is the dimension left?"""

    dim: int
    start: int
    stop: int
    keeps: bool


class _Form(NamedTuple):
    """A call, of other forms and of tensors whose rows the pieces are. like: a node that has it."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    like: Node

    def is_as(self, other: Any) -> bool:
        return isinstance(other, _Form) and all(map(_are_alike, self[:4], other[:4]))


@dataclass(frozen=True)
class _Rows:
    """Of this tensor."""

    source: Node


class _No(Exception):
    """These are not the pieces of something that may be computed at once."""


@dataclass(frozen=True)
class _Joined:
    """node: whose value is that of all pieces. at: the node before which it is complete. writes:
    what puts the pieces there, if not the node itself."""

    node: Node
    pieces: list[Node]
    spans: list[_Span | None]  # of the node; None: by the pieces' own
    dim: int
    at: Node
    writes: tuple[Node, ...] = ()


def puts_together(node: Node) -> bool:
    """May it be what pieces are put into?"""
    return called_name(node) in {"stack", "cat"} | _EMPTY and is_torchs(node)


def join(view: View, node: Node) -> Edit | None:
    """Edits the graph, if nothing else reads the pieces that are put together at the node."""
    try:
        return _join(view, node)
    except _No:
        return None


def _join(view: View, node: Node) -> Edit:
    joined = _listed(node) if called_name(node) in ("stack", "cat") else _written(view, node)
    pieces = [_Piece(view, one) for one in joined.pieces]
    first, inner = pieces[0], {n for piece in pieces for n in piece.inner}
    _check(
        any(is_loss(n) or is_log_sum_exp(n) for n in first.inner),
        all(first.form.is_as(piece.form) for piece in pieces),
        all(inner.issuperset({*n.users} - {node, *joined.writes}) for n in inner),
    )
    _check(all(piece.span.dim == joined.dim for piece in pieces))
    count = value_of(first.sources[0]).shape[joined.dim]
    _check(all(value_of(s).shape[joined.dim] == count for s in first.sources))
    end = 0
    for piece, span in zip(pieces, joined.spans):
        keeps = span.keeps if span else called_name(node) == "cat"
        _check(piece.span == _Span(joined.dim, end, piece.span.stop, keeps))
        _check(span is None or span == piece.span)
        end = piece.span.stop
    _check(type(count) is int and end == count)
    _check_modes(view, [*inner, *(n for p in pieces for n in p.leaves), *joined.writes], joined)
    maker = Maker(view, joined.at)
    try:
        whole = _made(maker, first.form)
        value, now = value_of(node), value_of(whole)
        if joined.writes and now.dtype is not value.dtype:
            to = value.dtype
            whole = maker("call_method", "to", (whole, to), {}, first.form.like, to)
            now = value_of(whole)
        _check(now.shape == value.shape, now.dtype is value.dtype, now.device == value.device)
        _check(now.requires_grad == any(value_of(p).requires_grad for p in joined.pieces))
    except BaseException:
        maker.drop()
        raise
    leaves = [leaf for piece in pieces for leaf in piece.leaves]
    splits = [n for leaf in leaves for n in inputs_of(leaf) if called_name(n) in _SPLITS]
    return edit(view, node, maker.made, [node, *joined.writes, *inner], [*leaves, *splits])


def _check(*facts: bool) -> None:
    if not all(facts):
        raise _No


def _check_modes(view: View, read: Sequence[Node], joined: _Joined) -> None:
    """All is computed in the same modes, and nothing that is read is written meanwhile."""
    region = view.region[joined.pieces[0]]
    _check(all(view.region[n] == region for n in read))
    _check(joined.writes != () or view.region[joined.node] == region)
    first = min(view.order[n] for n in read)
    between = view.nodes[first : view.order[joined.at]]
    written = storages(n for one in between for n in view.writers.get(one, ()))
    own = storages((joined.node,)) if joined.writes else set()
    sources = [n for leaf in read for n in inputs_of(leaf) if n not in joined.writes]
    _check((written - own).isdisjoint({None, *(storages(sources) - own)}))


# ---- what puts pieces together -------------------------------------------------------------------


def _listed(node: Node) -> _Joined:
    """stack, cat."""
    listed, dim = argument_of(node, 0, "tensors"), argument_of(node, 1, "dim") or 0
    _check(isinstance(listed, (list, tuple)) and bool(listed) and all(map(is_plain, listed)))
    _check(type(dim) is int, "out" not in node.kwargs)
    pieces = list(listed)
    return _Joined(node, pieces, [None] * len(pieces), dim % value_of(node).ndim, node)


def _written(view: View, node: Node) -> _Joined:
    """An empty tensor, to which nothing but the pieces is written, before it is read."""
    users = sorted(node.users, key=view.order.__getitem__)
    writes = [n for n in users if n.target is operator.setitem and n.args[0] is node]
    _check("out" not in node.kwargs, bool(writes), users[: len(writes)] == writes)
    own = storages((node,))
    writers = [n for n, written in view.writers.items() if storages(written) & own]
    _check(writers == writes, len(users) > len(writes), None not in own)
    spans: list[_Span | None] = []
    pieces: list[Node] = []
    for write in writes:
        _, index, piece = cast(tuple[Any, Any, Any], write.args)
        span = _span(index, value_of(node))
        if span is None or not is_plain(piece):
            raise _No
        sizes = list(value_of(node).shape)
        sizes[span.dim : span.dim + 1] = [span.stop - span.start] * span.keeps
        _check(list(value_of(piece).shape) == sizes)
        spans.append(span)
        pieces.append(piece)
    assert spans[0] is not None, "each is checked"
    return _Joined(node, pieces, spans, spans[0].dim, writes[-1].next, tuple(writes))


# ---- a piece -------------------------------------------------------------------------------------


class _Piece:
    """What one is, and of which rows. inner: its operations. leaves: what takes rows of sources."""

    def __init__(self, view: View, node: Node) -> None:
        self.view = view
        self.inner: list[Node] = []
        self.leaves: list[Node] = []
        self.sources: list[Node] = []
        self._spans: list[_Span] = []
        form = self._read(node)
        _check(isinstance(form, _Form), all(span == self._spans[0] for span in self._spans))
        self.form: _Form = form
        self.span = self._spans[0]
        for n in self.inner:
            self._check_rows(n)

    def _read(self, node: Node) -> Any:
        _check(is_torchs(node), is_plain(node))
        taken = _rows_of(node)
        if taken is not None:
            source, span = taken
            self.leaves.append(node)
            self.sources.append(source)
            self._spans.append(span)
            return _Rows(source)
        args, kwargs = _by_row(node)
        self.inner.append(node)
        args = tuple(self._read(one) if isinstance(one, Node) else one for one in args)
        kwargs = {k: self._read(v) if isinstance(v, Node) else v for k, v in kwargs.items()}
        return _Form(node.op, node.target, args, kwargs, node)

    def _check_rows(self, node: Node) -> None:
        """The last dimension, over which operations of rows go, is not the one that is taken from;
        cross_entropy has the rows in the first."""
        first, span = value_of(inputs_of(node)[0]), self.span
        if node.target is F.cross_entropy:
            _check(first.ndim == 2 and span.dim == 0 and span.keeps)
        elif called_name(node) in ("log_softmax", "logsumexp", "gather", "squeeze"):
            _check(span.dim < first.ndim - span.keeps)


def _by_row(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation of each row, with dimensions counted from the last."""
    name, first = called_name(node), argument_of(node, 0, "input")
    _check(isinstance(first, Node), not called_in_place(node))
    if node.target is F.cross_entropy:
        _check(argument_of(node, 6, "reduction") == "none")
        return node.args, dict(node.kwargs)
    value, rest = value_of(first), (node.args[1:], node.kwargs)
    if name in _CASTS or (name == "getitem" and node.args[1] == (Ellipsis, None)):
        _check(not inputs_of(node)[1:])
        return node.args, dict(node.kwargs)
    if name in _SCALES:
        others = [n for n in (*node.args, *node.kwargs.values()) if not isinstance(n, Node)]
        _check(len(inputs_of(node)) == 1, all(map(is_number, others)))
        return node.args, dict(node.kwargs)
    dim = argument_of(node, 1, "dim")
    if name == "logsumexp":
        _check(is_log_sum_exp(node))
    elif name in ("log_softmax", "gather", "squeeze", "unsqueeze"):
        _check(type(dim) is int and dim in (-1, value.ndim - (name != "unsqueeze")))
        _check(name != "gather" or not argument_of(node, 3, "sparse_grad"))
    else:
        raise _No
    named = {k: v for k, v in rest[1].items() if k not in ("dim", "input")}
    return (first, -1, *rest[0][1:]), named


def _rows_of(node: Node) -> tuple[Node, _Span] | None:
    """The tensor whose rows a node takes, and which."""
    if node.target is not operator.getitem:
        return None
    before, index = node.args
    if not isinstance(before, Node):
        return None
    if is_plain(before):
        span = _span(index, value_of(before))
        return None if span is None else (before, span)
    place = _SPLITS.get(called_name(before))
    source = argument_of(before, 0, "input")
    parts: Any = before.meta.get("example_value")
    if place is None or not is_torchs(before) or not is_plain(source) or type(index) is not int:
        return None
    dim = (argument_of(before, place, "dim") or 0) % value_of(source).ndim
    index %= len(parts)
    if called_name(before) == "unbind":
        return source, _Span(dim, index, index + 1, False)
    sizes = [part.shape[dim] for part in parts]
    if any(type(size) is not int for size in sizes):
        return None
    return source, _Span(dim, sum(sizes[:index]), sum(sizes[: index + 1]), True)


def _span(index: Any, value: Any) -> _Span | None:
    """What `value[index]` takes, if that is a range of one dimension."""
    entries = index if isinstance(index, tuple) else (index,)
    cut = [at for at, entry in enumerate(entries) if entry != slice(None)]
    if len(cut) != 1 or len(entries) > value.ndim:
        return None
    (dim,) = cut
    entry, size = entries[dim], value.shape[dim]
    if type(size) is not int:
        return None
    if type(entry) is int:
        return _Span(dim, entry % size, entry % size + 1, False)
    if not isinstance(entry, slice) or entry.step not in (None, 1):
        return None
    if not all(end is None or type(end) is int for end in (entry.start, entry.stop)):
        return None
    start, stop, _ = entry.indices(size)
    return _Span(dim, start, stop, True) if start < stop else None


def _made(maker: Maker, form: _Form) -> Node:
    def of(value: Any) -> Any:
        if isinstance(value, _Rows):
            return value.source
        return _made(maker, value) if isinstance(value, _Form) else value

    args = tuple(map(of, form.args))
    kwargs = {name: of(value) for name, value in form.kwargs.items()}
    return maker(form.op, form.target, args, kwargs, form.like)


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, _Form):
        return one.is_as(other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_alike(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


def is_plain(node: Any) -> TypeGuard[Node]:
    """Is it a node whose value is a plain tensor?"""
    return isinstance(node, Node) and type(value_of(node)) is FakeTensor
