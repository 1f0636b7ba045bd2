"""Inductor's graph → the same, with a shortcut's convolution where it keeps less memory alive.

In inference Inductor moves what has one reader right before it, in the order of the reader's
operands (`reorder_for_locality`). A convolution that adds a shortcut has its image as the first
operand and the shortcut as a later one. So of `relu(proj(x) + f(x))` all of f would run before
proj, and x outlive it. Inductor's own order for the lowest peak (`reorder_for_peak_memory`) leaves
that as it is: by its estimate, which knows of no library's workspace, both are alike in a RegNet,
where the peak is 6 to 15 % higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from fx_fuser.graph.nodes import hint_of

_ALIKE = 0.01  # of a peak; weights are alive until their layers have run


def place(graph: Graph, reader: Node, operand: Node) -> None:
    """Move what only `operand` of this reader needs to where it can first run, if the peak is then
    lower, or much the same with less memory alive at other times.
    """
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    own = _only_for(operand, reader, order)
    inputs = [order[n] for node in own for n in node.all_input_nodes if n not in own]
    if not own or not inputs:
        return
    first = max(inputs) + 1
    late = nodes[first : order[reader] + 1]
    if not all(map(_is_movable, late)):
        return
    early = [n for n in late if n in own] + [n for n in late if n not in own]
    before = set(nodes[:first])
    if early == late or not _is_better(_cost(early, before), _cost(late, before)):
        return
    at = nodes[first - 1]
    for node in early[: len(own)]:
        at.append(node)
        at = node


def _only_for(operand: Node, reader: Node, order: dict[Node, int]) -> set[Node]:
    """What nobody but the reader needs of what makes the operand."""
    own: set[Node] = set()
    waiting = [operand]
    while waiting:
        node = max(waiting, key=order.__getitem__)  # after all its readers
        waiting.remove(node)
        if node.op == "call_function" and all(n is reader or n in own for n in node.users):
            own.add(node)
            waiting += [n for n in node.all_input_nodes if n not in waiting]
    return own


def _is_movable(node: Node) -> bool:
    """Does it make its results of its operands and do nothing else?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        # operator.getitem, arithmetic with sizes; but what a higher-order op runs may draw numbers,
        # as `run_and_save_rng_state` does at a random op that backward repeats.
        is_opaque = isinstance(node.target, torch._ops.HigherOrderOperator)
        return node.op == "call_function" and not is_opaque
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (node.target._schema.is_mutable or is_random or node.is_impure())


def _is_better(cost: tuple[int, int], other: tuple[int, int]) -> bool:
    """Of two `_cost`s, is this one lower? Where peaks differ by a weight or so, the sums decide."""
    (peak, total), (other_peak, other_total) = cost, other
    if abs(peak - other_peak) > _ALIKE * other_peak:
        return peak < other_peak
    return total < other_total


def _cost(nodes: Sequence[Node], before: set[Node]) -> tuple[int, int]:
    """Bytes alive at the peak, and those of all steps added up. before: what has run already."""
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    within = {node: i for i, node in enumerate(nodes)}
    for node in (*before, *nodes):
        steps = [within.get(n, len(nodes) if n not in before else -1) for n in node.users]
        for storage, size in _storages(node):
            last[storage] = max([last.get(storage, -1), within.get(node, -1), *steps])
            sizes[storage] = max(sizes.get(storage, 0), size)
    alive = {s for node in before for s, _ in _storages(node) if last[s] >= 0}
    live = sum(sizes[s] for s in alive)
    peak = total = 0
    for i, node in enumerate(nodes):
        made = {s for s, _ in _storages(node)} - alive
        alive |= made
        live += sum(sizes[s] for s in made)
        peak, total = max(peak, live), total + live
        ended = {s for s in alive if last[s] <= i}
        live -= sum(sizes[s] for s in ended)
        alive -= ended
    return peak, total


def _storages(node: Node) -> Iterator[tuple[int, int]]:
    """Those of its values, a view's being its base's, and their bytes; a graph's inputs have none:
    they are the caller's."""
    for value in tree_leaves(node.meta.get("val")) if node.op == "call_function" else ():
        if isinstance(value, Tensor):
            sizes = [hint_of(size) or 0 for size in value.shape]
            yield value.untyped_storage()._cdata, math.prod(sizes) * value.dtype.itemsize
