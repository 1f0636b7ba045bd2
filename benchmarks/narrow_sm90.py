"""The fp32 gemms of sm_90a whose operands were cast up from 16 bits: checks and times.

    python -m benchmarks.narrow_sm90 [--skip-checks] [--skip-timing] [--cases 200] [--seed 0]

Exits with 1 where a check failed. Two 16-bit operands make one gemm ("exact"), one makes two
("mixed"). Timings are medians with the L2 cache cleared before each call: the library's fp32 gemm
of the cast tensors, the split gemm of them, and this kernel's of the 16-bit tensors.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.linear_sm90 import compare, families, special_values
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import CUDA, GUESSED, SENTINEL, n_major, relative
from fx_fuser.anchors.linear import EXACT_GEMMS, MIXED_GEMMS, SPLIT_GEMM, split_gemm
from fx_fuser.native import load

DTYPES = tuple(EXACT_GEMMS)
WAYS = ("exact", "mixed x", "mixed weight")  # which operand is of 16 bits


def cast(way: str, dtype: torch.dtype, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Those operands in 16 bits that the way has so."""
    x = x if way == "mixed weight" else x.to(dtype)
    return x, weight if way == "mixed x" else weight.to(dtype)


def by_op(way: str, dtype: torch.dtype, x: Tensor, weight: Tensor) -> Tensor:
    ops = torch.ops.fx_fuser
    if way == "exact":
        made: Tensor = ops.exact_product.default(x, weight, EXACT_GEMMS[dtype].name)
    else:
        made = ops.split_product.default(x, weight, MIXED_GEMMS[dtype].name)
    return made


def by_kernel(
    way: str,
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    chunks: int = 0,
) -> Tensor:
    """The kernel itself, where the op may use the library."""
    if out is None:
        out = torch.full((*x.shape[:-1], weight.shape[-2]), float("nan"), device=x.device)
    if way == "exact":
        spec = EXACT_GEMMS[dtype]
        taken = kernels.linear_dense(spec, x, weight, None, out, None, [], [])
    else:
        spec = MIXED_GEMMS[dtype]
        taken = kernels.linear_split(spec, x, weight, None, out, None, [], [], chunks)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


def every_way() -> Iterator[tuple[str, torch.dtype]]:
    yield from ((way, dtype) for way in WAYS for dtype in DTYPES)


# ---- what must be right --------------------------------------------------------------------------


def accuracy(failures: list[str]) -> list[tuple[object, ...]]:
    """The contract's data: error and SGEMM's, of all and of the worst row. What fp16 cannot hold is
    left out."""
    rows: list[tuple[object, ...]] = []
    for k in (64, 1024, 8192, 32768):
        for name, wide_x, wide_weight in families(256, 384, k):
            for way, dtype in every_way():
                x, weight = cast(way, dtype, wide_x, wide_weight)
                if not (x.isfinite().all() and weight.isfinite().all()):
                    continue
                exact = x.double() @ weight.double().T
                ours, sgemm = by_kernel(way, dtype, x, weight), F.linear(x.float(), weight.float())
                what = f"K = {k}, {name}, {way}, {dtype}"
                rows.append((k, name, way, dtype, *compare(what, ours, sgemm, exact, failures)))
    return rows


def sizes(choose: random.Random) -> tuple[int, int, int]:
    m, n = choose.choice((1, 2, choose.randint(1, 700))), choose.randint(1, 700)
    return m, n, choose.choice((choose.randint(1, 64), choose.randint(1, 3000)))


def small_sizes(choose: random.Random) -> tuple[int, int, int]:
    """For the sanitizers, under which a gemm takes minutes."""
    return choose.choice((1, 17, 130, 260)), choose.randint(1, 300), choose.randint(1, 300)


def strided(rows: int, columns: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    """Random values with 16-byte aligned rows, some with a gap between them."""
    unit = 16 // dtype.itemsize
    padded = (-(-columns // unit) + choose.choice((0, 0, 1, 3))) * unit
    return torch.randn(rows, padded, device=CUDA).to(dtype)[:, :columns]


def sweep(
    cases: int,
    seed: int,
    failures: list[str],
    sizes: Callable[[random.Random], tuple[int, int, int]] = sizes,
) -> float:
    """Random sizes, strides and alignments; poison where the result goes, sentinels beside it."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    largest = 0.0
    for case in range(cases):
        way, dtype = choose.choice([*every_way()])
        m, n, k = sizes(choose)
        types = [t.dtype for t in cast(way, dtype, torch.empty(0), torch.empty(0))]
        x, weight = strided(m, k, types[0], choose), strided(n, k, types[1], choose)
        if way != "exact":
            x = n_major(x) if choose.random() < 0.3 else x
            weight = n_major(weight) if choose.random() < 0.3 else weight
            if choose.random() < 0.2:
                (weight if way == "mixed x" else x)[:, :GUESSED] *= choose.choice((0.0, 1e-4))
            if choose.random() < 0.2 and k > 1:  # rows that nothing is aligned in
                x, weight = x[:, 1:], weight[:, 1:]
        chunks = choose.choice((0, 0, 1, 3))
        frame = torch.full((m + 2, n + 5), SENTINEL, device=CUDA)
        out = frame[1:-1, 3 : 3 + n].fill_(float("nan"))
        by_kernel(way, dtype, x, weight, out, chunks)
        exact = x.double() @ weight.double().T
        error = float((out.double() - exact).norm() / (exact.norm() + 1e-3 * exact.numel() ** 0.5))
        frame[1:-1, 3 : 3 + n] = SENTINEL
        what = f"case {case}: {way}, {dtype}, {m} x {n} x {k}, strides {x.stride()}"
        if not bool((frame == SENTINEL).all()):
            failures.append(f"{what}: wrote outside the result")
        if not error <= 2e-6:
            failures.append(f"{what}: error {error:.2e}")
        largest = max(largest, error)
    return largest


def in_aligned_rows(matrix: Tensor) -> Tensor:
    """The same values, as the exact kernel takes them; what lies between the rows is poison."""
    rows, columns = matrix.shape
    padded = matrix.new_full((rows, -(-columns // 8) * 8), float("nan"))
    return padded[:, :columns].copy_(matrix)


def specials(failures: list[str]) -> None:
    """Infinities, NaN, zeros, denormals and extremes; n_major operands too."""

    def multiply(way: str, dtype: torch.dtype, x: Tensor, weight: Tensor) -> Tensor:
        if way == "exact":
            x, weight = in_aligned_rows(x), in_aligned_rows(weight)
        return by_kernel(way, dtype, x, weight)

    for way, dtype in every_way():
        found: list[str] = []
        gemm = functools.partial(multiply, way, dtype)
        special_values(found, cast=functools.partial(cast, way, dtype), multiply=gemm)
        failures += [f"{way}, {dtype}: {what}" for what in found]


def graphs_and_repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches over two streams agree bit for bit."""
    for way, dtype in every_way():
        x, weight = cast(way, dtype, *(torch.randn(n, 1000, device=CUDA) for n in (300, 1500)))
        out = by_kernel(way, dtype, x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            by_kernel(way, dtype, x, weight, out)
        weight.normal_()
        graph.replay()
        if not torch.equal(out, by_kernel(way, dtype, x, weight)):
            failures.append(f"{way}, {dtype}: graph replay differs")
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        differ = []
        for i in range(400):
            with torch.cuda.stream(streams[i % 2]):
                differ.append((by_kernel(way, dtype, x, weight) != out).any())
        torch.cuda.synchronize()
        if any(map(bool, differ)):
            failures.append(f"{way}, {dtype}: launches over two streams differ")


def through_the_ops(failures: list[str]) -> None:
    """What a kernel does not take goes to the library; batches; K beyond what one sum holds."""
    for way, dtype in every_way():
        for what, x_shape, weight_shape in (
            ("an odd K", (130, 1003), (300, 1003)),
            ("a long K", (130, 40000), (260, 40000)),
            ("leading dimensions", (3, 50, 512), (260, 512)),
            ("batches", (3, 500, 512), (3, 600, 512)),
            ("no rows", (0, 64), (32, 64)),
            ("no K", (16, 0), (32, 0)),
        ):
            if what == "batches" and way == "exact":
                continue
            wide = (torch.randn(shape, device=CUDA) for shape in (x_shape, weight_shape))
            x, weight = cast(way, dtype, *wide)
            exact = x.double() @ weight.double().mT
            ours = by_op(way, dtype, x, weight)
            if ours.shape != exact.shape or ours.dtype != torch.float32:
                failures.append(f"{way}, {dtype}, {what}: {ours.dtype} {tuple(ours.shape)}")
            elif not relative(ours, exact) <= 1e-6:
                failures.append(f"{way}, {dtype}, {what}: error {relative(ours, exact):.2e}")


CHECKS = (specials, graphs_and_repeats, through_the_ops)

# ---- time ----------------------------------------------------------------------------------------

CASES = (
    ("a router", 4096, 256, 7168),
    ("a small router", 16384, 8, 4096),
    ("a head, some tokens", 512, 32000, 4096),
    ("a head, one token", 1, 128256, 4096),
    ("a square", 4096, 4096, 4096),
    ("#70", 1024, 8192, 8192),
    ("the gradient of a router's weight", 256, 7168, 4096),
)


def took(step: Callable[[], object]) -> float:
    return median_ms(step, [], CUDA, 50, 200)


def timing() -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, m, n, k in CASES:
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA) / k**0.5
        times = [
            took(functools.partial(F.linear, x, weight)),
            took(functools.partial(split_gemm, x, weight)),
        ]
        for way in WAYS:
            operands = cast(way, torch.bfloat16, x, weight)
            times.append(took(functools.partial(by_op, way, torch.bfloat16, *operands)))
        rows.append((f"{name}: {m} x {n} x {k}", *times))
    return rows


def main() -> int:
    chosen = harness.parser("narrow_sm90", cases=200).parse_args()
    done = harness.progress()
    specs = [SPLIT_GEMM, *EXACT_GEMMS.values(), *MIXED_GEMMS.values()]
    load.prepare(specs, CUDA)
    done("built")
    failures: list[str] = []
    tables: list[str] = []
    with float32_settings("fp32"):
        if not chosen.skip_checks:
            largest = sweep(chosen.cases, chosen.seed, failures)
            done(f"{chosen.cases} random cases, largest error {largest:.1e}")
            for check in CHECKS:
                check(failures)
                done(check.__name__)
            heads = ["K", "data", "way", "dtype", "kernel", "SGEMM", "worst row", "SGEMM's"]
            tables.append(tabulate(accuracy(failures), heads, floatfmt=".1e"))
            done("accuracy")
        if not chosen.skip_timing:
            heads = ["ms", "library", "split", *WAYS]
            tables.append(tabulate(timing(), heads, floatfmt=".4f"))
            done("timing")
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
