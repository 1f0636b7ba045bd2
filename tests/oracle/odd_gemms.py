"""Random graphs of 16-bit gemms with odd sizes, before and after `fx_fuser.passes.padding`.

    python tests/oracle/odd_gemms.py --count 10000 [--seed S] [--jobs 2] [--device cuda] [--show]

A program is a tree of gemms over operands with all kinds of strides (transposed, sliced, expanded,
off 16 bytes), with pointwise operations, views and softmaxes between them; parts have several
readers. Forward and backward are traced together, as Inductor's joint graph is. On a CPU each gemm
that may be padded is padded, and the rest runs on the reference of the unaligned kernel. On a GPU
the kernel runs wherever it takes a gemm, even if it is slower.

Strides and dtypes must be as before, and the error against float64 at most twice that of the graph
before, or one rounding of the result. Where a relu's argument is 0 but for rounding, its derivative
is 0 or 1: float64 then takes the side that the program took, which must be within rounding.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import seeds
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.passes import padding

SIZES = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 27, 33, 40, 49, 65)
BATCHES = (1, 2, 3, 5)
DTYPES = (torch.bfloat16, torch.float16)
Shape = tuple[int, ...]
_STEP = torch.ops.aten.threshold_backward.default
_SAME = torch.ops.aten.alias.default, torch.ops.aten.detach.default  # of a saved result, by torch


# ---- programs ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """compute: of the arguments' values. An input has no arguments, and an index."""

    shape: Shape
    compute: Callable[..., Tensor]
    args: tuple[Value, ...] = ()
    index: int = -1


@dataclass
class Program:
    dtype: torch.dtype
    inputs: list[Tensor] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        known: dict[int, Tensor] = {}

        def of(value: Value) -> Tensor:
            if value.index >= 0:
                return inputs[value.index]
            if id(value) not in known:
                known[id(value)] = value.compute(*map(of, value.args))
            return known[id(value)]

        return [of(result) for result in self.results]

    def joint(self, *inputs: Tensor) -> list[Tensor]:
        """Results and gradients; of each result's sum with factors that depend on the place."""
        found = self.run(inputs)
        if not any(y.requires_grad for y in found):
            return found
        leaves = [v for v in inputs if v.requires_grad]
        total = sum((_factors(y) * y.to(_wide(y))).sum() for y in found if y.requires_grad)
        grads = torch.autograd.grad(total, leaves, allow_unused=True)  # type: ignore[arg-type]
        return [*found, *(grad for grad in grads if grad is not None)]


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _factors(value: Tensor) -> Tensor:
    count = torch.arange(value.numel(), device=value.device, dtype=_wide(value))
    return (count.view(value.shape) * 0.7).cos()


class Writer:
    """Values of a wanted shape, from a seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.draw = random.Random(seed)
        self.device = device
        self.program = Program(self.draw.choice(DTYPES))
        self.made: dict[Shape, list[Value]] = {}

    def write(self) -> Program:
        for _ in range(self.draw.choice((1, 1, 2))):
            batch = self.draw.choice(((), (), (self.draw.choice(BATCHES),)))
            m, n = self.size(), self.size()
            result = self.gemm((*batch, m, n), 3)
            ends = (lambda y: y, lambda y: y.mT, lambda y: y.relu(), lambda y: y[..., 1:])
            compute = self.draw.choice(ends if n > 1 else ends[:3])
            self.program.results.append(Value(result.shape, compute, (result,)))
        return self.program

    def size(self) -> int:
        return self.draw.choice(SIZES)

    def value(self, shape: Shape, depth: int) -> Value:
        known = self.made.get(shape, [])
        if known and self.draw.random() < 0.35:
            return self.draw.choice(known)
        made = self.leaf(shape)
        if depth and self.draw.random() < 0.7:
            ways = (self.gemm, self.gemm, self.pointwise, self.pointwise, self.turned, self.cut,
                    self.joined)  # fmt: skip
            made = self.draw.choice(ways)(shape, depth - 1)
        self.made.setdefault(shape, []).append(made)
        return made

    def leaf(self, shape: Shape) -> Value:
        """Contiguous, transposed, of rows further apart, from any element on, or spread."""
        ahead, apart = self.draw.choice((0, 0, 1, 3, 8)), self.draw.choice((0, 0, 0, 1, 8))
        *batch, m, n = shape
        if self.draw.random() < 0.3:
            m, n = n, m
        spread = bool(batch) and self.draw.random() < 0.2
        held = [1 if spread else b for b in batch]
        count = max(1, *held) if held else 1
        memory = torch.randn(ahead + count * m * (n + apart) + 1, device=self.device)
        memory = (memory * max(n, 2) ** -0.5).to(self.program.dtype)
        steps = [0 if spread else m * (n + apart)] * len(batch)
        tensor = memory.as_strided((*batch, m, n), (*steps, n + apart, 1), ahead)
        tensor = tensor if (m, n) == shape[-2:] else tensor.mT
        if tensor.shape != shape:  # m and n are equal, or it was turned for nothing
            tensor = tensor.mT
        tensor.requires_grad_(self.draw.random() < 0.6 and not spread)
        self.program.inputs.append(tensor)
        return Value(shape, lambda: tensor, index=len(self.program.inputs) - 1)

    def gemm(self, shape: Shape, depth: int) -> Value:
        *batch, m, n = shape
        k = self.size()
        left, right = self.value((*batch, m, k), depth), self.value((*batch, k, n), depth)
        kind = self.draw.choice(("plain", "plain", "added", "linear"))
        if kind == "linear":
            rows = self.value((n, k), depth)
            bias = (self.vector(n),) if self.draw.random() < 0.5 else ()
            return Value(shape, F.linear, (left, rows, *bias))
        if kind == "added":
            add = torch.baddbmm if batch else torch.addmm
            factors = self.draw.choice(((1, 1), (1, 1), (0.5, 2)))
            addend = self.addend(shape, depth)
            return Value(
                shape,
                lambda z, x, y: add(z, x, y, beta=factors[0], alpha=factors[1]),
                (addend, left, right),
            )
        return Value(shape, torch.matmul, (left, right))

    def addend(self, shape: Shape, depth: int) -> Value:
        """Of the result's shape, or spread over one of its dimensions."""
        *batch, m, n = shape
        kind = self.draw.choice(("whole", "vector", "row", "column"))
        if kind == "vector":
            return self.vector(n)
        sizes = {"whole": (m, n), "row": (1, n), "column": (m, 1)}[kind]
        return self.value((*batch, *sizes), depth)

    def vector(self, n: int) -> Value:
        row = self.leaf((1, n))
        return Value((n,), lambda y: y[0], (row,))

    def pointwise(self, shape: Shape, depth: int) -> Value:
        value = self.value(shape, depth)
        ways: tuple[Callable[[Tensor], Tensor], ...] = (
            torch.relu, torch.sigmoid, lambda y: y * 0.5, lambda y: y.softmax(-1),
            lambda y: y.float().tanh().to(y.dtype) if y.dtype != torch.float64 else y.tanh(),
            lambda y: y.contiguous(),
        )  # fmt: skip
        if self.draw.random() < 0.3:
            return Value(shape, torch.add, (value, self.value(shape, depth)))
        return Value(shape, self.draw.choice(ways), (value,))

    def turned(self, shape: Shape, depth: int) -> Value:
        *batch, m, n = shape
        return Value(shape, lambda y: y.mT, (self.value((*batch, n, m), depth),))

    def cut(self, shape: Shape, depth: int) -> Value:
        *batch, m, n = shape
        rows, columns = self.draw.choice((0, 1, 5)), self.draw.choice((0, 1, 5))
        value = self.value((*batch, m + rows, n + columns), depth)
        return Value(shape, lambda y: y[..., rows:, columns:], (value,))

    def joined(self, shape: Shape, depth: int) -> Value:
        *batch, m, n = shape
        if n < 2:
            return self.pointwise(shape, depth)
        at = self.draw.randint(1, n - 1)
        parts = [self.value((*batch, m, size), depth) for size in (at, n - at)]
        return Value(shape, lambda a, b: torch.cat([a, b], -1), tuple(parts))


def generate(seed: int, device: str = "cpu") -> Program:
    torch.manual_seed(seed)
    return Writer(seed, device).write()


# ---- is it right? --------------------------------------------------------------------------------


def steps_that_count(value: Tensor, is_gradient: bool) -> list[int]:
    """Of a gradient's dimensions of one element none counts."""
    found = zip(value.shape, value.stride())
    return [0 if is_gradient and size == 1 else stride for size, stride in found]


@contextmanager
def _forced(device: str) -> Iterator[None]:
    """On a GPU small gemms count, too, and the unaligned kernel runs where it takes one."""

    def fastest(gemm: Any, free: Sequence[bool]) -> str | None:
        return padding.UNALIGNED if gemm.spec is not None else padding.PADDED if gemm.pads else None

    if device == "cpu":
        yield
        return
    with (
        patch.object(padding, "_fastest", fastest),
        patch.object(padding, "_is_small", lambda gemm: False),
    ):
        yield


def _steps(made: GraphModule) -> list[tuple[Node, Node]]:
    """The derivative of each relu that has one, and the relu's argument."""
    found = []
    for node in made.graph.find_nodes(op="call_function", target=_STEP):
        relu: Any = node.args[1]
        while relu.target in _SAME:
            relu = relu.args[0]
        assert relu.target is torch.ops.aten.relu.default
        found.append((node, relu.args[0]))
    return found


class Run(Interpreter):
    """A run of a graph. sides: for each derivative of a relu, where it is 1, if not as computed."""

    def __init__(self, made: GraphModule, sides: Sequence[Tensor] = ()) -> None:
        super().__init__(made, garbage_collect_values=False)
        self.steps = _steps(made)
        self._sides = dict(zip((node for node, _ in self.steps), sides))

    def run_node(self, n: Node) -> Any:
        if n not in self._sides:
            return super().run_node(n)
        gradient: Any = n.args[0]
        return self.env[gradient] * self._sides[n]

    def arguments(self) -> list[Tensor]:
        """Of those relus."""
        return [self.env[before] for _, before in self.steps]

    def sides(self) -> list[Tensor]:
        return [value > 0 for value in self.arguments()]


def _exact(
    program: Program, theirs: Run, runs: Sequence[Run], faults: list[str]
) -> list[Sequence[Tensor]]:
    """In float64, with each run's sides of the relus; a fault where a side is not within rounding.

    theirs: the run that tells what rounding is.
    """
    doubles = [v.detach().double().requires_grad_(v.requires_grad) for v in program.inputs]
    made = make_fx(program.joint)(*doubles)
    usual = Run(made)
    results = usual.run(*doubles)
    eps = torch.finfo(program.dtype).eps
    found = []
    for run in runs:
        as_usual = True
        sides = zip(run.sides(), usual.sides(), usual.arguments(), theirs.arguments(), strict=True)
        for mine, right, exact, rounded in sides:
            differ = mine != right
            if differ.any():
                as_usual = False
                near = max((rounded - exact).abs().max(), eps / 8 * exact.abs().max())
                if exact[differ].abs().max() > 2 * near:
                    faults.append(f"a relu's argument is {exact[differ].abs().max():.3g}, not 0")
        found.append(results if as_usual else Run(made, run.sides()).run(*doubles))
    return found


def attempt(seed: int, device: str = "cpu", replaced: Counter[str] | None = None) -> str:
    """What is wrong with a program. replaced: counts the gemms, by operation."""
    program = generate(seed, device)
    before = make_fx(program.joint, tracing_mode="fake")(*program.inputs)
    after = copy.deepcopy(before)
    counters[padding.COUNTERS].clear()
    with _forced(device):
        padding.Padding(strict=True, on_cpu=device == "cpu")(after.graph)
    if replaced is not None:
        replaced.update(counters[padding.COUNTERS])
    for node in after.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # as Inductor lowers it: a slice has gaps
    after.graph.lint()
    after.recompile()
    runs = Run(after), Run(before)
    mine, theirs = (run.run(*program.inputs) for run in runs)
    faults: list[str] = []
    exact = _exact(program, runs[1], runs, faults)
    for i, (a, b, e, of_theirs) in enumerate(zip(mine, theirs, *exact, strict=True)):
        is_gradient = i >= len(program.results)
        if (a.shape, a.dtype, steps_that_count(a, is_gradient)) != (
            b.shape,
            b.dtype,
            steps_that_count(b, is_gradient),
        ):
            faults.append(f"{i}: {a.shape}, {a.stride()}, {a.dtype} for {b.shape}, {b.stride()}")
            continue
        error, others = ((v.double() - w).norm().item() for v, w in ((a, e), (b, of_theirs)))
        bound = max(2 * others, torch.finfo(a.dtype).eps / 4 * e.norm().item())
        if not error <= bound:
            faults.append(f"{i}: error {error:.3g}, bound {bound:.3g}, of {e.norm().item():.3g}")
    return "; ".join(faults)


fuzz = functools.partial(seeds.fuzz, attempt)


def shown(seed: int, device: str) -> str:
    """The graph before the pass."""
    program = generate(seed, device)
    return str(make_fx(program.joint, tracing_mode="fake")(*program.inputs).code)


if __name__ == "__main__":
    sys.exit(seeds.main(__doc__, attempt, shown))
