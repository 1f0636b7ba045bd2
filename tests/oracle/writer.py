"""Expr → source text, in a random one of the forms of `forms`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forms import INFIX, NAMES, UNARY, Bound, Form, defaults_of, fit, forms_of, name_of, numbers_in
from torch.fx import Node

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.match.trace import leaves
from fx_fuser.graph.read.canonical import Arg, Expr, Operand, is_number

_TAKE_NUMBERS = ("other", "exponent", "min", "max")  # parameters; of operators, all
_OF_MATRICES = ("mm", "addmm")


class Draw:
    """Random choices that can be replayed, and so shrunk: 0 is always the simplest option."""

    def __init__(self, seed: int = 0, replay: Sequence[int] | None = None) -> None:
        self.random = random.Random(seed)
        self.replay = replay
        self.made: list[int] = []

    def below(self, count: int) -> int:
        at = len(self.made)
        if self.replay is None:
            value = self.random.randrange(count)
        else:
            value = min(self.replay[at], count - 1) if at < len(self.replay) else 0
        self.made.append(value)
        return value

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]


class NoSpelling(Exception):
    """The random choices made so far lead to nothing that can be written."""


@dataclass(frozen=True)
class Text:
    """A piece of source. atom: needs no brackets. name: it is a variable that may be written to.
    reads_z: it depends on the anchor."""

    code: str
    atom: bool = True
    number: bool = False
    fresh: bool = False
    reads_z: bool = False


@dataclass
class Writer:
    """Writes one expression as statements.

    names: leaf → text. integers: leaves that are integer tensors. prefix: of new variables.
    steps: one statement an op. in_place: writing to what is not needed again is allowed.
    own: leaves that may be written to, each used once; `wrote` tells which were.
    matrices: x is one, so `mm` is legal. attributes: `w.T` may be written.
    """

    draw: Draw
    names: dict[str, Text]
    prefix: str
    integers: frozenset[str] = frozenset()
    steps: bool = False
    in_place: bool = False
    own: frozenset[str] = frozenset()
    matrices: bool = True
    attributes: bool = True
    wrote: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)  # variables that depend on z
    _z_left: int = 0
    _count: int = 0

    def write(self, expr: Operand, result: str = "") -> str:
        """Statements for `expr`; returns the variable that holds its value."""
        self._z_left = _count_z(expr)
        return self._named(self._render(expr), result).code

    def _new_name(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    def _named(self, text: Text, name: str = "") -> Text:
        if text.fresh and not name:
            return text
        name = name or self._new_name()
        self.lines.append(f"{name} = {text.code}")
        return Text(name, fresh=True, reads_z=text.reads_z)

    def _render(self, e: Operand) -> Text:
        if isinstance(e, Arg):
            return self.names[e.name]
        if e is None:
            return Text("None")
        if is_number(e):
            return Text(repr(e), atom=e >= 0, number=True)  # type: ignore[operator]
        assert isinstance(e, Expr)
        form, bound = self._form(e)
        texts = {hole: self._render(operand) for hole, operand in bound.items()}
        return self._call(form, bound, texts)

    def _form(self, e: Expr) -> tuple[Form, Bound]:
        for _ in range(8):
            wanted, cut = self._shuffled(e), self.draw.below(4)
            fitting: list[tuple[Form, Bound]] = []
            for form in forms_of(e.op, frozenset(numbers_in(e)), e.attrs):
                bound: Bound = {}
                if fit(form.expr, wanted, bound, cut) and self._legal(form, bound):
                    fitting.append((form, bound))
            if fitting:
                # Targets first: a rule with many constants must not crowd out the others.
                name = self.draw.pick(list(dict.fromkeys(str(f.target) for f, _ in fitting)))
                return self.draw.pick([f for f in fitting if str(f[0].target) == name])
        raise NoSpelling(str(e))

    def _shuffled(self, e: Operand) -> Operand:
        if not isinstance(e, Expr):
            return e
        args = tuple(map(self._shuffled, e.args))
        if e.op in ("add", "mul", "minimum", "maximum"):
            args = tuple(self.draw.shuffled(args))
        return Expr(e.op, args, e.attrs)

    def _legal(self, form: Form, bound: Bound) -> bool:
        holes = [(n, bound.get(v)) for n, v in form.arguments if isinstance(v, Node)]
        if name_of(form.target) in _OF_MATRICES and not self.matrices:
            return False
        if form.target is getattr and not self.attributes:
            return False
        if any(_only_integers(v, self.integers) for _, v in holes):
            return False
        infix = not isinstance(form.target, str) and form.target.__module__ == "_operator"
        for position, (name, value) in enumerate(holes):
            is_tensor = value is not None and bool(leaves(value))
            if not is_tensor and isinstance(value, Expr):
                return False  # Python would make one number of it
            if not is_tensor and value is not None:
                takes = infix or (name in _TAKE_NUMBERS and position > 0)
                if not takes or form.expr.op in ("minimum", "maximum"):
                    return False
        if not form.in_place:
            return True
        first = holes[0][1]
        if not self.in_place or not isinstance(first, (Expr, Arg)) or not leaves(first):
            return False
        return isinstance(first, Expr) or first == Z or first.name in self.own

    def _call(self, form: Form, bound: Bound, texts: Mapping[Node, Text]) -> Text:
        direct = sum(_uses(form.expr, hole) for hole, value in bound.items() if value == Z)
        holes = [v for _, v in form.arguments if isinstance(v, Node)]
        z_is_free = self._z_left == direct
        if form.in_place and bound[holes[0]] == Z and not z_is_free:
            raise NoSpelling("z is needed again")
        named = dict(texts)
        if form.in_place:
            named[holes[0]] = self._named(texts[holes[0]])
            receiver = bound[holes[0]]
            if isinstance(receiver, Arg) and receiver != Z:
                self.wrote.add(receiver.name)
        self._z_left -= direct
        reads_z = any(t.reads_z for t in texts.values())
        code, atom = self._code(form, named)
        written = named[holes[0]].code
        if form.in_place and (INFIX.get(name_of(form.target)) or self.draw.chance(2)):
            statement = f"{written} {code}" if INFIX.get(name_of(form.target)) else code
            self.lines.append(statement)
            return Text(written, fresh=True, reads_z=reads_z)
        made = Text(code, atom, reads_z=reads_z)
        if self.steps or self.in_place or self.draw.chance(2):
            made = self._named(made)
            if reads_z:
                self.inner.append(made.code)
        return made

    def _code(self, form: Form, texts: Mapping[Node, Text]) -> tuple[str, bool]:
        given = [(n, texts[v] if isinstance(v, Node) else v) for n, v in form.arguments]
        plain = [v.code if isinstance(v, Text) else repr(v) for _, v in given]
        atoms = [
            v.code if not isinstance(v, Text) or v.atom else f"({v.code})"
            for v in (v if isinstance(v, Text) else Text(repr(v), False) for _, v in given)
        ]
        name, target = name_of(form.target), form.target
        if not isinstance(target, str) and target.__module__ == "_operator":
            if name in UNARY:
                return UNARY[name].format(atoms[0]), False
            if form.in_place:
                return f"{INFIX[name]}= {plain[1]}", False
            return f"{atoms[0]} {INFIX[name]} {atoms[1]}", False
        if target is getattr:
            return f"{atoms[0]}.{given[1][1]}", True
        skip = 1 if isinstance(target, str) else 0
        arguments = self._arguments(form, given, plain, skip)
        head = f"{atoms[0]}.{target}" if skip else NAMES[target]
        return f"{head}({arguments})", True

    def _arguments(self, form: Form, given: Any, plain: Sequence[str], skip: int) -> str:
        """By position up to a random one, by keyword after it; defaults mostly left out."""
        defaults = defaults_of(form)
        by_position = len(given)
        if self.draw.chance(3) and "dims" not in dict(given):
            by_position = skip + self.draw.below(2)
        parts: list[str] = []
        for i, ((name, value), code) in enumerate(zip(given, plain)):
            if i < skip:
                continue
            if name == "dims":
                apart = skip and self.draw.chance(2)  # only the method takes them one by one
                parts.append(code.strip("()") if apart else code)
                continue
            required = name not in defaults or name == "cudnn_enabled"
            if not required and value == defaults[name] and not isinstance(value, Text):
                by_position = min(by_position, i)
                # Dynamo takes addcmul_ with a value apart into two calls and a copy: not fused.
                never = name in ("inplace", "rounding_mode") or form.target == "addcmul_"
                if never or not self.draw.chance(4):
                    continue
            keyword = name in ("alpha", "value", "beta", "inplace") or i >= by_position
            parts.append(f"{name}={code}" if keyword else code)
        return ", ".join(parts)


def _uses(e: Operand, hole: Node) -> int:
    """How often a call of the form reads the hole: once, whatever its expression says."""
    return 1 if e is hole or (isinstance(e, Expr) and any(_uses(a, hole) for a in e.args)) else 0


def _count_z(e: Operand) -> int:
    if isinstance(e, Expr):
        return sum(map(_count_z, e.args))
    return 1 if e == Z else 0


def _only_integers(e: Operand, integers: frozenset[str]) -> bool:
    """A product or sum of integers alone: it wraps around, and fx_fuser does not open it."""
    if not isinstance(e, Expr) or e.op not in ("add", "mul"):
        return False
    return bool(leaves(e)) and all(
        isinstance(a, (int, bool)) or (isinstance(a, Arg) and a.name in integers) for a in e.args
    )
