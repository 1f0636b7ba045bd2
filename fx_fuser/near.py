"""(site, patterns) → the nearest miss, where none of the patterns fits whole.

Two ways to be near. One operation is off: it is another one, or stands between two of the pattern;
found by reading the graph as if it were right, and then all checks must pass. Or the pattern
begins after the anchor, and what would complete it does not follow.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.epilogue import OPS, Z
from fx_fuser.match import (
    Binding,
    CheckAll,
    Fault,
    Refusal,
    Unifier,
    descendants_of,
    fits,
    reads_itself,
)
from fx_fuser.pattern import Pattern, size_of
from fx_fuser.sites import Site
from fx_fuser.spell import Expr, Operand, View, inputs_of, meta_tensor
from fx_fuser.words import at, called, infix, op_of, returned, without_break

_REACH = 12  # nodes after the anchor, of which one may be off
# Beside the epilogue's own ops: what stands where an activation would.
_ACTIVATIONS = frozenset(
    "celu elu hardsigmoid hardswish leaky_relu logsigmoid mish selu softsign tanhshrink".split()  # noqa: SIM905
)
_PRODUCTS = ("add", "mul")


def near_miss(
    view: View, site: Site, patterns: Sequence[Pattern], check: CheckAll
) -> Refusal | None:
    """The pattern that lacks least at this site, if any of it is there beyond the anchor."""
    own = [p for p in patterns if p.kind == site.kind]
    misses = [*_one_off(view, site, own, check), *_begun(view, site, own)]
    return min(misses, key=lambda m: m.missing, default=None)


# ---- one operation is off -------------------------------------------------------------------


def _one_off(
    view: View, site: Site, patterns: Sequence[Pattern], check: CheckAll
) -> Iterator[Refusal]:
    reach = _reach(view, site)
    for node, source in reach.items():
        for pattern in patterns:
            if (miss := _between(view, site, pattern, check, node, source)) is not None:
                yield miss
            if (miss := _another(view, site, pattern, check, node, source)) is not None:
                yield miss


def _reach(view: View, site: Site) -> dict[Node, Node]:
    """The first nodes computed from z that read one of these values alone, with that value."""
    reached = [site.node]
    for node in reached:  # which grows
        readers = [r for r in view.readers[node] if meta_tensor(r) is not None]
        reached += [r for r in readers if r not in reached]
        if len(reached) > _REACH:
            break
    read = {n: [v for v in _values_read(view, n) if v in reached] for n in reached[1:]}
    return {node: values[0] for node, values in read.items() if len(values) == 1}


def _values_read(view: View, node: Node) -> list[Node]:
    return list(dict.fromkeys(view.value(node, n) for n in inputs_of(node)))


def _between(
    view: View, site: Site, pattern: Pattern, check: CheckAll, node: Node, source: Node
) -> Refusal | None:
    """The pattern fits if `node` is passed over."""
    before, after = meta_tensor(source), meta_tensor(node)
    assert before is not None and after is not None
    same = before.ndim == after.ndim and all(
        statically_known_true(a == b) for a, b in zip(before.shape, after.shape)
    )
    if not same or not view.readers[node]:
        return None
    without = _without(view, node, source)
    supposed = _supposed(without, site, pattern, check)
    if supposed is None:
        return None
    reason = (
        f"{called(node)}{at(node)}, is {op_of(node)}, which stands in between: without it, this is "
        f"{infix(pattern.epilogue)}"
    )
    return replace(supposed, node=node, reason=reason, help=_register(view, node))


def _another(
    view: View, site: Site, pattern: Pattern, check: CheckAll, node: Node, source: Node
) -> Refusal | None:
    """The pattern fits if `node` is one of its own operations, or SiLU."""
    said = view.spell(node)
    for wanted, name in _wanted(pattern, said, node, source):
        supposed = _supposed(_as_if(view, {node: wanted}), site, pattern, check)
        if supposed is None or node not in supposed.nodes:
            continue
        if size_of(pattern.epilogue) <= size_of(wanted):
            continue  # nothing else of the pattern is there
        what = f"{called(node)}{at(node)}, is {op_of(node)}"
        reason = f"{what}, where {infix(pattern.epilogue)} has {name}"
        return replace(supposed, node=node, reason=reason, help=_register(view, node))
    return None


def _wanted(
    pattern: Pattern, said: Expr | None, node: Node, source: Node
) -> Iterator[tuple[Expr, str]]:
    """What the node could say instead, by the number of its operands, and how to call that."""
    known = said is not None and said.op in OPS and said.op != "cast"
    within = _operations(pattern.epilogue)
    if said is not None and known and len(said.args) == 2 and not isinstance(said.args[1], Expr):
        for op in _PRODUCTS:
            if op in {e.op for e in within} and op != said.op:
                yield Expr(op, said.args), op
    unary = known and said is not None and said.args == (source,)
    if unary or (said is None and op_of(node) in _ACTIVATIONS):
        for e in within:
            if len(e.args) == 1 and (said is None or (e.op, e.attrs) != (said.op, said.attrs)):
                yield Expr(e.op, (source,), e.attrs), e.op
        if {"mul", "sigmoid"} <= {e.op for e in within} and (said is None or said.op != "sigmoid"):
            yield Expr("mul", (source, Expr("sigmoid", (source,)))), "silu"


def _operations(epilogue: Operand) -> list[Expr]:
    if not isinstance(epilogue, Expr):
        return []
    return [epilogue, *(e for a in epilogue.args for e in _operations(a))]


def _supposed(view: View, site: Site, pattern: Pattern, check: CheckAll) -> Refusal | None:
    """The pattern in the supposed graph, if it would be fused there."""
    pattern = replace(pattern, check=None)  # the pattern's own sees graphs of the user's only
    for root in descendants_of(view, site):
        for match in fits(view, site, pattern, root):
            if reads_itself(match) is None and check(match) is None:
                return Refusal.of(match, Fault(root, ""), missing=1)
    return None


def _as_if(view: View, said: dict[Node, Expr]) -> View:
    """The same graph, in which some nodes say something else."""
    supposed = copy.copy(view)
    supposed._spelled = {**view._spelled, **said}
    return supposed


def _without(view: View, node: Node, source: Node) -> View:
    """The same graph without `node`: who reads it reads what it was made from."""

    def seen(operand: Operand) -> Operand:
        if isinstance(operand, Expr):
            return Expr(operand.op, tuple(map(seen, operand.args)), operand.attrs)
        return source if operand is node else operand

    said = {r: seen(e) for r in view.readers[node] if (e := view.spell(r)) is not None}
    supposed = _as_if(view, said)  # type: ignore[arg-type]
    left = {v: [r for r in view.readers[v] if r is not node] for v in _values_read(view, node)}
    left[source] = list(dict.fromkeys(left[source] + view.readers[node]))
    supposed.readers = {**view.readers, **left}
    supposed.nodes = [n for n in view.nodes if n is not node]
    supposed.order = {n: i for i, n in enumerate(supposed.nodes)}
    return supposed


def _register(view: View, node: Node) -> str:
    """A pattern of the user's own helps where the operation is one that epilogues may use."""
    said = view.spell(node)
    if said is None or said.op not in OPS:
        return ""
    return f"register a pattern with {op_of(node)} (README, Add a pattern)"


# ---- the beginning of a pattern -------------------------------------------------------------


def _begun(view: View, site: Site, patterns: Sequence[Pattern]) -> Iterator[Refusal]:
    """For each pattern the largest part of its epilogue that is there."""
    unifier = Unifier(view, site)
    descendants = descendants_of(view, site)
    for pattern in patterns:
        found = next(
            (
                Refusal(
                    pattern,
                    site,
                    node,
                    f"{infix(part)} is there, but nothing that makes it {infix(pattern.epilogue)}: "
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
    """Parts of an epilogue that hold z, the largest first: also of `a * b * c` the first two."""
    if not isinstance(epilogue, Expr):
        return []
    parts: list[Expr] = []
    if epilogue.op in _PRODUCTS:
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
    following = [f"{op_of(r)}{at(r)}" for r in readers if r.op != "output"]
    if following:
        return f"it is followed by {' and '.join(following[:2])}"
    return f"it is {returned(view)}" if readers else "nothing follows"


def _help(view: View, node: Node) -> str:
    ends = any(r.op == "output" for r in view.readers[node])
    return without_break(view) if ends else ""
