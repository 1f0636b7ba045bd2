"""Calls that read only a tail's dtype and device read the anchor's operand instead.

    z = linear(x, w); mask = z.new_ones(5); y = sigmoid(z) * mask

In the copy of the graph that is searched, `mask` is x.new_ones(5, dtype=z.dtype), so that z has no
reader outside its tail. `torch.zeros_like(z)` is x.new_zeros(z.shape, …), if z is contiguous and of
constant size. Where z is not fused, the call is put back as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from fx_fuser.graph.prepare.reindex import is_view
from fx_fuser.graph.read.nodes import argument_of, as_written, meta_tensor
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.sites import Site, site_at
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

_NEW = frozenset("new_ones new_zeros new_full new_empty".split())  # noqa: SIM905
_LIKE = {f"{name}_like": f"new_{name}" for name in ("ones", "zeros", "full", "empty")}


@dataclass(frozen=True)
class Reread:
    """The calls that read another tensor now, as (node, the value it read, how it was)."""

    calls: tuple[tuple[Node, Node, dict[str, Any]], ...] = ()

    def restore(self, results: Mapping[Node, Node]) -> None:
        """Put back each call of a value that was not fused. results: see `sink.Sunk.restore`."""
        for node, value, written in self.calls:
            if value not in results and not value._erased:
                for name, was in written.items():
                    setattr(node, name, was)


def reread(graph: Graph) -> Reread:
    """Make each such call read the anchor's first operand."""
    if not any(called_name(node) in {*_NEW, *_LIKE} for node in graph.nodes):
        return Reread()
    view = View(graph)
    tails: dict[Node, Site] = {}
    found: list[tuple[Node, Node, dict[str, Any]]] = []
    for node in view.nodes:
        with suppress(Exception):  # a node that cannot be read raises again in `find`
            site = site_at(view, node) or _site_before(view, node, tails)
            if site is not None:
                tails[node] = site
        value = argument_of(node, 0, "self" if called_name(node) in _NEW else "input")
        site = tails.get(value) if isinstance(value, Node) else None
        x = site.operands["x"] if site is not None else None
        if x is None or node in tails:
            continue
        written = as_written(node)
        if _reads_from(node, value, x):
            found.append((node, value, written))
    return Reread(tuple(found))


def _site_before(view: View, node: Node, tails: Mapping[Node, Site]) -> Site | None:
    """The anchor of the tail that a pointwise operation, or a view, belongs to."""
    written = view.written(node)
    if not is_view(node) and (written is None or written.op not in OPS):
        return None
    return next((tails[n] for n in node.all_input_nodes if n in tails), None)


def _reads_from(node: Node, value: Node, x: Node) -> bool:
    """Edit the call to read x; False if it cannot."""
    name, tensor, other = called_name(node), meta_tensor(value), meta_tensor(x)
    if tensor is None or other is None or tensor.device != other.device:
        return False
    kwargs = {**node.kwargs, "dtype": node.kwargs.get("dtype") or tensor.dtype}
    if name in _NEW and node.op == "call_method" and node.args[:1] == (value,):
        node.args, node.kwargs = (x, *node.args[1:]), kwargs
        return True
    shape = tuple(tensor.shape)
    plain = all(isinstance(size, int) for size in shape) and tensor.is_contiguous()
    if name not in _LIKE or node.op != "call_function" or not plain or node.args[:1] != (value,):
        return False
    if {*node.kwargs} - {"dtype", "device", "requires_grad"}:
        return False
    node.op, node.target = "call_method", _LIKE[name]
    node.args, node.kwargs = (x, shape, *node.args[1:]), kwargs
    return True
