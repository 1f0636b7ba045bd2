"""Calls that are an anchor and more, taken apart for matching: baddbmm is a bmm and a sum.

Sites, matches and epilogues are made of nodes, and the product inside `torch.baddbmm(r, a, b)` is
none. So in the copy of the graph that is searched the call becomes two; what is not fused becomes
one again, as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.nodes import meta_tensor
from fx_fuser.spell import is_number

_KEY = "fx_fuser_decomposed"
_AS_WRITTEN = ("op", "target", "args", "kwargs")
# In fewer bits baddbmm rounds once, and a product apart from the sum twice: where they cancel, that
# is another result.
_DTYPES = (torch.float32, torch.float64)


def decompose(graph: Graph) -> None:
    """Take apart every call that this can be said of. Nothing is known of a pattern's tensors."""
    for node in list(graph.nodes):
        operands = _baddbmm(node)
        if operands is None or not _is_exact((node, *operands)):
            continue
        addend, *factors = operands
        with graph.inserting_before(node):
            product = graph.call_function(torch.bmm, tuple(factors))
        product.meta = dict(node.meta)
        y = meta_tensor(node)
        if y is not None:
            needs_grad = y.requires_grad and any(meta_tensor(f).requires_grad for f in factors)  # type: ignore[union-attr]
            product.meta["example_value"] = y.new_empty(y.shape).requires_grad_(needs_grad)
        node.meta[_KEY] = product, operands, {k: getattr(node, k) for k in _AS_WRITTEN}
        _become(node, "call_function", torch.add, (product, addend), {})


def inner_of(nodes: Iterable[Node]) -> set[Node]:
    """Values among them that the user's own call never writes to memory."""
    return {node.meta[_KEY][0] for node in nodes if _KEY in node.meta}


def recompose(graph: Graph) -> None:
    """Put together what `decompose` took apart and is still there. Operands may be others now."""
    for node in list(graph.nodes):
        product, operands, written = node.meta.pop(_KEY, (None, (), {}))
        if product is None or node.args[0] is not product:
            continue
        now = dict(zip(operands, (node.args[1], *product.args)))
        args, kwargs = map_arg((written["args"], written["kwargs"]), lambda n: now.get(n, n))  # noqa: B023
        _become(node, written["op"], written["target"], args, kwargs)
        graph.erase_node(product)


def _become(node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
    node.op, node.target, node.args, node.kwargs = op, target, args, kwargs


def _baddbmm(node: Node) -> tuple[Node, ...] | None:
    """Addend and factors of a plain baddbmm."""
    if node.target not in (torch.baddbmm, "baddbmm") or not node.op.startswith("call_"):
        return None
    try:
        return _operands(*node.args, **node.kwargs)
    except TypeError:  # out=, a dtype, or the order of before torch 1.0
        return None


def _operands(
    input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> tuple[Node, ...] | None:
    found = input, batch1, batch2
    plain = all(is_number(factor) and factor == 1 for factor in (beta, alpha))
    return found if plain and all(isinstance(o, Node) for o in found) else None


def _is_exact(nodes: tuple[Node, ...]) -> bool:
    dtypes = {None if (t := meta_tensor(node)) is None else t.dtype for node in nodes}
    return len(dtypes) == 1 and dtypes <= {None, *_DTYPES}
