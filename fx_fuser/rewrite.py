"""Match → one call node. Every other node stays as it was, to the letter."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.match import Match
from fx_fuser.spell import inputs_of

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


@dataclass(frozen=True)
class Call:
    """What to put in: a function of graph values that returns a list of tensors, the result first.

    results: nodes whose tensors take the further outputs, in order, by `copy_`.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    results: tuple[Any, ...]


def replace(match: Match, call: Call, moved: Mapping[Node, Node]) -> Node:
    """Put the call where the last matched node stood; return the node of its result.

    moved: last node → result, of the matches of this graph that were replaced before.
    The result's `example_value` is that of the node it replaces; nothing else of the old nodes'
    meta is kept but where in the user's source they came from.
    """
    graph, root = match.root.graph, match.root
    meta = {k: root.meta[k] for k in _KEPT_META if k in root.meta}

    def add(op: str, target: Any, args: tuple[Any, ...], like: Node | None = None) -> Node:
        node = graph.create_node(op, target, args)
        node.meta = dict(meta)
        if like is not None:
            node.meta["example_value"] = like.meta["example_value"]
        return node

    with graph.inserting_before(root):
        scalars: dict[Node, Node] = {}
        for scalar, item in match.items.items():
            # Through a product with the number itself: AOTAutograd makes a constant, and a compile
            # for each value, of every changing number that no tensor op of the graph takes.
            one = add("call_method", "new_ones", (scalar, ()), scalar)
            scalars[scalar] = add("call_function", torch.mul, (one, item), scalar)
        args = torch.fx.node.map_arg(call.args, lambda n: scalars.get(n, moved.get(n, n)))
        fused = add("call_function", call.target, args)
        fused.meta["example_value"] = [n.meta["example_value"] for n in (root, *call.results)]
        result = add("call_function", operator.getitem, (fused, 0), root)
        for i, destination in enumerate(call.results):
            value = add("call_function", operator.getitem, (fused, i + 1), destination)
            add("call_method", "copy_", (destination, value), destination)

    # Whoever else names a matched node means the root's tensor: after an in-place operation under
    # an older name, and if changed in place since, it is the result that was changed.
    for node in match.nodes:
        for reader in [user for user in node.users if user not in match.nodes]:
            reader.replace_input_with(node, result)
    _erase(match)
    return result


def _erase(match: Match) -> None:
    """Drop the matched nodes, and the transposes of weights that only they used."""
    order = match.view.order
    dead = sorted(match.nodes, key=order.__getitem__, reverse=True)
    for node in dead:
        producers = [n for n in inputs_of(node) if n not in match.nodes]
        match.root.graph.erase_node(node)
        for producer in producers:
            spelled = match.view.spell(producer)
            if spelled is not None and spelled.op == "t" and not producer.users:
                match.root.graph.erase_node(producer)
