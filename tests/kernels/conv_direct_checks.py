"""Checks of the direct convolution: benchmarks/conv_sm90.py calls and times it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from checks import agree_over_two_streams, as_ieee, captured
from conv_checks import Results, families, random_case, random_operand
from torch import Tensor, nn

from benchmarks import kernels
from benchmarks.conv_cases import NONE, Padding, convolve
from benchmarks.conv_sm90 import (
    HALVES,
    IDENTITY,
    NORM,
    OPERANDS,
    ROUNDED,
    SWISH,
    Example,
    allowed,
    exact_statistics,
    of_dtype,
    run,
    statistics,
)
from benchmarks.sm90 import CUDA, FLOOR, relative

EXAMPLES = (IDENTITY, SWISH, NORM, OPERANDS, dataclasses.replace(IDENTITY, out=torch.float16))
HALF_EXAMPLES = (
    *(of_dtype(example, dtype) for example in EXAMPLES[:4] for dtype in HALVES),
    dataclasses.replace(NORM, x=torch.bfloat16),
    dataclasses.replace(SWISH, x=torch.float16, out=torch.bfloat16),
)


def accuracy(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    """On the accuracy contract's data: of c, and of c normalised as in training."""
    for x_shape, weight_shape in (
        ((4, 8, 128, 128), (64, 8, 3, 3)),
        ((8, 3, 65, 71), (32, 3, 4, 4)),
    ):
        for name, *drawn in families(x_shape, weight_shape):
            x, weight = (v.to(dtype) for v in drawn)
            exact = F.conv2d(x.double(), weight.double())
            ours, eager = run(of_dtype(IDENTITY, dtype), x, weight), F.conv2d(x, weight)
            if not eager.isfinite().all():  # overflow in fp16
                continue
            error, other = relative(ours, exact), relative(eager, exact)
            # Training: the normalised values, which lose digits where the mean is large.
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


def sweep(
    failures: list[str],
    cases: int,
    seed: int,
    draw: Callable[[random.Random, torch.dtype], tuple[Tensor, Tensor, Padding]] = random_case,
    examples: Sequence[Example] = EXAMPLES,
) -> None:
    """Random sizes, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example = choose.choice(examples)
        x, weight, padding = draw(choose, example.x)
        exact_c = convolve(x.double(), weight.double(), padding)
        shape = exact_c.shape
        operands = [random_operand(shape, dtype, choose) for dtype in example.operands]
        if example.name == NORM.name:
            operands[1] = operands[1].abs() + 0.1
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        results = Results.like(exact_c, (example.out, example.x), choose, (0, 0, 1, 4, 7))
        run(example, x, weight, padding, operands, scalars, results.out, results.c)

        exact = example.reference(exact_c, operands, scalars)
        what = (
            f"case {case}: {tuple(x.shape)} by {tuple(weight.shape)}, padding {padding}, "
            f"{', '.join(example.spec.signature)}, operands {[tuple(t.shape) for t in operands]}"
        )
        # Rounding to the result's dtype and the epilogue's own roundings do not count as errors.
        found = results.faults(exact, exact_c, ROUNDED[example.out], ROUNDED[example.x])
        failures += [f"{what}: {fault}" for fault in found]
        mean, var = statistics(x, weight, padding)
        exact_mean, exact_var = exact_statistics(exact_c)
        scale = exact_c.abs().amax((0, 2, 3)).clamp_min(1e-30)
        off = float(((mean - exact_mean).abs() / scale).max())
        off = max(off, float(((var - exact_var).abs() / (exact_var + 1e-6 * scale**2)).max()))
        if not off <= 1e-5:
            failures.append(f"{what}: statistics are off by {off:.2e}")


def special_values(
    failures: list[str],
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int] = (40, 50),
    wide: tuple[int, ...] = (20, 8, 124, 124),
) -> None:
    """Infinities, NaN, zeros, denormals and extremes, as a convolution of this dtype gives them.

    size: of most images, at least 21. wide: an x whose statistics are computed in wide units.
    """

    def pair() -> tuple[Tensor, Tensor]:
        x, weight = torch.randn(2, 8, *size, device=CUDA), torch.randn(70, 8, 3, 3, device=CUDA)
        return x.to(dtype), weight.to(dtype)

    def same(what: str, x: Tensor, weight: Tensor, padding: Padding = NONE) -> None:
        # Where c is stored too, another kernel is used.
        alone = run(of_dtype(IDENTITY, dtype), x, weight, padding)
        also = torch.empty_like(alone)
        beside = run(of_dtype(IDENTITY, dtype), x, weight, padding, c=also)
        for way, ours in (("alone", alone), ("with c", beside), ("c", also)):
            same_as_exact(f"{what}, {way}, {dtype}", ours, x, weight, padding)

    def same_as_exact(what: str, ours: Tensor, x: Tensor, weight: Tensor, padding: Padding) -> None:
        # On the CPU, by plain products: fast algorithms spread an infinity to other elements.
        windows = F.unfold(F.pad(x.double(), padding), weight.shape[2:])
        products = weight.flatten(1).double() @ windows
        exact = products.view(ours.shape).to(dtype)
        as_ieee(what, ours, exact, ROUNDED[dtype], failures)

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
    # In wide units a lane has 122 values, not a power of two.
    for flat in (torch.full_like(x, 3.0), x.new_full(wide, 3.0)):
        mean, var = statistics(flat, torch.ones_like(weight))
        if not bool((mean == 216).all() and (var == 0).all()):
            failures.append(f"statistics of a constant, {dtype}: {mean[0]}, {var[0]}")


def graphs_and_repeats(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    """Replays follow the tensors; launches, also on two streams, agree bit for bit."""
    swish = of_dtype(SWISH, dtype)
    x = torch.randn(5, 8, 130, 128, device=CUDA).to(dtype)
    weight = torch.randn(64, 8, 3, 3, device=CUDA).to(dtype)
    out = run(swish, x, weight)
    found: list[Tensor] = []

    def both() -> None:
        run(swish, x, weight, out=out)
        found[:] = statistics(x, weight)

    graph = captured(both)
    for factor in (1.0, 1e-3, 1e2) if dtype == torch.float16 else (1.0, 1e-6, 1e6):
        weight.normal_().mul_(factor)
        graph.replay()
        c = F.conv2d(x.double(), weight.double())
        if not relative(out, F.silu(c) * 2) <= ROUNDED[dtype]:
            failures.append(f"graph replay, weight * {factor}, {dtype}")
        if not relative(found[1], exact_statistics(c)[1]) <= 1e-6:
            failures.append(f"statistics in a graph, weight * {factor}, {dtype}")
    weight.normal_()

    def step() -> tuple[Tensor, ...]:
        return run(swish, x, weight), *statistics(x, weight)

    if not agree_over_two_streams(step, step(), 5_000):
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
