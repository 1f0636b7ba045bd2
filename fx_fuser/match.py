"""(site, pattern) → Match, or a Refusal that says why.

Products and sums are matched as multisets: the target's nested `mul` (or `add`) nodes are opened
until as many factors are there as the pattern has, and factors are assigned with backtracking.
A structural fit becomes a Match only if every check of `fx_fuser.checks` passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fx_fuser.epilogue import OPS, Z
from fx_fuser.pattern import Pattern
from fx_fuser.sites import Site, site_at
from fx_fuser.spell import Arg, Expr, Operand, View, is_number, meta_tensor
from fx_fuser.words import at, called

_MULTISET: dict[str, Callable[[Iterable[Any]], float]] = {"add": math.fsum, "mul": math.prod}
_COMMUTATIVE = ("minimum", "maximum")
_MAX_DESCENDANTS = 64


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits.

    root: the last matched node, whose value the fused op replaces. nodes: all matched nodes.
    wildcards: name → `Z`, a number, or the node of a tensor. view: the reading of its graph.
    items: 0-d tensor → its `item()`, for wildcards that are a number which changes by the call.
    """

    pattern: Pattern
    site: Site
    root: Node
    nodes: frozenset[Node]
    wildcards: dict[str, Operand]
    view: View = field(repr=False)
    items: dict[Node, Node] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[Node, ...]:
        """Every tensor the fused op reads."""
        own = [o for o in self.site.operands.values() if o is not None]
        free = [o for o in self.wildcards.values() if isinstance(o, Node)]
        return tuple(dict.fromkeys([*own, *free]))

    @property
    def first(self) -> Node:
        return min(self.nodes, key=self.view.order.__getitem__)

    def between(self) -> list[Node]:
        """Nodes that run between the first and the last matched one and are not matched."""
        span = self.view.nodes[self.view.order[self.first] : self.view.order[self.root]]
        return [n for n in span if n not in self.nodes]


class Fault(NamedTuple):
    """Why a match must not be fused. help: an edit after which it would, where there is one."""

    node: Node
    reason: str
    help: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a pattern was not fused at a site. Falsy.

    node: the one at fault. nodes: all that were found of the pattern, with the anchor. missing:
    operations to add, to change or to drop until it fits; none if something else is in the way.
    """

    pattern: Pattern
    site: Site
    node: Node
    reason: str
    help: str = ""
    nodes: frozenset[Node] = frozenset()
    missing: int = 0

    @classmethod
    def of(cls, match: Match, fault: Fault, missing: int = 0) -> Refusal:
        return cls(match.pattern, match.site, *fault, match.nodes, missing)

    def __bool__(self) -> bool:
        return False


CheckAll = Callable[[Match], "Fault | None"]


@dataclass(frozen=True)
class Binding:
    wildcards: tuple[tuple[str, Operand], ...] = ()
    nodes: frozenset[Node] = frozenset()

    def bind(self, name: str, operand: Operand) -> Binding | None:
        """With the wildcard bound, or None if it already stands for something else."""
        for known, value in self.wildcards:
            if known == name:
                same = value is operand or (is_number(value) and value == operand)
                return self if same else None
        return Binding((*self.wildcards, (name, operand)), self.nodes)


class Unifier:
    """Finds all ways in which an epilogue fits the graph after one site."""

    def __init__(self, view: View, site: Site) -> None:
        self.view = view
        self.site = site

    def fit(self, pattern: Operand, target: Operand, b: Binding) -> Iterator[Binding]:
        if target is self.site.node:
            target = Z
        if isinstance(pattern, Arg):
            if pattern == Z:
                if target == Z:
                    yield b
            elif target == Z or isinstance(target, Node) or is_number(target):
                bound = b.bind(pattern.name, target)
                if bound is not None:
                    yield bound
        elif not isinstance(pattern, Expr):
            if pattern is target or (is_number(target) and pattern == target):
                yield b
        elif is_number(target):
            scaled = _solved(pattern, target)  # type: ignore[arg-type]
            if scaled is not None:
                yield from self.fit(*scaled, b)
        else:
            expr, nodes = self._open(target)
            if expr is None or (expr.op, expr.attrs) != (pattern.op, pattern.attrs):
                return
            b = Binding(b.wildcards, b.nodes | nodes)
            if pattern.op in _MULTISET:
                yield from self._terms(pattern, expr, b)
            elif pattern.op in _COMMUTATIVE:
                yield from self._assign(pattern.args, expr.args, b)
            elif len(pattern.args) == len(expr.args):
                yield from self._positional(pattern.args, expr.args, b)

    def _open(self, target: Operand) -> tuple[Expr | None, frozenset[Node]]:
        if isinstance(target, Node):
            return self.view.spell(target), frozenset((target,))
        return (target, frozenset()) if isinstance(target, Expr) else (None, frozenset())

    def _positional(
        self, patterns: Sequence[Operand], targets: Sequence[Operand], b: Binding
    ) -> Iterator[Binding]:
        if not patterns:
            yield b
            return
        for fitted in self.fit(patterns[0], targets[0], b):
            yield from self._positional(patterns[1:], targets[1:], fitted)

    def _assign(
        self, patterns: Sequence[Operand], targets: Sequence[Operand], b: Binding
    ) -> Iterator[Binding]:
        """Each pattern to one target, the most specific patterns first."""
        if not patterns:
            yield b
            return
        for i, target in enumerate(targets):
            for fitted in self.fit(patterns[0], target, b):
                rest = (*targets[:i], *targets[i + 1 :])
                yield from self._assign(patterns[1:], rest, fitted)

    def _terms(self, pattern: Expr, expr: Expr, b: Binding) -> Iterator[Binding]:
        wanted = sorted(pattern.args, key=_specificity)
        for terms, nodes in self._cuts(expr, len(wanted)):
            terms = _fold_numbers(expr.op, terms, len(wanted))
            if len(terms) == len(wanted):
                yield from self._assign(wanted, terms, Binding(b.wildcards, b.nodes | nodes))

    def _cuts(
        self, expr: Expr, limit: int
    ) -> Iterator[tuple[tuple[Operand, ...], frozenset[Node]]]:
        """All ways to write a nested sum or product flat, opening some of its inner nodes."""
        choices = [list(self._openings(expr.op, arg, limit)) for arg in expr.args]
        for chosen in itertools.product(*choices):
            terms = tuple(t for part, _ in chosen for t in part)
            if len([t for t in terms if not is_number(t)]) <= limit:
                yield terms, frozenset().union(*(nodes for _, nodes in chosen))

    def _openings(
        self, op: str, operand: Operand, limit: int
    ) -> Iterator[tuple[tuple[Operand, ...], frozenset[Node]]]:
        expr, nodes = (None, frozenset()) if operand is self.site.node else self._open(operand)
        same = expr is not None and expr.op == op and all(map(_is_inexact, nodes))
        if expr is not None and same:
            for terms, inner in self._cuts(expr, limit):
                yield terms, inner | nodes
        yield (operand,), frozenset()


def _solved(pattern: Expr, number: float) -> tuple[Arg, float] | None:
    """(a, value) where the pattern is a · constants and a number is there: `- a` and `- 2`."""
    constants = [a for a in pattern.args if is_number(a)]
    free = [a for a in pattern.args if isinstance(a, Arg) and a != Z]
    factor = math.prod(constants)  # type: ignore[arg-type]
    if pattern.op != "mul" or len(free) != 1 or len(constants) + 1 != len(pattern.args):
        return None
    return (free[0], number / factor) if factor else None


def _is_inexact(node: Node) -> bool:
    """Integer products wrap around; opening one would change its value."""
    tensor = meta_tensor(node)
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _specificity(pattern: Operand) -> int:
    if isinstance(pattern, Expr):
        return 0
    return 2 if isinstance(pattern, Arg) and pattern != Z else 1


def _fold_numbers(op: str, terms: tuple[Operand, ...], limit: int) -> tuple[Operand, ...]:
    """Several numbers as one, where there are more terms than the pattern has.

    Not if a product leaves float32's range, which the steps of `tiny * 1e30 * 1e30` do not.
    """
    numbers = [float(t) for t in terms if is_number(t)]  # type: ignore[arg-type]
    if len(terms) <= limit or len(numbers) < 2:
        return terms
    folded = _MULTISET[op](numbers)
    if op == "mul" and folded != 0 and not 1e-30 < abs(folded) < 1e30:
        return terms
    return (*(t for t in terms if not is_number(t)), folded)


def descendants_of(view: View, site: Site) -> list[Node]:
    """Nodes an epilogue of this site may end at, the last first."""
    found: dict[Node, None] = {}
    queue = [site.node]
    while queue and len(found) < _MAX_DESCENDANTS:
        for reader in view.readers[queue.pop(0)]:
            expr = view.spell(reader)
            if expr is not None and expr.op in OPS and reader not in found:
                found[reader] = None
                queue.append(reader)
    return sorted(found, key=view.order.__getitem__, reverse=True)


def fits(view: View, site: Site, pattern: Pattern, root: Node) -> Iterator[Match]:
    for b in Unifier(view, site).fit(pattern.epilogue, root, Binding()):
        nodes = b.nodes | set(site.nodes)
        wildcards, items = dict(b.wildcards), {}
        for name, operand in b.wildcards:
            scalar = _scalar_behind(operand)
            if scalar is not None:
                wildcards[name] = scalar
                items[scalar] = operand
        yield Match(pattern, site, root, nodes, wildcards, view, items)  # type: ignore[arg-type]


def reads_itself(match: Match) -> Fault | None:
    """A wildcard stands for a matched node, say the second factor of `s * s`, s = sigmoid(z)."""
    for operand in match.wildcards.values():
        if isinstance(operand, Node) and operand in match.nodes:
            reason = (
                f"{called(operand)}{at(operand)}, is computed inside the pattern and is another of "
                "its operands as well"
            )
            return Fault(operand, reason)
    return None


def _scalar_behind(operand: Operand) -> Node | None:
    """The 0-d tensor behind a number that changes from call to call, or None.

    Dynamo passes a Python float that has changed as a tensor and takes its `item()`. Giving a
    SymFloat to a `float` argument would recompile for every value; a 0-d tensor does not.
    """
    if not isinstance(operand, Node) or (operand.op, operand.target) != ("call_method", "item"):
        return None
    scalar = operand.args[0]
    tensor = meta_tensor(scalar) if isinstance(scalar, Node) else None
    detached = tensor is not None and tensor.ndim == 0 and not tensor.requires_grad
    is_float = isinstance(operand.meta.get("example_value"), torch.SymFloat)
    return scalar if detached and is_float else None  # type: ignore[return-value]


def find(
    view: View, patterns: Sequence[Pattern], check: CheckAll, node: Node
) -> Match | Refusal | None:
    """The first match at the anchor whose value `node` is.

    check: match → why it must not be fused.
    Returns a Refusal if a pattern fitted all the same, and None if none did: see `fx_fuser.near`.
    """
    site = site_at(view, node)
    if site is None:
        return None
    own = [p for p in patterns if p.kind == site.kind]
    refusal: Refusal | None = None
    itself: Refusal | None = None
    for root, pattern in itertools.product(descendants_of(view, site), own):
        for match in fits(view, site, pattern, root):
            fault = reads_itself(match)
            if fault is not None:
                if itself is None:  # a Refusal is falsy: `or` would lose it
                    itself = Refusal.of(match, fault)
                continue
            fault = check(match)
            if fault is None:
                return match
            if refusal is None:
                refusal = Refusal.of(match, fault)
    return itself if refusal is None else refusal
