"""Matches → one call node each. Every other node stays exactly as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.nodes import inputs_of

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


@dataclass(frozen=True)
class Call:
    """The call to put in: a function of graph values that returns tensors, the result first.

    results: nodes whose tensors receive the further outputs, in order, by `copy_`.
    items: see `fx_fuser.graph.match.bind.Bound`.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    results: tuple[Any, ...]
    items: dict[Node, Node] = field(default_factory=dict)


def replace_all(graph: Graph, replacements: Sequence[tuple[Match, Call]]) -> dict[Node, Node]:
    """Put each call in place of its match's last node; erase the matched nodes. Returns for each of
    them the node that has its match's result.

    Of the old nodes' meta only two things are kept: the `example_value` of the node that is
    replaced, and where in the user's source it comes from.
    """
    # A node outside the match that names a matched one means the root's tensor: an in-place
    # operation gave that tensor several names, and a later one changed that same tensor.
    result_of: dict[Node, Node] = {}
    for match, call in replacements:
        result = _insert(match, call)
        result_of |= dict.fromkeys(match.nodes, result)
    for node in graph.nodes:
        if node not in result_of and not result_of.keys().isdisjoint(inputs_of(node)):
            node.args = torch.fx.node.map_arg(node.args, lambda n: result_of.get(n, n))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: result_of.get(n, n))
    _erase(graph, [match for match, _ in replacements])
    return result_of


def _insert(match: Match, call: Call) -> Node:
    """The call before the last matched node; returns the node of its result."""
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
        for scalar, item in call.items.items():
            # Multiply by the number itself: AOTAutograd treats a changing number that no tensor op
            # reads as a constant, and recompiles for each value.
            one = add("call_method", "new_ones", (scalar, ()), scalar)
            scalars[scalar] = add("call_function", torch.mul, (one, item), scalar)
        fused = add(
            "call_function",
            call.target,
            torch.fx.node.map_arg(call.args, lambda n: scalars.get(n, n)),
        )
        fused.meta["example_value"] = [n.meta["example_value"] for n in (root, *call.results)]
        result = add("call_function", operator.getitem, (fused, 0), root)
        for i, destination in enumerate(call.results):
            value = add("call_function", operator.getitem, (fused, i + 1), destination)
            add("call_method", "copy_", (destination, value), destination)
    return result


def _erase(graph: Graph, matches: Sequence[Match]) -> None:
    """Erase the matched nodes, and the transposes of weights that only they used.

    Last to first, over all matches: one match may read what another one makes, in either order.
    """
    matched = {node: match.view for match in matches for node in match.nodes}
    for node in sorted(matched, key=lambda n: matched[n].order[n], reverse=True):
        producers = [n for n in inputs_of(node) if n not in matched]
        graph.erase_node(node)
        for producer in producers:
            expr = matched[node].canonical(producer)
            if expr is not None and expr.op == "t" and not producer.users:
                graph.erase_node(producer)
