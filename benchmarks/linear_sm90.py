"""The fp32 linear kernel of sm_90a by itself: builds it, checks it against float64, times it.

    python -m benchmarks.linear_sm90 [--skip-checks] [--skip-timing] [--cases 200] [--seed 0]
        [--results FOLDER [--commit HASH]]

`--results` keeps the figures where benchmarks/report.py finds them. Exits with 1 where a check
failed. Timings are medians with the L2 cache cleared before each call, on random data, the
splitting of x included; `sustained` is the mean of 0.4 s back to back, where the power cap binds.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
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
    ROW_FLOOR,
    SENTINEL,
    host_us,
    misleading,
    n_major,
    random_operand,
    relative,
    strided,
    sustained_ms,
    worst_row,
)
from fx_fuser import build
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import LINEAR_SPLIT, Family, KernelSpec

First = Literal["", "x", "weight"]  # the operand that is split first


@dataclass(frozen=True)
class Example:
    """An epilogue of examples.cuh and the same in torch ops, as f(z, operands, scalars)."""

    spec: KernelSpec
    reference: Callable[[Tensor, list[Tensor], list[float]], Tensor]
    operands: tuple[torch.dtype, ...] = ()
    scalars: int = 0
    out: torch.dtype = torch.float32


def _example(
    name: str, scalars: int, *operands: torch.dtype, out: torch.dtype = torch.float32
) -> KernelSpec:
    f32 = torch.float32
    return build.example(LINEAR_SPLIT, name, scalars, f32, out, f32, *operands)


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


def choose_family(family: Family) -> None:
    """From here on all examples are kernels of this family: LINEAR_SPLIT, LINEAR_SPLIT_MMA."""
    global IDENTITY, SWISH, RESIDUAL, OPERANDS, HALF_OUT, EXAMPLES
    made = [replace(e, spec=replace(e.spec, family=family)) for e in EXAMPLES]
    IDENTITY, SWISH, RESIDUAL, OPERANDS, HALF_OUT = EXAMPLES = tuple(made)


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
    """Relative Frobenius errors against float64, over all and of the worst row by itself."""

    k: int
    data: str
    error: float
    sgemm: float
    worst_row: float
    sgemm_worst_row: float


def compare(
    what: str, ours: Tensor, sgemm: Tensor, exact: Tensor, failures: list[str]
) -> list[float]:
    """Errors of kernel and SGEMM, over all and of the worst row; notes what is out of bounds."""
    error, other = relative(ours, exact), relative(sgemm, exact)
    row, other_row = worst_row(ours, exact), worst_row(sgemm, exact)
    if not error <= max(1.5 * other, FLOOR):
        failures.append(f"accuracy, {what}: {error:.2e} v {other:.2e}")
    if not row <= max(4 * other_row, ROW_FLOOR):
        failures.append(f"worst row, {what}: {row:.2e} v {other_row:.2e}")
    return [error, other, row, other_row]


def families(m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The data of the accuracy contract: name, x [m, k], weight [n, k]."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device=CUDA)

    def spread(decades: float, *shape: int) -> Tensor:
        return 10.0 ** ((uniform(*shape) * 2 - 1) * decades)

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


def accuracy(failures: list[str]) -> list[Accuracy]:
    rows: list[Accuracy] = []
    for m, n, k in ((256, 384, 64), (256, 384, 1024), (256, 384, 8192), (256, 384, 65536)):
        for name, x, weight in families(m, n, k):
            exact = x.double() @ weight.double().T
            ours, sgemm = run(IDENTITY, x, weight), F.linear(x, weight)
            errors = compare(f"K = {k}, {name}", ours, sgemm, exact, failures)
            rows.append(Accuracy(k, name, *errors))
    return rows


def imprecise_neighbours(failures: list[str], chunks: int = 0, first: First = "x") -> None:
    """Rows of both operands that split badly beside rows that split well, and tails."""
    for m, n, k in ((200, 300, 500), (130, 140, 65536 + 36)):
        for x_rows, weight_rows in ((slice(7, 8), slice(n)), (slice(m), slice(16, 32))):
            columns = 10.0 ** (torch.rand(k, device=CUDA) * 8 - 4)
            x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
            x[x_rows] *= columns
            weight[weight_rows] /= columns
            exact = x.double() @ weight.double().T
            ours, sgemm = run(IDENTITY, x, weight, chunks=chunks, first=first), F.linear(x, weight)
            compare(f"{m} x {n} x {k}, imprecise rows", ours, sgemm, exact, failures)
            part = (slice(m), weight_rows) if x_rows == slice(m) else (x_rows, weight_rows)
            what = f"{m} x {n} x {k}, just these"
            compare(what, ours[part], sgemm[part], exact[part], failures)
            ours = run(IDENTITY, x, n_major(weight), chunks=chunks, first=first)
            compare(f"{what}, n_major", ours[part], sgemm[part], exact[part], failures)


# ---- everything else that must be right ----------------------------------------------------------


def sweep(cases: int, seed: int, failures: list[str]) -> float:
    """Random shapes, strides, operands and outputs; returns the largest error seen."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    largest = 0.0
    for case in range(cases):
        example = choose.choice(EXAMPLES)
        m, n = choose.choice((1, 2, choose.randint(1, 700))), choose.randint(1, 700)
        k = choose.choice((choose.randint(1, 64), choose.randint(1, 3000)))
        x = strided(m, k, choose)
        weight = strided(k, n, choose).t() if choose.random() < 0.3 else strided(n, k, choose)
        if choose.random() < 0.2:
            weight[:, :GUESSED] *= choose.choice((0.0, 1e-4))
        bias = torch.randn(n, device=CUDA) if choose.random() < 0.5 else None
        operands = [random_operand(m, n, dtype, choose) for dtype in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        # Poison where the result goes, sentinels beside it.
        frame = torch.full((m + 2, n + 5), SENTINEL, device=CUDA, dtype=example.out)
        out = frame[1:-1, 3 : 3 + n].fill_(float("nan"))
        z = torch.full((m, n), float("nan"), device=CUDA) if choose.random() < 0.5 else None
        run(example, x, weight, bias, operands, scalars, out, z)

        exact_z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        exact = example.reference(exact_z, operands, scalars)
        # Rounding to the result's dtype, and the epilogue's own few roundings, are no error here.
        bound = 1e-3 if example.out == torch.float16 else 2e-6
        error = float((out.double() - exact).norm() / (exact.norm() + 1e-3 * exact.numel() ** 0.5))
        if z is not None:
            error = max(error, relative(z, exact_z))
        frame[1:-1, 3 : 3 + n] = SENTINEL
        what = f"case {case}: {m} x {n} x {k}, {', '.join(example.spec.signature)}"
        if not bool((frame == SENTINEL).all()):
            failures.append(f"{what}: wrote outside the result")
        if not error <= bound:
            failures.append(f"{what}: error {error:.2e}")
        if example.out == torch.float32:
            largest = max(largest, error)
    return largest


def special_values(
    failures: list[str],
    chunks: int = 0,
    first: First = "x",
    cast: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, weight: (x, weight),
    multiply: Callable[[Tensor, Tensor], Tensor] | None = None,
    sizes: tuple[int, int, int] = (200, 300, 500),
) -> None:
    """Infinities, NaN, zeros, denormals and extremes, as an fp32 gemm gives them.

    cast: of the operands, beforehand. multiply: what is checked, if not this kernel.
    """
    m, n, k = sizes
    gemm = multiply or (lambda a, b: run(IDENTITY, a, b, chunks=chunks, first=first))

    def same(what: str, x: Tensor, weight: Tensor) -> None:
        x, weight = cast(x, weight)
        exact = F.linear(x.double(), weight.double()).float()
        forms = (
            ("", x, weight),
            (", n_major", x, n_major(weight)),
            (", n_major x", n_major(x), weight),
        )
        for form, a, b in forms:
            check(what + form, gemm(a, b), exact)

    def check(what: str, ours: Tensor, exact: Tensor) -> None:
        finite = exact.isfinite()
        if not torch.equal(ours.nan_to_num(0, 1, -1)[~finite], exact.nan_to_num(0, 1, -1)[~finite]):
            failures.append(f"{what}: other infinities or NaN than IEEE's")
        if not torch.equal(ours.isnan(), exact.isnan()):
            failures.append(f"{what}: NaN differ")
        rows, columns = finite.all(1), finite.all(0)
        error = relative(ours[rows][:, columns], exact[rows][:, columns].double())
        if not error <= 1e-6:
            failures.append(f"{what}: error {error:.2e} where finite")

    def pair() -> tuple[Tensor, Tensor]:
        return torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)

    inf, nan = float("inf"), float("nan")
    x, weight = pair()
    x[3, 7], x[m - 50, k - 1], weight[5, 8], weight[n - 1, 0] = inf, -inf, inf, -inf
    same("infinities", x, weight)
    x, weight = pair()
    x[3, 7], x[3, 9], weight[17, 100] = inf, nan, nan
    same("NaN", x, weight)
    x, weight = pair()
    x[3, 7], weight[20, 7] = inf, 0.0
    same("0 * inf", x, weight)
    x, weight = pair()
    same("all NaN", x * nan, weight)
    same("zeros", x * 0, weight)
    same("zero rows", x * (torch.arange(m, device=CUDA) % 2)[:, None], weight)
    same("denormal x", x * 1e-40, weight * 1e4)
    same("denormal weight", x * 1e4, weight * 1e-40)
    same("tiny weight", x * 1e20, weight * 1e-30)
    same("huge weight", x * 1e-36, weight * 1e36)
    same("huge x", x * 1e36, weight * 1e-36)
    if gemm(*cast(x * 1e30, weight * 1e30)).isfinite().any():  # in fp32 of either sign, or NaN
        failures.append("overflow: finite values")


def wrong_guesses(failures: list[str], chunks: int = 0, first: First = "x") -> None:
    """Tiles that are redone: one, some and all of a block's, with tails and chunks of K."""
    for m, n, k in ((200, 300, 500), (1000, 4100, 576), (256, 384, 8192), (130, 140, 65536 + 36)):
        x = torch.randn(m, k, device=CUDA)
        for what, weight in misleading(n, k):
            exact = x.double() @ weight.double().T
            what = f"{m} x {n} x {k}, {what}"
            sgemm = F.linear(x, weight)
            for form, values in (("", weight), (", n_major", n_major(weight))):
                ours = run(IDENTITY, x, values, chunks=chunks, first=first)
                compare(what + form, ours, sgemm, exact, failures)
    x, weight = torch.randn(200, 500, device=CUDA), torch.randn(300, 500, device=CUDA)
    weight[:, :GUESSED] = 0
    weight[5, 400], weight[290, 499], x[3, 300] = float("inf"), float("nan"), float("-inf")
    ours, exact = run(IDENTITY, x, weight), F.linear(x.double(), weight.double()).float()
    if not torch.allclose(ours, exact, rtol=1e-4, atol=1e-4, equal_nan=True):
        failures.append("infinities in a weight whose first columns are zero")


def graphs_and_repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches, over two streams too, agree bit for bit."""
    x, weight = torch.randn(300, 1000, device=CUDA), torch.randn(500, 1000, device=CUDA)
    out = run(SWISH, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(SWISH, x, weight, out=out)
    for factor, zeros in ((1.0, 0), (1e-6, 0), (1e6, GUESSED), (1e6, 0)):
        weight.normal_().mul_(factor)[:, :zeros] = 0
        graph.replay()
        exact = F.silu(x.double() @ weight.double().T) * 2
        if not relative(out, exact) <= 1e-6:
            failures.append(f"graph replay, weight * {factor}: {relative(out, exact):.2e}")
    for zeros in (0, GUESSED):
        weight[:, :zeros] = 0
        soak(x, weight, 400, f"first {zeros} columns zero", failures)
    columns = 10.0 ** (torch.rand(1000, device=CUDA) * 8 - 4)
    soak(x * columns, torch.randn_like(weight) / columns, 400, "imprecise", failures)


def soak(x: Tensor, weight: Tensor, launches: int, what: str, failures: list[str]) -> None:
    """Launches over two streams at once give the same bits, every one."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    first = run(SWISH, x, weight)
    torch.cuda.synchronize()
    differ = [torch.zeros((), dtype=torch.bool, device=CUDA) for _ in streams]
    torch.cuda.synchronize()
    for i in range(launches):
        with torch.cuda.stream(streams[i % 2]):
            differ[i % 2] |= (run(SWISH, x, weight) != first).any()
    torch.cuda.synchronize()
    if any(map(bool, differ)):
        failures.append(f"{launches} launches over two streams differ, {what}")


def long_soak(failures: list[str]) -> None:
    """Tails in all three dimensions, several rounds of tiles."""
    x, weight = torch.randn(700, 1004, device=CUDA), torch.randn(5000, 1004, device=CUDA)
    soak(x, weight, 10_000, "700 x 5000 x 1004", failures)


def refusals(failures: list[str]) -> None:
    x, weight = torch.randn(8, 33, device=CUDA), torch.randn(16, 33, device=CUDA)
    out = torch.empty(8, 16, device=CUDA)
    # Rows in four dimensions none of which merges with the next.
    scattered = torch.randn(2, 2, 2, 2, 33, device=CUDA)[:, :, :, :, :32].permute(3, 2, 1, 0, 4)
    for what, a, b, o in (
        ("K = 0", x[:, :0], weight[:, :0], out),
        ("scattered rows", scattered, weight[:, :32], out.new_empty(2, 2, 2, 2, 16)),
    ):
        if kernels.linear_split(IDENTITY.spec, a, b, None, o, None, [], []):
            failures.append(f"{what} was not refused")


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """ms: the median, with the L2 cache cleared; again: once more; sustained: back to back."""

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
    """Of a call from Python, in µs."""
    x, weight = torch.randn(8, 64, device=CUDA), torch.randn(8, 64, device=CUDA)
    out = torch.empty(8, 8, device=CUDA)
    return {
        "linear_split": host_us(lambda: run(SWISH, x, weight, out=out)),
        "F.linear": host_us(lambda: F.linear(x, weight)),
    }


CHECKS = (special_values, wrong_guesses, imprecise_neighbours, refusals, graphs_and_repeats)


def main() -> int:
    parser = harness.parser("linear_sm90", cases=200)
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="what is measured, for the results")
    chosen = parser.parse_args()
    done = harness.progress()
    load.prepare([e.spec for e in EXAMPLES], CUDA)
    done("built")
    failures: list[str] = []
    errors: list[Accuracy] = []
    times: list[Timing] = []
    host: dict[str, float] = {}
    with float32_settings("fp32"):
        if not chosen.skip_checks:
            largest = sweep(chosen.cases, chosen.seed, failures)
            done(f"{chosen.cases} random cases, largest error {largest:.1e}")
            for check in CHECKS:
                check(failures)
            done(", ".join(check.__name__ for check in CHECKS))
            long_soak(failures)
            done("soak")
            errors = accuracy(failures)
            done("accuracy")
        if not chosen.skip_timing:
            times, host = timing(failures), host_times()
            done("timing")

    tables = []
    if errors:
        heads = ["K", "data", "kernel", "SGEMM", "worst row", "SGEMM's"]
        tables.append(tabulate(map(astuple, errors), heads, floatfmt=".1e"))
    if times:
        heads = ["", "ms", "again", "sustained", "eager", "TFLOP/s", "error", "eager's"]
        formats = ["", ".4f", ".4f", ".4f", ".3f", ".0f", ".1e", ".1e"]
        tables.append(tabulate(map(astuple, times), heads, floatfmt=formats))
        tables.append(
            ", ".join(f"{name} {us:.1f} us" for name, us in host.items()) + " on the host"
        )
    if chosen.results and errors and times:
        here = machine(CUDA)
        path = results.linear_path_for(here["gpu"], chosen.results)
        figures = {"accuracy": list(map(asdict, errors)), "timing": list(map(asdict, times))}
        results.save(path, here, chosen.commit, **figures)
        tables.append(f"wrote {path}")
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
