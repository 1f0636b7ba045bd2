"""Inductor's graph → the same, with a shortcut's convolution where it keeps less memory alive.

In inference Inductor moves a node with one reader right before that reader, in the order of the
reader's operands (`reorder_for_locality`). A convolution that adds a shortcut has its image as the
first operand and the shortcut as a later one. So in `relu(proj(x) + f(x))` all of f would run
before proj, and x would outlive it. Inductor's own order for the lowest peak
(`reorder_for_peak_memory`) leaves that as it is: by its estimate, which ignores the libraries'
workspaces, both are alike in a RegNet, where the peak is 6 to 15 % higher.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_fuser.passes.memory import storages_of

_ALIKE = 0.01  # of a peak; weights are alive until their layers have run


class Places:
    """The places of a graph's nodes, while some are moved. Nothing else may change the graph
    meanwhile.

    prepares: an op that moves along with what it prepares, whoever else reads it.
    """

    def __init__(self, graph: Graph, prepares: Any = None) -> None:
        self._graph, self._prepares = graph, prepares
        self._storages = {node: list(storages_of(node)) for node in graph.nodes}
        self._holders: dict[int, list[Node]] = defaultdict(list)  # a base and its views
        self._sizes: dict[int, int] = {}
        for node, held in self._storages.items():
            for storage, size in held:
                self._holders[storage].append(node)
                self._sizes[storage] = max(self._sizes.get(storage, 0), size)
        self._movable = {node: _is_movable(node) for node in graph.nodes}
        self._read_order()

    def _read_order(self) -> None:
        self._nodes = list(self._graph.nodes)
        self._order = {node: i for i, node in enumerate(self._nodes)}

    def improve(self, reader: Node, operand: Node) -> None:
        """Move what only `operand` of this reader needs to where it can first run, if the peak is
        then lower, or much the same with less memory alive at other times.
        """
        own = self._only_for(operand, reader)
        inputs = [self._order[n] for node in own for n in node.all_input_nodes if n not in own]
        if not inputs:
            return
        first = max(inputs) + 1
        late = self._nodes[first : self._order[reader] + 1]
        if not all(map(self._movable.__getitem__, late)):
            return
        early = [n for n in late if n in own] + [n for n in late if n not in own]
        if early == late or not _is_better(self._cost(early), self._cost(late)):
            return
        at = self._nodes[first - 1]
        for node in early[: len(own)]:
            at.append(node)
            at = node
        self._read_order()

    def _only_for(self, operand: Node, reader: Node) -> set[Node]:
        """The nodes that make the operand and that only the reader needs, and what prepares it."""
        own: set[Node] = set()
        waiting = [operand]
        while waiting:
            node = max(waiting, key=self._order.__getitem__)  # after all its readers
            waiting.remove(node)
            if node.op == "call_function" and (
                node.target == self._prepares or all(n is reader or n in own for n in node.users)
            ):
                own.add(node)
                waiting += [n for n in node.all_input_nodes if n not in waiting]
        return own

    def _cost(self, nodes: Sequence[Node]) -> tuple[int, int]:
        """Bytes alive at the peak, and those of all steps added up, if these nodes, which are
        adjacent in the graph, ran in this order. Leaves out what they neither make nor read, which
        is alive in any order.

        A node that makes nothing is not a step: there are two views per layer that `fold` folds.
        """
        within = {node: i for i, node in enumerate(nodes)}
        begin = min(map(self._order.__getitem__, nodes))

        def step(node: Node) -> int:
            return within.get(node, -1 if self._order[node] < begin else len(nodes))

        touched = {s for node in nodes for n in (node, *node.all_input_nodes)
                   for s, _ in self._storages[n]}  # fmt: skip
        steps = {s: [step(n) for held in self._holders[s] for n in (held, *held.users)]
                 for s in touched}  # fmt: skip
        changes = [0] * (len(nodes) + 2)
        for storage, used in steps.items():
            changes[max(min(used), 0)] += self._sizes[storage]
            changes[max(used) + 1] -= self._sizes[storage]
        makes = {min(used) for used in steps.values()}
        live = peak = total = 0
        for i in range(len(nodes)):
            live += changes[i]
            peak = max(peak, live)
            total += live if i in makes else 0
        return peak, total


def _is_movable(node: Node) -> bool:
    """Does it only make its results from its operands?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        # operator.getitem, arithmetic with sizes; but what a higher-order op runs may draw numbers,
        # as `run_and_save_rng_state` does at a random op that backward repeats.
        is_opaque = isinstance(node.target, torch._ops.HigherOrderOperator)
        return node.op == "call_function" and not is_opaque
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (node.target._schema.is_mutable or is_random or node.is_impure())


def _is_better(cost: tuple[int, int], other: tuple[int, int]) -> bool:
    """Of two costs, is this one lower? Where peaks differ by a weight or so, the sums decide."""
    (peak, total), (other_peak, other_total) = cost, other
    if abs(peak - other_peak) > _ALIKE * other_peak:
        return peak < other_peak
    return total < other_total
