"""Checks of the direct convolution's backward: benchmarks/conv_backward_sm90.py times it."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from checks import SENTINEL, captured, replays_agree
from conv_checks import random_case
from torch import Tensor

from benchmarks import kernels
from benchmarks.conv_backward_sm90 import IDENTITY, SCALED, Problem, run
from benchmarks.conv_cases import NONE, Padding, convolve
from benchmarks.conv_sm90 import DTYPES, ROUNDED
from benchmarks.sm90 import CUDA, normal, spread
from fx_fuser.kernels.direct import conv_direct_backward_cut

MODES = ("training", "evaluation", "plain")
NAMES = ("dx", "dweight", "dgamma", "dbeta")


def random_problem(
    x: Tensor, weight: Tensor, padding: Padding, mode: str, choose: random.Random
) -> Problem:
    count = len(weight)

    def vector() -> Tensor:
        return torch.randn(count, device=CUDA)

    dy = torch.randn_like(convolve(x, weight, padding))
    gamma = vector() if mode != "plain" and choose.random() < 0.7 else None
    bias = vector() if mode == "evaluation" and choose.random() < 0.5 else None
    running = (vector(), vector().abs() + 0.1) if mode == "evaluation" else (None, None)
    problem = Problem(x, weight, dy, mode, padding, gamma, bias, *running)
    if choose.random() < 0.5:
        return problem
    shape = choose.choice(((count, 1, 1), (1, count, 1, 1), (1,)))
    factors = (torch.randn(shape, device=CUDA), vector().bfloat16().view(-1, 1, 1))
    return replace(problem, operands=factors, scalars=(choose.uniform(0.5, 2),))


def ours(problem: Problem, with_dx: bool = True) -> tuple[Tensor, ...]:
    dx = torch.full_like(problem.x, float("nan")) if with_dx else None
    dweight = torch.full_like(problem.weight, float("nan"), dtype=torch.float32)
    sums = run(problem, dx, dweight)
    return (problem.x.new_zeros(0) if dx is None else dx, dweight, *sums)


def errors(
    found: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    usual: tuple[Tensor, ...] | None = None,
) -> list[float]:
    """Frobenius errors, relative to `exact` or, if its norm is larger, to `usual`."""
    return [
        float((f.double() - e).norm() / torch.maximum(e.norm(), u.norm()).clamp_min(1e-300))
        if f.numel()
        else 0.0
        for f, e, u in zip(found, exact, usual or exact)
    ]


def bounds(eagers: list[float], dtype: torch.dtype) -> list[float]:
    """The largest errors allowed, given eager's, in the order of NAMES.

    In 16 bits dx and dweight have only the error of rounding the result, about as eager; the
    others are sums, which eager computes in float32, too.
    """
    factors = (2, 2, 2, 2) if dtype == torch.float32 else (1.1, 1.1, 4, 4)
    return [max(factor * error, 6e-7) for factor, error in zip(factors, eagers)]


def families(dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """The data of the accuracy contract, as far as `dtype` can hold it."""
    shape, weights = (4, 8, 128, 128), (64, 8, 3, 3)

    x = torch.rand(shape, device=CUDA)
    layer = (torch.rand(weights, device=CUDA) * 2 - 1) / 72**0.5
    out = (4, 64, 126, 126)
    dy = normal(*out)
    seed = Problem(x, layer, dy)
    yield "as nn.Conv2d", seed
    if dtype == torch.float16:
        yield "gradients of 1e-4", replace(seed, dy=dy * 1e-4)
        yield "gradients of 1e3", replace(seed, dy=dy * 1e3)
    yield "normal", replace(seed, x=normal(*shape), weight=normal(*weights))
    yield "gradients of 1e-10", replace(seed, dy=dy * 1e-10)
    yield "gradients of 1e-30", replace(seed, dy=dy * 1e-30)
    yield "heavy-tailed gradients", replace(seed, dy=dy * spread(4, *out))
    heavy = normal(*shape) * spread(4, *shape)
    yield "heavy-tailed x and weight", replace(seed, x=heavy, weight=layer * spread(4, *weights))
    yield "mean 1e4, deviation 1", replace(seed, x=normal(*shape) + 1e4)
    filters = spread(6, 64, 1, 1, 1)
    yield (
        "scaled filters and their gradients",
        replace(seed, weight=layer * filters, dy=dy * spread(6, 64, 1, 1)),
    )
    yield "scaled samples' gradients", replace(seed, dy=dy * spread(6, 4, 1, 1, 1))
    yield "gradients that are mostly a mean", replace(seed, dy=dy * 1e-2 + 1)
    with torch.no_grad():
        z = F.batch_norm(convolve(x, layer, NONE), None, None, training=True)
    yield "gradients along x̂", replace(seed, dy=dy + z)
    yield "gradients mostly along x̂", replace(seed, dy=1e-2 * dy + z)


def accuracy(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    for name, drawn in families(dtype):
        of_training = drawn.to(dtype)
        if not (of_training.x.abs().amax() * of_training.weight.abs().amax()).isfinite():
            continue
        for mode in ("training", "evaluation"):
            if mode == "evaluation" and name.startswith("gradients that are mostly"):
                continue  # their statistics are the batch's own, so that dgamma is only rounding
            problem = of_training
            if mode == "evaluation":
                mean, variance = problem.statistics()
                problem = replace(problem, mode=mode, mean=mean, variance=variance)
            exact = problem.in_torch(torch.float64)
            found = errors(ours(problem), exact)
            eagers = errors(problem.in_torch(dtype), exact)
            for what, error, other, bound in zip(NAMES, found, eagers, bounds(eagers, dtype)):
                if not error <= bound and math.isfinite(other):
                    failures.append(f"{dtype}, {name}, {mode}, {what}: {error:.2e} v {other:.2e}")


def _allowed(eagers: float, dtype: torch.dtype, name: str) -> float:
    """The error of a gradient. dx is rounded to its dtype, the others are fp32."""
    return max(4 * eagers, 2e-6, ROUNDED[dtype] if name == "dx" else 0.0)


def sweep(
    failures: list[str],
    cases: int,
    seed: int,
    draw: Callable[[random.Random, torch.dtype], tuple[Tensor, Tensor, Padding]] = random_case,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Random sizes, modes and factors."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        dtype = choose.choice(dtypes)
        x, weight, padding = draw(choose, dtype)
        sizes = (x.shape, weight.shape, padding)
        cut = functools.partial(conv_direct_backward_cut, *sizes, x_bytes=dtype.itemsize)
        with_dx = choose.random() < 0.8 and bool(cut(True))
        if not cut(False):
            failures.append(f"case {case}: {sizes} was refused")
            continue
        problem = random_problem(x, weight, padding, choose.choice(MODES), choose)
        exact = problem.in_torch(torch.float64)
        # dy begins at any element; NaN where results go, sentinels around them.
        skew = choose.choice((0, 0, 1, 2, 3))
        memory = x.new_empty(problem.dy.numel() + skew)
        memory[skew:] = problem.dy.flatten()
        problem = replace(problem, dy=memory[skew:].view_as(problem.dy))
        frame = x.new_full((x.numel() + 128,), SENTINEL)
        dx = frame[64:-64].view_as(x).fill_(float("nan"))
        dweight = torch.full_like(weight, float("nan"), dtype=torch.float32)
        with_dweight = choose.random() < 0.9
        sums = run(problem, dx if with_dx else None, dweight if with_dweight else None)
        none = x.new_zeros(0)
        found = (dx if with_dx else none, dweight if with_dweight else none, *sums)
        # A sum, e.g. for one channel, may happen to be nearly zero; that of other dy is not, too.
        others = replace(problem, dy=torch.randn_like(problem.dy)).in_torch(torch.float64)
        eagers = errors(problem.in_torch(dtype), exact, others)
        what = (
            f"case {case}, {dtype}: {tuple(x.shape)} by {tuple(weight.shape)}, padding {padding}, "
            f"{problem.mode}, {len(problem.operands)} operands"
        )
        if not bool((frame[:64] == SENTINEL).all() and (frame[-64:] == SENTINEL).all()):
            failures.append(f"{what}: wrote outside the result")
        values = problem.dy.numel() // len(weight)
        of_case = errors(found, exact, others)
        for name, error, other in zip(NAMES, of_case, eagers):
            if problem.mode == "training" and values < 64:
                continue  # larger terms cancel
            if not error <= _allowed(other, dtype, name):
                failures.append(f"{what}, {name}: error {error:.2e} v {other:.2e}")


def special_values(
    failures: list[str], dtype: torch.dtype = torch.float32, size: tuple[int, int] = (40, 50)
) -> None:
    """Infinities and NaN in dy reach the gradients that they must. size: of the images."""
    far = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, *size, device=CUDA), torch.randn(70, 8, 3, 3, device=CUDA)
    dy = torch.randn_like(convolve(x, weight, NONE))
    for value in (float("inf"), -float("inf"), float("nan")):
        for mode in ("plain", "training"):
            poisoned = dy.clone()
            poisoned[1, 65, 7, 9] = value
            problem = Problem(x, weight, poisoned, mode).to(dtype)
            exact = problem.in_torch(torch.float64)
            for name, found, truth in zip(NAMES, ours(problem), exact):
                if mode == "plain" and name == "dgamma":
                    continue
                if not torch.equal(found.isfinite(), truth.isfinite()):
                    failures.append(f"{value} in dy, {dtype}, {mode}, {name}: finite elsewhere")
                usual = truth.isfinite() & found.isfinite()
                if not errors((found[usual],), (truth[usual],))[0] <= far:
                    failures.append(f"{value} in dy, {dtype}, {mode}, {name}: off where finite")
    for name, found in zip(NAMES, ours(Problem(x, weight, dy * 0).to(dtype))):
        if bool((found != 0).any()):
            failures.append(f"gradients of zeros, {dtype}, {name}: not zero")


# Two operands and a number.
_FACTORS = (
    *((0.0, 1.0, 1.0), (1e-30, 1.0, 1.0), (1e38, 1.0, 1.0)),
    *((1e30, 1e30, 1.0), (1e-30, 1e-30, 1.0), (1e30, 1e30, 1e-30), (1e-30, 1e-30, 1e30)),
    *((1e30, 1e30, 1e30), (1e38, 1e38, 1e30), (1e38, 0.0, 1e30)),
    *((1e-8, 1e30, 1e20), (100.0, 1e-30, 1e-30), (1e30, 1e22, 1.0)),
)


def extreme_factors(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    """Sums of gradients, or products of factors, that leave float's range although dz does not.

    An infinity times a factor of zero would give NaN where the gradient is zero.
    """
    torch.manual_seed(0)
    count = 70
    largest = min(torch.finfo(dtype).max, 3.38e38)
    some = torch.arange(count, device=CUDA) % 3 > 0
    bias = torch.randn(count, device=CUDA)
    running = torch.randn(count, device=CUDA), torch.rand(count, device=CUDA) + 0.1
    for factors, of_dy, window, mode in itertools.product(
        _FACTORS, (0.0, 1e-20, largest), ((3, 3), (2, 1)), ("evaluation", "training")
    ):
        if math.prod(factors) * of_dy > largest:
            continue
        if dtype == torch.float16 and factors[2] != 1:  # would overflow the other channels
            continue
        x = torch.randn(2, 3, 13, 11, device=CUDA)
        weight = torch.randn(count, 3, *window, device=CUDA) * 0.1
        dy = torch.randn_like(convolve(x, weight, NONE))
        extremes = of_dy * (torch.rand_like(dy) < 0.3) * dy.sign()
        dy = torch.where(some.view(-1, 1, 1), extremes, dy)
        first, second = (torch.where(some, v, 1.0).view(-1, 1, 1) for v in factors[:2])
        problem = Problem(x, weight, dy, mode, gamma=torch.full((count,), 20.0, device=CUDA))
        if mode == "evaluation":
            problem = replace(problem, bias=bias, mean=running[0], variance=running[1])
        operands = first, second.bfloat16()
        problem = replace(problem.to(dtype), operands=operands, scalars=factors[2:])
        exact = problem.in_torch(torch.float64)
        eagers = errors(problem.in_torch(dtype), exact)
        of_case = errors(ours(problem), exact)
        for name, error, other in zip(NAMES, of_case, eagers):
            if not math.isfinite(other):  # 1e38 in fp16
                other = ROUNDED[dtype]
            if not error <= _allowed(other, dtype, name):
                failures.append(
                    f"dy of {of_dy:.0e} times {factors}, {dtype}, {window}, {mode}, {name}: "
                    f"error {error:.2e} v {other:.2e}"
                )


def extreme_variances(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    """Training, where 1 / variance times dy leaves float's range, although dx does not."""
    if dtype == torch.float16:  # cannot hold them
        return
    torch.manual_seed(0)
    for of_x, of_dy in ((1e12, 1e-18), (3e-3, 3e34)):
        x = torch.randn(2, 3, 13, 11, device=CUDA) * of_x
        weight = torch.randn(70, 3, 1, 1, device=CUDA)
        c = convolve(x, weight, NONE)
        # Along c, so that the term of dx from the variance is as large as the others.
        dy = (c.sign() + 0.5 * torch.randn_like(c)) * of_dy
        problem = Problem(x, weight, dy).to(dtype)
        exact = problem.in_torch(torch.float64)
        eagers = errors(problem.in_torch(dtype), exact)
        for name, error, other in zip(NAMES, errors(ours(problem), exact), eagers):
            if not math.isfinite(other):
                other = ROUNDED[dtype]
            if not error <= _allowed(other, dtype, name):
                failures.append(
                    f"x of {of_x:.0e}, dy of {of_dy:.0e}, {dtype}, {name}: "
                    f"error {error:.2e} v {other:.2e}"
                )


def refusals(failures: list[str]) -> None:
    """Calls that the kernels do not take are reported, and nothing is written."""

    def attempt(problem: Problem) -> bool:
        dweight = torch.empty_like(problem.weight, dtype=torch.float32)
        dgamma, dbeta = dweight.new_empty((2, len(problem.weight)))
        return kernels.conv_direct_backward(
            (SCALED if problem.operands else IDENTITY)[problem.x.dtype],
            *(problem.dy, problem.x, problem.weight, problem.padding, None),
            *(torch.empty_like(problem.x), dweight, dgamma, dbeta),
            *(list(problem.operands), list(problem.scalars)),
        )

    def problem_of(x: tuple[int, ...], weight: tuple[int, ...]) -> Problem:
        values = torch.randn(x, device=CUDA), torch.randn(weight, device=CUDA)
        return Problem(*values, torch.randn_like(F.conv2d(*values)), "plain")

    usual = problem_of((2, 8, 20, 20), (64, 8, 3, 3))
    half = torch.randn(64, device=CUDA).bfloat16().view(-1, 1, 1)

    def scaled(factor: Tensor) -> Problem:
        return replace(usual, operands=(factor, half), scalars=(1.0,))

    for what, problem, taken in (
        ("usual", usual, True),
        ("nine channels", problem_of((2, 9, 20, 20), (64, 9, 3, 3)), False),
        ("25 taps", problem_of((2, 8, 20, 20), (64, 8, 5, 5)), False),
        ("25 taps in 16 bits", problem_of((2, 8, 20, 20), (64, 8, 5, 5)).to(torch.half), True),
        ("wide", problem_of((2, 8, 20, 500), (64, 8, 3, 3)), False),
        ("strides of dy", replace(usual, dy=usual.dy.mT.contiguous().mT), False),
        ("strides of x", replace(usual, x=usual.x.mT.contiguous().mT), False),
        ("a factor per channel", scaled(torch.randn(64, 1, 1, device=CUDA)), True),
        ("a factor per pixel", scaled(torch.randn(18, 18, device=CUDA)), False),
        ("a factor per sample", scaled(torch.randn(2, 1, 1, 1, device=CUDA)), False),
    ):
        if attempt(problem) != taken:
            failures.append(f"{what}: {'refused' if taken else 'taken'}")


def graphs_and_repeats(failures: list[str], dtype: torch.dtype = torch.float32) -> None:
    """Replays follow the tensors; launches agree bit for bit."""
    x = torch.randn(5, 8, 130, 128, device=CUDA)
    weight = torch.randn(64, 8, 3, 3, device=CUDA)
    problem = Problem(x, weight, torch.randn(5, 64, 128, 126, device=CUDA)).to(dtype)
    mean, variance = problem.statistics()
    dx, dweight = torch.empty_like(problem.x), torch.empty_like(weight)
    run(problem, dx, dweight, (mean, variance))
    sums: list[Tensor] = []

    def step() -> None:
        sums[:] = run(problem, dx, dweight, (mean, variance))

    graph = captured(step)
    problem.dy.normal_()
    graph.replay()
    exact = problem.in_torch(torch.float64)
    far = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    if not max(errors((dx, dweight, *sums), exact)) <= far:
        failures.append(f"graph replay, {dtype}: {errors((dx, dweight, *sums), exact)}")
    if not replays_agree(graph, (dx, dweight, *sums), 300):
        failures.append(f"launches differ, {dtype}")
