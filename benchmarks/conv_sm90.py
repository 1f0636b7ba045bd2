"""The direct convolution of sm_90a by itself: builds it, checks it against float64, times it.

    python -m benchmarks.conv_sm90 [--skip-checks] [--skip-timing] [--cases 150] [--seed 0]

Exits with 1 where a check failed. Timings are medians with the L2 cache cleared before each call,
on random data.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks import harness, kernels
from benchmarks.conv_cases import (
    NONE,
    Padding,
    convolve,
    families,
    random_case,
    random_operand,
    wide_case,
)
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import FLOOR, SENTINEL, relative, sustained_ms
from fx_fuser import build
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import CONV_DIRECT, KernelSpec

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Example:
    """An epilogue of examples.cuh and the same in torch ops, as f(c, operands, scalars)."""

    name: str
    reference: Callable[[Tensor, list[Tensor], list[float]], Tensor]
    operands: tuple[torch.dtype, ...] = ()
    scalars: int = 0
    x: torch.dtype = torch.float32  # and of the weight and c
    out: torch.dtype = torch.float32

    @functools.cached_property
    def spec(self) -> KernelSpec:
        types = (torch.float32, self.out, self.x, *self.operands)
        return build.example(CONV_DIRECT, self.name, self.scalars, *types)


def _batch_norm_mul(c: Tensor, t: list[Tensor], s: list[float]) -> Tensor:
    mean, var, gamma, beta, scale = (v.to(c.dtype) for v in t)
    return ((c - mean) * torch.rsqrt(var.abs() + s[0]) * gamma + beta) * scale


IDENTITY = Example("Identity", lambda c, t, s: c)
SWISH = Example("Swish", lambda c, t, s: F.silu(c) * s[0], scalars=1)
NORM = Example("BatchNormMul", _batch_norm_mul, (torch.float32,) * 5, scalars=1)
OPERANDS = Example(
    "ThreeOperands",
    lambda c, t, s: F.silu(c) * t[0].to(c.dtype) + t[1].to(c.dtype) * t[2].to(c.dtype) - s[0],
    (torch.float32, torch.bfloat16, torch.bool),
    scalars=1,
)
# silu(batch_norm(c)) as the backend makes it, without a bias
NORM_SILU = Example("NormSilu", lambda c, t, s: c, (torch.float32,) * 4, scalars=1)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


@functools.cache
def of_dtype(example: Example, dtype: torch.dtype) -> Example:
    """The same of x, weight and result in this dtype."""
    return dataclasses.replace(example, x=dtype, out=dtype)


EXAMPLES = (IDENTITY, SWISH, NORM, OPERANDS, dataclasses.replace(IDENTITY, out=torch.float16))
HALF_EXAMPLES = (
    *(of_dtype(example, dtype) for example in EXAMPLES[:4] for dtype in HALVES),
    dataclasses.replace(NORM, x=torch.bfloat16),
    dataclasses.replace(SWISH, x=torch.float16, out=torch.bfloat16),
)


def run(
    example: Example,
    x: Tensor,
    weight: Tensor,
    padding: Padding = NONE,
    operands: list[Tensor] | None = None,
    scalars: list[float] | None = None,
    out: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    if out is None:
        left, right, top, bottom = padding
        height = x.shape[2] + top + bottom - weight.shape[2] + 1
        width = x.shape[3] + left + right - weight.shape[3] + 1
        out = x.new_empty((len(x), len(weight), height, width), dtype=example.out)
    taken = kernels.conv_direct(
        *(example.spec, x, weight, padding, out, c),
        operands or [],
        scalars or [2.0] * example.scalars,
    )
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


def statistics(x: Tensor, weight: Tensor, padding: Padding = NONE) -> tuple[Tensor, Tensor]:
    mean, variance = torch.full((2, len(weight)), float("nan"), device=CUDA)
    spec = of_dtype(IDENTITY, x.dtype).spec
    taken = kernels.conv_direct_statistics(spec, x, weight, padding, mean, variance)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return mean, variance


def exact_statistics(c: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(c.double(), (0, 2, 3), correction=0)
    return mean, variance


# ---- accuracy ------------------------------------------------------------------------------------


def allowed(eagers: float, dtype: torch.dtype, factor: float = 1.5) -> float:
    """The accuracy contract: how large an error may be beside eager's."""
    return max(factor * eagers, FLOOR) if dtype == torch.float32 else 2 * eagers


def accuracy(failures: list[str], dtype: torch.dtype = torch.float32) -> list[list[object]]:
    table: list[list[object]] = []
    for x_shape, weight_shape in (
        ((4, 8, 128, 128), (64, 8, 3, 3)),
        ((8, 3, 65, 71), (32, 3, 4, 4)),
    ):
        for name, *drawn in families(x_shape, weight_shape):
            x, weight = (v.to(dtype) for v in drawn)
            exact = F.conv2d(x.double(), weight.double())
            ours, eager = run(of_dtype(IDENTITY, dtype), x, weight), F.conv2d(x, weight)
            if not eager.isfinite().all():  # beyond fp16
                continue
            error, other = relative(ours, exact), relative(eager, exact)
            # Of the normalised values, which a large mean takes digits from: what training gives.
            norm = nn.BatchNorm2d(len(weight), device=CUDA)
            vectors = [*statistics(x, weight), norm.weight.detach(), norm.bias.detach()]
            operands = [*(v.view(-1, 1, 1) for v in vectors), torch.ones((), device=CUDA)]
            ours = run(of_dtype(NORM, dtype), x, weight, NONE, operands, [norm.eps])
            exact_mean, exact_var = exact_statistics(exact)
            exact -= exact_mean.view(-1, 1, 1)
            exact *= (exact_var + norm.eps).rsqrt().view(-1, 1, 1)
            normalised, eagers = relative(ours, exact), relative(norm(eager).detach(), exact)
            what = f"{list(weight_shape)}, {dtype}, {name}"
            if not error <= allowed(other, dtype):
                failures.append(f"accuracy, {what}: {error:.2e} v {other:.2e}")
            if not normalised <= max(allowed(eagers, dtype, 4), 2 * FLOOR):
                failures.append(f"normalised, {what}: {normalised:.2e} v {eagers:.2e}")
            which = f"{str(dtype).removeprefix('torch.')}, {weight_shape[1]} channels"
            table.append([which, name, error, other, normalised, eagers])
    return table


# ---- everything else that must be right ----------------------------------------------------------


ROUNDED = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def sweep(
    cases: int,
    seed: int,
    failures: list[str],
    draw: Callable[[random.Random, torch.dtype], tuple[Tensor, Tensor, Padding]] = random_case,
    examples: Sequence[Example] = EXAMPLES,
) -> float:
    """Random sizes, operands and outputs; returns the largest error seen in fp32."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    largest = 0.0
    for case in range(cases):
        example = choose.choice(examples)
        x, weight, padding = draw(choose, example.x)
        exact_c = convolve(x.double(), weight.double(), padding)
        shape = exact_c.shape
        operands = [random_operand(shape, dtype, choose) for dtype in example.operands]
        if example.name == NORM.name:
            operands[1] = operands[1].abs() + 0.1
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        # Poison where the result goes, sentinels beside it; the result begins anywhere.
        before = 64 + choose.choice((0, 0, 1, 4, 7))
        frame = torch.full(
            (before + exact_c.numel() + 64,), SENTINEL, device=CUDA, dtype=example.out
        )
        out = frame[before:-64].view(shape).fill_(float("nan"))
        c = None
        if choose.random() < 0.4:
            c = torch.full(shape, float("nan"), device=CUDA, dtype=example.x)
        run(example, x, weight, padding, operands, scalars, out, c)

        exact = example.reference(exact_c, operands, scalars)
        # Rounding to the result's dtype, and the epilogue's own few roundings, are no error here.
        error = float((out.double() - exact).norm() / (exact.norm() + 1e-3 * exact.numel() ** 0.5))
        error_of_c = 0.0 if c is None else relative(c, exact_c)
        what = (
            f"case {case}: {tuple(x.shape)} by {tuple(weight.shape)}, padding {padding}, "
            f"{', '.join(example.spec.signature)}, operands {[tuple(t.shape) for t in operands]}"
        )
        if not bool((frame[:before] == SENTINEL).all() and (frame[-64:] == SENTINEL).all()):
            failures.append(f"{what}: wrote outside the result")
        if not error <= ROUNDED[example.out] or not error_of_c <= ROUNDED[example.x]:
            failures.append(f"{what}: error {error:.2e}, of c {error_of_c:.2e}")
        if example.out == example.x == torch.float32:
            largest = max(largest, error, error_of_c)
        mean, var = statistics(x, weight, padding)
        exact_mean, exact_var = exact_statistics(exact_c)
        scale = exact_c.abs().amax((0, 2, 3)).clamp_min(1e-30)
        off = float(((mean - exact_mean).abs() / scale).max())
        off = max(off, float(((var - exact_var).abs() / (exact_var + 1e-6 * scale**2)).max()))
        if not off <= 1e-5:
            failures.append(f"{what}: statistics are off by {off:.2e}")
    return largest


def special_values(
    failures: list[str],
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int] = (40, 50),
    wide: tuple[int, ...] = (20, 8, 124, 124),
) -> None:
    """Infinities, NaN, zeros, denormals and extremes, as a convolution of this dtype gives them.

    size: of most images, 21 at least. wide: x of statistics of wide units.
    """

    def pair() -> tuple[Tensor, Tensor]:
        x, weight = torch.randn(2, 8, *size, device=CUDA), torch.randn(70, 8, 3, 3, device=CUDA)
        return x.to(dtype), weight.to(dtype)

    def same(what: str, x: Tensor, weight: Tensor, padding: Padding = NONE) -> None:
        # Where the convolution is wanted too, another kernel makes both.
        alone = run(of_dtype(IDENTITY, dtype), x, weight, padding)
        also = torch.empty_like(alone)
        beside = run(of_dtype(IDENTITY, dtype), x, weight, padding, c=also)
        for way, ours in (("alone", alone), ("with c", beside), ("c", also)):
            same_as_exact(f"{what}, {way}, {dtype}", ours, x, weight, padding)

    def same_as_exact(what: str, ours: Tensor, x: Tensor, weight: Tensor, padding: Padding) -> None:
        # On the CPU, as plain multiplications: fast algorithms spread an infinity around.
        windows = F.unfold(F.pad(x.double(), padding), weight.shape[2:])
        products = weight.flatten(1).double() @ windows
        exact = products.view(ours.shape).to(dtype)
        finite = exact.isfinite()
        if not torch.equal(ours.nan_to_num(0, 1, -1)[~finite], exact.nan_to_num(0, 1, -1)[~finite]):
            failures.append(f"{what}: other infinities or NaN than IEEE's")
        if not torch.equal(ours.isfinite(), finite):
            failures.append(f"{what}: not finite elsewhere")
        usual = [torch.where(finite, v, 0).double() for v in (ours, exact)]
        if not relative(*usual) <= ROUNDED[dtype]:
            failures.append(f"{what}: error {relative(*usual):.2e} where finite")

    inf, nan = float("inf"), float("nan")
    x, weight = pair()
    x[0, 3, 7, 9], x[1, 0, -1, -1] = inf, -inf
    same("infinities in x", x, weight)
    same("infinities in x", x, weight[:, :, :2, :2].contiguous())
    same("infinities in x", x, weight[:, :, :1, :1].contiguous())
    same("infinities in x of 5 channels", x[:, :5].contiguous(), weight[:, :5].contiguous())
    x, weight = pair()
    weight[5, 0, 1, 1], weight[69, 7, 2, 2] = inf, -inf
    same("infinities in the weight", x, weight)
    x, weight = pair()
    x[0, 3, 7, 9], x[1, 0, 20, 20], weight[17, 0, 0, 0] = nan, inf, nan
    same("NaN", x, weight, (1, 1, 1, 1))
    x, weight = pair()
    x[0, 3, 7, 9], weight[20, 3] = inf, 0.0
    same("0 * inf", x, weight)
    x, weight = pair()
    same("all NaN", x * nan, weight)
    same("zeros", x * 0, weight)
    if dtype == torch.float16:
        same("denormal x", x * 1e-6, weight * 1e2)
        same("denormal weight", x * 1e2, weight * 1e-6)
        same("denormal result", x * 1e-3, weight * 1e-3)
        same("results beyond fp16", x * 1e2, weight * 2e1)
    else:
        same("denormal x", x * 1e-40, weight * 1e4)
        same("denormal weight", x * 1e4, weight * 1e-40)
        same("tiny weight", x * 1e20, weight * 1e-30)
        same("tiny both", x * 1e-18, weight * 1e-17)
        same("huge weight", x * 1e-36, weight * 1e36)
        same("huge x", x * 1e36, weight * 1e-36)
        overflow = run(of_dtype(IDENTITY, dtype), x * 1e30, weight * 1e30)
        if overflow.isfinite().any():  # in fp32 of either sign, or NaN
            failures.append(f"overflow, {dtype}: finite values")
    x[0, 0, 0, 0] = nan
    mean, var = statistics(x, weight)
    if not bool(mean.isnan().all() and var.isnan().all()):
        failures.append(f"statistics of a NaN are not NaN, {dtype}")
    # In wide units a lane has 122 values, no power of two.
    for flat in (torch.full_like(x, 3.0), x.new_full(wide, 3.0)):
        mean, var = statistics(flat, torch.ones_like(weight))
        if not bool((mean == 216).all() and (var == 0).all()):
            failures.append(f"statistics of a constant, {dtype}: {mean[0]}, {var[0]}")


def graphs_and_repeats(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    """Replays follow the tensors; launches, over two streams too, agree bit for bit."""
    swish = of_dtype(SWISH, dtype)
    x = torch.randn(5, 8, 130, 128, device=CUDA).to(dtype)
    weight = torch.randn(64, 8, 3, 3, device=CUDA).to(dtype)
    out = run(swish, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(swish, x, weight, out=out)
        _, var = statistics(x, weight)
    for factor in (1.0, 1e-3, 1e2) if dtype == torch.float16 else (1.0, 1e-6, 1e6):
        weight.normal_().mul_(factor)
        graph.replay()
        c = F.conv2d(x.double(), weight.double())
        if not relative(out, F.silu(c) * 2) <= ROUNDED[dtype]:
            failures.append(f"graph replay, weight * {factor}, {dtype}")
        if not relative(var, exact_statistics(c)[1]) <= 1e-6:
            failures.append(f"statistics in a graph, weight * {factor}, {dtype}")
    weight.normal_()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    first = (run(swish, x, weight), *statistics(x, weight))
    torch.cuda.synchronize()
    differ = torch.zeros((), dtype=torch.bool, device=CUDA)
    flags = []
    for i in range(5_000):  # of two kernels each
        with torch.cuda.stream(streams[i % 2]):
            again = (run(swish, x, weight), *statistics(x, weight))
            flags += [(a != b).any() for a, b in zip(again, first)]
    torch.cuda.synchronize()
    for flag in flags:
        differ |= flag
    if bool(differ):
        failures.append(f"launches over two streams differ, {dtype}")


def refusals(failures: list[str]) -> None:
    x, weight = torch.randn(2, 8, 16, 16, device=CUDA), torch.randn(4, 8, 3, 3, device=CUDA)
    out = torch.empty(2, 4, 14, 14, device=CUDA)
    last = torch.channels_last
    for what, a, b, result in (
        ("x in channels_last", x.to(memory_format=last), weight, out),
        ("a weight in channels_last", x, weight.to(memory_format=last), out),
        ("out in channels_last", x, weight, out.to(memory_format=last)),
    ):
        if kernels.conv_direct(IDENTITY.spec, a, b, NONE, result, None, [], []):
            failures.append(f"{what} was not refused")


# ---- time ----------------------------------------------------------------------------------------


def timing(failures: list[str]) -> list[list[object]]:
    table: list[list[object]] = []
    seed = ("#73", (128, 8, 128, 128), (64, 8, 3, 3), NONE)
    stem = ("stem", (32, 3, 224, 224), (32, 3, 3, 3), (1, 1, 1, 1))
    odd = ("127", (128, 8, 127, 127), (64, 8, 3, 3), (1, 1, 1, 1))
    cases = [(case, torch.float32) for case in (seed, stem, odd)]
    cases += [(seed, torch.float16), *((case, torch.bfloat16) for case in (seed, stem, odd))]
    for (name, shape, weight_shape, padding), dtype in cases:
        name += f" {str(dtype).removeprefix('torch.')}"
        x = torch.rand(shape, device=CUDA).to(dtype)
        conv = nn.Conv2d(shape[1], weight_shape[0], 3, padding=padding[0], bias=False, device=CUDA)
        conv.to(dtype)
        norm = nn.BatchNorm2d(weight_shape[0], device=CUDA)
        weight = conv.weight.detach()
        norm.running_mean, norm.running_var = exact_statistics(conv(x).detach())
        norm.float()
        vectors = [norm.running_mean, norm.running_var, norm.weight, norm.bias]
        per_channel = [v.detach().view(-1, 1, 1) for v in vectors]
        per_channel.append(torch.tensor(2.0, device=CUDA))

        def ours(
            x: Tensor = x, w: Tensor = weight, p: Padding = padding, v: list[Tensor] = per_channel
        ) -> Tensor:
            return run(of_dtype(NORM, x.dtype), x, w, p, v, [1e-5])

        def measured(x: Tensor = x, w: Tensor = weight, p: Padding = padding) -> Tensor:
            return statistics(x, w, p)[0]

        def training(
            x: Tensor = x, w: Tensor = weight, p: Padding = padding, v: list[Tensor] = per_channel
        ) -> Tensor:
            found = [s.view(-1, 1, 1) for s in statistics(x, w, p)]
            return run(of_dtype(NORM, x.dtype), x, w, p, [*found, *v[2:]], [1e-5])

        def eager(x: Tensor = x, c: nn.Module = conv, n: nn.Module = norm) -> Tensor:
            with torch.no_grad():
                result: Tensor = n(c(x)) * 2.0
            return result

        ways: tuple[tuple[str, Callable[[], Tensor]], ...]
        ways = ("eval", ours), ("statistics", measured), ("training", training)
        for mode, way in ways:
            norm.train(mode == "training")
            error = eager_error = 0.0
            if mode != "statistics" and shape[2] == 128:
                conv64, norm64 = nn.Conv2d(8, 64, 3, bias=False), nn.BatchNorm2d(64)
                conv64.load_state_dict(conv.state_dict())
                norm64.load_state_dict(norm.state_dict())
                norm64.train(mode == "training")
                few = slice(None, None, 8) if mode == "eval" else slice(None)
                exact = eager(x[few].double(), conv64.to(CUDA).double(), norm64.to(CUDA).double())
                error = relative(way()[few], exact)
                eager_error = relative(eager()[few], exact)
                del exact
                if not error <= allowed(eager_error, dtype):
                    failures.append(f"{name} {mode}: error {error:.2e}, eager's {eager_error:.2e}")
            ms = median_ms(way, [], CUDA, 25, 100)
            row: list[object] = [f"{name} {mode}", ms, median_ms(way, [], CUDA, 25, 100)]
            row.append(sustained_ms(way, ms))
            if mode != "statistics":
                eager_ms = median_ms(eager, [], CUDA, 10, 50)
                row += [eager_ms, eager_ms / ms, error, eager_error]
            table.append(row)
    return table


def main() -> int:
    chosen = harness.parser("conv_sm90", cases=150).parse_args()
    done = harness.progress()
    load.prepare([e.spec for e in (*EXAMPLES, *HALF_EXAMPLES)], CUDA)
    load.prepare_batch_stats(CUDA)
    done("built")
    failures: list[str] = []
    errors: list[list[object]] = []
    times: list[list[object]] = []
    with float32_settings("fp32", cudnn_tf32=False):
        if not chosen.skip_checks:
            largest = sweep(chosen.cases, chosen.seed, failures)
            sweep(chosen.cases, chosen.seed, failures, examples=HALF_EXAMPLES)
            for examples in (EXAMPLES, HALF_EXAMPLES):
                sweep(chosen.cases // 10, chosen.seed, failures, wide_case, examples)
            done(f"2.2 x {chosen.cases} random cases, largest error in fp32 {largest:.1e}")
            refusals(failures)
            for dtype in DTYPES:
                special_values(failures, dtype)
                graphs_and_repeats(failures, dtype)
                done(f"special values, graphs, repeats in {dtype}")
                errors += accuracy(failures, dtype)
            done("accuracy")
        if not chosen.skip_timing:
            times = timing(failures)
            done("timing")

    tables = []
    if errors:
        heads = ["", "data", "kernel", "eager", "normalised", "eager's"]
        tables.append(tabulate(errors, heads, floatfmt=".1e"))
    if times:
        heads = ["", "ms", "again", "sustained", "eager", "×", "error", "eager's"]
        formats = ["", ".4f", ".4f", ".4f", ".3f", ".2f", ".1e", ".1e"]
        tables.append(tabulate(times, heads, floatfmt=formats))
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
