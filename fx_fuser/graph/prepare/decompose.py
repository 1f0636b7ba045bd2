"""Decompose calls that are an anchor and more, for matching: baddbmm is a bmm and a sum, and addmm
is a gemm and a sum, unless it is a Linear with its bias.

A BatchNorm of core ATen is a tuple and its first item; the two become one call.

Sites, matches and epilogues consist of nodes. The gemm inside `torch.baddbmm(r, a, b)` is not a
node; nor are an einsum's permuted operands. So in the copy of the graph that is searched, one call
becomes several. What is not fused becomes one call again, as the user wrote it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from fx_fuser.graph.read.aten import aten, by_name, lookup
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.einsum import Gemm, classify
from fx_fuser.graph.read.nodes import meta_tensor

_KEY, _PAIR = "fx_fuser_decomposed", "fx_fuser_pair"
_AS_WRITTEN = ("op", "target", "args", "kwargs")
# In 16 bits baddbmm rounds once, and a gemm followed by a sum twice. Where the two cancel, the
# result differs.
_DTYPES = (torch.float32, torch.float64)
# Calls that make a tensor for an addend that must be given and is not read.
_MAKERS = frozenset("empty empty_like new_empty zeros zeros_like new_zeros".split())  # noqa: SIM905


@dataclass(frozen=True)
class _Call:
    """The call that a node was. steps: its gemm and what follows it, each the first argument of the
    next; the last is the node. readers: (operand as written, node that reads it now, place among
    that node's arguments). made: the new nodes."""

    steps: tuple[Node, ...]
    readers: tuple[tuple[Node, Node, int], ...]
    made: tuple[Node, ...]
    written: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """Is nothing of it fused?"""
        return all(after.args[0] is before for before, after in pairwise(self.steps))


def decompose(graph: Graph) -> None:
    """Decompose every call that is known to be an anchor and more. A pattern's tensors have no
    shapes."""
    for node in list(graph.nodes):
        rule = _rule_of(node)
        if rule is None:
            continue
        bind, take_apart = rule
        try:
            operands = bind(*node.args, **node.kwargs)
        except TypeError:  # out=, a dtype, or a deprecated order of arguments
            continue
        if operands is not None:
            with graph.inserting_before(node):
                take_apart(node, *operands)


def _rule_of(node: Node) -> tuple[Callable[..., Any], Callable[..., None]] | None:
    if isinstance(node.target, OpOverload):
        if node.target._schema.is_mutable:  # `lookup` finds the function of its twin
            return None
        rule = lookup(node.target, _RULES)
        return None if rule is None else (by_name(rule[0], node.target), rule[1])
    return _RULES.get(node.target) if node.op in _CALLS else None


def inner_of(nodes: Iterable[Node]) -> set[Node]:
    """The gemms, and their multiples, among these nodes whose values the user's own call never
    writes to memory."""
    calls: list[_Call] = [n.meta[_KEY] for n in nodes if _KEY in n.meta]
    return {step for call in calls for step in call.steps[:-1]}


def is_decomposed(node: Node) -> bool:
    """Is it the result of a call that was decomposed?"""
    return _KEY in node.meta


def recompose(graph: Graph) -> None:
    """Undo `decompose` where nothing was fused. A rewrite may have replaced operands since."""
    for node in list(graph.nodes):
        if _PAIR in node.meta:
            _into_item(node)
        call: _Call | None = node.meta.pop(_KEY, None)
        if call is None or not call.is_whole:
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
    steps: Sequence[Node], made: Sequence[Node], readers: Iterable[tuple[Any, Node, int]]
) -> None:
    node = steps[-1]
    written = {name: getattr(node, name) for name in _AS_WRITTEN}
    node.meta[_KEY] = _Call(tuple(steps), tuple(readers), tuple(made), written)


def _made(node: Node, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    """A new node before this one, with this one's meta except for the value."""
    made = node.graph.call_function(target, args)
    made.meta = {k: v for k, v in node.meta.items() if k not in (_KEY, _PAIR, "example_value")}
    return made


# ---- baddbmm and addmm -------------------------------------------------------------------------


def _baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> tuple[Any, ...] | None:
    return _scaled_sum(torch.bmm, input, batch1, batch2, beta, alpha)


def _addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1
) -> tuple[Any, ...] | None:
    if beta == 1 and alpha == 1 and _may_be_bias(input):
        return None  # `fx_fuser.graph.read.sites` reads it as it is
    return _scaled_sum(torch.mm, input, mat1, mat2, beta, alpha)


def _may_be_bias(addend: Any) -> bool:
    """A pattern's tensors have no shapes: there it may be one."""
    vector = meta_tensor(addend) if isinstance(addend, Node) else None
    return vector is None or vector.ndim == 1


def _scaled_sum(
    gemm: Callable[..., Any], addend: Any, x: Any, weight: Any, beta: Any, alpha: Any
) -> tuple[Any, ...] | None:
    """The operands of alpha · x · weight + beta · addend, where the factors are known."""
    if not all(isinstance(o, Node) for o in (addend, x, weight)):
        return None
    if not is_number(beta) or not is_number(alpha):
        return None
    if alpha == 0:  # the libraries then read neither x nor weight, whose NaN would spread
        return None
    if beta == 0 and not _is_unread(addend):
        return None
    return gemm, addend, x, weight, beta, alpha


def _is_unread(addend: Node) -> bool:
    """Can the graph do without reading it?  Yes if it has no gradient, which would be zeros, and
    no edit can replace it, since `recompose` would not find the new node."""
    tensor = meta_tensor(addend)
    name = getattr(addend.target, "__name__", str(addend.target)).partition(".")[0]
    stays = addend.op in ("placeholder", "get_attr") or name in _MAKERS
    return tensor is not None and not tensor.requires_grad and stays


def _into_sum(
    node: Node,
    product: Callable[..., Any],
    addend: Node,
    x: Node,
    weight: Node,
    beta: float,
    alpha: float,
) -> None:
    """→ gemm, its multiple, and the sum with a multiple of the addend, as needed. With beta = 0
    torch does not read the addend: 0 times a NaN would be NaN."""
    tensors = [meta_tensor(n) for n in (node, addend, x, weight)]
    dtypes = {None if t is None else t.dtype for t in tensors}
    if len(dtypes) > 1 or not dtypes <= {None, *_DTYPES}:
        return
    wanted: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    wanted = [(product, (x, weight), {})]
    if alpha != 1:
        wanted.append((torch.mul, (alpha,), {}))
    if beta != 0:
        wanted.append((torch.add, (addend,), {} if beta == 1 else {"alpha": beta}))
    y = tensors[0]
    made: list[Node] = []
    for target, args, _ in wanted[:-1]:
        step = _made(node, target, (*made[-1:], *args))
        if y is not None:
            step.meta["example_value"] = y.new_empty(y.shape).requires_grad_(y.requires_grad)
        made.append(step)
    steps = [*made, node]
    readers = [(x, steps[0], 0), (weight, steps[0], 1)]
    readers += [(addend, node, 1)] if beta != 0 else []
    _note(steps, made, readers)
    target, args, kwargs = wanted[-1]
    _become(node, "call_function", target, (*made[-1:], *args), kwargs)


# ---- einsum ------------------------------------------------------------------------------------


def _einsum(equation: Any, *operands: Any) -> tuple[str, Node, Node] | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        (operands,) = operands
    if len(operands) != 2 or not all(isinstance(o, Node) for o in operands):
        return None
    return (equation, *operands) if isinstance(equation, str) else None


def _into_gemm(node: Node, equation: str, x: Node, weight: Node) -> None:
    """An einsum with a batch → permute, matmul, permute."""
    left, right, y = map(meta_tensor, (x, weight, node))
    found, order = _batched(equation, left, right)
    if found is None:
        return
    if left is None or right is None or y is None:  # a pattern's trace: only the kind matters
        if order == sorted(order):
            _note([node], (), ())
            _become(node, "call_function", torch.bmm, (x, weight), {})
        return
    i, j = found.contracted
    z = y.new_empty([y.shape[order.index(d)] for d in range(y.ndim)])
    lies = zip(z.permute(order).stride(), y.stride(), y.shape)
    if not statically_known_true(left.shape[i] == right.shape[j]) or not all(
        statically_known_true(a == b) or statically_known_true(size == 1) for a, b, size in lies
    ):
        return  # einsum broadcasts a size of 1, or the permuted gemm has other strides
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
        view.meta.pop("stack_trace", None)  # that line is the einsum's
        with torch.enable_grad():
            view.meta["example_value"] = meta_tensor(factor).permute(places)  # type: ignore[union-attr]
        made.append(view)
        readers.append((factor, view, 0))
        factors.append(view)
    gemm = node
    if order != sorted(order):
        gemm = _made(node, torch.matmul, tuple(factors))
        gemm.meta["example_value"] = z.requires_grad_(y.requires_grad)
        made.append(gemm)
    steps = [node] if gemm is node else [gemm, node]
    _note(steps, made, ((o, reader or gemm, place) for o, reader, place in readers))
    if gemm is node:
        _become(node, "call_function", torch.matmul, tuple(factors), {})
    else:
        _become(node, "call_function", torch.permute, (gemm, tuple(order)), {})


def _batched(
    equation: str, left: Tensor | None, right: Tensor | None
) -> tuple[Gemm | None, list[int]]:
    """The batched gemm that the equation is, and the permutation that gives the einsum's result."""
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


# ---- batch_norm of core ATen -------------------------------------------------------------------


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: Any,
    eps: Any,
) -> tuple[Any, ...]:
    return input, weight, bias, running_mean, running_var, momentum, eps


def _into_norm(node: Node, *operands: Any) -> None:
    """The norm and its first item → the batch_norm that `run_decompositions` made them of."""
    item = next(iter(node.users), None)
    if len(node.users) != 1 or item is None:
        return
    if (
        item.target is not operator.getitem
        or item.args[1] != 0
        or item.meta.get("example_value") is None
    ):
        return
    *tensors, momentum, eps = operands
    args = (*tensors, False, momentum, eps, False)
    _become(item, "call_function", aten.batch_norm.default, args, {})
    item.meta[_PAIR] = node.meta
    item.graph.erase_node(node)


def _into_item(item: Node) -> None:
    """Undo `_into_norm`."""
    *tensors, _, momentum, eps, _ = item.args
    with item.graph.inserting_before(item):
        target = aten._native_batch_norm_legit_no_training.default
        pair = item.graph.call_function(target, (*tensors, momentum, eps))
    pair.meta = item.meta.pop(_PAIR)
    _become(item, "call_function", operator.getitem, (pair, 0), {})


_CALLS = ("call_function", "call_method")
_RULES: dict[Any, tuple[Callable[..., Any], Callable[..., None]]] = {
    torch.baddbmm: (_baddbmm, _into_sum),
    "baddbmm": (_baddbmm, _into_sum),
    torch.addmm: (_addmm, _into_sum),
    "addmm": (_addmm, _into_sum),
    torch.einsum: (_einsum, _into_gemm),
    aten._native_batch_norm_legit_no_training: (_batch_norm, _into_norm),
}
