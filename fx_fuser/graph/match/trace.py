"""A pattern is a Python function: an anchor, then a free pointwise epilogue.

    def source(x, weight, bias, a, b):
        z = F.linear(x, weight, bias)
        return torch.sigmoid(z) * a * b

It is traced once. `graph.read.sites` finds the anchor in the trace. What follows is the epilogue,
an expression over z and the wildcards: parameters that are not the anchor's operands. If nothing
follows, the pattern is the anchor alone. A pattern says what to look for; what is computed is what
the user wrote there (`fx_fuser.graph.match.bind`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.fx
from torch.fx import Node

from fx_fuser.arguments import fault_of_call, shown
from fx_fuser.errors import PatternError
from fx_fuser.graph.epilogue import MAX_STEPS, Z
from fx_fuser.graph.match.pattern import Check, Pattern, size_of
from fx_fuser.graph.prepare.decompose import decompose
from fx_fuser.graph.read.canonical import Arg, Expr, Operand, is_number
from fx_fuser.graph.read.operations import OPS, is_sum_or_product
from fx_fuser.graph.read.sites import ANCHOR_NAMES, Site, outermost
from fx_fuser.graph.read.view import View

_MAX_NODES = 2 * MAX_STEPS


def flatten(expr: Operand) -> Operand:
    """Nested products, and nested sums, as one n-ary op, which matches in any order."""
    if not isinstance(expr, Expr):
        return expr
    args: list[Operand] = []
    for arg in map(flatten, expr.args):
        if isinstance(arg, Expr) and arg.op == expr.op and is_sum_or_product(expr.op):
            args += arg.args
        else:
            args.append(arg)
    return Expr(expr.op, tuple(args), expr.attrs)


def leaves(expr: Operand) -> set[str]:
    """Names of the leaves that occur."""
    if isinstance(expr, Arg):
        return {expr.name}
    return set().union(*map(leaves, expr.args)) if isinstance(expr, Expr) else set()


def trace(
    source: Callable[..., Any], check: Check | None = None, name: str | None = None
) -> Pattern:
    """Trace `source` into a `Pattern`; raise PatternError if it is not one.

    name: by default the function's name, or its module's if that is just `source`.
    """
    _check_arguments(source, check, name)
    name = _default_name(source) if name is None else name
    if not name.isidentifier():
        raise PatternError(
            f"pattern name {name!r} is not a Python identifier: pass another `name=`"
        )
    for parameter in inspect.signature(source).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PatternError(
                f"pattern {name}: parameter {parameter} is not a plain positional one; "
                "give every operand its own name"
            )
    try:
        graph = torch.fx.symbolic_trace(source).graph
    except Exception as e:
        raise PatternError(
            f"pattern {name}: torch.fx could not trace its source ({type(e).__name__}: {e}); "
            "use torch functions on the parameters, without control flow on their values"
        ) from e
    decompose(graph)
    view = View(graph)
    if len(view.nodes) > _MAX_NODES:
        raise PatternError(
            f"pattern {name}: it has {len(view.nodes)} operations and parameters, more than "
            f"{_MAX_NODES}; a kernel takes at most {MAX_STEPS} operations"
        )
    result = next(n for n in view.nodes if n.op == "output").args[0]
    if isinstance(result, (tuple, list, dict)):
        raise PatternError(
            f"pattern {name}: it returns a {type(result).__name__}; return the one tensor that the "
            "operations end with"
        )
    site = _only_site(view, name)
    operands = {o for o in site.operands.values() if o is not None}
    free = [n for n in view.nodes if n.op == "placeholder" and n not in operands]
    for operand in operands:
        if operand.op != "placeholder":
            raise PatternError(
                f"pattern {name}: the anchor's operand {operand} is computed; "
                "an anchor takes parameters of the source as they are"
            )
    names = _wildcard_names(free)
    epilogue = flatten(_epilogue(view, result, site, name, names))
    if "z" not in leaves(epilogue):
        raise PatternError(
            f"pattern {name}: its result does not depend on the {site.kind}; return a value "
            "computed from it"
        )
    if size_of(epilogue) > MAX_STEPS:
        raise PatternError(
            f"pattern {name}: it has {size_of(epilogue)} operations; "
            f"a kernel takes at most {MAX_STEPS}"
        )
    wildcards = tuple(names.values())
    for node, wildcard in names.items():
        if wildcard not in leaves(epilogue):
            raise PatternError(f"pattern {name}: its parameter {node.target!r} is not used")
        if wildcard == "z":
            raise PatternError(
                f"pattern {name}: 'z' names the anchor's value; rename the parameter"
            )
    return Pattern(name, site.kind, epilogue, wildcards, source, check)


def _check_arguments(source: Any, check: Any, name: Any) -> None:
    if not inspect.isfunction(source):  # torch.fx traces functions, and modules
        raise PatternError(
            f"the source of a pattern is {shown(source)}; give a Python function of the anchor's "
            "operands and the other tensors, say `def swish(x, weight, bias)`"
        )
    if name is not None and not isinstance(name, str):
        raise PatternError(f"the name of a pattern is {shown(name)}; give a str as `name=`")
    if check is None:
        return
    if not callable(check):
        raise PatternError(
            f"the check of a pattern is {shown(check)}; give a function of the match that returns "
            "why it must not be fused, or None (a name goes into `name=`)"
        )
    if fault := fault_of_call(check, (None,), {}):
        raise PatternError(f"the check of a pattern gets the match alone: {fault}")


def _default_name(source: Callable[..., Any]) -> str:
    name = getattr(source, "__name__", "")
    return source.__module__.rpartition(".")[2] if name == "source" else name


def _only_site(view: View, name: str) -> Site:
    outer = outermost(view)
    if len(outer) != 1:
        raise PatternError(
            f"pattern {name}: it has {len(outer)} anchors ({', '.join(s.kind for s in outer)}); "
            "a pattern has one F.linear, x @ weight, torch.bmm, F.conv2d or "
            "F.batch_norm(F.conv2d(...))"
        )
    return outer[0]


def _wildcard_names(parameters: list[Node]) -> dict[Node, str]:
    """Each parameter's own name, with an underscore after it where an anchor uses that name."""
    taken = set(ANCHOR_NAMES) | {str(p.target) for p in parameters}
    names: dict[Node, str] = {}
    for parameter in parameters:
        name = str(parameter.target)
        if name in ANCHOR_NAMES:
            while name in taken:
                name += "_"
            taken.add(name)
        names[parameter] = name
    return names


def _epilogue(view: View, value: Any, site: Site, name: str, names: dict[Node, str]) -> Operand:
    if value is site.node:
        return Z
    if value is None or is_number(value):
        return value
    if isinstance(value, Node) and value.op == "placeholder":
        if value not in names:
            raise PatternError(
                f"pattern {name}: {value.target!r} is an operand of the {site.kind} and is used "
                "after it too; take it as another parameter"
            )
        return Arg(names[value])
    expr = view.canonical(value) if isinstance(value, Node) else value
    if not isinstance(expr, Expr) or expr.op not in OPS:
        known = ", ".join(sorted(OPS))
        what = getattr(value, "target", value) if expr is None else getattr(expr, "op", expr)
        raise PatternError(
            f"pattern {name}: {getattr(what, '__name__', what)} is not an epilogue op. "
            f"Known: {known}"
        )
    return Expr(
        expr.op, tuple(_epilogue(view, a, site, name, names) for a in expr.args), expr.attrs
    )
