"""Make the copy of a graph that is searched easier to match, and put back what was not fused."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from fx_fuser.graph.prepare.decompose import decompose, recompose
from fx_fuser.graph.prepare.frozen import as_batch_norms
from fx_fuser.graph.prepare.localize import localize
from fx_fuser.graph.prepare.metadata import reread
from fx_fuser.graph.prepare.sink import sink
from fx_fuser.graph.read.aten import drop_proven_checks


class Prepared:
    """Edits the graph: checks that hold are dropped, operations on DTensors moved to their local
    shards, calls that are an anchor and more decomposed, a frozen BatchNorm's operations made one
    call, and views between an anchor and its tail moved out of the way."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        drop_proven_checks(graph)
        self._localized = localize(graph)
        decompose(graph)
        self._frozen = as_batch_norms(graph)
        self._moved = reread(graph), sink(graph)

    def restore(self, results: Mapping[Node, Node]) -> None:
        """Put back what was not fused. results: fused node → the node of its match's result."""
        for moved in self._moved:
            moved.restore(results)
        self._frozen.restore()
        recompose(self.graph)
        self._localized.restore(results)
