"""The split fp32 gemm by itself: its errors on the contract's data, and its times.

    python -m benchmarks.linear_sm90 [--results FOLDER [--commit HASH]]

`--results` keeps the figures where benchmarks/report.py finds them. Timings are medians with the L2
cache cleared before each call, on random data, the splitting of x included; `sustained` is the mean
of 0.4 s back to back, where the power cap limits it.
`python -m pytest tests/kernels/test_linear_sm90.py` checks the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels, results
from benchmarks.measure import float32_settings, machine, median_ms
from benchmarks.sm90 import (
    CUDA,
    FLOOR,
    GUESSED,
    host_us,
    n_major,
    normal,
    relative,
    spread,
    sustained_ms,
    uniform,
    worst_row,
)
from fx_fuser.kernels import base
from fx_fuser.kernels.split import LINEAR_SPLIT
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

First = Literal["", "x", "weight"]  # the operand that is split first


@dataclass(frozen=True)
class Example:
    """An epilogue of examples.cuh, and the same in torch ops, as f(z, operands, scalars)."""

    spec: KernelSpec
    reference: Callable[[Tensor, list[Tensor], list[float]], Tensor]
    operands: tuple[torch.dtype, ...] = ()
    scalars: int = 0
    out: torch.dtype = torch.float32


def _example(
    name: str, scalars: int, *operands: torch.dtype, out: torch.dtype = torch.float32
) -> KernelSpec:
    f32 = torch.float32
    return base.example(LINEAR_SPLIT, name, scalars, f32, out, f32, *operands)


IDENTITY = Example(_example("Identity", 0), lambda z, t, s: z)
SWISH = Example(_example("Swish", 1), lambda z, t, s: F.silu(z) * s[0], scalars=1)
RESIDUAL = Example(_example("Residual", 1), lambda z, t, s: torch.sigmoid(z) * s[0] + z, scalars=1)
OPERANDS = Example(
    _example("ThreeOperands", 1, torch.float32, torch.bfloat16, torch.bool),
    lambda z, t, s: F.silu(z) * t[0].to(z.dtype) + t[1].to(z.dtype) * t[2].to(z.dtype) - s[0],
    (torch.float32, torch.bfloat16, torch.bool),
    scalars=1,
)
HALF_OUT = Example(_example("Identity", 0, out=torch.float16), lambda z, t, s: z, out=torch.float16)
EXAMPLES: tuple[Example, ...] = (IDENTITY, SWISH, RESIDUAL, OPERANDS, HALF_OUT)


def run(
    example: Example,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    operands: list[Tensor] | None = None,
    scalars: list[float] | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    chunks: int = 0,
    first: First = "",
    exact: bool = False,
) -> Tensor:
    if out is None:
        out = x.new_empty((*x.shape[:-1], weight.shape[-2]), dtype=example.out)
    numbers = scalars or [2.0] * example.scalars
    taken = kernels.linear_split(
        example.spec, x, weight, bias, out, z, operands or [], numbers, chunks, first, exact
    )
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


# ---- accuracy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    """Relative Frobenius errors against float64, of the whole and of the worst row."""

    k: int
    data: str
    error: float
    sgemm: float
    worst_row: float
    sgemm_worst_row: float


def families(m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The data of the accuracy contract: name, x [m, k], weight [n, k]."""

    yield "as nn.Linear", uniform(m, k), (uniform(n, k) * 2 - 1) / k**0.5
    yield "normal", normal(m, k), normal(n, k)
    yield "all positive", uniform(m, k), uniform(n, k)
    yield "heavy-tailed", normal(m, k) * spread(4, m, k), normal(n, k) * spread(4, n, k)
    yield "scaled rows", normal(m, k) * spread(6, m, 1), normal(n, k) * spread(6, n, 1)
    columns = torch.where(uniform(1, k) < 0.01, 1000.0, 1.0)
    yield "outlier columns", normal(m, k) * columns, normal(n, k)
    for decades in (4, 5, 8):
        columns = spread(decades / 2, 1, k)
        yield f"columns over 1e{decades}", normal(m, k) * columns, normal(n, k) / columns


def errors_of(ours: Tensor, sgemm: Tensor, exact: Tensor) -> list[float]:
    """Of the kernel and of SGEMM, each of the whole and of the worst row."""
    return [of(value, exact) for of in (relative, worst_row) for value in (ours, sgemm)]


def accuracy() -> list[Accuracy]:
    rows: list[Accuracy] = []
    for m, n, k in ((256, 384, 64), (256, 384, 1024), (256, 384, 8192), (256, 384, 65536)):
        for name, x, weight in families(m, n, k):
            exact = x.double() @ weight.double().T
            ours, sgemm = run(IDENTITY, x, weight), F.linear(x, weight)
            rows.append(Accuracy(k, name, *errors_of(ours, sgemm, exact)))
    return rows


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """ms: the median, with the L2 cache cleared; again: a second time; sustained: back to back."""

    problem: str
    ms: float
    again: float
    sustained: float
    eager: float
    tflops: float
    error: float
    eager_error: float


def timing(failures: list[str]) -> list[Timing]:
    rows: list[Timing] = []
    for name, example, m, k, n, zeros in (
        ("#70", RESIDUAL, 1024, 8192, 8192, 0),
        ("#59", SWISH, 128, 32768, 32768, 0),
        ("#70, all tiles done again", RESIDUAL, 1024, 8192, 8192, GUESSED),
        ("#70, n_major weight", IDENTITY, 1024, 8192, 8192, 0),
        ("#59, n_major weight", IDENTITY, 128, 32768, 32768, 0),
        ("#59, gradient of the weight", IDENTITY, 32768, 128, 32768, 0),
    ):
        x = torch.rand(m, k, device=CUDA)
        linear = torch.nn.Linear(k, n, device=CUDA)
        weight, bias = linear.weight.detach(), linear.bias.detach()
        weight[:, :zeros] = 0
        if example is IDENTITY:
            weight = n_major(weight)
        out = torch.empty(m, n, device=CUDA).fill_(float("nan"))

        def ours(
            e: Example = example,
            x: Tensor = x,
            w: Tensor = weight,
            b: Tensor = bias,
            o: Tensor = out,
        ) -> Tensor:
            return run(e, x, w, b, out=o)

        def eager(
            e: Example = example, x: Tensor = x, w: Tensor = weight, b: Tensor = bias
        ) -> Tensor:
            return e.reference(F.linear(x, w, b), [], [2.0])

        del linear
        exact = example.reference(F.linear(x.double(), weight.double(), bias.double()), [], [2.0])
        error, eager_error = relative(ours(), exact), relative(eager(), exact)
        del exact
        if not error <= max(1.5 * eager_error, FLOOR):
            failures.append(f"{name}: error {error:.2e}, eager's {eager_error:.2e}")
        ms = median_ms(ours, [], CUDA, 50, 200)
        again = median_ms(ours, [], CUDA, 50, 200)
        eager_ms = median_ms(eager, [], CUDA, 20, 100)
        rate = 2e-9 * m * n * k / ms
        sustained = sustained_ms(ours, ms)
        rows.append(Timing(name, ms, again, sustained, eager_ms, rate, error, eager_error))
    return rows


def host_times() -> dict[str, float]:
    """Host times of a call from Python, in µs."""
    x, weight = torch.randn(8, 64, device=CUDA), torch.randn(8, 64, device=CUDA)
    out = torch.empty(8, 8, device=CUDA)
    return {
        "linear_split": host_us(lambda: run(SWISH, x, weight, out=out)),
        "F.linear": host_us(lambda: F.linear(x, weight)),
    }


def main() -> int:
    parser = harness.parser("linear_sm90")
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="what is measured, for the results")
    chosen = parser.parse_args()
    done = harness.progress()
    load.prepare([e.spec for e in EXAMPLES], CUDA)
    done("built")
    failures: list[str] = []
    with float32_settings("fp32"):
        errors = accuracy()
        done("accuracy")
        times, host = timing(failures), host_times()
        done("timing")

    heads = ["K", "data", "kernel", "SGEMM", "worst row", "SGEMM's"]
    tables = [tabulate(map(astuple, errors), heads, floatfmt=".1e")]
    heads = ["", "ms", "again", "sustained", "eager", "TFLOP/s", "error", "eager's"]
    formats = ["", ".4f", ".4f", ".4f", ".3f", ".0f", ".1e", ".1e"]
    tables.append(tabulate(map(astuple, times), heads, floatfmt=formats))
    tables.append(", ".join(f"{name} {us:.1f} us" for name, us in host.items()) + " on the host")
    if chosen.results:
        here = machine(CUDA)
        path = results.linear_path_for(here["gpu"], chosen.results)
        figures = {"accuracy": list(map(asdict, errors)), "timing": list(map(asdict, times))}
        results.save(path, here, chosen.commit, **figures)
        tables.append(f"wrote {path}")
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
