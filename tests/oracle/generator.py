"""Random models from registered patterns: programs that must fuse, and near misses that must not.

A program is source text. It holds one to three sites; each is an anchor and the pattern's traced
epilogue in a random spelling (`writer`), with random operands, in a random region, or it is spoilt
in one way of `near_misses`, and then must not fuse. Every choice goes through one `Draw`, so a
seed is a program, and a shorter list of choices a smaller one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from near_misses import SPOILT
from parts import Made, Site, anchor, device_of, indented, may_write, tail_of
from writer import Draw, NoSpelling, Writer

from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.read.canonical import Expr, Operand, is_number

DTYPES = ["float64", "float64", "float32", "float32", "float32", "bfloat16", "float16"]
REGIONS = ["plain", "plain", "plain", "plain", "no_grad", "autocast", "checkpoint"]


@dataclass
class Program:
    """source: defines `Model` and `inputs()`. expected: pattern → sites that must fuse."""

    source: str
    expected: dict[str, int]
    train: bool
    labels: list[str]


# ---- sites that must fuse --------------------------------------------------------------------


def _good(made: Made, pattern: Pattern, i: int) -> Site:
    draw = made.draw
    region = draw.pick(REGIONS)
    if region == "checkpoint" and pattern.kind == "conv2d_batchnorm" and made.train:
        region = "plain"  # Dynamo does not trace a write to a buffer under checkpoint
    at = anchor(made, pattern.kind, i, region, simple=False)
    tail = tail_of(made, pattern, i, at)
    writer = Writer(draw, tail.names, f"t{i}_", tail.integers)
    writer.in_place = may_write(made, region)
    result = writer.write(_split_number(draw, tail.expr))
    before = draw.chance(2)
    lines = [*tail.lines, *at.lines] if before else [*at.lines, *tail.lines]
    lines = [*lines, *writer.lines]
    site = Site(pattern.name, region, lines, [result], True, norm=at.norm)
    if region == "no_grad":
        site.lines = ["with torch.no_grad():", *indented(lines)]
    elif region == "autocast":
        site.lines = [f"with torch.autocast({device_of(at)}, torch.bfloat16):", *indented(lines)]
    elif region == "checkpoint":
        body = [f"def body{i}():", *indented([*lines, f"return {result}"])]
        site.lines = [*body, f"r{i} = checkpoint(body{i}, use_reentrant=False)"]
        site.results = [f"r{i}"]
    else:
        site.apart = False
        made.pool.setdefault(("result", at.shape), []).append(result)
    return site


def _split_number(draw: Draw, e: Operand) -> Operand:
    """One number of a product or sum as two, which fx_fuser folds."""
    if not isinstance(e, Expr):
        return e
    args = [_split_number(draw, a) for a in e.args]
    numbers = [a for a in args if is_number(a)]
    if e.op in ("mul", "add") and len(numbers) == 1 and draw.chance(4):
        args.remove(numbers[0])
        half = float(numbers[0]) / 2 if e.op == "mul" else float(numbers[0]) - 2  # type: ignore[arg-type]
        args += [2.0, half]
    return Expr(e.op, tuple(args), e.attrs)


# ---- programs --------------------------------------------------------------------------------


def generate(draw: Draw, patterns: Sequence[Pattern], train: bool, dtype: str = "") -> Program:
    """A program, or NoSpelling where the choices lead to none. dtype: if it is not random."""
    made = Made(draw, train, dtype or draw.pick(DTYPES))
    sites = []
    for i in range(1 + draw.below(3)):
        pattern = draw.pick(patterns)
        spoil = draw.pick(SPOILT) if draw.chance(3) else None
        try:
            sites.append((spoil or _good)(made, pattern, i))
        except NoSpelling:
            if spoil is None:
                raise
            sites.append(_good(made, pattern, i))
    if train:  # two norms over the same statistics: neither may be fused
        shared = Counter(site.norm for site in sites if site.norm)
        for site in sites:
            site.fuses &= shared[site.norm] < 2
    expected = Counter(site.pattern for site in sites if site.fuses)
    labels = [f"{site.pattern}: {site.label}" for site in sites]
    lines = _merged(draw, sites)
    results = [_seen(draw, name) for site in sites for name in site.results]
    return Program(_source(made, lines, results), dict(expected), train, labels)


def _merged(draw: Draw, sites: Sequence[Site]) -> list[str]:
    """The statements of all sites; those of plain sites may be mixed, each in its own order."""
    lines: list[str] = []
    open_sites: list[list[str]] = []
    for site in sites:
        if site.apart or not open_sites or not draw.chance(2) or _reads(site, open_sites):
            for left in open_sites:
                lines += left
            open_sites = []
        if site.apart:
            lines += site.lines
        else:
            open_sites.append(list(site.lines))
            while len(open_sites) > 1 and all(open_sites):
                lines.append(draw.pick(open_sites).pop(0))
            open_sites = [left for left in open_sites if left]
    return [*lines, *(line for left in open_sites for line in left)]


def _reads(site: Site, open_sites: Sequence[Sequence[str]]) -> bool:
    """Does the site use a variable that an open one has yet to make?"""
    made = {line.split(" ")[0] for left in open_sites for line in left}
    return any(name in line for name in made for line in site.lines)


def _seen(draw: Draw, result: str) -> str:
    return str(draw.pick(["{}", "{}", "{}.float()", "{}.sum(-1)", "{}[..., :2]"])).format(result)


def _source(made: Made, lines: Sequence[str], results: Sequence[str]) -> str:
    arguments = ", ".join(f"x{n + 1}" for n in range(len(made.inputs)))
    body = "\n".join(indented(indented([*lines, f"return {', '.join(results)},"])))
    members = "\n".join(indented(indented(["super().__init__()", *made.members])))
    inputs = "\n".join(indented(indented([f"{value}," for value in made.inputs])))
    return f"""\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D = torch.{made.dtype}


class Model(nn.Module):
    def __init__(self):
{members}

    def forward(self, {arguments}):
{body}


def inputs():
    return (
{inputs}
    )
"""
