"""(site, patterns) → the nearest miss, if none of the patterns fits.

There are two kinds. Either one operation is off: a different one, or one too many in between. That
is found by reading the graph as if that operation were right; then all checks must pass. Or the
pattern begins after the anchor, and the rest of it does not follow.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.match.match import (
    MAX_WORK,
    Binding,
    CheckAll,
    TooMuchWorkError,
    Unifier,
    Work,
    descendants_of,
    fits,
    reads_itself,
)
from fx_fuser.graph.match.pattern import Fault, Match, Pattern, Refusal, size_of
from fx_fuser.graph.prepare.reindex import is_view
from fx_fuser.graph.read.canonical import Expr, Operand
from fx_fuser.graph.read.functions import ACTIVATIONS
from fx_fuser.graph.read.naming import at, called, infix, returned, without_break
from fx_fuser.graph.read.nodes import inputs_of, meta_tensor, writes_of
from fx_fuser.graph.read.operations import OPS, is_sum_or_product
from fx_fuser.graph.read.sites import Site, site_at
from fx_fuser.graph.read.source import op_of
from fx_fuser.graph.read.view import View

_WORK = 2 * MAX_WORK
_REACH = 12  # nodes after the anchor, of which one may be off
_CACHED = [n for n, v in vars(View).items() if isinstance(v, functools.cached_property)]


def near_miss(
    view: View, site: Site, patterns: Sequence[Pattern], check: CheckAll
) -> Refusal | None:
    """The pattern that is nearest to a match here, if more of it than the anchor is there."""
    fitting = [p for p in patterns if p.kind == site.kind]
    work, begun, off = Work(_WORK), list[Refusal](), list[Refusal]()
    with contextlib.suppress(TooMuchWorkError):  # keep the misses found until then
        begun += _begun(view, site, fitting, work)
        for miss in _one_off(view, site, fitting, check, work):
            off.append(miss)
    return min((*off, *begun), key=lambda m: m.missing, default=None)


# ---- one operation is off -------------------------------------------------------------------


def _one_off(
    view: View, site: Site, patterns: Sequence[Pattern], check: CheckAll, work: Work
) -> Iterator[Refusal]:
    reached = _reach(view, site)
    # The pattern's own check never sees a supposed graph.
    unchecked = [(pattern, replace(pattern, check=None)) for pattern in patterns]
    for node in reached[1:]:
        if is_view(node) or site_at(view, node) is not None:
            continue  # replacing it or leaving it out would not help
        sources = [v for v in _values_read(view, node) if v in reached]
        if len(sources) > 1:
            continue
        roots = [n for n in reached if view.order[n] >= view.order[node]][::-1]
        without = _without(view, node, sources[0]) if _could_go(view, node, sources[0]) else None
        for pattern, supposed in unchecked:
            says = infix(pattern.epilogue)
            found = _supposed(without, site, supposed, check, roots[:-1], work) if without else None
            if found is not None:
                what = f"without it, this would be {says}"
                yield _off(view, node, found, pattern, what)
            for wanted, name in _wanted(pattern, view.canonical(node), node, sources[0]):
                if size_of(wanted) >= pattern.size:
                    continue  # nothing else of the pattern would be there
                as_if = _as_if(view, {node: wanted})
                found = _supposed(as_if, site, supposed, check, roots, work)
                if found is not None and node in found.nodes:
                    yield _off(
                        view,
                        node,
                        found,
                        pattern,
                        f"with {name} in its place, this would be {says}",
                    )


def _off(view: View, node: Node, match: Match, pattern: Pattern, what: str) -> Refusal:
    said = view.canonical(node)
    fusible = said is not None and said.op in OPS and not OPS[said.op].returns_input
    help = f"register a pattern with {op_of(node)} (see docs/add_a_pattern.md)" if fusible else ""
    value = "" if called(node) == op_of(node) else f"{called(node)}{at(node)}, is "
    place = "" if value else at(node)
    fault = Fault(node, f"{value}{op_of(node)}{place}; {what}", help)
    refusal = Refusal.of(match, fault, missing=1)
    return replace(refusal, pattern=pattern, nodes=match.nodes | {node})


def _reach(view: View, site: Site) -> list[Node]:
    """z and the first nodes that are computed from it."""
    reached = [site.node]
    for node in reached:  # which grows
        readers = [r for r in view.readers[node] if meta_tensor(r) is not None]
        reached += [r for r in readers if r not in reached]
        if len(reached) > _REACH:
            break
    return sorted(reached, key=view.order.__getitem__)


def _values_read(view: View, node: Node) -> list[Node]:
    return list(dict.fromkeys(view.value(node, n) for n in inputs_of(node)))


def _could_go(view: View, node: Node, source: Node) -> bool:
    """Is its value read, and of the size of its input?"""
    before, after = meta_tensor(source), meta_tensor(node)
    if before is None or after is None:
        return False
    sizes = zip(before.shape, after.shape)
    same = before.ndim == after.ndim and all(statically_known_true(a == b) for a, b in sizes)
    return same and bool(view.readers[node])


def _wanted(
    pattern: Pattern, said: Expr | None, node: Node, source: Node
) -> Iterator[tuple[Expr, str]]:
    """What the node could be instead, given the number of its operands; and a name for that."""
    within = _operations(pattern.epilogue)
    args = () if said is None else said.args
    op = None if said is None else OPS.get(said.op)
    other = "" if op is None else op.off_by_one
    if len(args) == 2 and not isinstance(args[1], Expr) and other in {e.op for e in within}:
        yield Expr(other, args), other
    unary = op is not None and "dtype" not in op.attrs and args == (source,)
    if unary or (said is None and op_of(node) in ACTIVATIONS):
        for e in within:
            if len(e.args) == 1 and (said is None or (e.op, e.attrs) != (said.op, said.attrs)):
                yield Expr(e.op, (source,), e.attrs), e.op
        if {"mul", "sigmoid"} <= {e.op for e in within} and (said is None or said.op != "sigmoid"):
            yield Expr("mul", (source, Expr("sigmoid", (source,)))), "silu"


def _operations(epilogue: Operand) -> list[Expr]:
    if not isinstance(epilogue, Expr):
        return []
    return [epilogue, *(e for a in epilogue.args for e in _operations(a))]


def _supposed(
    view: View,
    site: Site,
    pattern: Pattern,
    check: CheckAll,
    roots: Sequence[Node],
    work: Work,
) -> Match | None:
    """The pattern in the supposed graph, if it would be fused there."""
    for root in roots:
        for match in fits(view, site, pattern, root, work):
            if reads_itself(match) is None and check(match) is None:
                return match
    return None


def _as_if(view: View, said: Mapping[Node, Expr]) -> View:
    """The same graph, in which some nodes have another expression."""
    for name in _CACHED:
        getattr(view, name)  # computed once for all supposed views
    supposed = copy.copy(view)
    vars(supposed).pop("batch_norms_at")  # it depends on the nodes' expressions
    # New readings go into the supposed view alone.
    supposed._written = collections.ChainMap(dict(said), view._written)
    supposed._canonical = collections.ChainMap(dict(said), view._canonical)
    return supposed


def _without(view: View, node: Node, source: Node) -> View:
    """The same graph without `node`: its readers read its input."""

    def seen(operand: Operand) -> Operand:
        if isinstance(operand, Expr):
            return Expr(operand.op, tuple(map(seen, operand.args)), operand.attrs)
        return source if operand is node else operand

    said = ((r, view.canonical(r)) for r in view.readers[node])
    supposed = _as_if(view, {r: seen(e) for r, e in said if e is not None})  # type: ignore[misc]
    left = {v: [r for r in view.readers[v] if r is not node] for v in _values_read(view, node)}
    left[source] = list(dict.fromkeys(left[source] + view.readers[node]))
    supposed.readers = {**view.readers, **left}
    if writes_of(node):
        supposed.nodes = [n for n in view.nodes if n is not node]
        supposed.order = {n: i for i, n in enumerate(supposed.nodes)}
        for name in _CACHED:
            vars(supposed).pop(name, None)
    return supposed


# ---- the beginning of a pattern -------------------------------------------------------------


def _begun(view: View, site: Site, patterns: Sequence[Pattern], work: Work) -> Iterator[Refusal]:
    """For each pattern the largest part of its epilogue that is there."""
    unifier = Unifier(view, site, work)
    descendants = descendants_of(view, site)
    for pattern in patterns:
        found = next(
            (
                Refusal(
                    pattern,
                    site,
                    node,
                    f"of {infix(pattern.epilogue)}, only {infix(part)} is there: "
                    f"{_next(view, node)}",
                    _help(view, node),
                    binding.nodes | set(site.nodes),
                    size_of(pattern.epilogue) - size_of(part),
                )
                for part in _parts(pattern.epilogue)
                for node in descendants
                for binding in unifier.fit(part, node, Binding())
                if not any(value in binding.nodes for _, value in binding.wildcards)
            ),
            None,
        )
        if found is not None:
            yield found


def _parts(epilogue: Operand) -> list[Expr]:
    """Parts of an epilogue that contain z, the largest first; `a * b` is a part of `a * b * c`."""
    if not isinstance(epilogue, Expr):
        return []
    parts: list[Expr] = []
    if is_sum_or_product(epilogue.op):
        cut = [replace(epilogue, args=epilogue.args[:n]) for n in range(2, len(epilogue.args))]
        parts += [p for p in cut if _holds_z(p)]
    for arg in epilogue.args:
        if isinstance(arg, Expr) and _holds_z(arg):
            parts += [arg, *_parts(arg)]
    return sorted(parts, key=size_of, reverse=True)


def _holds_z(operand: Operand) -> bool:
    if isinstance(operand, Expr):
        return any(map(_holds_z, operand.args))
    return operand == Z


def _next(view: View, node: Node) -> str:
    """What follows instead."""
    readers = view.readers[node]
    following = [f"followed by {op_of(r)}{at(r)}" for r in readers if r.op != "output"][:2]
    if any(r.op == "output" for r in readers):
        following.append(returned(view))
    return f"it is {' and '.join(following)}" if following else "nothing follows"


def _help(view: View, node: Node) -> str:
    ends = any(r.op == "output" for r in view.readers[node])
    return without_break(view) if ends else ""
