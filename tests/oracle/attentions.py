"""Random programs of attention, and what their descriptions compute beside eager mode.

    python tests/oracle/attentions.py --count 1000 [--seed S] [--show]

A program is text: q, k and v come in all layouts, heads of keys may be shared, and between the two
products stand steps of a tail, on views that merge, split and move dimensions. Many sizes are
equal, so that nothing can be told from a size. A third of the programs have a trap: something reads
or writes what lies between, or heads and keys are mistaken for each other.

Without a trap an attention of several keys must be found. With or without, what is found must
compute what eager mode does, values and gradients.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import seeds
import torch
import torch.nn.functional as F
from describing import assert_described, outcome, traced
from torch import Tensor

Atom = tuple[str, int]  # B, H, L, K or a part of one; its size
Dim = tuple[Atom, ...]
TRAPS = ("return p", "return s", "softmax dim", "transposed", "relu", "write", "view in place",
         "amax", "read s", "no grad", "into a bias")  # fmt: skip


@dataclass
class Program:
    lines: list[str] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    trap: str = ""
    is_sure: bool = True  # that it is found, which one key leaves open: a view may lose it
    autocast: bool = False

    @property
    def text(self) -> str:
        head = f"def attend({', '.join(self.inputs)}):"
        return "\n    ".join([head, *self.lines])

    def compiled(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"torch": torch, "F": F, "inf": float("inf")}
        exec(self.text, scope)
        made: Callable[..., Any] = scope["attend"]
        return made


class Writer:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        pick = self.draw.choice
        self.program = Program(trap=pick(TRAPS) if self.draw.random() < 0.33 else "")
        self.program.autocast = self.draw.random() < 0.25
        self.dtype = pick((torch.float32, torch.float32, torch.bfloat16))
        self.b, self.kv, self.group = pick((1, 2, 4)), pick((1, 2, 3)), pick((1, 1, 2))
        self.l, self.k = pick((1, 2, 3, 4)), pick((1, 2, 4, 5))
        self.d, self.e = pick((2, 4)), pick((2, 4, 4))
        if self.draw.random() < 0.3:
            self.k = self.d = self.e = self.l = 4
        self.heads = self.kv * self.group
        self.program.is_sure = not self.program.trap and self.k > 1
        self.dims: list[Dim] = []

    def write(self) -> Program:
        self.operand("q", self.heads, self.l, self.d)
        self.operand("k", self.kv, self.k, self.d)
        self.operand("v", self.kv, self.k, self.e)
        self.share_heads()
        self.scores()
        for _ in range(self.draw.randint(0, 4)):
            self.draw.choice((self.step, self.step, self.move))()
        self.softmax()
        for _ in range(self.draw.randint(0, 2)):
            self.move("p")
        self.values()
        self.end()
        return self.program

    # ---- parts ---------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self.program.lines.append(line)

    def input(self, *shape: int, dtype: torch.dtype | None = None) -> str:
        name = f"x{len(self.program.inputs)}"
        tensor = torch.randn(shape).to(dtype or self.dtype)
        self.program.inputs[name] = tensor.requires_grad_(self.draw.random() < 0.8)
        return name

    def operand(self, name: str, heads: int, rows: int, columns: int) -> None:
        """[B, heads, rows, columns], from memory of any order."""
        b = self.b
        layout = self.draw.randrange(6)
        if layout == 0:
            x = self.input(b, rows, heads * columns)
            how = f"{x}.view({b}, {rows}, {heads}, {columns}).transpose(1, 2)"
        elif layout == 1:
            x = self.input(b, rows, 3, heads, columns)
            how = f"{x}.permute(2, 0, 3, 1, 4).unbind(0)[1]"
        elif layout == 2:
            how = f"{self.input(b, heads, columns, rows)}.mT"
        elif layout == 3:
            how = f"{self.input(rows, b, heads, columns)}.permute(1, 2, 0, 3)"
        elif layout == 4:
            x = self.input(b, heads, rows, columns)
            how = f"({x} * {self.draw.choice(('0.5', '2'))}).contiguous()"
        else:
            how = f"{self.input(b * heads, rows, columns)}.reshape({b}, {heads}, {rows}, {columns})"
        self.say(f"{name} = {how}")

    def share_heads(self) -> None:
        if self.group == 1:
            return
        b, h, g = self.b, self.kv, self.group
        for name, size in (("k", self.d), ("v", self.e)):
            tail = f"{self.k}, {size}"
            self.say(
                f"{name} = "
                + self.draw.choice((
                    f"{name}[:, :, None].expand({b}, {h}, {g}, {tail})"
                    f".reshape({b}, {h * g}, {tail})",
                    f"{name}.repeat_interleave({g}, dim=1)",
                    f"torch.repeat_interleave({name}, {g}, 1)",
                ))
            )  # fmt: skip

    def scores(self) -> None:
        b, h, m, n, d = self.b, self.heads, self.l, self.k, self.d
        batch, heads, rows, keys = ("B", b), ("H", h), ("L", m), ("K", n)
        whole: list[Dim] = [(batch,), (heads,), (rows,), (keys,)]
        flat: list[Dim] = [(batch, heads), (rows,), (keys,)]
        how = self.draw.randrange(6)
        q3, k3 = f"q.reshape({b * h}, {m}, {d})", f"k.reshape({b * h}, {n}, {d})"
        if how == 0:
            self.dims = whole
            self.say("s = q @ k.transpose(-2, -1)")
        elif how == 1:
            self.dims = [whole[0], whole[1], whole[3], whole[2]]
            self.say("s = torch.matmul(k, q.mT)")
        elif how == 2:
            order = self.draw.sample("bhqk", 4)
            self.dims = [whole["bhqk".index(x)] for x in order]
            self.say(f"s = torch.einsum('bhqd,bhkd->{''.join(order)}', q, k)")
        elif how == 3:
            self.dims = flat
            self.say(f"s = torch.bmm({q3}, {k3}.transpose(1, 2))")
        elif how == 4:
            self.dims = flat
            x = self.input(b * h, self.draw.choice((1, m)), n)
            beta = self.draw.choice((0, 1, 0.5))
            # Of what is not read the gradient is zeros, not none: such a program is refused.
            self.program.inputs[x].requires_grad_(beta != 0)
            call = f"torch.baddbmm({x}, {q3}, {k3}.mT, beta={beta}, alpha=0.3)"
            self.say(f"s = {call}")
        else:
            self.dims = whole
            self.say("s = (q * 0.5) @ k.permute(0, 1, 3, 2)")

    def sizes(self, dims: Sequence[Dim]) -> list[int]:
        found = []
        for dim in dims:
            size = 1
            for _, n in dim:
                size *= n
            found.append(size)
        return found

    def spread(self) -> list[int]:
        """Sizes of what broadcasts to the scores."""
        sizes = [n if self.draw.random() < 0.6 else 1 for n in self.sizes(self.dims)]
        return sizes[self.draw.choice((0, 0, 1)) :]

    def step(self) -> None:
        wide = torch.float32 if self.draw.random() < 0.2 else None
        x = self.input(*self.spread(), dtype=wide)
        self.say(
            self.draw.choice((
                "s = s * 0.7", "s = s / 1.3", "s = 2 * s", "s = s - 1", "s = s.float()",
                f"s = s + {x}", f"s = {x} + s", f"s += {x}", f"s = s.mul({x})", f"s = s - {x}",
                f"s = s.masked_fill({x} > 0.8, -inf)", f"s = torch.where({x} > 1, -1e4, s)",
                f"s = s.masked_fill_({x} > 0.8, -1e4)",
                f"s = torch.where({x} < 1, s, torch.zeros(()))",
                "s = torch.tanh(s / 5) * 5", "s = s * torch.tensor(0.3)", "s = s.contiguous()",
            ))
        )  # fmt: skip

    def move(self, name: str = "s") -> None:
        """Merge, split or exchange dimensions."""
        how = self.draw.randrange(3)
        if how == 0:
            i, j = self.draw.sample(range(len(self.dims)), 2)
            self.dims[i], self.dims[j] = self.dims[j], self.dims[i]
            self.say(f"{name} = {name}.transpose({i}, {j})")
            return
        at = self.draw.randrange(len(self.dims))
        if how == 1 and len(self.dims[at]) > 1:
            self.dims[at : at + 1] = [(atom,) for atom in self.dims[at]]
        elif how == 1 and self.dims[at] and self.dims[at][0][1] == 4 and len(self.dims[at]) == 1:
            letter = self.dims[at][0][0]
            if letter not in "BH":
                return
            self.dims[at : at + 1] = [((f"{letter}0", 2),), ((f"{letter}1", 2),)]
        elif at + 1 < len(self.dims):
            merged = self.dims[at] + self.dims[at + 1]
            letters = [letter for letter, _ in merged]
            if letters != sorted(letters) or {*letters} & {"L", "K"}:
                return
            self.dims[at : at + 2] = [merged]
        self.say(f"{name} = {name}.reshape({self.sizes(self.dims)})")

    def place(self, letter: str) -> int:
        return next(i for i, dim in enumerate(self.dims) if dim[0][0] == letter)

    def softmax(self) -> None:
        trap, dim = self.program.trap, self.place("K")
        if trap == "softmax dim":
            dim = self.draw.randrange(len(self.dims))
        if trap == "relu":
            self.say("s = s.relu()")
        if trap == "amax":
            self.say(f"s = s - s.amax({dim}, keepdim=True)")
        if trap == "write":
            self.say(f"{self.draw.choice(('q', 'k', 'v', 's'))}.mul_(1.5)")
        if trap == "view in place":
            self.say("s[..., :1].add_(1)" if self.draw.random() < 0.5 else "s.view_as(s).mul_(0.5)")
        if trap == "no grad":
            self.say("with torch.no_grad(): s = s * 2")
        if trap == "into a bias":
            x = self.input(*self.sizes(self.dims), dtype=torch.float32)
            self.say(f"b = {x} * 2")
            self.say("c = b.view(-1)")
            self.say("s = b.add_(s)")
        summed = {"read s": "s.sum()", "into a bias": "c.sum()"}.get(trap, "0")
        self.say(f"r = {summed}")
        self.say(
            self.draw.choice((
                f"p = s.softmax({dim})", f"p = F.softmax(s, dim={dim - len(self.dims)})",
                f"p = torch.softmax(s, {dim}, dtype=torch.float32)",
                f"p = F.softmax(s, {dim}, dtype=torch.float32).to(v.dtype)",
            ))
        )  # fmt: skip
        if self.draw.random() < 0.3:
            self.say("p = F.dropout(p, 0.1, training=False)")

    def values(self) -> None:
        dims = self.dims
        if self.program.trap == "transposed":
            i, j = self.draw.sample(range(len(dims)), 2)
            self.say(f"p = p.transpose({i}, {j})")
        if not self.program.autocast:
            self.say("p = p.to(v.dtype)")
        letters = {"B": "b", "H": "h", "L": "q", "K": "k"}
        known = all(len(dim) == 1 and dim[0][0] in letters for dim in dims)
        if known and self.draw.random() < 0.5:
            labels = "".join(letters[dim[0][0]] for dim in dims)
            order = "".join(self.draw.sample("bhqd", 4))
            self.say(f"o = torch.einsum('{labels},bhkd->{order}', p, v)")
            return
        batch = sorted((dim for dim in dims if dim[0][0] not in "LK"), key=lambda dim: dim[0][0])
        order = [dims.index(dim) for dim in batch] + [self.place("L"), self.place("K")]
        sizes = self.sizes(batch)
        self.say(f"p = p.permute({order})")
        self.say(f"w = v.reshape({[*sizes, self.k, self.e]})")
        self.say(self.draw.choice(("o = p @ w", "o = torch.matmul(p, w)", "o = (w.mT @ p.mT)")))

    def end(self) -> None:
        self.say(
            self.draw.choice((
                "o = o.contiguous()", "o = o.transpose(0, 1)", "o = o * 2",
                "o = o.transpose(-1, -2).flatten(-2)", "pass",
                "o = o.transpose(1, 2).contiguous().flatten(-2)",
            ))
        )  # fmt: skip
        last = {"return p": ", p", "return s": ", s"}.get(self.program.trap, "")
        self.say(f"return o + r{last}")


def generate(seed: int) -> Program:
    torch.manual_seed(seed)
    return Writer(seed).write()


def attempt(seed: int, device: str = "cpu", seen: Counter[str] | None = None) -> str:
    """What is wrong with a program; empty if nothing is. seen: counts what was found."""
    program = generate(seed)
    run, given = program.compiled(), [*program.inputs.values()]
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            run(*(t.detach().clone().requires_grad_(t.requires_grad) for t in given))
    except (RuntimeError, IndexError):
        return "" if program.trap else "it does not run"
    with_trap = f" with {program.trap}" if program.trap else ""
    one = traced(run, *given, autocast=program.autocast)
    if seen is not None:
        seen[("found" if one.sites else "refused") + with_trap] += 1
    if program.is_sure and len(one.sites) != 1:
        return f"it is refused: {one.reasons}"
    if one.sites:
        try:
            outcome(one, False, program.autocast)
        except RuntimeError:  # a write to what backward needs
            return "" if program.trap else "it has no gradient"
        try:
            assert_described(one, program.autocast)
        except AssertionError as error:
            return f"it computes something else: {str(error)[:200]}"
    return ""


fuzz = functools.partial(seeds.fuzz, attempt)


def shown(seed: int, device: str) -> str:
    return generate(seed).text


if __name__ == "__main__":
    sys.exit(seeds.main(__doc__, attempt, shown))
