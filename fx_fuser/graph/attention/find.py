"""Find the attentions of a graph: `find`.

Each search starts at a softmax. It goes back through views and the steps of a tail to the product
of q and k, and forward through casts, a dropout and views to the product with v. The axes of the
first product are followed all the way (`fx_fuser.graph.attention.axes`), so that keys, queries and
heads are known by how the graph got there. What may not be attention is refused, with a reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fx_fuser.graph.attention import hazards
from fx_fuser.graph.attention.axes import Axes, Dim
from fx_fuser.graph.attention.calls import (
    ATTENTIONS,
    DROPOUTS,
    OPAQUE,
    Product,
    Softmax,
    product_at,
    softmax_at,
)
from fx_fuser.graph.attention.read_through import moved, numbered, origin
from fx_fuser.graph.attention.site import (
    SCORE,
    AttentionSite,
    Operand,
    Refused,
    RefusedError,
    Step,
)
from fx_fuser.graph.attention.torchs import torchs_attention
from fx_fuser.graph.prepare.reindex import Permutation, is_same, same_sizes
from fx_fuser.graph.read.canonical import Arg, is_number
from fx_fuser.graph.read.naming import called, statement
from fx_fuser.graph.read.nodes import argument_of, input_of, meta_tensor
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

# The operations of a tail, with casts and those that return their input.
TAIL = frozenset({"identity", "cast", "add", "sub", "mul", "div", "tanh", "where"})
# Followed from the softmax to the product with v, so that such an attention is reported as refused.
_PASSED_BY_A_CANDIDATE = frozenset({"getitem", "mul", "conv2d", "masked_fill", "nan_to_num"})
_INPUTS = ("placeholder", "get_attr")
_LONGEST = 32  # operations between the product and the softmax, or the softmax and the product
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def find(view: View) -> list[AttentionSite | Refused]:
    """The attentions of a graph, in the order of their softmax. A softmax that no product follows
    is skipped."""
    found: list[AttentionSite | Refused] = []
    for node in view.nodes:
        softmax = softmax_at(view, node)
        try:
            if softmax is not None and _is_candidate(view, node):
                found.append(_Finder(view, softmax).site())
            elif node.op == "call_function" and node.target in ATTENTIONS:
                found.append(hazards.checked(view, torchs_attention(view, node)))
            elif node.op == "call_function" and node.target in OPAQUE:
                raise RefusedError(node, "it is one torch call, projections included")
        except RefusedError as refused:
            found.append(Refused(node, refused.at, str(refused)))
    return found


def _is_candidate(view: View, softmax: Node) -> bool:
    """Does a product of two tensors follow, or a Linear over the heads?  A softmax of classes or of
    experts is not attention."""
    queue, seen = [softmax], {softmax}
    while queue and len(seen) < _LONGEST:
        node = queue.pop(0)
        for reader in view.readers[node]:
            if reader in seen or meta_tensor(reader) is None:
                continue
            seen.add(reader)
            is_mixed = called_name(reader) == "linear" and _is_permuted(view, node)
            if is_mixed or product_at(view, reader) is not None:
                return True
            passes = called_name(reader) in _PASSED_BY_A_CANDIDATE
            if passes or _is_post(view, reader, node) or moved(view, reader) is not None:
                queue.append(reader)
    return False


def _is_permuted(view: View, node: Node) -> bool:
    found = moved(view, node)
    return found is not None and isinstance(found[1], Permutation)


def _is_post(view: View, node: Node, weights: Node) -> bool:
    """Is it a cast or a dropout of the weights?  `x.type_as(weights)` is a cast of x."""
    written = view.written(node)
    if written is not None:
        return written.op in ("identity", "cast") and written.args[0] is weights
    return node.target in DROPOUTS


@dataclass
class _Scores:
    """The first product and its axes. of: label → axes, of the product's sizes. factors: the axes
    of each factor's dimensions."""

    product: Product
    of: dict[str, Dim]
    factors: tuple[list[Dim], list[Dim]]

    def axes(self, labels: Sequence[str]) -> Dim:
        return tuple(axis for label in labels for axis in self.of[label])


class _Finder:
    """One attention, from its softmax."""

    def __init__(self, view: View, softmax: Softmax) -> None:
        self.view = view
        self.softmax = softmax
        self.axes = Axes()
        self.failed: dict[Node, RefusedError] = {}

    def site(self) -> AttentionSite:
        view, softmax = self.view, self.softmax
        path = self._path(softmax.input)
        first = self._labelled(path[0])
        scores, tail, dims = self._start(first)
        for before, node in itertools.pairwise(path):
            steps, dims = self._step(node, before, dims)
            tail += steps
        query, keys = self._orientation(first, dims)
        post, between, second, dims = self._after(dims)
        p = (softmax.node, *between)[-1]
        v, out, columns = self._values(second, p, dims, keys)
        rows = self._rows(first, query, v)
        q, k = (
            Operand(first.product.factors[i], tuple(first.factors[i])) for i in (query, 1 - query)
        )
        q, k, v = (origin(view, self.axes, operand, second.node) for operand in (q, k, v))
        views, result = self._views_behind(second.node, out)
        entry, weights, made = map(_tensor, (path[0], softmax.node, second.node))
        q, k = (replace(operand, dtype=entry.dtype) for operand in (q, k))
        site = AttentionSite(
            node=second.node, nodes=(*path, softmax.node, *between, second.node), views=views,
            result=result, sizes=(), batch=(), rows=rows, keys=keys,
            inner=first.axes(first.product.summed), columns=columns, q=q, k=k, v=v,
            scores=scores, tail=tuple(self._read_through(tail, second.node)),
            weights=weights.dtype, post=tuple(post), values=made.dtype, dtype=made.dtype,
        )  # fmt: skip
        return hazards.checked(view, numbered(self.axes, site))

    # ---- from the softmax back to the product of q and k ------------------------------------

    def _path(self, node: Node, most: int = _LONGEST) -> list[Node]:
        """The nodes from the product to this one."""
        if product_at(self.view, node) is not None:
            return [node]
        if node in self.failed:  # otherwise nested sums would be walked along every path
            raise self.failed[node]
        refused: RefusedError | None = None
        for before in self._befores(node) if most else ():
            try:
                return [*self._path(before, most - 1), node]
            except RefusedError as error:
                if refused is None or refused.at.op in _INPUTS:  # a bias, most likely
                    refused = error
        self.failed[node] = refused or RefusedError(node, self._why_no_step(node))
        raise self.failed[node]

    def _befores(self, node: Node) -> list[Node]:
        """Operands that may be the score before this step: those of its size, in order."""
        found = moved(self.view, node)
        if found is not None:
            return [found[0]]
        written = self.view.written(node)
        if written is None or written.op not in TAIL:
            return []
        given = written.args[1:] if written.op == "where" else written.args
        shape = _tensor(node).shape
        tensors = [(n, meta_tensor(n)) for n in given if isinstance(n, Node)]
        return [n for n, t in tensors if t is not None and same_sizes(t.shape, shape)]

    def _why_no_step(self, node: Node) -> str:
        if node.op in _INPUTS:
            return f"its scores are not a product of two tensors but {called(node)}"
        if called_name(node) == "linear":
            mixed = _reaches_product(self.view, node)
            return f"{statement(node)}, " + (
                "mixes heads before the softmax" if mixed else "makes its scores instead of q · kᵀ"
            )
        if called_name(node) == "cat":
            return f"{statement(node)}, adds columns to its scores"
        return f"{statement(node)}, is not supported between q · kᵀ and the softmax"

    def _labelled(self, node: Node) -> _Scores:
        """The product, with an axis for each of its labels."""
        product = product_at(self.view, node)
        assert product is not None
        of = {x: self.axes.new(n) for x, n in zip(product.out, _tensor(node).shape)}
        shapes = [_tensor(factor).shape for factor in product.factors]
        sizes = dict(zip(product.out, _tensor(node).shape))
        for label in product.summed:
            a, b = (s[x.index(label)] for s, x in zip(shapes, product.labels))
            sizes[label] = b if is_same(a, 1) else a
            of[label] = self.axes.new(sizes[label])
        factors: list[list[Dim]] = []
        for labels, shape in zip(product.labels, shapes):
            dims = self.axes.spread(shape, [of[x] for x in labels], [sizes[x] for x in labels])
            if dims is None:
                raise RefusedError(node, f"sizes of {statement(node)}, are not known to be equal")
            factors.append(dims)
        return _Scores(product, of, (factors[0], factors[1]))

    def _start(self, first: _Scores) -> tuple[torch.dtype, list[Step], list[Dim]]:
        """The dtype of q · kᵀ, the steps that a baddbmm has, and the dimensions of its result."""
        product, made = first.product, _tensor(first.product.node)
        dims = [first.of[label] for label in product.out]
        if product.alpha == 1 and product.addend is None:
            return made.dtype, [], dims
        wide = _WIDER.get(made.dtype, made.dtype)  # a library rounds once
        steps = [] if product.alpha == 1 else [Step("mul", (SCORE, product.alpha), wide)]
        if product.addend is not None:
            addend = replace(self._operand(product.node, product.addend, dims), dtype=made.dtype)
            factor = () if product.beta == 1 else (product.beta,)
            steps.append(Step("add", (SCORE, addend, *factor), wide))
        return wide, [*steps, Step("cast", (SCORE,), made.dtype)], dims

    def _step(self, node: Node, before: Node, dims: list[Dim]) -> tuple[list[Step], list[Dim]]:
        found = moved(self.view, node)
        if found is not None:
            seen = dims if found[1] is None else self.axes.seen(dims, found[1])
            if seen is None:
                raise RefusedError(node, f"{statement(node)}, mixes dimensions of its scores")
            return [], seen
        written = self.view.written(node)
        assert written is not None
        if written.op == "identity":
            return [], dims
        args: list[Arg | Operand | float] = []
        for given in written.args:
            if given is before and SCORE not in args:
                args.append(SCORE)
            elif isinstance(given, Node) and meta_tensor(given) is not None and given is not before:
                args.append(self._operand(node, given, dims))
            elif is_number(given):
                args.append(float(given))  # type: ignore[arg-type]
            else:
                why = (
                    "scores twice" if given is before else "a value that changes from call to call"
                )
                raise RefusedError(node, f"{statement(node)}, takes {why}")
        return [Step(written.op, tuple(args), _tensor(node).dtype)], dims

    def _operand(self, node: Node, given: Node, dims: list[Dim]) -> Operand:
        spread = self.axes.spread(_tensor(given).shape, dims, _tensor(node).shape)
        if spread is None:
            raise RefusedError(node, f"{called(given)} is not known to fit {called(node)}")
        return Operand(given, tuple(spread))

    def _read_through(self, tail: Sequence[Step], end: Node) -> Iterator[Step]:
        for step in tail:
            yield replace(
                step,
                args=tuple(
                    origin(self.view, self.axes, a, end) if isinstance(a, Operand) else a
                    for a in step.args
                ),
            )

    def _orientation(self, first: _Scores, dims: list[Dim]) -> tuple[int, Dim]:
        """Which factor is q, and the axes of the keys, which only the other one has."""
        over = self.axes.leaves(dims[self.softmax.dim])
        for query in (0, 1):
            own = self.axes.leaves(first.axes(first.product.own(1 - query)))
            if over and {*over} <= {*own}:
                return query, over
        raise RefusedError(
            self.softmax.node,
            "its softmax is not over the keys of one factor: "
            "heads are mixed, or its scores are not q · kᵀ",
        )

    # ---- from the softmax to the product with v ----------------------------------------------

    def _after(self, dims: list[Dim]) -> tuple[list[Step], list[Node], Product, list[Dim]]:
        """(steps of P, their nodes and those of views, the product with v, dimensions of P)"""
        view, node = self.view, self.softmax.node
        steps: list[Step] = []
        between: list[Node] = []
        while len(between) < _LONGEST:
            reader = self._only_reader(node)
            product = product_at(view, reader)
            if product is not None:
                return steps, between, product, dims
            if _is_post(view, reader, node):
                if view.written(reader) is None:
                    steps.append(_dropout(reader))
                else:
                    steps += self._step(reader, node, dims)[0]
            else:
                found = moved(view, reader)
                if found is None:
                    raise RefusedError(reader, self._why_not_after(reader))
                _, dims = self._step(reader, node, dims)
            between.append(reader)
            node = reader
        raise RefusedError(node, "the product with v is too many operations away")

    def _only_reader(self, node: Node) -> Node:
        readers = self.view.readers[node]
        reader = next((r for r in readers if r.op != "output"), node)
        hazards.alone(self.view, node, (reader,))
        return reader

    def _why_not_after(self, node: Node) -> str:
        if called_name(node) in ("linear", "conv2d"):
            return f"{statement(node)}, mixes heads after the softmax"
        return f"{statement(node)}, is not supported between the softmax and the product with v"

    def _values(
        self, second: Product, p: Node, dims: list[Dim], keys: Dim
    ) -> tuple[Operand, list[Dim], Dim]:
        """(v, the dimensions of the product, the axes that v alone has)"""
        node, axes = second.node, self.axes
        if second.factors.count(p) != 1 or (second.alpha, second.addend) != (1, None):
            raise RefusedError(node, f"{statement(node)}, is not a plain product with v")
        place = second.factors.index(p)
        of = dict(zip(second.labels[place], dims))
        if sorted(axes.flat(of[x] for x in second.summed)) != sorted(axes.leaves(keys)):
            why = "does not sum over the keys: heads are mixed after the softmax"
            raise RefusedError(node, f"{statement(node)}, {why}")
        mine = dict(zip(second.labels[place], _tensor(p).shape))
        v = second.factors[1 - place]
        v_dims: list[Dim] = []
        for label, size in zip(second.labels[1 - place], _tensor(v).shape):
            summed = label in second.summed
            if label not in mine or (is_same(mine[label], 1) and not summed):
                of[label] = axes.new(size)
            elif not is_same(mine[label], size):
                if summed or not is_same(size, 1):
                    why = f"sizes of {statement(node)}, are not known to be equal"
                    raise RefusedError(node, why)
                v_dims.append(())
                continue
            v_dims.append(of[label])
        columns = tuple(a for label in second.own(1 - place) for a in of[label])
        return Operand(v, tuple(v_dims)), [of[label] for label in second.out], columns

    def _rows(self, first: _Scores, query: int, v: Operand) -> Dim:
        """The axes of q alone: in an einsum, v may have some of those that k lacks."""
        own = first.axes(first.product.own(query))
        if not own:
            node = first.product.node
            raise RefusedError(node, f"{statement(node)}, has keys of its own for each query")
        shared = self.axes.flat(v.dims)
        rows = tuple(axis for axis in self.axes.leaves(own) if axis not in shared)
        if not rows:
            reason = f"{called(v.node)} differs from query to query: heads are mixed"
            raise RefusedError(v.node, reason)
        return rows

    def _views_behind(self, node: Node, dims: list[Dim]) -> tuple[tuple[Node, ...], Operand]:
        """The chain of views, each the only reader of the one before, and their result."""
        view, views = self.view, list[Node]()
        while len(readers := view.readers[node]) == 1:
            found = moved(view, readers[0])
            if found is None or view.region[readers[0]] != view.region[node]:
                break
            seen = dims if found[1] is None else self.axes.seen(dims, found[1])
            if seen is None:
                break
            node, dims = readers[0], seen
            views.append(node)
        return tuple(views), Operand(node, tuple(dims))


def _tensor(node: Node) -> torch.Tensor:
    tensor = meta_tensor(node)
    if tensor is None:
        raise RefusedError(node, f"{called(node)} is not a tensor known at compile time")
    return tensor


def _dropout(node: Node) -> Step:
    p = argument_of(node, 1, "p")
    p = 0.5 if p is None else p
    if not is_number(p):
        raise RefusedError(node, f"{statement(node)}, has a number that changes from call to call")
    return Step("dropout", (SCORE, float(p)), _tensor(node).dtype)


def _reaches_product(view: View, node: Node) -> bool:
    """Do views and steps lead back from a mixture's input to a product?"""
    for _ in range(_LONGEST):
        source = input_of(node)
        if not isinstance(source, Node):
            return False
        node = view.value(node, source)
        if product_at(view, node) is not None:
            return True
        written = view.written(node)
        if moved(view, node) is None and (written is None or written.op not in TAIL):
            return False
    return False
