"""Checks of the depthwise convolution: benchmarks/depthwise.py calls and times it."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.nn.functional as F
from checks import as_ieee, captured, replays_agree
from conv_checks import Results, framed, random_operand
from torch import Tensor

from benchmarks import conv_sm90, kernels
from benchmarks.conv_cases import FORMATS, Padding
from benchmarks.conv_sm90 import DTYPES, IDENTITY, NORM, OPERANDS, ROUNDED, SWISH, Example
from benchmarks.depthwise import WINDOWS, Window, convolve, run, spec_of
from benchmarks.sm90 import CUDA, relative


def _examples() -> list[tuple[Example, Window]]:
    """Every window in every dtype, alternately with operands of any shape and a BatchNorm's."""
    found = []
    for i, window in enumerate(WINDOWS):
        for j, dtype in enumerate(DTYPES):
            example = (OPERANDS, NORM)[(i + j) % 2]
            found.append((conv_sm90.of_dtype(example, dtype), window))
    found.append((dataclasses.replace(NORM, x=torch.bfloat16), (3, 3, 1)))
    found.append((dataclasses.replace(OPERANDS, x=torch.float16, out=torch.bfloat16), (5, 5, 1)))
    return found


EXAMPLES = _examples()
ALONE = [(conv_sm90.of_dtype(IDENTITY, dtype), (3, 3, 1)) for dtype in DTYPES]
ALONE += [(conv_sm90.of_dtype(IDENTITY, dtype), (5, 5, 2)) for dtype in DTYPES]


def _drawn(
    choose: random.Random, window: Window, dtype: torch.dtype, side: int
) -> tuple[Tensor, Tensor, Padding]:
    height, width, _ = window
    layout = choose.choice(FORMATS)
    channels = 2 * choose.choice((1, 3, 8, choose.randint(1, 40), 33, 72))
    if layout is torch.contiguous_format:
        channels += choose.randint(0, 1)
    usual = (width // 2, width // 2, height // 2, height // 2)
    padding = choose.choice((usual, usual, (0, 0, 0, 0), (0, 2, 3, 1), (9, 0, 0, 12)))
    while True:
        h, w = (choose.choice((7, 14, choose.randint(1, side))) for _ in range(2))
        left, right, top, bottom = padding
        if h + top + bottom >= height and w + left + right >= width:
            break
    x = torch.randn(choose.randint(1, 9), channels, h, w, device=CUDA).to(dtype)
    weight = (torch.randn(channels, 1, height, width, device=CUDA) * 0.3).to(dtype)
    return x.contiguous(memory_format=layout), weight, padding


def sweep(failures: list[str], cases: int, seed: int, side: int = 90) -> None:
    """Random sizes, layouts, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example, window = choose.choice(EXAMPLES)
        x, weight, padding = _drawn(choose, window, example.x, side)
        exact_c = convolve(x.double(), weight.double(), padding, window[2])
        layout = FORMATS[0] if x.stride(1) == 1 else FORMATS[1]
        exact_c = exact_c.contiguous(memory_format=layout)
        operands = [random_operand(exact_c.shape, dtype, choose) for dtype in example.operands]
        if example.name == NORM.name:
            operands[1] = operands[1].abs() + 0.1
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        # In channels_last two channels are one access.
        into = (0, 2, 6) if layout is FORMATS[0] else (0, 1, 3)
        results = Results.like(exact_c, (example.out, example.x), choose, into)
        run(example, window, x, weight, padding, results.out, results.c, operands, scalars)

        exact = example.reference(exact_c, operands, scalars)
        what = (
            f"case {case}: {tuple(x.shape)} {layout} by {tuple(weight.shape)}, padding {padding}, "
            f"{', '.join(spec_of(example, window).signature)}, "
            f"operands {[tuple(t.shape) for t in operands]}"
        )
        found = results.faults(exact, exact_c, ROUNDED[example.out], ROUNDED[example.x])
        failures += [f"{what}: {fault}" for fault in found]


def special_values(failures: list[str], dtype: torch.dtype) -> None:
    """Infinities, NaN and denormals at edges and inside, as IEEE products give them."""
    inf, nan = float("inf"), float("nan")

    def same(what: str, x: Tensor, weight: Tensor, window: Window, padding: Padding) -> None:
        height, width, stride = window
        wide = F.pad(x.double(), padding)
        samples, channels = x.shape[:2]
        windows = F.unfold(wide, (height, width), stride=stride)
        windows = windows.view(samples, channels, height * width, -1)
        example = conv_sm90.of_dtype(IDENTITY, dtype)
        like = convolve(x.double(), weight.double(), padding, stride)
        exact = (windows * weight.double().view(channels, -1, 1)).sum(2).view(like.shape).to(dtype)
        for layout in FORMATS:
            out, _ = framed(like.contiguous(memory_format=layout), dtype, 64)
            run(example, window, x.contiguous(memory_format=layout), weight, padding, out)
            name = f"{what}, {dtype}, {layout}, {window}"
            as_ieee(name, out, exact, ROUNDED[dtype], failures)

    for window, padding in (((3, 3, 1), (1, 1, 1, 1)), ((5, 5, 2), (2, 2, 2, 2))):
        x = torch.randn(3, 10, 17, 30, device=CUDA).to(dtype)
        weight = torch.randn(10, 1, *window[:2], device=CUDA).to(dtype)
        small, large = (1e-6, 1e2) if dtype == torch.float16 else (1e-40, 1e4)
        same("denormal x", x * small, weight * large, window, padding)
        for n, i, j, value in ((0, 0, 0, inf), (1, 16, 29, -inf), (2, 0, 29, nan), (0, 16, 9, inf)):
            x[n, (3 * i + j) % 10, i, j] = value
        same("in x", x, weight, window, padding)
        none = (0, 0, 0, 0)  # the library, too, may or may not multiply padding
        weight[5, 0, 1, 1], weight[9, 0, 2, 0], weight[0, 0, 0, 0] = inf, nan, -inf
        same("in both", x, weight, window, none)


def repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches agree bit for bit."""
    example, window = conv_sm90.of_dtype(SWISH, torch.bfloat16), (3, 3, 1)
    x = torch.randn(5, 96, 60, 61, device=CUDA).to(torch.bfloat16, memory_format=FORMATS[0])
    weight = torch.randn(96, 1, 3, 3, device=CUDA).bfloat16()
    padding = (1, 1, 1, 1)
    out = torch.empty_like(x)
    run(example, window, x, weight, padding, out, scalars=[2.0])
    graph = captured(lambda: run(example, window, x, weight, padding, out, scalars=[2.0]))
    for _ in range(3):
        weight.normal_()
        graph.replay()
        exact = F.silu(convolve(x.double(), weight.double(), padding, 1)) * 2
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    if not replays_agree(graph, [out], 500):
        failures.append("launches differ")


def refusals(failures: list[str]) -> None:
    example, window = ALONE[0]
    weight = torch.randn(9, 1, 3, 3, device=CUDA)
    x = torch.randn(2, 9, 16, 16, device=CUDA)
    last = x.to(memory_format=FORMATS[0])
    even = torch.randn(2 * 8 * 16 * 16 + 1, device=CUDA)[1:].view(2, 16, 16, 8).permute(0, 3, 1, 2)
    for what, a, out in (
        ("odd channels in channels_last", last, torch.empty_like(last)),
        ("out in another layout", x, torch.empty_like(last)),
        ("x with gaps", torch.randn(2, 9, 16, 32, device=CUDA)[..., ::2], torch.empty_like(x)),
        ("channels_last begun at an odd element", even, torch.empty_like(even)),
    ):
        of_a = weight[: a.shape[1]]
        spec = spec_of(example, window)
        if kernels.depthwise(spec, a, of_a, (1, 1, 1, 1), out, None, [], []):
            failures.append(f"{what} was not refused")
