"""A packed projection, one Linear and then chunk, compared with its halves as two Linears:

    python -m benchmarks.packed [--train]

GPU time of `torch.compile(model)`, and of fx_fuser on the packed one and on the halves, in one
process, with a cleared L2 cache. benchmarks/results/packed has the findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks import harness, measure
from fx_fuser.planning import timing

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Shape:
    """x [rows, k], weight [2 * half, k]."""

    rows: int
    k: int
    half: int
    act: Callable[[Tensor], Tensor]
    bias: bool


SHAPES = {
    "Phi-3": Shape(4096, 3072, 8192, F.silu, False),
    "eva02": Shape(16448, 768, 2048, F.silu, True),
    "GEGLU": Shape(4096, 1280, 5120, F.gelu, True),
    "GEGLU, narrow": Shape(16384, 320, 1280, F.gelu, True),
    "few rows": Shape(512, 8192, 3584, F.silu, False),
    "GLU": Shape(8192, 256, 256, torch.sigmoid, True),
    "small": Shape(1024, 512, 1024, F.silu, True),
}


class Packed(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.k, 2 * shape.half, bias=shape.bias)
        self.act, self.columns = shape.act, shape.half

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).chunk(2, -1)
        return self.act(a) * b


class Halves(Packed):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.linear.weight.split(self.columns)
        bias = self.linear.bias
        biases = (None, None) if bias is None else bias.split(self.columns)
        a, b = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases))
        return self.act(a) * b


def step(model: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> Tensor:
    with torch.set_grad_enabled(train):
        y = model(x)
    if train:
        y.backward(torch.ones_like(y))
    return y.detach()


def row(name: str, dtype: torch.dtype, train: bool, failures: list[str]) -> list[object]:
    shape = SHAPES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    packed, halves = (made(shape).to(CUDA, dtype) for made in (Packed, Halves))
    halves.load_state_dict(packed.state_dict())
    x = torch.randn(shape.rows, shape.k, device=CUDA, dtype=dtype, requires_grad=train)
    models = [torch.compile(packed)]
    models += [torch.compile(model, backend="fx_fuser") for model in (packed, halves)]
    runs = [partial(step, model, x, train) for model in models]
    found = [run().double() for run in runs]
    limit = 8 * torch.finfo(dtype).eps * float(found[0].abs().max())
    if not all(float((value - found[0]).abs().max()) <= limit for value in found):
        failures.append(f"{name} {dtype}: the results are more than {limit:.1e} apart")
    took = [t.gpu for t in timing.times_of([timing.Candidate(run) for run in runs], CUDA)]
    return [name, str(dtype).removeprefix("torch."), *took, took[2] / took[1]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed")
    parser.add_argument("--train", action="store_true", help="a forward and a backward pass")
    chosen = parser.parse_args()
    failures: list[str] = []
    dtypes = (torch.float32, torch.bfloat16)
    table = [row(name, dtype, chosen.train, failures) for dtype in dtypes for name in SHAPES]
    heads = ["", "dtype", "Inductor, ms", "packed, ms", "two gemms, ms", "two / packed"]
    text = tabulate(table, heads, tablefmt="github", floatfmt=".3f")
    return harness.report([str(measure.machine(CUDA)), text], failures)


if __name__ == "__main__":
    sys.exit(main())
