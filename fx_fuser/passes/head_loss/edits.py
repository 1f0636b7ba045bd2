"""Edits of a graph that can be undone: until it is decided whether anything comes of them, the
nodes that they replace stay in the graph, and read nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.graph.read.heads import value_of
from fx_fuser.graph.read.nodes import as_written
from fx_fuser.graph.read.view import View


@dataclass(frozen=True, eq=False)
class Edit:
    """node: whose value the last node made has. blank: the nodes that are not needed for it, and
    what they called."""

    node: Node
    made: tuple[Node, ...]
    blank: dict[Node, dict[str, Any]]

    def undo(self) -> None:
        for node in self.blank:
            self._restore(node)
        self.made[-1].replace_all_uses_with(self.node)
        for node in reversed(self.made):
            node.graph.erase_node(node)

    def keep(self) -> None:
        for node in reversed(self.blank):
            if node.users:  # of another edit, which is undone
                self._restore(node)
            else:
                node.graph.erase_node(node)

    def _restore(self, node: Node) -> None:
        for name, value in self.blank[node].items():
            setattr(node, name, value)


def edit(
    view: View, node: Node, made: Sequence[Node], old: Iterable[Node], views: Iterable[Node] = ()
) -> Edit:
    """Read the last node made in place of `node`. old: the nodes that go. views: others, which go
    if nothing else reads them."""
    gone = {*old}
    for one in sorted({*views}, key=view.order.__getitem__, reverse=True):
        if gone.issuperset(one.users):
            gone.add(one)
    ordered = sorted(gone, key=view.order.__getitem__)
    done = Edit(node, tuple(made), {one: as_written(one) for one in ordered})
    for one in ordered:
        one.op, one.target, one.args, one.kwargs = "call_function", _blank, (), {}
    node.replace_all_uses_with(made[-1])
    return done


def _blank() -> None:
    """In place of what a node called."""


class Maker:
    """Makes nodes before another, each in the modes, and with the source, of one it is like."""

    def __init__(self, view: View, at: Node) -> None:
        self.view = view
        self.at = at
        self.made: list[Node] = []

    def __call__(
        self, op: str, target: Any, args: Any, kwargs: Any, like: Node,
        dtype: torch.dtype | None = None,
    ) -> Node:  # fmt: skip
        """dtype: of the result, if it is not that of `like`."""
        graph: Graph = self.at.graph
        known = map_arg((args, kwargs), lambda n: n.meta["example_value"])
        called = getattr(torch.Tensor, target) if op == "call_method" else target
        value = value_of(like)
        gradients = torch.set_grad_enabled(value.requires_grad)
        with value.fake_mode, gradients, self.view.region[like].autocast():
            fake = called(*known[0], **known[1])
            # A body does not show the autocast that it is called under; `like` has run under it.
            fake = fake.to(dtype or value.dtype)
        with graph.inserting_before(self.at):
            node = graph.create_node(op, target, args, kwargs)
        node.meta = {**like.meta, "example_value": fake}
        self.made.append(node)
        return node

    def drop(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)
        self.made = []


def settle(edits: Sequence[Edit], taken: Collection[Node]) -> dict[Node, Node]:
    """Keep the edits that made nodes which became part of an op; undo the others. Returns nodes
    that an undone edit had made, and the node that has their value."""
    undone: dict[Node, Node] = {}
    kept = [one for one in edits if any(node in taken for node in one.made)]
    for one in reversed(edits):
        if one not in kept:
            one.undo()
            undone.update(dict.fromkeys(one.made, one.node))
    for one in kept:
        one.keep()
    return undone
