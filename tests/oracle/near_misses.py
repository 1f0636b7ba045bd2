"""Sites that are spoilt in one way, and must not fuse for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parts import Anchored, Made, Site, anchor, device_of, indented, tail_of
from writer import NoSpelling, Text, Writer

from fx_fuser.graph.epilogue import Z
from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.match.trace import leaves as names_in
from fx_fuser.graph.read.canonical import Arg, Expr, Operand

Spoil = Callable[[Made, Pattern, int], Site]


def _steps(made: Made, pattern: Pattern, i: int, simple: bool = False, plain: bool = False) -> Any:
    """A site with one statement an op: its anchor, its tail, and the writer that wrote that."""
    at = anchor(made, pattern.kind, i, "plain", simple)
    tail = tail_of(made, pattern, i, at, plain)
    writer = Writer(made.draw, tail.names, f"t{i}_", tail.integers, steps=True)
    result = writer.write(tail.expr)
    return at, tail, writer, result


def _site(pattern: Pattern, label: str, lines: Sequence[str], *results: str, at: Anchored) -> Site:
    return Site(pattern.name, label, list(lines), list(results), False, norm=at.norm)


def inner_value_needed(made: Made, pattern: Pattern, i: int) -> Site:
    at, tail, writer, result = _steps(made, pattern, i)
    inner = made.draw.pick([at.z, *(n for n in writer.inner if n != result)])
    use = made.draw.pick(["{}", "torch.cos({})", "{}[..., :1]"]).format(inner)
    lines = [*tail.lines, *at.lines, *writer.lines, f"u{i} = {use}"]
    return _site(pattern, "inner value needed", lines, result, f"u{i}", at=at)


_WRITES = ["{}.add_(1)", "{}.zero_()", "{}[0] = 0.5", "{}.view(-1).mul_(2)", "{} += 1",
           "torch.add({0}, 1, out={0})"]  # fmt: skip


def x_written(made: Made, pattern: Pattern, i: int) -> Site:
    at, tail, writer, result = _steps(made, pattern, i)
    *anchor, last = at.lines or [""]
    fresh = f"c{i} = {at.x}.detach().clone()"
    read = [line.replace(at.x, f"c{i}") for line in [*anchor, last]]
    if at.x.endswith("]") or not any(f"c{i}" in line for line in read):
        raise NoSpelling("x is no variable")
    where = made.draw.below(len(writer.lines))
    lines = [*writer.lines[:where], made.draw.pick(_WRITES).format(f"c{i}"), *writer.lines[where:]]
    return _site(pattern, "x written", [fresh, *tail.lines, *read, *lines], result, at=at)


def operand_written(made: Made, pattern: Pattern, i: int) -> Site:
    """Into a copy of an operand, by one of the pattern's own ops."""
    at = anchor(made, pattern.kind, i, "plain", False)
    tail = tail_of(made, pattern, i, at)
    used = [n for n in pattern.wildcards if n in names_in(tail.expr)]
    if not used:
        raise NoSpelling("no tensor operand")
    name = made.draw.pick(used)
    y = made.input(made.tensor(at.shape))
    tail.names[name] = Text(f"c{i}", fresh=True)
    integers, copied = tail.integers - {name}, f"c{i} = {y}.clone()"
    writer = Writer(
        made.draw, tail.names, f"t{i}_", integers, in_place=True, own=frozenset((name,))
    )
    result = writer.write(tail.expr)
    lines = [copied, *tail.lines, *at.lines, *writer.lines]
    site = _site(pattern, "operand written", lines, result, at=at)
    site.fuses = not writer.wrote
    return site


def another_op(made: Made, pattern: Pattern, i: int) -> Site:
    """z goes through an op that no pattern has, or that changes nothing."""
    at = anchor(made, pattern.kind, i, "plain", False)
    tail = tail_of(made, pattern, i, at)
    detour = made.draw.pick(
        ["torch.cos({})", "F.hardsigmoid({})", "{}.clone()", "{}[None][0]", "{}.contiguous()",
         "F.leaky_relu({})", "{}.to(torch.float32)", "torch.cumsum({}, 0)"]
    ).format(at.z)  # fmt: skip
    where = made.draw.pick([Z, *_around_z(tail.expr)])
    expr = _replaced(tail.expr, where, Arg("detour"))
    tail.names["detour"] = Text(f"d{i}", reads_z=True)
    writer = Writer(made.draw, tail.names, f"t{i}_", tail.integers)
    result = writer.write(expr)
    lines = [*tail.lines, *at.lines, f"d{i} = {detour}", *writer.lines]
    return _site(pattern, "another op", lines, result, at=at)


def _around_z(e: Operand) -> list[Expr]:
    """Ops of z alone: sigmoid(z), but not z + z, of which there may be more to come."""
    if not isinstance(e, Expr):
        return []
    own = [e] if names_in(e) == {"z"} and len(e.args) == 1 else []
    return own + [x for a in e.args for x in _around_z(a)]


def _replaced(e: Operand, old: Operand, new: Operand) -> Operand:
    if e == old:
        return new
    if isinstance(e, Expr):
        return Expr(e.op, tuple(_replaced(a, old, new) for a in e.args), e.attrs)
    return e


def mode_changes(made: Made, pattern: Pattern, i: int) -> Site:
    at, tail, writer, result = _steps(made, pattern, i)
    modes = [f"torch.autocast({device_of(at)}, torch.bfloat16)", "torch.no_grad()"]
    mode = made.draw.pick(modes[: 2 if made.train else 1])
    where = made.draw.below(len(writer.lines))
    inside = [f"with {mode}:", *indented(writer.lines[where:])]
    lines = [*tail.lines, *at.lines, *writer.lines[:where], *inside]
    return _site(pattern, "mode changes", lines, result, at=at)


def result_grows(made: Made, pattern: Pattern, i: int) -> Site:
    return _with_operand(made, pattern, i, "result grows", lambda s: made.tensor((2, *s)))


def complex_operand(made: Made, pattern: Pattern, i: int) -> Site:
    if made.train or made.dtype in ("float16", "bfloat16"):
        raise NoSpelling("complex gradients are not compared")
    return _with_operand(
        made, pattern, i, "complex operand", lambda s: f"torch.randn({s}, dtype=torch.complex64)"
    )


def _with_operand(
    made: Made, pattern: Pattern, i: int, label: str, text: Callable[[tuple[int, ...]], str]
) -> Site:
    at = anchor(made, pattern.kind, i, "plain", False)
    tail = tail_of(made, pattern, i, at)
    used = [n for n in pattern.wildcards if n in names_in(tail.expr)]
    if not used:
        raise NoSpelling("no tensor operand")
    tail.names[used[0]] = Text(made.input(text(at.shape)))
    writer = Writer(made.draw, tail.names, f"t{i}_", tail.integers - {used[0]})
    result = writer.write(tail.expr)
    return _site(pattern, label, [*tail.lines, *at.lines, *writer.lines], result, at=at)


def integer_anchor(made: Made, pattern: Pattern, i: int) -> Site:
    if pattern.kind != "linear":
        raise NoSpelling("only products of integers are defined")
    x, w = made.input("torch.randint(-3, 4, (4, 8))"), made.member("torch.randint(-3, 4, (6, 8))")
    at = Anchored([f"z{i} = {x} @ {w}.t()"], f"z{i}", (4, 6), x)
    tail = tail_of(made, pattern, i, at)
    writer = Writer(made.draw, tail.names, f"t{i}_", tail.integers | {"z"})
    result = writer.write(tail.expr)
    return _site(pattern, "integer anchor", [*at.lines, *tail.lines, *writer.lines], result, at=at)


def under_vmap(made: Made, pattern: Pattern, i: int) -> Site:
    if pattern.kind != "linear" or made.train:
        raise NoSpelling("batch norm has no rule for vmap")
    at, _, writer, result = _steps(made, pattern, i, simple=True, plain=True)
    if not at.x.isidentifier():
        raise NoSpelling("x is no variable")
    body = [line.replace(at.x, "row") for line in [*at.lines, *writer.lines]]
    lines = [f"def body{i}(row):", *indented([*body, f"return {result}"])]
    lines.append(f"r{i} = torch.func.vmap(body{i})({at.x})")
    return _site(pattern, "under vmap", lines, f"r{i}", at=at)


def statistics_read(made: Made, pattern: Pattern, i: int) -> Site:
    """In eval nothing is wrong with it."""
    if pattern.kind != "conv2d_batchnorm":
        raise NoSpelling("no statistics")
    at, tail, writer, result = _steps(made, pattern, i, simple=True)
    seen = made.draw.pick(["running_mean.clone()", "running_var[:3] * 1.0"])
    look = f"u{i} = {at.norm}.{seen}"
    lines = [*tail.lines, *at.lines, look, *writer.lines]
    site = _site(pattern, "statistics read", lines, result, f"u{i}", at=at)
    site.fuses = not made.train
    return site


SPOILT: tuple[Spoil, ...] = (
    inner_value_needed,
    another_op,
    mode_changes,
    x_written,
    operand_written,
    result_grows,
    complex_operand,
    integer_anchor,
    under_vmap,
    statistics_read,
)
