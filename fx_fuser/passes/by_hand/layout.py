"""Views of an attention's operands as torch's fused one takes them, and of its result as it was.

Axes that q, k and v all have become the batch, except the last one, which together with those that
k or v lack becomes the heads. So grouped heads stay neighbours, as `passes.attention_split` needs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.graph.attention.axes import Dim
from fx_fuser.graph.attention.site import AttentionSite, Operand
from fx_fuser.graph.prepare.reindex import Size, is_same
from fx_fuser.graph.read.nodes import storages
from fx_fuser.graph.read.view import Region
from fx_fuser.passes.masks import Stays

_MOST_HEADS = 2**16 - 1  # the second dimension of a grid


@dataclass
class Calls:
    """Calls before a node of a graph, each with its fake value, under the modes of that node."""

    before: Node
    region: Region
    made: list[Node] = field(default_factory=list)

    def method(self, name: str, of: Node, *args: Any) -> Node:
        return self._add("call_method", name, (of, *args), {})

    def function(self, target: Callable[..., Any], *args: Any, **named: Any) -> Node:
        return self._add("call_function", target, args, named)

    def _add(self, op: str, target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Node:
        was: Any = self.before.meta["example_value"]
        fakes = torch.fx.map_arg(args, _value)
        with was.fake_mode, torch.set_grad_enabled(was.requires_grad), self.region.autocast():
            call = getattr(fakes[0], target) if op == "call_method" else target
            value = call(*(fakes[1:] if op == "call_method" else fakes), **named)
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.create_node(op, target, args, named)
        node.meta = {**self.before.meta, "example_value": value}
        self.made.append(node)
        return node

    def undo(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)
        self.made.clear()


def _value(node: Node) -> Any:
    return node.meta["example_value"]


@dataclass(frozen=True)
class Layout:
    """A site's axes as [batch, heads, rows, elements]. Sizes may be dynamic; nothing adds a guard
    on one."""

    site: AttentionSite
    batch: Dim
    heads: Dim

    @classmethod
    def of(cls, site: AttentionSite) -> Layout:
        have = [{a for dim in o.dims for a in dim} for o in (site.q, site.k, site.v)]

        def is_shared(axis: int) -> bool:
            return is_same(site.sizes[axis], 1) or all(axis in axes for axes in have)

        shared = [axis for axis in site.batch if is_shared(axis)]
        rest = [axis for axis in site.batch if axis not in shared]
        at = max(len(shared) - 1, min(1, len(shared)))
        heads = (*shared[at:], *rest)
        count = math.prod(site.sizes[axis] for axis in heads)
        if not isinstance(count, int):
            raise Stays("its number of heads is dynamic")
        if count > _MOST_HEADS:
            raise Stays(f"it has {count} heads, more than torch's kernel accepts")
        return cls(site, (*shared[:at],), heads)

    def query(self, calls: Calls) -> Node:
        first, whole = self._of_four(calls, self.site.q, (self.site.rows, self.site.inner))
        if first is not whole:
            raise Stays("its queries are repeated")
        return whole

    def keys(self, calls: Calls) -> tuple[Node, Node]:
        """The keys as they are, and with a head for each query head."""
        return self._of_four(calls, self.site.k, (self.site.keys, self.site.inner))

    def values(self, calls: Calls) -> tuple[Node, Node]:
        return self._of_four(calls, self.site.v, (self.site.keys, self.site.columns))

    def _of_four(self, calls: Calls, operand: Operand, ends: tuple[Dim, Dim]) -> tuple[Node, Node]:
        """[batch, heads, rows, elements], the heads as they are in memory, and repeated."""
        node, axes = self._apart(calls, operand.node, operand.dims)
        wanted = (self.batch, self.heads, *ends)
        parts = [tuple(a for a in part if a in axes) for part in wanted]
        node = _permuted(calls, node, [axes.index(a) for part in parts for a in part])
        node = _joined(calls, node, parts, copies=False)
        whole = [math.prod(self.site.sizes[a] for a in part) for part in wanted]
        count = _value(node).shape[1]
        node = _expanded(calls, node, [whole[0], count, *whole[2:]])
        if is_same(count, whole[1]):
            return node, node
        if is_same(count, 1):
            return node, _expanded(calls, node, whole)
        if parts[1] != self.heads[: len(parts[1])]:
            raise Stays("its key heads are not shared by neighbouring query heads")
        each = calls.method("unsqueeze", node, 2)
        each = calls.method("expand", each, -1, -1, whole[1] // count, -1, -1)
        return node, calls.method("flatten", each, 1, 2)

    def of_heads(self, calls: Calls, operand: Operand) -> Node:
        """An operand of the score that has nothing but heads, as [heads, 1, 1]."""
        node, axes = self._apart(calls, operand.node, operand.dims)
        mine = [a for a in self.heads if a in axes]
        lost = [a for a in axes if a not in mine]
        if not all(is_same(self.site.sizes[a], 1) for a in (*lost, *{*self.heads} - {*mine})):
            raise Stays("its scores are multiplied by what is not one number of each head")
        node = _permuted(calls, node, [axes.index(a) for a in (*mine, *lost)])
        for _ in lost:
            node = calls.method("squeeze", node, -1)
        node = _joined(calls, node, [tuple(mine)], copies=True)
        for _ in range(2):
            node = calls.method("unsqueeze", node, -1)
        return node

    def bias(self, calls: Calls, operands: Sequence[Operand]) -> Node:
        """The sum of operands of the score, in fp32, as [period, heads, rows, keys]: the bias of a
        batch is that of its number modulo the period."""
        site = self.site
        have = {a for o in operands for a in _axes_of(o) if not is_same(site.sizes[a], 1)}
        lead = self.batch
        while lead and lead[0] not in have:
            lead = lead[1:]
        parts = lead, self.heads, site.rows, site.keys
        order = [a for part in parts for a in part]
        total: Node | None = None
        for operand in operands:
            node = calls.method("float", self._spread(calls, operand, order))
            total = node if total is None else calls.function(operator.add, total, node)
        assert total is not None, "there is a bias"
        total = _expanded(calls, total, [site.sizes[a] for a in order])
        return _joined(calls, total, parts, copies=True)

    def _spread(self, calls: Calls, operand: Operand, order: Sequence[int]) -> Node:
        """An operand of the score with a dimension for each of these axes, of size 1 where it lacks
        the axis, rounded as it is in the graph."""
        if operand.parts:
            first, *others = (self._spread(calls, part, order) for part in operand.parts)
            node = functools.reduce(functools.partial(calls.function, operator.add), others, first)
        else:
            node, axes = self._apart(calls, operand.node, operand.dims)
            mine = [a for a in order if a in axes]
            lost = [a for a in axes if a not in order]  # of size 1
            node = _permuted(calls, node, [axes.index(a) for a in (*mine, *lost)])
            for _ in lost:
                node = calls.method("squeeze", node, -1)
            for i, axis in enumerate(order):
                if axis not in axes:
                    node = calls.method("unsqueeze", node, i)
        if operand.dtype in (None, _value(node).dtype):
            return node
        return calls.method("to", node, operand.dtype)

    def result(self, calls: Calls, made: Node) -> Node:
        """[batch, heads, rows, columns] as the site's result."""
        site = self.site
        node, axes = self._apart(calls, made, (self.batch, self.heads, site.rows, site.columns))
        mine = [a for dim in site.result.dims for a in dim]
        lost = [a for a in axes if a not in mine]  # of size 1
        node = _permuted(calls, node, [axes.index(a) for a in (*mine, *lost)])
        for _ in lost:
            node = calls.method("squeeze", node, -1)
        return _joined(calls, node, site.result.dims, copies=True)

    def _apart(self, calls: Calls, node: Node, dims: Sequence[Dim]) -> tuple[Node, list[int]]:
        """The node with one dimension per axis, and the axes."""
        for i in reversed(range(len(dims))):
            sizes = [self.site.sizes[a] for a in dims[i]]
            if not sizes:
                node = calls.method("squeeze", node, i)
            elif len(sizes) > 1:
                said = tuple(n if isinstance(n, int) else -1 for n in sizes)
                if said.count(-1) > 1:
                    raise Stays("several of its sizes are dynamic in one dimension")
                node = calls.method("unflatten", node, i, said)
        return node, [a for dim in dims for a in dim]


def _axes_of(operand: Operand) -> set[int]:
    """Over which it changes: of a sum, those of its parts."""
    if operand.parts:
        return set().union(*map(_axes_of, operand.parts))
    return {axis for dim in operand.dims for axis in dim}


def _expanded(calls: Calls, node: Node, sizes: Sequence[Size]) -> Node:
    said = [-1 if is_same(n, m) else m for n, m in zip(_value(node).shape, sizes)]
    if not all(isinstance(n, int) for n in said):
        raise Stays("it is repeated a dynamic number of times")
    return node if {*said} == {-1} else calls.method("expand", node, *said)


def _permuted(calls: Calls, node: Node, order: Sequence[int]) -> Node:
    return node if [*order] == sorted(order) else calls.method("permute", node, *order)


def _joined(calls: Calls, node: Node, parts: Sequence[Dim], copies: bool) -> Node:
    """Joins neighbouring dimensions, one per axis, into one for each of these parts."""
    for i, part in enumerate(parts):
        if not part:
            node = calls.method("unsqueeze", node, i)
        elif len(part) > 1:
            before = node
            node = calls.method("flatten", node, i, i + len(part) - 1)
            if not copies and storages([node]) != storages([before]):
                raise Stays("seeing its heads as one dimension needs a copy")
    return node
