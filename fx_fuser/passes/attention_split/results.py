"""What replaces an attention's results in Inductor's graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from fx_fuser.ops import run
from fx_fuser.passes.graph_pass import call
from fx_fuser.planning import bench_ops


def results_by(
    arguments: run.Arguments, is_one: bool, node: Node, items: Mapping[int, Node]
) -> dict[int, Node]:
    """Insert our call before torch's operation. Returns: index of a result → the node that is to
    replace it.

    is_one: does it return a single tensor?  items: from `items_of`.

    Raises:
        RuntimeError: a result would have another form than torch's.
    """
    graph = node.graph
    with graph.inserting_before(node):
        if is_one:
            made = [call(graph, node, run.ONE, *arguments)]
        else:
            several = call(graph, node, run.MANY, *arguments)
            count = len(several.meta["val"])
            made = [call(graph, node, operator.getitem, several, i) for i in range(count)]
        new = {i: made[i] if i < len(made) else _not_read(item) for i, item in items.items()}
    for i, item in items.items():
        forms = [bench_ops.form_of_value(n.meta["val"]) for n in (item, new[i])]
        if forms[0] != forms[1]:
            raise RuntimeError(f"result {i} would be {forms[1]}, not {forms[0]}")
    return new


def _not_read(item: Node) -> Node:
    """torch's seed or offset, which our backwards do not read."""
    value = item.meta["val"]
    like = {"dtype": value.dtype, "device": value.device}
    return call(item.graph, item, torch.ops.aten.empty_strided.default, [], [], **like)
