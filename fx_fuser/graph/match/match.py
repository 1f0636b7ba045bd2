"""(site, pattern) → Match, or a Refusal that says why.

Products and sums match as multisets: nested `mul` (or `add`) nodes of the graph are flattened until
there are as many factors as in the pattern, and factors are assigned with backtracking. Several
numbers may match one of the pattern's. This finds nodes and computes nothing: what runs is what the
user wrote (`Match.bound`).
A structural fit becomes a Match only if every check of `fx_fuser.ops.checks` passes.

The work at a site is bounded, whatever the graph: see `MAX_WORK`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.match.bind import scalar_behind
from fx_fuser.graph.match.pattern import Fault, Match, Pattern, Refusal
from fx_fuser.graph.read.canonical import Arg, Expr, Operand, is_number
from fx_fuser.graph.read.naming import at, called
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.sites import Site, site_at
from fx_fuser.graph.read.view import View
from fx_fuser.native.kernel_spec import MAX_NUMBERS

_MAX_DESCENDANTS = 64
MAX_WORK = 4000  # operands compared at one site; some 5 us each


class TooMuchWorkError(Exception):
    """The bound on the work at one site is reached."""


class Work:
    """What is left of the work at one site."""

    def __init__(self, left: int | None = None) -> None:
        self.left = MAX_WORK if left is None else left

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooMuchWorkError


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

    def __init__(self, view: View, site: Site, work: Work) -> None:
        self.view = view
        self.site = site
        self.work = work

    def fit(self, pattern: Operand, target: Operand, b: Binding) -> Iterator[Binding]:
        self.work.spend()
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
            expr, nodes = self._open(target, pattern.op == "div")
            if expr is None or (expr.op, expr.attrs) != (pattern.op, pattern.attrs):
                return
            b = Binding(b.wildcards, b.nodes | nodes)
            if OPS[pattern.op].total is not None:
                yield from self._terms(pattern, expr, b)
            elif OPS[pattern.op].is_symmetric:
                yield from self._assign(pattern.args, expr.args, b)
            elif len(pattern.args) == len(expr.args):
                yield from self._positional(pattern.args, expr.args, b)

    def _open(
        self, target: Operand, as_written: bool = False
    ) -> tuple[Expr | None, frozenset[Node]]:
        """as_written: take a division by a number as a division, not as a multiplication."""
        if isinstance(target, Node):
            written = self.view.written(target) if as_written else None
            is_division = written is not None and written.op == "div"
            return written if is_division else self.view.canonical(target), frozenset((target,))
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
        """Assign each pattern one target, the most specific patterns first."""
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
        """The ways to flatten a nested sum or product to at most `limit` terms besides numbers.

        Flattening an inner node never removes terms, so a way with too many is given up.
        """

        def extend(
            done: tuple[Operand, ...], pending: tuple[Operand, ...], nodes: frozenset[Node]
        ) -> Iterator[tuple[tuple[Operand, ...], frozenset[Node]]]:
            self.work.spend()
            numbers = sum(map(is_number, (*done, *pending)))
            if len(done) + len(pending) - numbers > limit or numbers > MAX_NUMBERS:
                return
            if not pending:
                yield done, nodes
                return
            operand, *rest = pending
            inner, opened = (None, frozenset[Node]())
            if operand is not self.site.node and not is_number(operand):
                inner, opened = self._open(operand)
            if inner is not None and inner.op == expr.op and all(map(_is_inexact, opened)):
                yield from extend(done, (*inner.args, *rest), nodes | opened)
            yield from extend((*done, operand), tuple(rest), nodes)

        yield from extend((), expr.args, frozenset())


def _solved(pattern: Expr, number: float) -> tuple[Arg, float] | None:
    """(a, value) if the pattern is a · constants, the graph a number: `- a` matches `- 2`."""
    constants = [a for a in pattern.args if is_number(a)]
    free = [a for a in pattern.args if isinstance(a, Arg) and a != Z]
    factor = math.prod(constants)  # type: ignore[arg-type]
    if pattern.op != "mul" or len(free) != 1 or len(constants) + 1 != len(pattern.args):
        return None
    return (free[0], number / factor) if factor else None


def _is_inexact(node: Node) -> bool:
    """Integer products wrap around; flattening one would change its value."""
    tensor = meta_tensor(node)
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _specificity(pattern: Operand) -> int:
    if isinstance(pattern, Expr):
        return 0
    return 2 if isinstance(pattern, Arg) and pattern != Z else 1


def _fold_numbers(op: str, terms: tuple[Operand, ...], limit: int) -> tuple[Operand, ...]:
    """Several numbers as one, if there are more terms than in the pattern."""
    numbers = [float(t) for t in terms if is_number(t)]  # type: ignore[arg-type]
    if len(terms) <= limit or len(numbers) < 2:
        return terms
    total = OPS[op].total
    assert total is not None
    return (*(t for t in terms if not is_number(t)), total(numbers))


def descendants_of(view: View, site: Site, distance: int = _MAX_DESCENDANTS) -> list[Node]:
    """Nodes at which an epilogue of this site may end, the last first, and z itself.

    distance: operations from z at most.
    """
    found: dict[Node, int] = {site.node: 0}
    queue = collections.deque([site.node])
    while queue and len(found) <= _MAX_DESCENDANTS:
        node = queue.popleft()
        for reader in view.readers[node][:_MAX_DESCENDANTS]:
            expr = view.written(reader)
            if (
                expr is not None
                and expr.op in OPS
                and reader not in found
                and found[node] < distance
            ):
                found[reader] = found[node] + 1
                queue.append(reader)
    return sorted(found, key=view.order.__getitem__, reverse=True)


def fits(
    view: View, site: Site, pattern: Pattern, root: Node, work: Work | None = None
) -> Iterator[Match]:
    """Raises TooMuchWorkError."""
    unifier = Unifier(view, site, work or Work())
    for b in unifier.fit(pattern.epilogue, root, Binding()):
        wildcards = {name: scalar_behind(o) or o for name, o in b.wildcards}
        yield Match(pattern, site, root, b.nodes | set(site.nodes), wildcards, view)


def reads_itself(match: Match) -> Fault | None:
    """Is a wildcard bound to a matched node, say the second factor of `s * s`, s = sigmoid(z)?"""
    for operand in match.wildcards.values():
        if isinstance(operand, Node) and operand in match.nodes:
            reason = (
                f"{called(operand)}{at(operand)}, is computed inside the pattern and is also one "
                "of its operands"
            )
            return Fault(operand, reason)
    return None


def find(
    view: View, patterns: Sequence[Pattern], check: CheckAll, node: Node
) -> Match | Refusal | None:
    """The first match at the anchor whose value `node` is.

    check: match → why it must not be fused.
    Returns a Refusal if a pattern fits but must not be fused, None if none fits (see
    `graph.match.near_misses`).
    """
    site = site_at(view, node)
    fitting = [] if site is None else [p for p in patterns if p.kind == site.kind]
    if site is None or not fitting:
        return None
    refusal: Refusal | None = None
    itself: Refusal | None = None
    work = Work()
    refused: set[tuple[Pattern, frozenset[Node]]] = set()
    try:
        # A match has as many nodes as the pattern has operations, and some more with numbers.
        roots = descendants_of(view, site, fitting[0].size + MAX_NUMBERS)
        for root, pattern in itertools.product(roots, fitting):
            for match in fits(view, site, pattern, root, work):
                # Other names for the same operands matter only to the pattern's own check.
                if (pattern, match.nodes) in refused and pattern.check is None:
                    continue
                refused.add((pattern, match.nodes))
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
    except TooMuchWorkError:
        reason = f"matching what follows takes more than {MAX_WORK} comparisons"
        if refusal is None and itself is None:
            return Refusal(fitting[0], site, site.node, reason)
    return itself if refusal is None else refusal
