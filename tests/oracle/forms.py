"""Every way to write an op: `fx_fuser.graph.read.canonical`'s table of rules, read backwards.

A rule says what expression a call makes. Called with holes for operands it gives a form; a form
whose expression fits the wanted one is a way to write it. So the generator writes every spelling
that the table knows, of every op, without a second list.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from fx_fuser.graph.match.trace import flatten
from fx_fuser.graph.read import canonical
from fx_fuser.graph.read.canonical import Expr, Operand, Unsupported, is_number, meaning

INFIX = {
    "mul": "*", "imul": "*", "add": "+", "iadd": "+", "sub": "-", "isub": "-", "truediv": "/",
    "itruediv": "/", "pow": "**", "ipow": "**", "matmul": "@",
}  # fmt: skip
UNARY = {"neg": "-{}", "abs": "abs({})"}
_DIMS = {"dim0": (0, 1, -1), "dim1": (1, 0, -2), "axis0": (0, 1, -1), "axis1": (1, 0, -2)}


# ---- forms: how one op is written ------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A call of `target`, or of the method of that name; arguments: name → hole or constant."""

    expr: Expr
    target: Any
    arguments: tuple[tuple[str, Any], ...]
    in_place: bool = False


@functools.cache
def _hole(name: str) -> Node:
    return Graph().placeholder(name)


NAMES: dict[Any, str] = {}
for _prefix, _module in (
    ("torch._C._nn", torch._C._nn), ("torch.special", torch.special), ("F", F), ("torch", torch),
):  # fmt: skip
    for _name, _function in vars(_module).items():
        if callable(_function) and _function.__hash__ is not None:
            if getattr(_function, "__name__", "") == _name:
                NAMES[_function] = f"{_prefix}.{_name}"
            NAMES.setdefault(_function, f"{_prefix}.{_name}")


def _options_for(parameter: inspect.Parameter, numbers: frozenset[Any], attrs: Any) -> list[Any]:
    """What the parameter may be given: a hole, constants, or `empty` to leave it out."""
    name, hole, default = parameter.name, _hole(parameter.name), parameter.default
    if name in attrs:
        return [attrs[name]]
    if name in _DIMS:
        return list(_DIMS[name])
    if name == "dims":
        return [(1, 0), (-1, 0), (-1, -2)]
    if name == "name":
        return ["T", "mT"]
    if name in ("alpha", "value", "min_val", "max_val"):
        return [default, *numbers]
    if name in ("min", "max", "exponent"):
        return [*([] if default is parameter.empty else [default]), *numbers]
    if name == "other" and default is parameter.empty:
        return [hole, *(-n for n in numbers), *(1 / n for n in numbers if n)]
    if default is parameter.empty or name in ("bias", "weight"):
        return [hole] if default is parameter.empty else [hole, default]
    return [default]


def _products(lists: Sequence[list[Any]]) -> Iterator[tuple[Any, ...]]:
    if not lists:
        yield ()
        return
    for first in lists[0]:
        for rest in _products(lists[1:]):
            yield (first, *rest)


@functools.cache
def forms_of(op: str, numbers: frozenset[Any], attrs: tuple[tuple[str, Any], ...]) -> list[Form]:
    """All forms whose outermost op is `op`; constants come from `numbers` and `attrs`."""
    found: list[Form] = []
    for rule, targets in canonical._RULES:
        parameters = inspect.signature(rule).parameters.values()
        options = [_options_for(p, numbers, dict(attrs)) for p in parameters]
        for chosen in _products(options):
            try:
                expr = _applied(rule, parameters, chosen)
            except (TypeError, Unsupported):
                continue
            if not isinstance(expr, Expr) or expr.op != op:
                continue
            given = tuple((p.name, v) for p, v in zip(parameters, chosen))
            for target in targets:
                if not isinstance(target, torch._ops.OpOverloadPacket):  # which Dynamo writes
                    found += _called(Form(expr, target, given))
    return found


def _applied(rule: Any, parameters: Any, chosen: Sequence[Any]) -> Any:
    named = {p.name: v for p, v in zip(parameters, chosen) if p.kind is p.KEYWORD_ONLY}
    return flatten(meaning(rule(*chosen[: len(chosen) - len(named)], **named)))


def _called(form: Form) -> list[Form]:
    """As a function or a method, and in place where there is such a twin."""
    target = form.target
    if not isinstance(target, str):
        name = target.__name__
        if target.__module__ == "_operator" and not _fits_operator(form):
            return []
        writes = name.endswith("_") or (target.__module__ == "_operator" and name in _WRITING)
        made = [Form(form.expr, target, form.arguments, writes)]
        if not writes and _takes_inplace(target):
            made.append(Form(form.expr, target, (*form.arguments, ("inplace", True)), True))
        return made
    made = [form]
    if hasattr(torch.Tensor, f"{target}_") and target not in ("t", "transpose", "swapaxes"):
        made.append(Form(form.expr, f"{target}_", form.arguments, True))
    return made


def _fits_operator(form: Form) -> bool:
    """An operator has no `alpha` to say."""
    defaults, shown = defaults_of(form), 1 if form.target.__name__ in UNARY else 2
    return all(defaults.get(n, ...) == value for n, value in form.arguments[shown:])


_WRITING = {f"i{n}" for n in ("mul", "add", "sub", "truediv", "pow")}


def _takes_inplace(target: Any) -> bool:
    try:
        return "inplace" in inspect.signature(target).parameters
    except ValueError:
        return False


# ---- fitting a form to an expression ---------------------------------------------------------

Bound = dict[Node, Operand]


def fit(form: Any, wanted: Operand, bound: Bound, cut: int) -> bool:
    """Bind the form's holes so that it says `wanted`; `cut` says how a product is divided."""
    if isinstance(form, Node):
        if form in bound:
            return bound[form] == wanted
        bound[form] = wanted
        return True
    if not isinstance(form, Expr):
        if is_number(form) and is_number(wanted):
            return abs(float(form) - float(wanted)) <= 1e-12 * abs(float(form))  # type: ignore[arg-type]
        return form is None and wanted is None
    if not isinstance(wanted, Expr) or (form.op, form.attrs) != (wanted.op, wanted.attrs):
        return False
    if form.op in ("add", "mul"):
        return _fit_terms(form, wanted, bound, cut)
    pairs = zip(form.args, wanted.args)
    same = len(form.args) == len(wanted.args)
    return same and all(fit(f, w, bound, cut) for f, w in pairs)


def _fit_terms(form: Expr, wanted: Expr, bound: Bound, cut: int) -> bool:
    left = list(wanted.args)
    free = [a for a in form.args if isinstance(a, Node)]
    for part in (a for a in form.args if not isinstance(a, Node)):
        for term in left:
            tried = dict(bound)
            if fit(part, term, tried, cut):
                bound.update(tried)
                left.remove(term)
                break
        else:
            return False
    for hole in [h for h in free if h in bound]:
        if bound[hole] not in left:
            return False
        left.remove(bound[hole])
        free.remove(hole)
    if len(left) < len(free) or (left and not free):
        return False
    for i, hole in enumerate(free):
        size = 1 + cut % (len(left) - 1) if i == 0 and len(free) == 2 else 1
        size = len(left) if i == len(free) - 1 else size
        part, left = left[:size], left[size:]
        bound[hole] = part[0] if size == 1 else Expr(wanted.op, tuple(part))
    return True


def numbers_in(e: Operand) -> set[Any]:
    if isinstance(e, Expr):
        return set().union(*map(numbers_in, e.args)) if e.args else set()
    return {e} if is_number(e) else set()


def defaults_of(form: Form) -> dict[str, Any]:
    name = form.target[:-1] if isinstance(form.target, str) else form.target
    rule = canonical._RULE_OF.get(form.target) or canonical._RULE_OF[name]
    parameters = inspect.signature(rule).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def name_of(target: Any) -> str:
    return target if isinstance(target, str) else target.__name__
