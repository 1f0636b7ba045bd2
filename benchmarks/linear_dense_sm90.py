"""The bf16, fp16 and TF32 linear kernels of sm_90a by themselves: build, check, time.

    python -m benchmarks.linear_dense_sm90 [--skip-checks] [--skip-timing] [--cases 200] [--seed 0]
        [--only WORD] [--compiled]

Exits with 1 where a check failed. Timings are medians with the L2 cache cleared before each call,
on random data. `two` is F.linear and the pointwise kernel; `--compiled` adds torch.compile's
default and max-autotune.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import SENTINEL, host_us, random_operand, relative, sustained_ms
from fx_fuser import build
from fx_fuser.native import launch, load
from fx_fuser.native.kernel_spec import LINEAR_DENSE, POINTWISE, Family, KernelSpec

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Errors that always pass: a rounding to the type or, of TF32, of the operands. cuBLAS takes some
# small fp32 gemms without TF32.
SMALL = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-3}


@dataclass(frozen=True)
class Example:
    """An epilogue of examples.cuh and the same in torch ops, as f(z, operands, scalars)."""

    name: str
    reference: Callable[[Tensor, list[Tensor], list[float]], Tensor]
    scalars: int = 0
    operands: tuple[torch.dtype | None, ...] = ()  # None: the dtype of x
    out: torch.dtype | None = None

    def spec(self, dtype: torch.dtype, family: Family = LINEAR_DENSE) -> KernelSpec:
        types = (t or dtype for t in (self.out, None, *self.operands))
        return build.example(family, self.name, self.scalars, torch.float32, *types)


IDENTITY = Example("Identity", lambda z, t, s: z)
SWISH = Example("Swish", lambda z, t, s: z * torch.sigmoid(z) * s[0], 1)
RESIDUAL = Example("Residual", lambda z, t, s: torch.sigmoid(z) * s[0] + z, 1)
SILU_MUL = Example("SiluMul", lambda z, t, s: F.silu(z) * t[0], 0, (None,))
OPERANDS = Example(
    "ThreeOperands",
    lambda z, t, s: F.silu(z) * t[0].to(z.dtype) + t[1].to(z.dtype) * t[2].to(z.dtype) - s[0],
    *(1, (torch.float32, torch.bfloat16, torch.bool)),
)
TO_FLOAT = Example("Identity", lambda z, t, s: z.float(), out=torch.float32)
TO_HALF = Example("Swish", lambda z, t, s: (F.silu(z) * s[0]).half(), 1, out=torch.float16)
EXAMPLES = (IDENTITY, SWISH, RESIDUAL, SILU_MUL, OPERANDS, TO_FLOAT, TO_HALF)


def run(
    example: Example,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    operands: list[Tensor] | None = None,
    scalars: list[float] | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = x.new_empty((*x.shape[:-1], len(weight)), dtype=example.out)
    scalars = [2.0] * example.scalars if scalars is None else scalars
    spec = example.spec(x.dtype)
    taken = kernels.linear_dense(spec, x, weight, bias, out, z, operands or [], scalars)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


# ---- what must be right --------------------------------------------------------------------------


def sizes(choose: random.Random) -> tuple[int, int, int]:
    """Such that every kernel is chosen for some."""
    kind = choose.choice(("few", "any", "any", "wide", "large"))
    if kind == "few":
        return choose.choice((1, 2, 16, 17)), choose.randint(1, 9000), choose.randint(1, 3000)
    if kind == "any":
        return choose.randint(1, 700), choose.randint(1, 700), choose.randint(1, 3000)
    if kind == "wide":
        return choose.randint(65, 128), choose.randint(9000, 20000), choose.randint(1, 500)
    return choose.randint(900, 3000), choose.randint(900, 3000), choose.randint(1, 700)


def strided(rows: int, columns: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    """Random values with 16-byte aligned rows, some with a gap between them."""
    unit = 16 // dtype.itemsize
    padded = (-(-columns // unit) + choose.choice((0, 0, 1, 3))) * unit
    return torch.randn(rows, padded, device=CUDA, dtype=dtype)[:, :columns]


def error_of(value: Tensor, exact: Tensor) -> float:
    return float(
        (value.double() - exact.double()).norm()
        / (exact.double().norm() + 1e-3 * exact.numel() ** 0.5)
    )


def small_sizes(choose: random.Random) -> tuple[int, int, int]:
    """For the sanitizers, under which a gemm takes minutes."""
    return choose.choice((1, 17, 130, 260)), choose.randint(1, 300), choose.randint(1, 300)


def sweep(
    cases: int,
    seed: int,
    failures: list[str],
    sizes: Callable[[random.Random], tuple[int, int, int]] = sizes,
) -> dict[str, float]:
    """Random sizes, strides, operands and outputs; the largest error, over its bound, by dtype."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    largest = dict.fromkeys(map(str, DTYPES), 0.0)
    for case in range(cases):
        example, dtype = choose.choice(EXAMPLES), choose.choice(DTYPES)
        m, n, k = sizes(choose)
        x, weight = strided(m, k, dtype, choose), strided(n, k, dtype, choose).div_(k**0.5)
        bias = torch.randn(n, device=CUDA, dtype=dtype) if choose.random() < 0.5 else None
        operands = [random_operand(m, n, t or dtype, choose) for t in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        # Poison where the results go, sentinels beside them.
        left = choose.choice((3, 8))
        frame = torch.full((m + 2, n + 16), SENTINEL, device=CUDA, dtype=example.out or dtype)
        if choose.random() < 0.5:
            frame = F.pad(frame, (0, -frame.shape[1] % 8), value=SENTINEL)
        out = frame[1:-1, left : left + n].fill_(float("nan"))
        z = torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)
        z_taken = z if choose.random() < 0.5 else None
        run(example, x, weight, bias, operands, scalars, out, z_taken)

        exact_z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch_z = F.linear(x, weight, bias)
        checked = [
            (out, example.reference(exact_z, operands, scalars),
             example.reference(torch_z, operands, scalars), "out"),
        ]  # fmt: skip
        if z_taken is not None:
            checked.append((z, exact_z, torch_z, "z"))
        outside = frame.clone()
        outside[1:-1, left : left + n] = SENTINEL
        sentinel = torch.tensor(SENTINEL, dtype=frame.dtype, device=CUDA)
        what = f"case {case}: {m} x {n} x {k}, {', '.join(example.spec(dtype).signature)}"
        if not bool((outside == sentinel).all()):
            failures.append(f"{what}: wrote outside the result")
        for ours, exact, torchs, name in checked:
            error, bound = error_of(ours, exact), max(2 * error_of(torchs, exact), SMALL[dtype])
            if not error <= bound:
                failures.append(f"{what}: {name}'s error {error:.2e}, bound {bound:.2e}")
            largest[str(dtype)] = max(largest[str(dtype)], error / bound)
    return largest


def special_values(failures: list[str]) -> None:
    """Infinities and NaN are where an exact gemm has them; leading dimensions; M = 0."""
    for dtype in DTYPES:
        x = torch.randn(200, 504, device=CUDA).to(dtype)
        weight = torch.randn(300, 504, device=CUDA).to(dtype)
        x[3, 7], x[150, 499], weight[5, 8], weight[299, 0] = (
            *(float("inf"), float("-inf"), float("inf"), float("nan")),
        )
        exact = (x.double() @ weight.double().T).to(dtype)
        ours = run(IDENTITY, x, weight)
        same = torch.equal(ours.isnan(), exact.isnan()) and torch.equal(
            ours[ours.isinf()], exact[exact.isinf()]
        )
        if not same:
            failures.append(f"{dtype}: other infinities or NaN than IEEE's")
        x, weight = torch.randn(3, 5, 7, 64, device=CUDA).to(dtype), weight[6:200, 1:65].clone()
        flat = run(IDENTITY, x.view(105, 64), weight)
        if not torch.equal(run(IDENTITY, x, weight).view(105, 194), flat):
            failures.append(f"{dtype}: leading dimensions matter")
        run(IDENTITY, x[:0], weight)


def graphs_and_repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches, over two streams too, agree bit for bit."""
    for m, n, k in ((300, 500, 1000), (1000, 2500, 1000), (100, 17000, 512), (5, 500, 1000)):
        x = torch.randn(m, k, device=CUDA).bfloat16()
        weight = torch.randn(n, k, device=CUDA).bfloat16()
        out = run(SWISH, x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(SWISH, x, weight, out=out)
        weight.normal_()
        graph.replay()
        if not torch.equal(out, run(SWISH, x, weight)):
            failures.append(f"{m} x {n} x {k}: graph replay differs")
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        results = []
        for i in range(100):
            with torch.cuda.stream(streams[i % 2]):
                results.append((run(SWISH, x, weight) != out).any())
        torch.cuda.synchronize()
        if any(bool(r) for r in results):
            failures.append(f"{m} x {n} x {k}: launches over two streams differ")


def refusals(failures: list[str]) -> None:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA).bfloat16()

    x, weight, out = values(8, 36), values(16, 36), values(8, 16)
    for what, a, b in (
        ("K = 36", x, weight),
        ("unaligned x", values(8 * 32 + 1)[1:].view(8, 32), weight[:, :32].contiguous()),
        ("x with one row for all", values(1, 64).expand(8, 64), values(16, 64)),
        ("K = 0", x[:, :0], weight[:, :0]),
    ):
        if kernels.linear_dense(IDENTITY.spec(x.dtype), a, b, None, out, None, [], []):
            failures.append(f"{what} was not refused")


# ---- time ----------------------------------------------------------------------------------------

# name, epilogue, M, K, N, dtype
TIMED = (
    ("#70 bf16", RESIDUAL, 1024, 8192, 8192, torch.bfloat16),
    ("#70 fp16", RESIDUAL, 1024, 8192, 8192, torch.float16),
    ("#70 tf32", RESIDUAL, 1024, 8192, 8192, torch.float32),
    ("#59 bf16", SWISH, 128, 32768, 32768, torch.bfloat16),
    ("#59 tf32", SWISH, 128, 32768, 32768, torch.float32),
    ("Llama 1", SILU_MUL, 1, 4096, 14336, torch.bfloat16),
    ("Llama 16", SILU_MUL, 16, 4096, 14336, torch.bfloat16),
    ("Llama 64", SILU_MUL, 64, 4096, 14336, torch.bfloat16),
    ("Llama 128", SILU_MUL, 128, 4096, 14336, torch.bfloat16),
    ("Llama 512", SILU_MUL, 512, 4096, 14336, torch.bfloat16),
    ("Llama 4096", SILU_MUL, 4096, 4096, 14336, torch.bfloat16),
)


def timing(only: str, compiled: bool, failures: list[str]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, example, m, k, n, dtype in TIMED:
        if only not in name:
            continue
        x = torch.rand(m, k, device=CUDA).to(dtype)
        weight = torch.empty(n, k, device=CUDA, dtype=dtype).uniform_(-(k**-0.5), k**-0.5)
        bias = None
        if example is not SILU_MUL:
            bias = torch.empty(n, device=CUDA, dtype=dtype).uniform_(-(k**-0.5), k**-0.5)
        operands = [torch.randn(m, n, device=CUDA, dtype=dtype) for _ in example.operands]
        scalars = [2.0] * example.scalars
        out = torch.empty(m, n, device=CUDA, dtype=dtype).fill_(float("nan"))

        def eager(
            x: Tensor, weight: Tensor, e: Example = example, b: Tensor | None = bias,
            o: list[Tensor] = operands, s: list[float] = scalars,
        ) -> Tensor:  # fmt: skip
            return e.reference(F.linear(x, weight, b), o, s)

        pointwise = example.spec(dtype, POINTWISE)

        def two() -> None:
            z = F.linear(x, weight, bias)  # noqa: B023
            launch.pointwise(pointwise, z, [z, *operands], scalars)  # noqa: B023

        systems: dict[str, Callable[[], object]] = {
            "ours": lambda: run(example, x, weight, bias, operands, out=out),  # noqa: B023
            "two": two,
            "linear": lambda: F.linear(x, weight, bias),  # noqa: B023
            "eager": lambda: eager(x, weight),  # noqa: B023
        }
        if compiled:
            torch._dynamo.reset()
            default = torch.compile(eager)
            tuned = torch.compile(eager, mode="max-autotune-no-cudagraphs")
            systems["default"] = lambda: default(x, weight)  # noqa: B023
            systems["tuned"] = lambda: tuned(x, weight)  # noqa: B023
        systems["again"] = systems["ours"]
        exact = example.reference(
            F.linear(x.double(), weight.double(), None if bias is None else bias.double()),
            *(operands, scalars),
        )
        systems["ours"]()
        error, eager_error = relative(out, exact), relative(eager(x, weight), exact)
        del exact
        if not error <= (2 if dtype.itemsize == 2 else 1.5) * eager_error:
            failures.append(f"{name}: error {error:.2e}, eager's {eager_error:.2e}")
        rep = 60 if compiled else 100
        ms = {s: median_ms(step, [], CUDA, 20, rep) for s, step in systems.items()}
        sustained = sustained_ms(systems["ours"], ms["ours"])
        rate = 2e-9 * m * n * k / ms["ours"]
        rows.append([name, *(ms.get(s) for s in COLUMNS), sustained, rate, error, eager_error])
    x, weight = (torch.randn(8, 64, device=CUDA).bfloat16() for _ in range(2))
    out = x.new_empty(8, 8)
    rows.append(["host, µs", host_us(lambda: run(SWISH, x, weight, out=out))])
    rows.append(["F.linear, µs", host_us(lambda: F.linear(x, weight))])
    return rows


COLUMNS = ("ours", "again", "two", "linear", "eager", "default", "tuned")


def main() -> int:
    parser = harness.parser("linear_dense_sm90", cases=200)
    parser.add_argument("--compiled", action="store_true", help="time torch.compile, too")
    parser.add_argument("--only", default="", help="time those whose name has this in it")
    chosen = parser.parse_args()
    done = harness.progress()
    timed = [(e, dtype) for name, e, _, _, _, dtype in TIMED if chosen.only in name]
    specs = [e.spec(dtype, family) for e, dtype in timed for family in (LINEAR_DENSE, POINTWISE)]
    if not chosen.skip_checks:
        specs += [e.spec(dtype) for e in EXAMPLES for dtype in DTYPES]
    load.prepare(specs, CUDA)
    done("built")
    failures: list[str] = []
    times: list[list[object]] = []
    with float32_settings("tf32"):
        if not chosen.skip_checks:
            largest = sweep(chosen.cases, chosen.seed, failures)
            worst = ", ".join(f"{name} {share:.2f}" for name, share in largest.items())
            done(f"{chosen.cases} random cases, largest errors over their bounds: {worst}")
            special_values(failures)
            refusals(failures)
            graphs_and_repeats(failures)
            done("special values, refusals, graphs, repeats")
        if not chosen.skip_timing:
            times = timing(chosen.only, chosen.compiled, failures)
            done("timing")

    tables = []
    if times:
        heads = ["", *COLUMNS, "sustained", "TFLOP/s", "error", "eager's"]
        formats = ["", *[".4f"] * (len(COLUMNS) + 1), ".0f", ".1e", ".1e"]
        tables.append(tabulate(times, heads, floatfmt=formats))
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
