"""What generated programs are made of: anchors, operands, and the epilogue over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from writer import Draw, Text, Writer

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.read.canonical import Arg, Expr, Operand, is_number

NUMBERS = [2.0, 0.5, 3, -1, -0.75, 4.0, 1.5, -2]


@dataclass
class Site:
    """One anchor with what follows it.

    lines: its statements. results: variables to return. fuses: whether it must. apart: its
    statements must not be mixed with another site's.
    """

    pattern: str
    label: str
    lines: list[str]
    results: list[str]
    fuses: bool
    apart: bool = True
    norm: str = ""


@dataclass
class Made:
    """The parts of a program so far: members, inputs, and tensors that may be used again."""

    draw: Draw
    train: bool
    dtype: str
    members: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    pool: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)

    def member(self, value: str) -> str:
        name = f"m{len(self.members)}"
        buffer = f'self.register_buffer("{name}", {value})'
        own = value.startswith("nn.")
        self.members.append(f"self.{name} = {value}" if own else buffer)
        return f"self.{name}"

    def input(self, value: str) -> str:
        self.inputs.append(value)
        return f"x{len(self.inputs)}"

    def shared(self, key: tuple[Any, ...], make: Callable[[], str]) -> str:
        """A tensor or module of this kind, now and then one that there is already."""
        known = self.pool.setdefault(key, [])
        if known and self.draw.chance(2):
            return str(self.draw.pick(known))
        known.append(make())
        return known[-1]

    def tensor(self, shape: Sequence[int], dtype: str = "D", grad: bool = True) -> str:
        """Text of a random tensor."""
        sizes = ", ".join(map(str, shape)) or "()"
        return f"torch.randn({sizes}, dtype={dtype}{', requires_grad=True' if grad else ''})"


# ---- anchors ---------------------------------------------------------------------------------


@dataclass
class Anchored:
    """An anchor, written: lines, the variable z, its shape, and its input x."""

    lines: list[str]
    z: str
    shape: tuple[int, ...]
    x: str
    norm: str = ""


def _x(made: Made, shape: tuple[int, ...]) -> tuple[list[str], str]:
    """The anchor's input, sometimes through a view."""
    view = made.draw.below(6)
    if view == 1 and len(shape) > 1:
        turned = (*shape[:-2], shape[-1], shape[-2])
        x = made.shared(("x", turned), lambda: made.input(made.tensor(turned)))
        return [], f"{x}.mT"
    if view == 2:
        wide = (*shape[:-1], 2 * shape[-1])
        x = made.shared(("x", wide), lambda: made.input(made.tensor(wide)))
        return [], f"{x}[..., ::2]"
    x = made.shared(("x", shape), lambda: made.input(made.tensor(shape)))
    return [], x


def _linear(made: Made, i: int, region: str, simple: bool) -> Anchored:
    draw = made.draw
    lead = draw.pick([(4,), (3,), (2, 3), (2, 2, 2), ()])
    if simple and not lead:
        lead = (4,)
    k, n = draw.pick([(8, 6), (6, 6), (5, 8)])
    chained = made.pool.get(("result", (*lead, k)), [])
    lines, x = ([], draw.pick(chained)) if chained and draw.chance(2) else _x(made, (*lead, k))
    bias = not draw.chance(3)
    if simple or draw.chance(3):
        extra = "" if bias else ", bias=False"
        layer = made.shared(("linear", k, n, bias), lambda: made.member(
            f"nn.Linear({k}, {n}{extra}, dtype=D)"))  # fmt: skip
        return Anchored([*lines, f"z{i} = {layer}({x})"], f"z{i}", (*lead, n), x)
    names = {"x": x, "w": made.shared(("w", n, k), lambda: made.member(
        f"nn.Parameter(torch.randn({n}, {k}, dtype=D))"))}  # fmt: skip
    expr: Operand = Expr("linear", (Arg("x"), Arg("w"), Arg("b") if bias else None))
    if bias:
        names["b"] = made.member(f"nn.Parameter(torch.randn({n}, dtype=D))")
    # Under autocast a sum is wider than a product: there `x @ w.t() + b` is no Linear.
    if draw.chance(2) and not (region == "autocast" and bias):
        expr = Expr("matmul", (Arg("x"), Expr("t", (Arg("w"),))))
        expr = Expr("add", (expr, Arg("b"))) if bias else expr
    writer = Writer(draw, {n: Text(t) for n, t in names.items()}, f"a{i}_")
    writer.in_place, writer.matrices = may_write(made, region), len(lead) == 1
    writer.attributes = (
        region != "checkpoint"
    )  # Dynamo takes `w.T` out of the body: no Linear is in it
    z = writer.write(expr)
    return Anchored([*lines, *writer.lines], z, (*lead, n), x)


def _conv2d(made: Made, i: int, norm: bool, simple: bool) -> Anchored:
    draw = made.draw
    # Four values a channel at least: BatchNorm of two makes ±1 of them, and gradients of rounding.
    shape, out = draw.pick([(3, 4, 6, 7), (2, 2, 7, 6)]), 6
    bias, groups = draw.chance(2), draw.pick([1, 1, 2])
    stride, padding = draw.pick([(1, 0), (2, 1), ((2, 1), (1, 0)), (1, "same"), (1, "valid")])
    dilation = draw.pick([1, 1, 2])
    lines, x = _x(made, shape)
    kernel = (out, shape[1] // groups, 3, 3)
    z_shape = F.conv2d(
        torch.empty(shape), torch.empty(kernel), None, stride, padding, dilation, groups
    ).shape
    settings = f"stride={stride!r}, padding={padding!r}, dilation={dilation}, groups={groups}"
    if simple or draw.chance(2):
        layer = made.shared(("conv", shape[1], bias, settings), lambda: made.member(
            f"nn.Conv2d({shape[1]}, {out}, 3, {settings}, bias={bias}, dtype=D)"))  # fmt: skip
        conv: Operand = Arg("conv")
        names = {"conv": f"{layer}({x})"}
    else:
        names = {"x": x, "w": made.member(f"nn.Parameter(torch.randn({kernel}, dtype=D))")}
        if bias:
            names["b"] = made.member(f"nn.Parameter(torch.randn({out}, dtype=D))")
        attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        conv = Expr(
            "conv2d", (Arg("x"), Arg("w"), Arg("b") if bias else None), tuple(attrs.items())
        )
    writer = Writer(draw, {n: Text(t) for n, t in names.items()}, f"a{i}_")
    if not norm:
        z = writer.write(conv)
        return Anchored([*lines, *writer.lines], z, tuple(z_shape), x)
    if simple or draw.chance(2):
        options = draw.pick(["", ", affine=False", ", momentum=0.3, eps=0.01"])
        layer = made.shared(("norm", options), lambda: made.member(
            f"nn.BatchNorm2d({out}{options}, dtype=D)"))  # fmt: skip
        c = writer.write(conv)
        return Anchored(
            [*lines, *writer.lines, f"z{i} = {layer}({c})"], f"z{i}", tuple(z_shape), x, layer
        )
    mean, var, gamma, beta = (None,) * 4
    if draw.chance(2):
        gamma, beta = Arg("gamma"), Arg("beta")
        for name in ("gamma", "beta"):
            writer.names[name] = Text(made.member(f"nn.Parameter(torch.randn({out}, dtype=D))"))
    training = made.train
    if not draw.chance(4):
        mean, var = Arg("mean"), Arg("var")
        writer.names["mean"] = Text(made.member(f"torch.randn({out}, dtype=D)"))
        writer.names["var"] = Text(made.member(f"torch.rand({out}, dtype=D) + 0.5"))
    else:
        training = True
    attrs = {"training": training, "momentum": draw.pick([0.1, 0.3]), "eps": 1e-5}
    expr = Expr("batch_norm", (conv, mean, var, gamma, beta), tuple(attrs.items()))
    z = writer.write(expr)
    return Anchored([*lines, *writer.lines], z, tuple(z_shape), x)


def anchor(made: Made, kind: str, i: int, region: str, simple: bool) -> Anchored:
    if kind == "linear":
        return _linear(made, i, region, simple)
    return _conv2d(made, i, kind == "conv2d_batchnorm", simple)


# ---- operands --------------------------------------------------------------------------------


def _operand(made: Made, i: int, at: Anchored, z_is_free: bool) -> tuple[Operand | str, bool]:
    """What a wildcard stands for: a number, `Z`, or the text of a tensor; and is it integer?"""
    draw, shape = made.draw, at.shape
    column = (*shape[:-1], 1)
    vector = (shape[1], 1, 1) if len(shape) == 4 and at.norm else shape[-1:]
    full = lambda: made.shared(("y", shape), lambda: made.input(made.tensor(shape)))  # noqa: E731
    kinds: list[Callable[[], Any]] = [
        lambda: draw.pick(NUMBERS),
        lambda: Z if z_is_free else full(),
        full,
        lambda: made.shared(("s",), lambda: made.member(
            "nn.Parameter(torch.tensor(1.5, dtype=D))")),
        lambda: made.member("torch.tensor(0.75, dtype=torch.float64)"),
        lambda: made.member("torch.tensor(3)"),
        lambda: made.shared(("v", vector), lambda: made.member(
            f"nn.Parameter({made.tensor(vector, grad=False)})")),
        lambda: made.input(made.tensor(column)),
        lambda: made.input(made.tensor((1, *shape[1:]))),
        lambda: made.input(f"torch.randint(-3, 4, {shape})"),
        lambda: made.input(f"torch.rand({shape}) > 0.5"),
        lambda: made.input(made.tensor(vector, dtype=draw.pick(
            ["torch.float32", "torch.bfloat16", "torch.float64"]))),
        lambda: f"torch.cos({full()})",
        lambda: f"{made.input(made.tensor((2, *shape)))}[1]",
        lambda: f"{made.input(made.tensor((*shape[:-1], 2 * shape[-1])))}[..., ::2]",
        lambda: f"{made.input(made.tensor(column))}.expand({', '.join(map(str, shape))})",
        lambda: at.x if made.pool.get(("x", shape)) and at.x in made.pool[("x", shape)] else full(),
        lambda: f"torch.sin({draw.pick(made.pool[('result', shape)])})"
        if made.pool.get(("result", shape)) else full(),
    ]  # fmt: skip
    kind = draw.below(len(kinds))
    return kinds[kind](), kind in (5, 9, 10)


@dataclass
class Tail:
    """The epilogue over its operands, ready to be written."""

    expr: Operand
    names: dict[str, Text]
    integers: frozenset[str]
    lines: list[str]


def tail_of(made: Made, pattern: Pattern, i: int, at: Anchored, plain: bool = False) -> Tail:
    """plain: numbers and the anchor's value only."""
    names, integers, lines = {"z": Text(at.z, fresh=True, reads_z=True)}, set(), []
    values: dict[str, Operand] = {}
    for name in pattern.wildcards:
        value, is_integer = (made.draw.pick([2.0, Z]), False) if plain else _operand(
            made, i, at, True)  # fmt: skip
        if isinstance(value, str):
            if "(" in value or "[" in value:
                lines.append(f"{name}{i} = {value}")
                value = f"{name}{i}"
            names[name] = Text(value)
            integers |= {name} if is_integer else set()
        else:
            values[name] = value
    expr = _folded(substitute(pattern.epilogue, values))
    return Tail(expr, names, frozenset(integers), lines)


def substitute(expr: Operand, values: Mapping[str, Operand]) -> Operand:
    """`expr` with the named leaves replaced."""
    if isinstance(expr, Arg):
        return values.get(expr.name, expr)
    if isinstance(expr, Expr):
        return Expr(expr.op, tuple(substitute(a, values) for a in expr.args), expr.attrs)
    return expr


def _folded(e: Operand) -> Operand:
    """Products and sums of numbers alone as one number: `- a` where a is a number."""
    if not isinstance(e, Expr):
        return e
    args = tuple(map(_folded, e.args))
    if e.op in ("mul", "add") and all(map(is_number, args)):
        return math.prod(args) if e.op == "mul" else math.fsum(args)  # type: ignore[arg-type]
    return Expr(e.op, args, e.attrs)


def may_write(made: Made, region: str) -> bool:
    """Under checkpoint, eager does not notice that a saved tensor is written: wrong gradients."""
    return made.draw.chance(3) and not (made.train and region == "checkpoint")


def device_of(at: Anchored) -> str:
    return f"{at.x}.device.type"


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
