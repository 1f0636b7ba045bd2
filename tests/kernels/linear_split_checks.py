"""Checks of the split fp32 gemm: benchmarks/linear_sm90.py calls and times it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from checks import (
    agree_over_two_streams,
    captured,
    error_of,
    framed_matrix,
    is_untouched,
    misleading,
    random_operand,
    strided,
)
from torch import Tensor

from benchmarks import kernels, linear_sm90
from benchmarks.linear_sm90 import (
    EXAMPLES,
    IDENTITY,
    SWISH,
    Accuracy,
    First,
    errors_of,
    run,
)
from benchmarks.sm90 import CUDA, FLOOR, GUESSED, n_major, relative

ROW_FLOOR = 1e-6


def judge(what: str, errors: Sequence[float], failures: list[str]) -> None:
    """errors: of kernel and SGEMM, over all and of the worst row."""
    error, other, row, other_row = errors
    if not error <= max(1.5 * other, FLOOR):
        failures.append(f"accuracy, {what}: {error:.2e} v {other:.2e}")
    if not row <= max(4 * other_row, ROW_FLOOR):
        failures.append(f"worst row, {what}: {row:.2e} v {other_row:.2e}")


def compare(what: str, ours: Tensor, sgemm: Tensor, exact: Tensor, failures: list[str]) -> None:
    judge(what, errors_of(ours, sgemm, exact), failures)


def accuracy(failures: list[str]) -> list[Accuracy]:
    """The rows that the benchmark prints, within the contract."""
    rows = linear_sm90.accuracy()
    for row in rows:
        errors = (row.error, row.sgemm, row.worst_row, row.sgemm_worst_row)
        judge(f"K = {row.k}, {row.data}", errors, failures)
    return rows


def imprecise_neighbours(failures: list[str], chunks: int = 0, first: First = "x") -> None:
    """Rows of both operands that split badly next to rows that split well, and tails."""
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


def sweep(failures: list[str], cases: int, seed: int) -> float:
    """Random shapes, strides, operands and outputs; returns the largest error seen."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    largest, f32 = 0.0, torch.float32
    for case in range(cases):
        example = choose.choice(EXAMPLES)
        m, n = choose.choice((1, 2, choose.randint(1, 700))), choose.randint(1, 700)
        k = choose.choice((choose.randint(1, 64), choose.randint(1, 3000)))
        x = strided(m, k, f32, choose)
        is_transposed = choose.random() < 0.3
        weight = strided(k, n, f32, choose).t() if is_transposed else strided(n, k, f32, choose)
        if choose.random() < 0.2:
            weight[:, :GUESSED] *= choose.choice((0.0, 1e-4))
        bias = torch.randn(n, device=CUDA) if choose.random() < 0.5 else None
        operands = [random_operand(m, n, dtype, choose) for dtype in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        frame, out = framed_matrix((m, n), example.out)
        z = torch.full((m, n), float("nan"), device=CUDA) if choose.random() < 0.5 else None
        run(example, x, weight, bias, operands, scalars, out, z)

        exact_z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        exact = example.reference(exact_z, operands, scalars)
        # Rounding to the result's dtype and the epilogue's own roundings do not count as errors.
        bound = 1e-3 if example.out == torch.float16 else 2e-6
        error = error_of(out, exact)
        if z is not None:
            error = max(error, relative(z, exact_z))
        what = f"case {case}: {m} x {n} x {k}, {', '.join(example.spec.signature)}"
        if not is_untouched(frame, out):
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

    cast: applied to the operands first. multiply: the gemm to check, if not this kernel.
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
    """Tiles that are computed again: one, some and all of a block's, with tails and chunks of K."""
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
    """Replays follow the tensors; launches, also on two streams, agree bit for bit."""
    x, weight = torch.randn(300, 1000, device=CUDA), torch.randn(500, 1000, device=CUDA)
    out = run(SWISH, x, weight)
    graph = captured(lambda: run(SWISH, x, weight, out=out))
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
    """All of many launches on two streams at once give the same bits."""
    first = run(SWISH, x, weight)
    if not agree_over_two_streams(lambda: (run(SWISH, x, weight),), (first,), launches):
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


def chunks(failures: list[str]) -> None:
    """Chunks of K, either operand first, and scales computed in a kernel before."""
    choose = torch.Generator().manual_seed(0)
    for m, n, k in ((200, 300, 500), (16, 1000, 4100), (700, 90, 3000), (1, 5, 2000)):
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
        exact = x.double() @ weight.double().T
        for parts in (1, 3, int(torch.randint(4, 30, (), generator=choose))):
            for first in ("x", "weight"):
                for form, b in (("", weight), (", n_major", n_major(weight))):
                    for ahead in (False, True):
                        out = torch.full((m, n), float("nan"), device=CUDA)
                        run(IDENTITY, x, b, None, None, None, out, None, parts, first, ahead)
                        error = relative(out, exact)
                        if not error <= FLOOR:
                            what = f"{m} x {n} x {k}{form}, {parts} chunks, {first} first, {ahead}"
                            failures.append(f"{what}: error {error:.2e}")


CHECKS = (
    special_values,
    wrong_guesses,
    imprecise_neighbours,
    refusals,
    graphs_and_repeats,
    chunks,
)
