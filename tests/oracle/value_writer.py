"""A pattern's epilogue as statements: the operations of a program, one of many ways to write them.

Each operation becomes one of its spellings, products and sums in any order and association. Numbers
stand for a wildcard alone or several at a time. Which spellings there are is the business of
`writer`, which reads them off `graph.read.canonical`; that one is too slow for numbers that are new
each time, so here is a list of those by which other values could come out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.read.canonical import Arg, Expr, Operand, is_number

FREE = Arg("#")  # a wildcard for which a number stands


@dataclass(frozen=True)
class Text:
    """A piece of source.

    number: not a tensor. wide: a tensor of floats with dimensions, so what it is multiplied by
    or added to is opened by the matcher. fresh: a variable of the tail, to which it may write.
    """

    code: str
    number: bool = False
    wide: bool = False
    fresh: bool = False

    @property
    def atom(self) -> str:
        return self.code if self.code.isidentifier() else f"({self.code})"


_UNARY: dict[str, tuple[str, ...]] = {
    "sigmoid": ("torch.sigmoid({0})", "{1}.sigmoid()", "torch.special.expit({0})"),
    "silu": ("F.silu({0})",),
    "tanh": ("torch.tanh({0})", "{1}.tanh()", "F.tanh({0})"),
    "relu": ("torch.relu({0})", "{1}.relu()", "F.relu({0})"),
    "exp": ("torch.exp({0})", "{1}.exp()"),
    "log": ("torch.log({0})", "{1}.log()"),
    "sqrt": ("torch.sqrt({0})", "{1}.sqrt()"),
    "rsqrt": ("torch.rsqrt({0})", "{1}.rsqrt()"),
    "abs": ("torch.abs({0})", "{1}.abs()", "abs({0})"),
    "erf": ("torch.erf({0})", "{1}.erf()", "torch.special.erf({0})"),
    **{
        name: (f"torch.{name}({{0}})", f"{{1}}.{name}()")
        for name in ("exp2", "expm1", "log1p", "log2", "sin", "cos", "erfc", "sign", "reciprocal")
    },
    "identity": ("F.dropout({0}, 0.1, False)", "torch.dropout({0}, 0.0, True)"),
    "neg": ("-{1}", "torch.neg({0})", "{1}.neg()", "{1} * -1", "-1.0 * {1}"),
}  # fmt: skip
_MUL = ("{a} * {b}", "torch.mul({x}, {y})", "{a}.mul({y})", "torch.multiply({x}, {y})")
_ADD = ("{a} + {b}", "torch.add({x}, {y})", "{a}.add({y})")
_SUB = ("{a} - {b}", "torch.sub({x}, {y})", "{a}.sub({y})", "torch.subtract({x}, {y})")
_DIV = ("{a} / {b}", "torch.div({x}, {y})", "{a}.div({y})", "torch.true_divide({x}, {y})")


@dataclass
class TailWriter:
    """shape: draws what is written, and so which kernel it takes; the numbers are drawn by
    `number`, whose argument is how many stand for one: for a factor, a term or a bound.

    names: leaf → text. plain_addcmul: all floating operands are of z's dtype.
    in_place: may it write to what it made; then only where autograd needs no old value.
    """

    shape: random.Random
    number: Callable[[str, int], list[str]]
    names: dict[str, Text]
    plain_addcmul: bool
    in_place: bool
    lines: list[str] = field(default_factory=list)
    known: dict[Expr, Text] = field(default_factory=dict)
    numbers: int = 0

    def write(self, e: Operand) -> None:
        self.lines.append(f"return {self._render(e).code}")

    # -- pieces ------------------------------------------------------------------------------

    def _chance(self, one_in: int) -> bool:
        return self.shape.randrange(one_in) == 0

    def _made(self, code: str, wide: bool = True) -> Text:
        if self._chance(3):
            return Text(code, wide=wide)
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return Text(name, wide=wide, fresh=True)

    def _free(self, role: str, count: int = 1) -> list[Text]:
        self.numbers += count
        return [Text(n, number=True) for n in self.number(role, count)]

    def _render(self, e: Operand) -> Text:
        if e == FREE:
            return self._free("bound")[0]
        if isinstance(e, Arg):
            return self.names[e.name]
        if e is None:
            return Text("None", number=True)
        if is_number(e):
            return Text(repr(e), number=True)
        assert isinstance(e, Expr)
        if e in self.known and self._chance(2):
            return self.known[e]
        if e.op == "mul":
            return self._product(e)
        if e.op == "add":
            return self._sum(e)
        args = [self._render(a) for a in e.args]
        found = self._made(self._call(e, args))
        if len(e.args) == 1:
            self.known[e] = found = Text(found.code, wide=True)
        return found

    def _call(self, e: Expr, args: list[Text]) -> str:
        codes, atoms = [a.code for a in args], [a.atom for a in args]
        pick, attrs = self.shape.choice, dict(e.attrs)
        if e.op in _UNARY:
            return pick(_UNARY[e.op]).format(codes[0], atoms[0])
        if e.op == "div":
            return self._binary(pick(_DIV[:1] if args[0].number else _DIV), *args)
        if e.op in ("minimum", "maximum"):
            first, second = self.shape.sample(args, 2)
            form = pick((f"torch.{e.op}({{x}}, {{y}})", f"{{a}}.{e.op}({{y}})"))
            return self._binary(form, first, second)
        if e.op == "where":
            forms = ["torch.where({0}, {1}, {2})"]
            forms += [] if args[1].number else ["{a}.where({0}, {2})"]
            return pick(forms).format(*codes, a=atoms[1])
        if e.op == "pow":
            n = attrs["exponent"]
            forms = ["{a} ** {n}", "torch.pow({x}, {n})", "{a}.pow({n})"]
            forms += ["torch.square({x})", "{a}.square()"] if n == 2 else []
            return pick(forms).format(a=atoms[0], x=codes[0], n=n if n > 0 else f"({n})")
        if e.op == "cast":
            name = str(attrs["dtype"])
            short = {"bfloat16": "bfloat16", "float16": "half", "float32": "float"}
            method = short.get(name.removeprefix("torch."), "double")
            return f"{atoms[0]}.{pick((f'to({name})', f'type({name})', f'{method}()'))}"
        if e.op == "clamp":
            return self._clamp(e, codes, atoms)
        if e.op in ("lerp", "addcdiv"):
            forms = ("torch.{op}({0}, {1}, {2})", "{a}.{op}({1}, {2})")
            return pick(forms).format(*codes, a=atoms[0], op=e.op)
        if e.op == "elu":
            scales = attrs["alpha"], attrs["scale"], attrs["input_scale"]
            return f"torch._C._nn.elu({codes[0]}, {', '.join(map(repr, scales))})"
        said = ", ".join([codes[0], *(f"{k}={v!r}" for k, v in e.attrs)])
        return f"F.{e.op}({said})"

    def _clamp(self, e: Expr, codes: list[str], atoms: list[str]) -> str:
        forms = ["torch.clamp({x}, {low}, {high})", "torch.clip({x}, min={low}, max={high})"]
        forms.append("{a}.clamp(min={low}, max={high})")
        if None in e.args:
            kept = "min" if e.args[2] is None else "max"
            bound = "{low}" if kept == "min" else "{high}"
            forms += [f"torch.clamp_{kept}({{x}}, {bound})", f"{{a}}.clamp_{kept}({bound})"]
        elif all(b == FREE or is_number(b) for b in e.args[1:]):
            # With a bound of NaN the vectors of torch's own backward differ from its scalars.
            forms += [] if "nan" in codes[1:] else ["F.hardtanh({x}, {low}, {high})"]
        if e.args[1:] == (0, 6):
            forms.append("F.relu6({x})")
        names = {"x": codes[0], "a": atoms[0], "low": codes[1], "high": codes[2]}
        return str(self.shape.choice(forms)).format(**names)

    @staticmethod
    def _binary(form: str, x: Text, y: Text) -> str:
        return form.format(a=x.atom, b=y.atom, x=x.code, y=y.code)

    # -- products ----------------------------------------------------------------------------

    def _numbers_of(self, op: str, args: list[Operand]) -> list[Text]:
        """Those that stand for the numbers among these terms: several for a single one."""
        free, fixed = args.count(FREE), [a for a in args if is_number(a)]
        alone = free + len(fixed) == 1
        several = self.shape.choice((1, 1, 1, 2, 2, 3)) if alone and self.numbers < 5 else 1
        if free:
            found = self._free(op, several if alone else free)
            return found + [Text(repr(n), number=True) for n in fixed]
        if several > 1:  # exactly the pattern's own
            self.numbers += 2
            n = float(fixed[0])  # type: ignore[arg-type]
            pair = (2.0 * n, 0.5) if op == "mul" else (n + 2.0, -2.0)
            return [Text(repr(p), number=True) for p in pair]
        return [Text(repr(n), number=True) for n in fixed]

    def _product(self, e: Expr) -> Text:
        args = list(e.args)
        gate = Expr("sigmoid", (Z,))
        if Z in args and gate in args and self._chance(2):
            args.remove(Z)
            args.remove(gate)
            args.append(Expr("silu", (Z,)))
        if args.count(-1) == 1 and len(args) == 2 and not self._chance(4):
            (other,) = (a for a in args if a != -1)
            return self._made(self._call(Expr("neg", (other,)), [self._render(other)]))
        terms = [self._render(a) for a in args if not _is_any_number(a)]
        free = FREE in args
        terms += self._numbers_of("mul", args)
        return self._joined(terms, lambda x, y: self._times(x, y, free))

    def _times(self, x: Text, y: Text, free: bool) -> str:
        """free: a number may be divided by as well, which is another product."""
        if y.number and free and self._chance(3):
            return self._binary(self.shape.choice(_DIV), x, y)
        return self._binary(_MUL[0] if x.number else self.shape.choice(_MUL), x, y)

    def _joined(self, terms: list[Text], join: Callable[[Text, Text], str]) -> Text:
        """In any order and association, a wide one in each pair: others would be computed apart."""
        while len(terms) > 1:
            x = self.shape.choice([t for t in terms if t.wide])
            terms.remove(x)
            y = terms.pop(self.shape.randrange(len(terms)))
            if self._chance(2) and not (x.fresh and self.in_place):
                x, y = y, x
            terms.append(self._made(join(x, y)))
        return terms[0]

    # -- sums --------------------------------------------------------------------------------

    def _sum(self, e: Expr) -> Text:
        args, special = list(e.args), list[Expr]()
        for a in e.args:
            if isinstance(a, Expr) and a.op == "mul" and len(args) > 1 and not self._chance(3):
                rest = [r for r in a.args if not _is_any_number(r)]
                numbers = [r for r in a.args if _is_any_number(r)]
                one = numbers in ([-1], [FREE]) and len(rest) == 1
                two = len(rest) == 2 and numbers in ([], [FREE]) and self.plain_addcmul
                others = [o for o in args if o is not a]
                if one or (two and not all(map(_is_any_number, others))):
                    args = others
                    special.append(a)
        subtracted = [a for a in args if _is_negative_of_narrow(a, self.names)]
        args = [a for a in args if a not in subtracted]
        special += subtracted  # type: ignore[arg-type]
        terms = [self._render(a) for a in args if not _is_any_number(a)]
        terms += self._numbers_of("add", args)
        if not any(t.wide for t in terms):
            return self._from_narrow(terms, special)
        total = self._joined(terms, self._plus)
        for part in special:
            total = self._made(self._with(total, part))
        return total

    def _plus(self, x: Text, y: Text) -> str:
        if y.number and self._chance(3):
            return self._binary(self.shape.choice(_SUB), x, _negative(y))
        if x.number:
            return self._binary(_ADD[0], x, y)
        if x.fresh and self.in_place and not y.number and self._chance(3):
            return self._binary("{a}.add_({y})", x, y)
        return self._binary(self.shape.choice(_ADD), x, y)

    def _with(self, total: Text, part: Expr) -> str:
        """The sum so far, and a product in the same call."""
        rest = [self._render(r) for r in part.args if not _is_any_number(r)]
        free = self._free("mul")[0].code if FREE in part.args else ""
        free = "2.0" if free in ("1", "1.0", "True") else free  # no factor would be left
        if len(rest) == 2:
            x, y = (r.code for r in self.shape.sample(rest, 2))
            value = f", value={free}" if free else ""
            head = self.shape.choice((f"torch.addcmul({total.code}, ", f"{total.atom}.addcmul("))
            return f"{head}{x}, {y}{value})"
        if free:
            form = self.shape.choice(
                ("torch.add({x}, {y}, ", "{a}.add({y}, ", "torch.sub({x}, {y}, ")
            )
            return f"{self._binary(form, total, rest[0])}alpha={free})"
        forms = (*_SUB, "torch.rsub({y}, {x})")
        return self._binary(self.shape.choice(forms), total, rest[0])

    def _from_narrow(self, terms: list[Text], special: list[Expr]) -> Text:
        """a - z where a is a number or has no dimensions: z comes first."""
        at = next((i for i, s in enumerate(special) if -1 in s.args), None)
        if at is None or not terms:
            raise NothingToWrite("a number and a product, or nothing but what is taken away")
        first = special.pop(at)
        (y,) = (self._render(r) for r in first.args if r != -1)
        form = self.shape.choice((_SUB[0], "torch.rsub({y}, {x})"))
        total = self._made(self._binary(form, terms.pop(), y))
        for term in terms:
            total = self._made(self._plus(total, term))
        for part in special:
            total = self._made(self._with(total, part))
        return total


class NothingToWrite(Exception):
    """These choices lead to no tail."""


def _is_any_number(e: Operand) -> bool:
    return e == FREE or is_number(e)


def _negative(number: Text) -> Text:
    """Another number: which one does not matter, but it is to be as it was drawn."""
    code = number.code.removeprefix("-") if number.code.startswith("-") else f"-{number.code}"
    return Text(code, number=True)


def _is_negative_of_narrow(e: Operand, names: dict[str, Text]) -> bool:
    """-a where a is an integer, or has no dimensions: computed apart it is no part of the sum."""
    if not isinstance(e, Expr) or e.op != "mul" or len(e.args) != 2 or -1 not in e.args:
        return False
    (rest,) = (a for a in e.args if a != -1)
    return isinstance(rest, Arg) and rest != FREE and not names[rest.name].wide


def substitute(e: Operand, values: dict[str, Operand]) -> Operand:
    """With the wildcards replaced, and a negated number as a number."""
    if isinstance(e, Arg):
        return values.get(e.name, e)
    if not isinstance(e, Expr):
        return e
    args = tuple(substitute(a, values) for a in e.args)
    if e.op == "mul" and FREE in args and all(map(_is_any_number, args)):
        return FREE
    return Expr(e.op, args, e.attrs)
