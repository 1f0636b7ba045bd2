"""Checks of first layers' convolution: benchmarks/stem.py calls and times it."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.nn.functional as F
from checks import as_ieee, captured, replays_agree
from conv_checks import Results, framed
from torch import Tensor

from benchmarks import conv_sm90, kernels
from benchmarks.conv_cases import FORMATS, Padding
from benchmarks.conv_sm90 import DTYPES, IDENTITY, NORM, OPERANDS, ROUNDED, SWISH, Example
from benchmarks.sm90 import CUDA, relative
from benchmarks.stem import SIZES, Sizes, convolve, rounded, run, spec_of


def _examples() -> list[tuple[Example, Sizes]]:
    """All sizes in every dtype, with each epilogue in turn."""
    found = [
        (conv_sm90.of_dtype((NORM, OPERANDS, SWISH)[(i + j) % 3], dtype), sizes)
        for i, sizes in enumerate(SIZES)
        for j, dtype in enumerate(DTYPES)
    ]
    found.append((dataclasses.replace(NORM, x=torch.bfloat16), SIZES[0]))
    found.append((dataclasses.replace(OPERANDS, x=torch.float16, out=torch.bfloat16), SIZES[4]))
    found.append((dataclasses.replace(NORM, out=torch.float16), SIZES[1]))
    return found


EXAMPLES = _examples()
ALONE = [(conv_sm90.of_dtype(IDENTITY, dtype), SIZES[i]) for dtype in DTYPES for i in (0, 1, 4)]


def _drawn(
    choose: random.Random, sizes: Sizes, dtype: torch.dtype, side: int
) -> tuple[Tensor, Tensor, Padding]:
    channels, height, width, _, outputs = sizes
    usual = (width // 2, width // 2, height // 2, height // 2)
    padding = choose.choice((usual, usual, (0, 0, 0, 0), (0, 2, 3, 1), (9, 0, 0, 12)))
    h = choose.choice((height, choose.randint(height, side), choose.randint(height, side)))
    w = choose.choice((choose.randint(width, side), choose.randint(width, 2 * side), 32, 64, 96))
    shape = choose.randint(1, 9), channels, h, w
    # Sometimes it begins inside a vector.
    before = choose.choice((0, 0, 0, 1, 3))
    memory = torch.randn(before + h * w * channels * shape[0], device=CUDA).to(dtype)
    layout = choose.choice(FORMATS)
    like = torch.empty(shape, device=CUDA, memory_format=layout)
    x = memory[before:].as_strided(shape, like.stride())
    if choose.random() < 0.1:  # with gaps
        x = F.pad(x, (0, 5))[..., :w]
    weight = torch.randn(outputs, channels, height, width, device=CUDA) * 0.3
    if layout is FORMATS[0] or choose.random() < 0.1:
        weight = weight.contiguous(memory_format=FORMATS[0])
    return x, weight.to(dtype), padding


def _operand(outputs: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    shape = choose.choice(((outputs, 1, 1), (outputs, 1, 1), (1, outputs, 1, 1), (), (1,)))
    values = torch.randn(shape, device=CUDA)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def sweep(failures: list[str], cases: int, seed: int, side: int = 120) -> None:
    """Random sizes, layouts, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example, sizes = choose.choice(EXAMPLES)
        x, weight, padding = _drawn(choose, sizes, example.x, side)
        exact_c = convolve(x.double(), weight.double(), padding, sizes[3])
        # In the memory order of torch's result.
        like = convolve(x, weight, padding, sizes[3])
        exact_c = torch.empty_like(like, dtype=torch.float64).copy_(exact_c)
        operands = [_operand(sizes[4], dtype, choose) for dtype in example.operands]
        if example.name == NORM.name:
            operands[1] = operands[1].abs() + 0.1
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        dtypes = (example.out, example.x)
        results = Results.like(exact_c, dtypes, choose, (0, 0, 2, 3, 6))
        run(example, sizes, x, weight, padding, results.out, results.c, operands, scalars)

        exact = example.reference(exact_c, operands, scalars)
        what = (
            f"case {case}: {tuple(x.shape)} {x.stride()} by {tuple(weight.shape)}, padding "
            f"{padding}, {', '.join(spec_of(example, sizes).signature)}, "
            f"operands {[tuple(t.shape) for t in operands]}"
        )
        of_c = rounded(dataclasses.replace(example, out=example.x))
        found = results.faults(exact, exact_c, rounded(example), of_c)
        failures += [f"{what}: {fault}" for fault in found]


def special_values(failures: list[str], dtype: torch.dtype) -> None:
    """Infinities and NaN at edges and inside, and denormals, as IEEE products give them."""
    inf, nan = float("inf"), float("nan")

    def same(what: str, x: Tensor, weight: Tensor, sizes: Sizes, padding: Padding) -> None:
        example = conv_sm90.of_dtype(IDENTITY, dtype)
        # On the CPU, by plain products: fast algorithms spread an infinity to other elements.
        windows = F.unfold(F.pad(x.double().cpu(), padding), sizes[1:3], stride=sizes[3])
        like = convolve(x.double(), weight.double(), padding, sizes[3])
        exact = (weight.flatten(1).double().cpu() @ windows).view(like.shape).to(CUDA, dtype)
        for layout in FORMATS:
            out, _ = framed(like.contiguous(memory_format=layout), dtype, 64)
            a, b = (v.contiguous(memory_format=layout) for v in (x, weight))
            run(example, sizes, a, b, padding, out)
            name = f"{what}, {dtype}, {layout}, {sizes}, padding {padding}"
            as_ieee(name, out, exact, rounded(example), failures)

    for sizes in (SIZES[0], SIZES[1], SIZES[4]):
        for padding in ((0, 0, 0, 0), (sizes[2] // 2,) * 2 + (sizes[1] // 2,) * 2):
            x = torch.randn(3, 3, 40, 64, device=CUDA).to(dtype)
            weight = torch.randn(sizes[4], *sizes[:3], device=CUDA).to(dtype)
            if dtype == torch.float16:
                same("denormal x", x * 1e-6, weight * 1e2, sizes, padding)
            at = ((0, 0, 0, inf), (1, 39, 63, -inf), (2, 0, 63, nan), (0, 39, 9, inf))
            for n, i, j, value in at:
                x[n, (i + j) % 3, i, j] = value
            same("in x", x, weight, sizes, padding)
            weight[5, 0, 1, 1], weight[9, 2, 2, 0], weight[0, 0, 0, 0] = inf, nan, -inf
            same("in both", x, weight, sizes, padding)


def repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches agree bit for bit."""
    example, sizes = conv_sm90.of_dtype(IDENTITY, torch.bfloat16), SIZES[0]
    x = torch.randn(40, 3, 224, 224, device=CUDA).to(torch.bfloat16, memory_format=FORMATS[0])
    weight = torch.randn(64, 3, 7, 7, device=CUDA).bfloat16()
    padding = (3, 3, 3, 3)
    out = convolve(x, weight, padding, 2)
    run(example, sizes, x, weight, padding, out)
    graph = captured(lambda: run(example, sizes, x, weight, padding, out))
    for _ in range(3):
        weight.normal_()
        graph.replay()
        exact = convolve(x.double(), weight.double(), padding, 2)
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    if not replays_agree(graph, [out], 300):
        failures.append("launches differ")


def refusals(failures: list[str]) -> None:
    """Calls of other sizes than the kernel's are refused."""
    example, sizes = ALONE[1]
    weight, x = torch.randn(32, 3, 3, 3, device=CUDA), torch.randn(2, 3, 16, 16, device=CUDA)
    spec, out = spec_of(example, sizes), torch.empty(2, 32, 7, 7, device=CUDA)
    for what, a, b, stride, padding in (
        ("other outputs", x, weight[:31], [2, 2], (0, 0, 0, 0)),
        ("another kernel", x, weight[..., :2], [2, 2], (0, 0, 0, 0)),
        ("another stride", x, weight, [2, 1], (0, 0, 0, 0)),
        ("negative padding", x, weight, [2, 2], (-1, 0, 0, 0)),
        ("no output", x[..., :2], weight, [2, 2], (0, 0, 0, 0)),
        ("no sample", x[:0], weight, [2, 2], (0, 0, 0, 0)),
    ):
        if kernels.stem(spec, a, b, stride, padding, out, None, [], []):
            failures.append(f"{what} was not refused")
