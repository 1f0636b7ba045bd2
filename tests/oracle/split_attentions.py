"""Random fp32 attentions, before and after `fx_fuser.passes.attention_split`.

    python tests/oracle/split_attentions.py --count 1500 [--seed S] [--jobs 2] [--device cuda]

A program has one to three calls of `F.scaled_dot_product_attention`, some of which read what others
made. Operands are contiguous, rows first, parts of one projection, of rows further apart, off 16
bytes, spread over samples or over heads, or repeated for several heads of queries. Lengths and
sizes of heads are of all kinds, values too: large logits, a key that dominates, equal keys, zeros.
Forward and backward are traced together, as Inductor's joint graph is.

On a GPU the kernels run, at every size. Strides and dtypes must be as before, and errors against
float64 within the contract: at most 1.5 times that of the graph before, or 4e-7; of fewer than 4096
numbers 2 times, or 6e-7, since few sums prove little. A gradient that is 0 but for rounding, as
that of a single key's scores, is judged by the largest result or gradient.

On a CPU the rewritten graph runs in torch, in float64, and only what is replaced, and by what, is
judged: to 1e-9, or where a gradient cancels to 1e-13 of the largest result or gradient, some 450
roundings. Strides are not compared: torch's attention for CPUs has others.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import seeds
import torch
import torch.nn.functional as F
from attention_graphs import AsOnCuda
from odd_gemms import steps_that_count
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.ops import run
from fx_fuser.ops.attention_split import BACKWARD, FORWARD, NO_DROPOUT
from fx_fuser.passes import attention_split

LENGTHS = (1, 2, 7, 16, 31, 64, 65, 100, 128, 129, 197, 257, 300)
SIZES = (
    8,
    16,
    24,
    40,
    64,
    64,
    72,
    96,
    128,
    128,
    20,
    136,
)  # of a head; no kernel takes the last two
KINDS = ("contiguous", "rows first", "rows first", "packed", "apart", "off", "samples", "heads")
VALUES = ("random", "random", "random", "large", "one key", "equal", "zeros")


@dataclass
class Call:
    """One attention. operands: indices of inputs; of queries, before: a call whose result they
    are, instead."""

    operands: list[int]
    before: int | None
    repeats: int
    causal: bool
    scale: float | None


@dataclass
class Program:
    inputs: list[Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    rows_first: bool = False

    def joint(self, *inputs: Tensor) -> list[Tensor]:
        """Results and gradients; of each result's sum with factors that depend on the place."""
        made: list[Tensor] = []
        for one in self.calls:
            q, k, v = (inputs[i] for i in one.operands)
            if one.before is not None:
                q = made[one.before]
            if one.repeats > 1:
                k, v = (t.repeat_interleave(one.repeats, 1) for t in (k, v))
            made.append(
                F.scaled_dot_product_attention(q, k, v, is_causal=one.causal, scale=one.scale)
            )
        leaves = [t for t in inputs if t.requires_grad]
        grads: Sequence[Tensor | None] = []
        if any(y.requires_grad for y in made):  # a leaf may be read by nothing
            total = sum((_factors(y) * y).sum() for y in made)
            grads = torch.autograd.grad(total, leaves, allow_unused=True)  # type: ignore[arg-type]
        if self.rows_first:
            made = [y.transpose(1, 2).flatten(2) for y in made]
        return [*made, *(grad for grad in grads if grad is not None)]


def _factors(value: Tensor) -> Tensor:
    """That depend on the place, and that fp32 holds exactly."""
    count = torch.arange(value.numel(), device=value.device) * 37 % 61 - 30
    return (count / 32).to(value.dtype).view(value.shape)


class Writer:
    def __init__(self, seed: int, device: str) -> None:
        self.draw = random.Random(seed)
        self.device = device
        self.program = Program(rows_first=self.draw.random() < 0.5)
        self.trains = self.draw.random() < 0.7

    def write(self) -> Program:
        pick = self.draw.choice
        self.b, self.h, self.d = pick((1, 1, 2, 3)), pick((1, 2, 3, 4)), pick(SIZES)
        rows = pick(LENGTHS)
        for i in range(pick((1, 1, 2, 3))):
            before = i - 1 if i and self.draw.random() < 0.7 else None
            rows = rows if before is not None else pick(LENGTHS)
            keys = rows if self.draw.random() < 0.6 else pick(LENGTHS)
            repeats = self.h if self.h in (2, 4) and self.draw.random() < 0.2 else 1
            kind = pick(KINDS)
            values = pick(VALUES)
            operands = [self.operand(kind, self.h, rows, "random")]
            operands += [self.operand(kind, self.h // repeats, keys, values) for _ in "kv"]
            causal = self.draw.random() < 0.5
            scale = pick((None, None, 0.3 * self.d**-0.5, 2 * self.d**-0.5))
            self.program.calls.append(Call(operands, before, repeats, causal, scale))
        return self.program

    def operand(self, kind: str, heads: int, rows: int, values: str) -> int:
        b, d = self.b, self.d
        if kind == "contiguous":
            found = self.memory(b, heads, rows, d)
        elif kind == "packed":
            found = self.memory(b, rows, 3, heads, d)[:, :, 1].transpose(1, 2)
        elif kind == "apart":
            found = self.memory(b, heads, rows, d + self.draw.choice((1, 4, 8)))[..., :d]
        elif kind == "off":
            found = self.memory(b * heads * rows * d + 2)[self.draw.choice((1, 2)) :]
            found = found[: b * heads * rows * d].view(b, heads, rows, d)
        elif kind == "samples":
            found = self.memory(1, heads, rows, d).expand(b, -1, -1, -1)
        elif kind == "heads":
            found = self.memory(b, 1, rows, d).expand(-1, heads, -1, -1)
        else:
            found = self.memory(b, rows, heads, d).transpose(1, 2)
        self.fill(found, values)
        is_spread = kind in ("samples", "heads")
        found.requires_grad_(self.trains and not is_spread and self.draw.random() < 0.8)
        self.program.inputs.append(found)
        return len(self.program.inputs) - 1

    def memory(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device)

    def fill(self, tensor: Tensor, values: str) -> None:
        held = tensor[
            : 1 if tensor.stride(0) == 0 else None, : 1 if tensor.stride(1) == 0 else None
        ]
        if values == "large":
            held *= 6
        elif values == "one key":
            held[:, :, -1] *= 20
        elif values == "equal":
            held.copy_(held[:, :, :1].clone().expand_as(held))
        elif values == "zeros":
            held[:, :, ::2] = 0


def generate(seed: int, device: str = "cpu") -> Program:
    torch.manual_seed(seed)
    return Writer(seed, device).write()


# ---- is it right? --------------------------------------------------------------------------------


@contextmanager
def _forced() -> Iterator[None]:
    """Kernels run wherever they take an attention."""
    site = attention_split.Site
    with (
        patch.object(site, "is_small", lambda _: False),
        patch.object(site, "gains", lambda _: True),
    ):
        yield


def _arguments(q: Tensor, causal: bool, scale: float | None) -> tuple[Any, ...]:
    return "", q.shape[-1] ** -0.5 if scale is None else scale, causal


def _left(
    q: Tensor, k: Tensor, v: Tensor, bias: None, save: bool, dropout: float, causal: bool,
    scale: float | None = None,
) -> list[Tensor]:  # fmt: skip
    """In place of torch's operation, which no CPU has."""
    given = q, k, v, *_arguments(q, causal, scale), True, *NO_DROPOUT
    return [*run.IN_TORCH(*run.arguments(FORWARD, given)), *torch.zeros(2, dtype=torch.int64)]


def _left_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, mask: Sequence[bool], causal: bool,
    scale: float | None = None,
) -> list[Tensor]:  # fmt: skip
    given = d_out, q, k, v, out, lse, *_arguments(q, causal, scale), *NO_DROPOUT
    made: list[Tensor] = run.IN_TORCH(*run.arguments(BACKWARD, given))
    return made


_ON_CPU = {attention_split.ATTENTION: _left, attention_split.ATTENTION_BACKWARD: _left_backward}


def attempt(seed: int, device: str = "cpu", replaced: Counter[str] | None = None) -> str:
    """What is wrong with a program. replaced: counts the attentions, by operation."""
    program = generate(seed, device)
    before = make_fx(program.joint, tracing_mode="fake")(*program.inputs)
    after = copy.deepcopy(before)
    if device == "cpu":
        AsOnCuda()(after.graph)
    counters[attention_split.COUNTERS].clear()
    with _forced():
        attention_split.AttentionSplit(strict=True, on_cpu=device == "cpu")(after.graph)
    if replaced is not None:
        replaced.update(counters[attention_split.COUNTERS])
    if device == "cpu":
        for node in after.graph.nodes:
            node.target = _ON_CPU.get(node.target, node.target)
    after.graph.lint()
    after.recompile()
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in program.inputs]
    given = doubles if device == "cpu" else program.inputs
    mine, theirs = after(*given), before(*given)
    return "; ".join(_faults(program, mine, theirs, program.joint(*doubles)))


def _norm(value: Tensor) -> float:
    return float(value.detach().norm())


def _faults(
    program: Program, mine: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> list[str]:
    faults = []
    count = len(program.calls)
    largest = max(map(_norm, exact))
    for i, (a, b, e) in enumerate(zip(mine, theirs, exact, strict=True)):
        is_gradient = i >= count
        forms = [(t.shape, t.dtype, steps_that_count(t, is_gradient)) for t in (a, b)]
        if forms[0] != forms[1] if a.is_cuda else a.shape != b.shape:
            faults.append(f"{i}: {forms[0]} for {forms[1]}")
            continue
        error, others, norm = (
            float(t.detach().norm()) for t in (a.double() - e, b.double() - e, e)
        )
        if a.is_cuda:
            if is_gradient and norm < 1e-9 * largest:
                norm = largest
            times, least = (1.5, 4e-7) if e.numel() >= 4096 else (2.0, 6e-7)
            bound = max(times * others, least * norm)
        else:
            bound = max(1e-9 * norm, 1e-13 * largest)
        if not error <= bound:
            faults.append(f"{i}: error {error:.3g}, bound {bound:.3g}, of {norm:.3g}")
    return faults


fuzz = functools.partial(seeds.fuzz, attempt)


def shown(seed: int, device: str) -> str:
    """The graph before the pass."""
    program = generate(seed, device)
    return str(make_fx(program.joint, tracing_mode="fake")(*program.inputs).code)


if __name__ == "__main__":
    sys.exit(seeds.main(__doc__, attempt, shown, 1500))
