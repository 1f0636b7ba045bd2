"""Calls that are an anchor and more, taken apart for matching: baddbmm is a bmm and a sum.

Sites, matches and epilogues are made of nodes, and the product inside `torch.baddbmm(r, a, b)` is
none; nor are an einsum's permuted operands. So in the copy of the graph that is searched the call
becomes several; what is not fused becomes one again, as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from fx_fuser.graph.canonical import is_number
from fx_fuser.graph.einsum import Product, classify
from fx_fuser.graph.nodes import meta_tensor

_KEY = "fx_fuser_decomposed"
_AS_WRITTEN = ("op", "target", "args", "kwargs")
# In fewer bits baddbmm rounds once, and a product apart from the sum twice: where they cancel, that
# is another result.
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Call:
    """What a node was. readers: of each operand as it was written, who reads it now, and where;
    made: the nodes that are new."""

    product: Node
    readers: tuple[tuple[Node, Node, int], ...]
    made: tuple[Node, ...]
    written: dict[str, Any]


def decompose(graph: Graph) -> None:
    """Take apart every call that this can be said of. Nothing is known of a pattern's tensors."""
    for node in list(graph.nodes):
        bind, take_apart = _RULES.get(node.target, (None, None)) if node.op in _CALLS else _NONE
        if bind is None or take_apart is None:
            continue
        try:
            operands = bind(*node.args, **node.kwargs)
        except TypeError:  # out=, a dtype, or an order of arguments that is out of date
            continue
        if operands is not None:
            with graph.inserting_before(node):
                take_apart(node, *operands)


def inner_of(nodes: Iterable[Node]) -> set[Node]:
    """Values among them that the user's own call never writes to memory."""
    calls: dict[Node, _Call] = {n: n.meta[_KEY] for n in nodes if _KEY in n.meta}
    return {call.product for node, call in calls.items() if call.product is not node}


def recompose(graph: Graph) -> None:
    """Put together what `decompose` took apart and is still there. Operands may be others now."""
    for node in list(graph.nodes):
        call: _Call | None = node.meta.pop(_KEY, None)
        if call is None or (call.product is not node and node.args[0] is not call.product):
            continue
        now = {operand: reader.args[place] for operand, reader, place in call.readers}
        of_now = (call.written["args"], call.written["kwargs"])
        args, kwargs = map_arg(of_now, lambda n: now.get(n, n))  # noqa: B023
        _become(node, call.written["op"], call.written["target"], args, kwargs)
        for made in reversed(call.made):
            graph.erase_node(made)


def _become(node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
    node.op, node.target, node.args, node.kwargs = op, target, args, kwargs


def _note(
    node: Node, product: Node, made: Sequence[Node], readers: Iterable[tuple[Any, Node, int]]
) -> None:
    written = {name: getattr(node, name) for name in _AS_WRITTEN}
    node.meta[_KEY] = _Call(product, tuple(readers), tuple(made), written)


def _made(node: Node, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    """A new node at the place of this one, with its meta but for the value."""
    made = node.graph.call_function(target, args)
    made.meta = {k: v for k, v in node.meta.items() if k not in (_KEY, "example_value")}
    return made


# ---- baddbmm -----------------------------------------------------------------------------------


def _baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> tuple[Node, ...] | None:
    found = input, batch1, batch2
    plain = all(is_number(factor) and factor == 1 for factor in (beta, alpha))
    return found if plain and all(isinstance(o, Node) for o in found) else None


def _into_sum(node: Node, addend: Node, x: Node, weight: Node) -> None:
    tensors = [meta_tensor(n) for n in (node, addend, x, weight)]
    dtypes = {None if t is None else t.dtype for t in tensors}
    if len(dtypes) > 1 or not dtypes <= {None, *_DTYPES}:
        return
    product = _made(node, torch.bmm, (x, weight))
    y = tensors[0]
    if y is not None:
        product.meta["example_value"] = y.new_empty(y.shape).requires_grad_(y.requires_grad)
    _note(node, product, [product], [(addend, node, 1), (x, product, 0), (weight, product, 1)])
    _become(node, "call_function", torch.add, (product, addend), {})


# ---- einsum ------------------------------------------------------------------------------------


def _einsum(equation: Any, *operands: Any) -> tuple[str, Node, Node] | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        (operands,) = operands
    if len(operands) != 2 or not all(isinstance(o, Node) for o in operands):
        return None
    return (equation, *operands) if isinstance(equation, str) else None


def _into_product(node: Node, equation: str, x: Node, weight: Node) -> None:
    """matmul of permuted operands, and the result permuted, wherever there is a batch."""
    left, right, y = map(meta_tensor, (x, weight, node))
    found, order = _batched(equation, left, right)
    if found is None:
        return
    if left is None or right is None or y is None:  # a pattern, of which only the kind is asked
        if order == sorted(order):
            _note(node, node, (), ())
            _become(node, "call_function", torch.bmm, (x, weight), {})
        return
    i, j = found.contracted
    z = y.new_empty([y.shape[order.index(d)] for d in range(y.ndim)])
    lies = zip(z.permute(order).stride(), y.stride(), y.shape)
    if not statically_known_true(left.shape[i] == right.shape[j]) or not all(
        statically_known_true(a == b) or statically_known_true(size == 1) for a, b, size in lies
    ):
        return  # a size of 1 is spread over the other, or a view of the product lies otherwise
    columns = [*found.right]
    if found.op == "bmm_nt":
        columns[-2:] = columns[:-3:-1]
    made: list[Node] = []
    factors: list[Node] = []
    readers: list[tuple[Node, Node | None, int]] = []
    for factor, places in ((x, [*found.left]), (weight, columns)):
        if places == sorted(places):
            readers.append((factor, None, len(factors)))
            factors.append(factor)
            continue
        view = _made(node, torch.permute, (factor, tuple(places)))
        view.meta.pop("stack_trace", None)  # the line says what is made of it
        with torch.enable_grad():
            view.meta["example_value"] = meta_tensor(factor).permute(places)  # type: ignore[union-attr]
        made.append(view)
        readers.append((factor, view, 0))
        factors.append(view)
    product = node
    if order != sorted(order):
        product = _made(node, torch.matmul, tuple(factors))
        product.meta["example_value"] = z.requires_grad_(y.requires_grad)
        made.append(product)
    _note(node, product, made, ((o, reader or product, place) for o, reader, place in readers))
    if product is node:
        _become(node, "call_function", torch.matmul, tuple(factors), {})
    else:
        _become(node, "call_function", torch.permute, (product, tuple(order)), {})


def _batched(
    equation: str, left: Tensor | None, right: Tensor | None
) -> tuple[Product | None, list[int]]:
    """The product of batches that the equation is, and its result's dimensions in their order."""
    ranks = () if left is None or right is None else (left.ndim, right.ndim)
    operands, _, out = equation.replace(" ", "").partition("->")
    a, _, b = operands.partition(",")
    found = classify(equation, *ranks)
    order = [*range(len(found.left))] if found is not None else []
    if found is None and out and "." not in equation:
        natural = [c for c in a if c in b and c in out]
        natural += [c for c in a if c not in b] + [c for c in b if c not in a]
        if sorted(natural) == sorted(out):
            found = classify(f"{a},{b}->{''.join(natural)}", *ranks)
            order = [natural.index(c) for c in out]
    return (found, order) if found is not None and found.op in ("bmm", "bmm_nt") else (None, [])


_CALLS = ("call_function", "call_method")
_NONE = (None, None)
_RULES: dict[Any, tuple[Callable[..., Any], Callable[..., None]]] = {
    torch.baddbmm: (_baddbmm, _into_sum),
    "baddbmm": (_baddbmm, _into_sum),
    torch.einsum: (_einsum, _into_product),
}
