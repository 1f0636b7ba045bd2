"""Move views of an anchor's value below the pointwise operations that follow them.

    h = linear(x, w).view(B, T, H, D).transpose(1, 2)        z = linear(x, w)
    y = sigmoid(h) * t                                  →    y = (sigmoid(z) * t')
                                                             y.view(B, T, H, D).transpose(1, 2)

where t' is t, seen through the views' inverse (`prepare.reindex`). So the tail follows its anchor
with nothing in between, and is matched, grown, checked and fused like any other. This edits the
copy of the graph that is searched. What is not fused is put back as the user wrote it.

A view stays where it is if anything in the graph writes to its memory, if the mode changes (grad
mode, autocast), if the operation's result is larger than the view, or if another operand's inverse
would be a large copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.graph.prepare.decompose import is_decomposed
from fx_fuser.graph.prepare.reindex import (
    Call,
    Step,
    inverse,
    is_view,
    same_sizes,
    same_steps,
    step_of,
)
from fx_fuser.graph.read.canonical import Expr
from fx_fuser.graph.read.nodes import meta_tensor, storages
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.sites import site_at
from fx_fuser.graph.read.view import View


@dataclass(frozen=True)
class _Written:
    """A node as the user wrote it."""

    op: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: Node) -> _Written:
        return cls(node.op, node.target, node.args, node.kwargs, dict(node.meta))

    def again(self, graph: Graph, now: Callable[[Node], Node]) -> Node:
        """A copy of it at the graph's insertion point. now: what each argument is now."""
        args, kwargs = map_arg((self.args, self.kwargs), now)
        made = graph.create_node(self.op, self.target, args, kwargs)
        made.meta = dict(self.meta)
        return made


@dataclass
class _Move:
    """One operation that moves above the views of its operands.

    written: how it was before. bases: operand → the value that it reads instead. inverses: operand
    → the calls that undo the views. result: those for the operation's own result. views: those of
    its operand, each with what it is a view of, and the fake tensor of this view of the result.
    made: new nodes for the inverses. after: the views of the result.
    """

    written: _Written
    bases: dict[Node, Node]
    inverses: dict[Node, tuple[Call, ...]]
    result: tuple[Call, ...]
    views: list[tuple[_Written, Node, Tensor]]
    made: list[Node] = field(default_factory=list)
    after: list[Node] = field(default_factory=list)

    @property
    def value(self) -> Tensor:
        value: Tensor = self.written.meta["example_value"]
        return value

    def show(self, value: Node) -> None:
        """Make the views of this value."""
        for view, source, tensor in self.views:
            seen = self.after[-1] if self.after else value
            made = view.again(value.graph, lambda n: seen if n is source else n)  # noqa: B023
            made.meta["example_value"] = tensor
            self.after.append(made)


class Sunk:
    """What `sink` moved in one graph, and how to put it back."""

    def __init__(
        self, graph: Graph, moves: Mapping[Node, _Move], erased: Mapping[Node, _Written]
    ) -> None:
        self._graph = graph
        self._moves = moves
        self._erased = erased
        self._again: dict[Node, Node] = {}  # erased view → its copy

    def restore(self, results: Mapping[Node, Node]) -> None:
        """Put back each operation that was not fused. results: fused node → the node of its match's
        result."""
        unfused = {node: move for node, move in self._moves.items() if node not in results}
        # A fused op may have one as an operand: `x @ (image.t() * 3)` has image * 3 as its weight.
        above = {n: [u for u in n.users if u not in unfused] for n in unfused}
        for node, move in unfused.items():
            graph, written = self._graph, move.written
            with graph.inserting_before(node):
                node.args, node.kwargs = map_arg(
                    (written.args, written.kwargs), functools.partial(self._now, results)
                )
            node.meta["example_value"] = move.value
            if move.after:
                move.after[-1].replace_all_uses_with(node)
            for made in reversed(move.made + move.after):
                if not made.users and not made._erased:
                    graph.erase_node(made)
            readers = [reader for reader in above[node] if not reader._erased]
            if readers:
                with graph.inserting_before(node.next):
                    seen = _seen_before(node, move, node, move.result)
                for reader in readers:
                    reader.replace_input_with(node, seen)

    def _now(self, results: Mapping[Node, Node], node: Node) -> Node:
        """The node that now has the value which `node` had as the user wrote it."""
        move = self._moves.get(node)
        if move is not None and node in results:
            if not move.after or move.after[-1]._erased:  # together with the product that read it
                move.after.clear()
                move.show(results[node])
            return move.after[-1]
        if node in self._erased and node not in self._again:
            now = functools.partial(self._now, results)
            self._again[node] = self._erased[node].again(self._graph, now)
        return self._again.get(node, results.get(node, node))


def sink(graph: Graph) -> Sunk:
    """Move every view that can be moved."""
    if not any(map(is_view, graph.nodes)):
        return Sunk(graph, {}, {})
    finder = _Finder(View(graph))
    for node, move in finder.moves.items():
        seen = dict(move.bases)
        with graph.inserting_before(node):
            seen |= {o: _seen_before(node, move, o, calls) for o, calls in move.inverses.items()}
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: seen.get(n, n))  # noqa: B023
        with torch.set_grad_enabled(move.value.requires_grad):
            node.meta["example_value"] = _fake(move.result, move.value)
    erased = {}
    for view in reversed([node for node in graph.nodes if node in finder.views]):
        if not view.users:
            erased[view] = _Written.of(view)
            graph.erase_node(view)
    for node, move in finder.moves.items():
        readers = [u for u in node.users if not _reads_base(finder.moves.get(u), node)]
        if readers:
            with graph.inserting_before(node.next):
                move.show(node)
            for reader in readers:
                reader.replace_input_with(node, move.after[-1])
    return Sunk(graph, finder.moves, erased)


def _fake(calls: tuple[Call, ...], tensor: Tensor) -> Tensor:
    """The fake result of these calls of a fake tensor."""
    return calls[-1].of(tensor) if calls else tensor


def _reads_base(move: _Move | None, node: Node) -> bool:
    return move is not None and node in move.bases.values()


def _seen_before(node: Node, move: _Move, operand: Node, calls: tuple[Call, ...]) -> Node:
    """The operand as it is seen before the views."""
    tensor = meta_tensor(operand)
    assert tensor is not None
    seen = operand
    for call in calls:
        seen = node.graph.call_method(call.method, (seen, *call.args))
        seen.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        with torch.set_grad_enabled(move.value.requires_grad):
            seen.meta["example_value"] = call.of(tensor)
        move.made.append(seen)
    return seen


@dataclass(frozen=True)
class _Viewed:
    """A value of a tail: `base`, seen through views."""

    base: Node
    steps: tuple[Step, ...] = ()
    views: tuple[tuple[Node, Node], ...] = ()  # each with what it is a view of


def _leaves(expr: Expr) -> Iterator[Node]:
    for arg in expr.args:
        if isinstance(arg, Node):
            yield arg
        elif isinstance(arg, Expr):
            yield from _leaves(arg)


class _Finder:
    """Finds what can be moved, and edits nothing. views: those of values of tails."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.viewed: dict[Node, _Viewed] = {}
        self.moves: dict[Node, _Move] = {}
        self.views: set[Node] = set()
        for node in view.nodes:
            with suppress(Exception):  # a node that cannot be read raises again in `find`
                self._read(node)

    def _read(self, node: Node) -> None:
        if site_at(self.view, node) is not None:
            self.viewed[node] = _Viewed(node)
        elif is_view(node):
            self._read_view(node)
        else:
            self._read_operation(node)

    def _read_view(self, node: Node) -> None:
        source = node.args[0] if node.args else None
        known = self.viewed.get(source) if isinstance(source, Node) else None
        if known is None or not self._can_move(node, source):  # type: ignore[arg-type]
            return
        step = step_of(node, source)  # type: ignore[arg-type]
        if step is not None:
            views = (*known.views, (node, source))
            self.viewed[node] = _Viewed(known.base, (*known.steps, step), views)  # type: ignore[arg-type]
            self.views.add(node)

    def _read_operation(self, node: Node) -> None:
        written = self.view.written(node)
        if written is None or written.op not in OPS:
            return
        operands = list(dict.fromkeys(_leaves(written)))
        known = {o: self.viewed[o] for o in operands if o in self.viewed}
        if all(viewed.steps for viewed in known.values()):
            for viewed in known.values():
                move = self._moved(node, operands, viewed)
                if move is not None:
                    self.moves[node] = move
                    self.viewed[node] = _Viewed(node, viewed.steps, viewed.views)
                    return
        elif not any(viewed.steps for viewed in known.values()):
            self.viewed[node] = _Viewed(node)

    def _moved(self, node: Node, operands: Sequence[Node], viewed: _Viewed) -> _Move | None:
        """The node moved above these views of one of its operands; None if it cannot be."""
        shown, value = meta_tensor(viewed.views[-1][0]), meta_tensor(node)
        if shown is None or value is None or not same_sizes(shown.shape, value.shape):
            return None
        bases, inverses = dict[Node, Node](), dict[Node, tuple[Call, ...]]()
        for operand in operands:
            tensor, other = meta_tensor(operand), self.viewed.get(operand)
            if other is not None and same_steps(other.steps, viewed.steps):
                bases[operand] = other.base
            elif tensor is not None and tensor.ndim:
                calls = inverse(viewed.steps, tensor)
                if calls is None:
                    return None
                inverses[operand] = calls
        result = inverse(viewed.steps, value)
        if (
            result is None
            or any(call.strides is None for call in result)
            or not self._can_move(node, *bases)
        ):
            return None
        behind = [inverse(viewed.steps[i:], value) for i in range(1, len(viewed.steps))]
        with torch.set_grad_enabled(value.requires_grad):
            tensors = [*(_fake(calls or (), value) for calls in behind), value]
        views = [(_Written.of(v), s, t) for (v, s), t in zip(viewed.views, tensors)]
        return _Move(_Written.of(node), bases, inverses, result, views)

    def _can_move(self, node: Node, *operands: Node) -> bool:
        """Does nothing write to their memory, and are all in one region?"""
        memory = storages((node, *operands))
        view = self.view
        return (
            not memory & {None, *view.written_at}
            and all(view.region[o] == view.region[node] for o in operands)
            and not is_decomposed(node)
        )
