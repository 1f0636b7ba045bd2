"""Random heads with their losses, and what they compute fused beside eager mode.

    python tests/oracle/generated_heads.py --count 1000 [--seed S] [--jobs 2] [--device cuda]

A program is text: a Linear, then in any order casts, views, slices of rows, scales and a soft cap,
then one of the losses, with all their options; logits may be returned, at any step, or read for an
accuracy, and the loss may be in a checkpoint or under another autocast. A third of the programs
have a trap: something else reads or writes what lies between, or a step is not one of a head's.
A quarter multiply in fp32 what they cast up from 16 bits; returned logits are a trap of these.
Half are spelled otherwise where they can be: in pieces, scaled in place, with the classes second.

Without a trap the head must be one op with its loss. With or without, values and gradients are
held to the contract against float64.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("", "passes")]
    sys.path.insert(0, str(Path(__file__).parents[2]))

import seeds
import torch
import torch.nn.functional as F
from heads import by_eager, found, larger, widened
from helpers import Program, compiled, run
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fx_fuser.ops import head_wide
from fx_fuser.verify.accuracy import Observed, compare, errors_of

TRAPS = ("penalty", "class weights", "write", "operand", "tensor scale", "tanh twice", "softmax",
         "no grad", "smoothed away", "other rows", "nothing")  # fmt: skip
LOSSES = ("cross entropy", "cross entropy", "module", "nll", "gather", "by hand", "z-loss")
PEERS = 16
LINEARS = ("m.head(x)", "m.biased(x)", "F.linear(x, m.head.weight)", "x @ m.head.weight.T")
WIDE_LINEARS = (
    "F.linear(wide(x), wide(m.head.weight))",
    "F.linear(wide(x), wide(m.biased.weight), wide(m.biased.bias))",
    "wide(x) @ wide(m.head.weight).t()",
    "torch.matmul(wide(x), wide(m.head.weight.T)); aside = wide(x).square().mean()",
    "(h := wide(x)) @ wide(m.head.weight).T; aside = h.square().mean()",
    "F.linear(wide(x), (w := wide(m.head.weight))); aside = w.square().mean()",
)


@dataclass
class Head:
    """lines: of `loss(m, x, y)`. casts: is it under autocast, or are the weights of 16 bits?"""

    seed: int
    lines: list[str] = field(default_factory=list)
    trap: str = ""
    dtype: torch.dtype = torch.bfloat16
    casts: bool = True
    shape: tuple[int, ...] = ()
    width: int = 16
    columns: int = 51
    wide: bool = False  # in fp32, of operands that are cast up

    @property
    def text(self) -> str:
        return "\n    ".join(["def loss(m, x, y):", *self.lines]) + "\n"

    def compiled(self, device: str) -> Callable[..., Any]:
        scope: dict[str, Any] = {
            "torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "device": device,
            "kind": self.dtype, "wide": widened,
        }  # fmt: skip
        exec(self.text, scope)
        made: Callable[..., Any] = scope["loss"]
        return made


class Writer:
    def __init__(self, seed: int, device: str) -> None:
        self.draw = random.Random(seed)
        pick = self.draw.choice
        trap = pick(TRAPS) if self.draw.random() < 0.33 else ""
        self.made = Head(seed, trap=trap, dtype=pick((torch.bfloat16, torch.float16)))
        self.made.casts = self.draw.random() < 0.6
        rank = pick((1, 2, 2, 3))
        self.shape = [self.draw.randint(2, 6) for _ in range(rank)]
        if self.draw.random() < 0.1:
            self.shape[0] = 150  # of two pieces, where these have few rows
        self.made.shape = tuple(self.shape)
        self.made.width = pick((8, 16, 33))
        self.made.columns = pick((51, 64, 129)) if device == "cpu" else pick((8192, 50257))
        self.loss = "z-loss" if trap == "other rows" else pick(LOSSES)
        # A log-sum-exp and what is returned want all rows.
        self.keeps_rows = self.loss in ("by hand", "z-loss") or self.draw.random() < 0.5
        self.names = ["z"]  # of logits, at each step
        self.scaled = False
        self.made.wide = random.Random(f"wide {seed}").random() < 0.25
        self.spelling = random.Random(f"spelling {seed}")
        self.respells = self.spelling.random() < 0.5
        self.in_place = self.respells and not trap and self.spelling.random() < 0.3
        if self.made.wide:
            self.made.casts, self.made.width = False, self.made.width // 8 * 8

    def write(self) -> Head:
        add = self.made.lines.append
        trap = self.made.trap
        if trap == "operand":
            add("x = x * 1.0")
        around, inside = self.regions()
        add(f"with torch.autocast(device, kind, enabled={around}):")
        body: list[str] = []
        linear = self.draw.choice(WIDE_LINEARS if self.made.wide else LINEARS)
        no_grad = trap == "no grad"
        body += [f"with torch.set_grad_enabled({not no_grad}):", f"    z = {linear}"]
        for _ in range(self.draw.randint(0, 4)):
            body.append(self.step())
        if trap in ("tensor scale", "tanh twice", "softmax"):
            spoilt = {"tensor scale": "{} * m.scale", "tanh twice": "{}.tanh().tanh()",
                      "softmax": "{}.softmax(-1)"}[trap]  # fmt: skip
            body.append(f"t = {spoilt.format(self.names[-1])}")
            self.names.append("t")
        if trap == "write":
            body.append(f"{self.names[-1]}.mul_(0.5)")
        if trap == "operand":
            body += ["with torch.no_grad():", "    x.mul_(0.5)"]
        if self.in_place:
            how = self.spelling.choice(("{}.div_(1.7)", "{0} /= 0.8", "{}.mul_(2)", "{0} *= -0.5"))
            body.append(how.format(self.names[-1]))
        elsewhere = inside != around
        lines = self.losses()
        if elsewhere:
            body += [f"with torch.autocast(device, kind, enabled={inside}):"]
            lines = ["    " + line for line in lines]
        body += lines
        if trap == "penalty":
            body.append(f"total = total + {self.draw.choice(self.names)}.float().mean()")
        returned = self.returned()
        if "aside" in linear:
            body.append("total = total + 0.1 * aside")
        if self.made.wide:
            body = [_without_casts(line) for line in body]
            self.made.trap = trap or "returned" * bool(returned)
        body.append(f"return total{returned}")
        if not returned and not trap and self.draw.random() < 0.1:
            add("    def inner(x, y):")
            self.made.lines += ["        " + line for line in body]
            add("    return checkpoint(inner, x, y, use_reentrant=False)")
        else:
            self.made.lines += ["    " + line for line in body]
        return self.made

    def regions(self) -> tuple[bool, bool]:
        """Of the Linear and of the loss: autocast. Weights of 16 bits need none."""
        around = self.made.casts
        return around, not around if self.draw.random() < 0.2 else around

    def step(self) -> str:
        now, new = self.names[-1], f"z{len(self.names)}"
        kinds = ["float", "scale", "scale", "cap", "join", "split", "contiguous"]
        kinds += ["slice"] * 3 * (not self.keeps_rows)
        kind, code = self.draw.choice(kinds), now
        number = self.draw.choice((0.5, 2.0, 1.7, -0.8, 3))
        moved = ""
        if kind == "float":
            code = self.draw.choice(
                (f"{now}.float()", f"{now}.to(torch.float32)", f"{now}.type(torch.float32)")
            )
        elif kind == "scale":
            code = self.draw.choice(
                (f"{now} / {number}", f"{number} * {now}", f"{now}.mul({number})",
                 f"torch.div({now}, {number})", f"-{now}")
            )  # fmt: skip
        elif kind == "cap" and not self.scaled:
            cap, self.scaled = self.draw.choice((3.0, 30)), True
            code = f"torch.tanh({now} / {cap}) * {cap}"
        elif kind == "contiguous":
            code = f"{now}.contiguous()"
        elif kind == "join" and len(self.shape) > 1:
            self.shape[:2] = [self.shape[0] * self.shape[1]]
            code, moved = f"{now}.flatten(0, 1)", "y = y.flatten(0, 1)"
        elif kind == "split" and self.shape[0] % 2 == 0:
            self.shape[:1] = [2, self.shape[0] // 2]
            code = f"{now}.reshape(2, -1, *{now}.shape[1:])"
            moved = "y = y.reshape(2, -1, *y.shape[1:])"
        elif kind == "slice" and self.shape[-1] > 1:
            self.shape[-1] -= 1
            code, moved = f"{now}[..., :-1, :]", "y = y[..., 1:]"
        self.names.append(new)
        return f"{new} = {code}" + (f"; {moved}" if moved else "")

    def losses(self) -> list[str]:
        now, columns = self.names[-1], self.made.columns
        trap, draw = self.made.trap, self.draw
        flat = f"{now}.reshape(-1, {columns})" + draw.choice(("", ".float()"))
        reduction = draw.choice(("mean", "mean", "sum", "none"))
        smoothing = draw.choice((0.0, 0.0, 0.1, 0.45))
        smoothing = 1.0 if trap == "smoothed away" else smoothing
        ignored = draw.choice((-100, -100, 0))
        labels = "y.reshape(-1)" if ignored else "y.clamp(min=0).flatten()"
        how = f"ignore_index={ignored}, reduction={reduction!r}"
        smooth = f", label_smoothing={smoothing}" if smoothing else ""
        weight = ", weight=m.weights.to(v.dtype)" if trap == "class weights" else ""
        end = {"none": ".square().mean()", "sum": " / 9", "mean": ""}[reduction]
        rows = "y.clamp(min=0)"
        if self.loss == "module":
            module = f"nn.CrossEntropyLoss({how}{smooth}{weight.replace('.to(', '.float().to(')})"
            return [f"v = {flat}", f"total = {module}(v, {labels}){end}"]
        if self.respells and self.loss == "cross entropy" and len(self.shape) > 1:
            moved = self.spelling.choice(("movedim(-1, 1)", "moveaxis(-1, 1)"))
            if len(self.shape) == 2:
                moved = self.spelling.choice(("transpose(1, 2)", "permute(0, 2, 1)", moved))
            labels = "y" if ignored else "y.clamp(min=0)"
            lines = [f"v = {now}{draw.choice(('', '.float()'))}"]
            return [
                *lines,
                f"total = F.cross_entropy(v.{moved}, {labels}, {how}{smooth}{weight}){end}",
            ]
        if self.loss == "nll":
            likely = draw.choice((f"F.log_softmax({flat}, -1)", f"{flat}.log_softmax(1)"))
            return [f"total = F.nll_loss({likely}, {labels}, {how}){end}"]
        if self.loss == "gather":
            cast = draw.choice(("", ".float()"))
            total = "total = (likely.exp() + likely).mean()"
            if self.respells and self.spelling.random() < 0.3:
                index = "y.clamp(min=-3).flatten()"  # some count from the end
                order = "torch.arange(y.numel(), device=y.device)"
                return [f"likely = {flat}{cast}.log_softmax(-1)[{order}, {index}]", total]
            if self.respells:
                pieces = f"{{}}{cast}.log_softmax(-1).gather(-1, {{}}[..., None]).squeeze(-1)"
                return [*self.pieces("likely", pieces, now, rows), total]
            likely = f"{now}{cast}.log_softmax(-1)"
            return [f"likely = {likely}.gather(-1, {rows}[..., None]).squeeze(-1)", total]
        if self.loss == "by hand":
            lse = f"lse = v.logsumexp({draw.choice((-1, 'dim=-1'))})"
            picked = f"picked = v.gather(-1, {rows}.unsqueeze(-1)).squeeze(-1)"
            total = f"total = (lse - picked).{draw.choice(('mean', 'sum'))}() / 3"
            v = f"v = {now}{draw.choice(('', '.float()'))}"
            if self.respells:
                parts = self.pieces("lse", "{}.logsumexp(-1)", "v")
                both = [*parts, picked] if self.spelling.random() < 0.5 else [picked, *parts]
                return [v, *both, total]
            return [v, lse, picked, total]
        lines = [f"v = {flat}"]
        loss = f"total = F.cross_entropy(v, {labels}, {how}{smooth}{weight}){end}"
        if self.loss != "z-loss":
            return [*lines, loss]
        of = "v[1:]" if trap == "other rows" else "v"
        lse = f"lse = torch.logsumexp({of}, -1, keepdim=True)"
        both = [lse, loss] if draw.random() < 0.5 else [loss, lse]
        return [*lines, *both, "total = total + 0.01 * lse.square().mean()"]

    def pieces(self, name: str, piece: str, *of: str) -> list[str]:
        """Of tensors of rows, what a piece says, put together."""
        way = self.spelling.choice(("rows", "split", "chunk", "written", "unbind"))
        way = "split" if len(self.shape) == 1 and way in ("rows", "unbind") else way
        names = ["a", "b"][: len(of)]
        size = self.spelling.randint(1, 3)
        lines = [f"of_{one} = {source}" for one, source in zip(names, of)]
        sources = [f"of_{one}" for one in names]
        if way == "written":
            count, parts = self.shape[0], [f"{source}[{{0}}:{{1}}]" for source in sources]
            lines.append(f"{name} = of_a.new_zeros(of_a.shape[:-1])")
            for first in range(0, count, size):
                ends = first, min(first + size, count)
                right = piece.format(*(part.format(*ends) for part in parts))
                lines.append(f"{name}[{ends[0]}:{ends[1]}] = {right}")
            return lines
        suffix = {"rows": "", "split": f".split({size})", "chunk": f".chunk({size})",
                  "unbind": ".unbind(0)"}[way]  # fmt: skip
        joined = "stack" if way in ("rows", "unbind") else "cat"
        each = ", ".join(f"{source}{suffix}" for source in sources)
        loop = f"for {', '.join(names)} in " + (f"zip({each})" if len(of) > 1 else each)
        return [*lines, f"{name} = torch.{joined}([{piece.format(*names)} {loop}])"]

    def returned(self) -> str:
        if self.in_place or self.draw.random() < 0.6:
            return ""
        # Some rows of what is returned are refused.
        if self.made.trap != "nothing" and len(self.names) > 1 and not self.keeps_rows:
            return ""
        name = self.draw.choice(self.names)
        if self.draw.random() < 0.3:
            return f", ({name}.argmax(-1) == 1).float().mean()"
        return f", {name}"


def _without_casts(line: str) -> str:
    """The logits are in fp32 already, and in float64 where exact ones are made."""
    for cast in (".float()", ".to(torch.float32)", ".type(torch.float32)"):
        line = line.replace(cast, "")
    return line


def generate(seed: int, device: str = "cpu") -> Head:
    return Writer(seed, device).write()


def model_of(program: Head, device: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(program.seed)
    width, columns = program.width, program.columns
    made = Program(
        program.compiled(device),
        head=nn.Linear(width, columns, bias=False),
        biased=nn.Linear(width, columns),
        scale=nn.Parameter(torch.tensor(1.5)),
        weights=torch.rand(columns) + 0.5,
    ).to(device)
    dtype = torch.float32 if program.casts else program.dtype
    x = torch.randn(*program.shape, width).to(device, dtype).requires_grad_()
    y = torch.randint(0, columns, program.shape)
    y[torch.rand(program.shape) < 0.2] = -100
    y.view(-1)[:2] = torch.tensor([0, columns - 1])
    return made.to(dtype), [x, y.to(device)]


def attempt(seed: int, device: str = "cpu", seen: Counter[str] | None = None) -> str:
    """What is wrong with a program; nothing if it is right."""
    program = generate(seed, device)
    counters.clear()
    torch._dynamo.reset()
    model, inputs = model_of(program, device)
    try:
        own, truth, outputs = by_eager(model, inputs)
    except RuntimeError:  # an operand that backward needs is written
        if program.trap not in ("write", "operand"):
            raise
        if seen is not None:
            seen.update(illegal=True)
        return ""
    options: dict[str, Any] = {"auto": True, "inner": "aot_eager"}
    if device != "cpu":
        options |= {"cpu_ops": False, "plan": "always"}
    small = {"height_of": lambda count, most: max(min(count, 13), 1)} if device == "cpu" else {}
    with mock.patch.multiple(head_wide, **small) if small else contextlib.nullcontext():
        ours, _ = run(model, inputs, True, lambda m: compiled(m, **options), narrow=outputs)
    heads = found()
    if seen is not None:
        wide = program.wide and not program.trap
        seen.update(found=heads, trapped=bool(program.trap), wide=wide)
    if not program.trap and heads != 1:
        return f"{heads} heads"
    mine = Observed(ours.outputs, ours.grads)
    if not compare(mine, own, truth):
        return ""
    factors = [1 + i / 64 for i in range(1, PEERS + 1)]
    others = [by_eager(model, larger(inputs, factor)) for factor in factors]
    # Rows that are alike round alike, eager's by luck to nothing: not where the loss is larger.
    others += [by_eager(model, inputs, _times(factor)) for factor in factors]
    return "; ".join(compare(mine, own, truth, peers=[errors_of(*one[:2]) for one in others]))


def _times(factor: float) -> Callable[[Any], Any]:
    """The loss, which is the first result, times the factor."""
    return lambda made: (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor


fuzz = functools.partial(seeds.fuzz, attempt)


def shown(seed: int, device: str) -> str:
    program = generate(seed, device)
    return f"# {program.trap or 'no trap'}\n{program.text}"


if __name__ == "__main__":
    sys.exit(seeds.main(__doc__, attempt, shown))
