"""DTensors: an anchor with its tail, moved to the local shards before matching.

    x: DTensor, replicated; w, b: DTensors, Shard(0)          x', w', b' = to_local of x, w, b
    z = linear(x, w, b)                                       z = linear(x', w', b')
    y = silu(z.redistribute(Shard(-1)).to_local())        →   y = silu(z)

`ColwiseParallel` and `RowwiseParallel` write the left side. On the right all are plain tensors of
local sizes, which are matched, checked, timed and fused like any others. So no op of fx_fuser needs
a rule in DTensor's dispatcher, and a tail after the `to_local` is found. A value that
other operations read as a DTensor is made one again. This edits the copy of the graph that is
searched, and what is not fused is put back as the user wrote it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.graph.prepare.sharding import Finder, Local, Placements
from fx_fuser.graph.read.naming import SHARD_OF
from fx_fuser.graph.read.nodes import as_written, is_dtensor, meta_tensor
from fx_fuser.graph.read.view import View

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")

# ---- functions in the graph --------------------------------------------------------------------
# Functions made for one node each. Until torch 2.13 a placement cannot be an argument in a graph.


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    function.writes_nothing = True  # type: ignore[attr-defined]
    return function


def _to_local(gradient: Placements) -> Callable[[Any], Tensor]:
    def to_local(value: Any) -> Tensor:
        local: Tensor = value.to_local(grad_placements=gradient)
        return local

    return _reading(to_local)


def _to_share(gradient: Placements, parts: int) -> Callable[[Any], Tensor]:
    def to_share(value: Any) -> Tensor:
        local = value.to_local(grad_placements=gradient)
        share: Tensor = _Share.apply(local, parts)
        return share

    return _reading(to_share)


def _from_local(placements: Placements) -> Callable[[Tensor, Any], Any]:
    def from_local(local: Tensor, like: Any) -> Any:
        return type(like).from_local(local, like.device_mesh, placements, run_check=False)

    return _reading(from_local)


class _Share(torch.autograd.Function):
    """A rank's share of a replicated tensor that all ranks add to a sum, divided as DTensor does.

    The sum's gradient is replicated, and so is the tensor's, which is therefore not divided.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, parts: int) -> Tensor:
        return value / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---- editing and putting back ------------------------------------------------------------------


def localize(graph: Graph) -> Localized:
    """Move every operation that allows it to the local shards."""
    if not any(is_dtensor(meta_tensor(node)) for node in graph.nodes):
        return Localized(graph, {}, {})
    finder = Finder(View(graph))
    return Localized(graph, finder.found, finder.base)


class Localized:
    """What runs on local shards in one graph, and how to put it back. found, base: see
    `sharding.Finder`."""

    def __init__(
        self, graph: Graph, found: Mapping[Node, Local], base: Mapping[Node, Node]
    ) -> None:
        self._graph = graph
        self._found = found
        self._base = base
        self._nodes = [node for node in graph.nodes if node in base]
        self._written = {n: as_written(n) for n in self._nodes}
        self._meta = {n: dict(n.meta) for n in self._nodes}
        self._made: list[Node] = []
        self._whole: dict[Node, Node] = {}  # DTensor as written → the node that makes it again
        self._edit()

    def _edit(self) -> None:
        written = {n: [r for r in n.users if r not in self._base] for n in self._nodes}
        for node in self._nodes:
            if node in self._found:
                local = {o: self._local_of(node, o) for o in self._found[node].gradients}
                node.args, node.kwargs = map_arg(
                    (node.args, node.kwargs), functools.partial(_looked_up, local)
                )
                node.meta["example_value"] = _fake(self._found[node].value)
        for node, readers in written.items():
            for reader in readers:
                base = self._base[node]
                now = self._made_whole(node, base) if self._is_whole(node) else base
                reader.replace_input_with(node, now)
        for node in reversed(self._nodes):
            if node not in self._found:
                self._graph.erase_node(node)

    def _local_of(self, node: Node, operand: Node) -> Node:
        """The operand's local shard, as this operation reads it."""
        local = self._found[node]
        gradient, parts = local.gradients[operand], local.shares.get(operand, 1)
        source = operand
        if operand in self._base:
            base = self._base[operand]
            if parts == 1 and gradient == self._found[base].value.placements:
                return base
            source = self._made_whole(operand, base)
        function = _to_local(gradient) if parts == 1 else _to_share(gradient, parts)
        with self._graph.inserting_before(node):
            made = self._graph.call_function(function, (source,))
        shown = _fake(source.meta["example_value"], parts > 1)
        made.meta = {**_kept(source.meta), "example_value": shown, SHARD_OF: operand}
        self._made.append(made)
        return made

    def _made_whole(self, written: Node, local: Node) -> Node:
        """The DTensor that a node was as the user wrote it, made from its local shard."""
        if written not in self._whole:
            base = self._base[written]
            like = self._found[base].like
            while like in self._base:
                like = self._found[self._base[like]].like
            with self._graph.inserting_after(local):
                function = _from_local(self._found[base].value.placements)
                made = self._graph.call_function(function, (local, like))
            shown = self._meta[written]["example_value"]
            made.meta = {**_kept(self._meta[written]), "example_value": shown}
            self._whole[written] = made
        return self._whole[written]

    def restore(self, results: Mapping[Node, Node]) -> None:
        """Put back what was not fused. results: fused node → the node of its match's result."""
        now: dict[Node, Node] = {}  # node as written → the node that has its value
        last: dict[Node, Node] = {}  # operation → the last node put back for it

        def value_of(node: Node) -> Node:
            if node not in self._base:
                return results.get(node, node)
            if node not in now:
                result = results[self._base[node]]
                now[node] = self._made_whole(node, result) if self._is_whole(node) else result
            return now[node]

        for node in self._nodes:
            base = self._base[node]
            if base in results:
                continue
            written = self._written[node]
            args, kwargs = map_arg((written["args"], written["kwargs"]), value_of)
            if node is base:
                node.args, node.kwargs = args, kwargs
            else:
                with self._graph.inserting_after(last[base]):
                    now[node] = self._graph.create_node(
                        written["op"], written["target"], args, kwargs, name=node.name
                    )
            last[base] = now.setdefault(node, node)
            now[node].meta = dict(self._meta[node])
        restored = {*now.values(), *self._whole.values()}
        for base in last:
            self._show_local(base, [r for r in base.users if r not in restored], now)
        for node, whole in self._whole.items():
            if self._base[node] not in results:
                whole.replace_all_uses_with(now[node])
        for made in reversed([*self._made, *self._whole.values()]):
            if not made.users:
                self._graph.erase_node(made)

    def _show_local(self, base: Node, readers: Sequence[Node], now: Mapping[Node, Node]) -> None:
        """An operation was put back: give its local shard to the nodes that still read that."""
        if not readers:
            return
        own = (n for n, b in self._base.items() if b is base and not self._is_whole(n))
        local = next((now[n] for n in own), None)
        if local is None:
            value = self._found[base].value
            with self._graph.inserting_after(base):
                local = self._graph.call_function(_to_local(value.placements), (base,))
            local.meta = {**_kept(base.meta), "example_value": _fake(value)}
        for reader in readers:
            reader.replace_input_with(base, local)

    def _is_whole(self, node: Node) -> bool:
        """Was it a DTensor as the user wrote it?"""
        return is_dtensor(self._meta[node]["example_value"])


def _kept(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key in _KEPT_META}


def _looked_up(known: Mapping[Node, Node], node: Node) -> Node:
    return known.get(node, node)


def _fake(value: Any, is_new: bool = False) -> Tensor:
    """The fake local shard of a fake DTensor. is_new: in memory of its own."""
    with torch.set_grad_enabled(value.requires_grad):
        local: Tensor = value.to_local()
        return local * 1 if is_new else local
