"""What one of Inductor's graphs keeps in memory, step by step, in the order of its nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from fx_fuser.graph.read.nodes import hint_of
from fx_fuser.passes.graph_pass import GEMMS

_SLACK = 1 / 256  # of a peak: room for the first layers' weights next to their images
_OF_THE_LIBRARY = {*GEMMS, torch.ops.aten.convolution.default}


def storages_of(node: Node) -> Iterator[tuple[int, int]]:
    """The storages of its values, a view's being its base's, and their bytes; none for a graph's
    inputs, which are the caller's."""
    for value in tree_leaves(node.meta.get("val")) if node.op == "call_function" else ():
        if isinstance(value, Tensor):
            sizes = [hint_of(size) or 0 for size in value.shape]
            yield value.untyped_storage()._cdata, math.prod(sizes) * value.dtype.itemsize


class Memory:
    """Bytes alive at each node, and `peak`, the most. Nothing else may change the graph meanwhile.

    Leaves out what only operations that Inductor fuses make and read: most of it never exists.
    """

    def __init__(self, graph: Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._spans: dict[int, tuple[int, int]] = {}
        sizes: dict[int, int] = {}
        exists: set[int] = set()
        for node in graph.nodes:
            steps = [self.order[n] for n in (node, *node.users)]
            for storage, size in storages_of(node):
                first, last = self._spans.get(storage, (steps[0], 0))
                self._spans[storage] = first, max(last, *steps)
                sizes[storage] = max(sizes.get(storage, 0), size)
                if any(map(_is_no_loop, (node, *node.users))):
                    exists.add(storage)
        changes = [0] * (len(self.order) + 1)
        for storage in exists:
            first, last = self._spans[storage]
            changes[first] += sizes[storage]
            changes[last + 1] -= sizes[storage]
        self._sizes = sizes
        self._alive = list(itertools.accumulate(changes))
        self.peak = max(self._alive, default=0)

    def has_room_for(self, nodes: Sequence[Node]) -> bool:
        """Does the peak stay as it is if the first of these nodes makes what all of them make, and
        all of it lives until the last of it is read?"""
        most = self.peak * (1 + _SLACK)
        return all(alive <= most for _, alive in self._joined(nodes))

    def join(self, nodes: Sequence[Node]) -> None:
        """From now on, count all that these nodes make as made by the first of them."""
        for i, alive in list(self._joined(nodes)):
            self._alive[i] = alive

    def _joined(self, nodes: Sequence[Node]) -> Iterator[tuple[int, int]]:
        """The steps from the first of these nodes to the last reader, and what is alive there."""
        held = [(*self._spans[s], self._sizes[s]) for node in nodes for s, _ in storages_of(node)]
        whole = sum(size for *_, size in held)
        for i in range(self.order[nodes[0]], max(last for _, last, _ in held) + 1):
            apart = sum(size for first, last, size in held if first <= i <= last)
            yield i, self._alive[i] - apart + whole


def _is_no_loop(node: Node) -> bool:
    """Is it something that Inductor does not make a loop of and fuse with its neighbours?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "output"
    return node.target in _OF_THE_LIBRARY or node.target.namespace == "fx_fuser"
