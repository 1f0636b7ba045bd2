"""Checks of the implicit gemm: benchmarks/implicit.py calls and times it."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.nn.functional as F
from checks import as_ieee, captured, replays_agree
from conv_checks import Results, framed, random_operand
from torch import Tensor

from benchmarks import conv_sm90, kernels
from benchmarks.conv_cases import NONE
from benchmarks.conv_sm90 import HALVES, IDENTITY, NORM, OPERANDS, ROUNDED, SWISH, Example
from benchmarks.implicit import COLUMNS, LAST, Form, Window, run, spec_of
from benchmarks.sm90 import CUDA, relative
from benchmarks.stem import rounded


def _examples() -> list[tuple[Example, Form]]:
    """Each number of columns with and without a window, with each epilogue in turn."""
    epilogues = ((NORM, 5), (NORM, 4), (OPERANDS, 0), (SWISH, 0), (OPERANDS, 1))
    found = []
    for i, columns in enumerate(COLUMNS):
        for j, is_window in enumerate((False, True)):
            for k, dtype in enumerate(HALVES):
                example, leaves = epilogues[(2 * i + j + 3 * k) % len(epilogues)]
                form = Form(columns, is_window, leaves)
                found.append((conv_sm90.of_dtype(example, dtype), form))
    other = dataclasses.replace(NORM, x=torch.bfloat16)  # with a result in fp32
    found.append((other, Form(128, True, 4)))
    found.append((other, Form(96, False, 3)))
    mixed = dataclasses.replace(OPERANDS, x=torch.float16, out=torch.bfloat16)
    found.append((mixed, Form(64, False, 0)))
    return found


EXAMPLES = _examples()
ALONE = {
    (dtype, is_window): (conv_sm90.of_dtype(IDENTITY, dtype), Form(64, is_window, 0))
    for dtype in HALVES
    for is_window in (False, True)
}


def _drawn(
    choose: random.Random, form: Form, dtype: torch.dtype, side: int
) -> tuple[Tensor, Tensor, Window]:
    channels = 8 * choose.choice((1, 2, 3, 5, 8, 9, choose.randint(1, 40)))
    outputs = choose.choice((form.columns, 8 * choose.randint(1, 40), choose.randint(1, 260)))
    kernel, window = (1, 1), Window(stride=choose.choice(((1, 1), (1, 1), (2, 2), (3, 1))))
    if form.is_window:
        kernel = choose.choice(((3, 3), (3, 3), (1, 1), (5, 2), (1, 7), (2, 3)))
        channels = min(channels, 96)
        usual = (kernel[1] // 2, kernel[1] // 2, kernel[0] // 2, kernel[0] // 2)
        window = Window(
            choose.choice(((1, 1), (2, 2), (1, 2), (3, 2))),
            choose.choice((usual, usual, NONE, (0, 2, 3, 1), (9, 0, 0, 12))),
            choose.choice(((1, 1), (1, 1), (2, 2), (1, 3))),
        )
    least = [d * (k - 1) + 1 for d, k in zip(window.dilation, kernel)]
    h, w = (
        choose.choice((n, choose.randint(n, side + n), choose.randint(n, 9 + n))) for n in least
    )
    shape = choose.randint(1, 9), channels, h, w
    x = torch.randn(shape, device=CUDA).to(dtype, memory_format=LAST)
    if choose.random() < 0.2:  # a slice of the channels and pixels of a larger image
        wide = F.pad(x, (2, 1, 0, 3, 8, 16)).contiguous(memory_format=LAST)
        x = wide[:, 8 : 8 + channels, :h, 2 : 2 + w]
    fan_in = channels * kernel[0] * kernel[1]
    weight = torch.randn(outputs, channels, *kernel, device=CUDA) / fan_in**0.5
    if kernel != (1, 1) or choose.random() < 0.5:
        weight = weight.contiguous(memory_format=LAST)
    return x, weight.to(dtype), window


def _operands(choose: random.Random, one: tuple[Example, Form], shape: torch.Size) -> list[Tensor]:
    example, form = one
    found = []
    for i, dtype in enumerate(example.operands):
        if i < form.leaves:
            leaf = choose.choice(((shape[1], 1, 1), (shape[1], 1, 1), ()))
            values = torch.randn(leaf, device=CUDA)
            found.append(values > 0 if dtype == torch.bool else values.to(dtype))
        elif choose.random() < 0.4:
            values = torch.randn(shape, device=CUDA)
            values = values > 0 if dtype == torch.bool else values.to(dtype)
            found.append(values.contiguous(memory_format=LAST))
        else:
            found.append(random_operand(shape, dtype, choose))
    if example.name == NORM.name:
        found[1] = found[1].abs() + 0.1
    return found


def sweep(failures: list[str], cases: int, seed: int, side: int = 60) -> None:
    """Random sizes, layouts, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        one = example, form = choose.choice(EXAMPLES)
        x, weight, window = _drawn(choose, form, example.x, side)
        exact_c = window.convolve(x.double(), weight.double()).contiguous(memory_format=LAST)
        operands = _operands(choose, one, exact_c.shape)
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        results = Results.like(exact_c, (example.out, example.x), choose, (0, 0, 0, 4, 1))
        run(one, x, weight, window, results.out, results.c, operands, scalars)

        exact = example.reference(exact_c, operands, scalars)
        what = (
            f"case {case}: {tuple(x.shape)} {x.stride()} by {tuple(weight.shape)}, {window}, "
            f"{', '.join(spec_of(*one).signature)}, "
            f"operands {[(tuple(t.shape), t.stride()) for t in operands]}"
        )
        of_c = rounded(dataclasses.replace(example, out=example.x))
        found = results.faults(exact, exact_c, rounded(example), of_c)
        failures += [f"{what}: {fault}" for fault in found]


def special_values(failures: list[str], dtype: torch.dtype) -> None:
    """Infinities and NaN at edges and inside, and denormals, as IEEE products give them."""
    inf, nan = float("inf"), float("nan")

    def same(what: str, x: Tensor, weight: Tensor, window: Window) -> None:
        one = ALONE[dtype, weight.shape[2] > 1]
        # On the CPU, by plain products: fast algorithms spread an infinity to other elements.
        wide = F.pad(x.double().cpu(), window.padding)
        size = weight.shape[2], weight.shape[3]
        taps = F.unfold(wide, size, dilation=window.dilation, stride=window.stride)
        like = window.convolve(x.double(), weight.double()).contiguous(memory_format=LAST)
        products = weight.flatten(1).double().cpu() @ taps
        exact = products.view(like.shape).to(CUDA, dtype)
        out, _ = framed(like, dtype, 64)
        run(one, x, weight, window, out)
        name = f"{what}, {dtype}, {tuple(weight.shape)}, {window}"
        as_ieee(name, out, exact, ROUNDED[dtype], failures)

    around = (1, 1, 1, 1)
    for kernel, window in ((1, Window()), (3, Window()), (3, Window((2, 1), around, (1, 2)))):
        x = torch.randn(3, 24, 11, 13, device=CUDA).to(dtype, memory_format=LAST)
        weight = torch.randn(70, 24, kernel, kernel, device=CUDA)
        weight = weight.to(dtype, memory_format=LAST)
        if dtype == torch.float16:
            same("denormal x", x * 1e-6, weight * 1e2, window)
        for n, i, j, value in ((0, 0, 0, inf), (1, 10, 12, -inf), (2, 0, 12, nan), (0, 10, 9, inf)):
            x[n, (7 * i + j) % 24, i, j] = value
        same("in x", x, weight, window)
        last = kernel - 1
        weight[5, 0, last, 0], weight[9, 22, 0, last], weight[69, 23, 0, 0] = inf, nan, -inf
        same("in both", x, weight, window)


def repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches agree bit for bit."""
    one = conv_sm90.of_dtype(NORM, torch.bfloat16), Form(128, True, 4)
    x = torch.randn(8, 72, 60, 61, device=CUDA).to(torch.bfloat16, memory_format=LAST)
    weight = torch.randn(200, 72, 3, 3, device=CUDA) / 26
    weight = weight.to(torch.bfloat16, memory_format=LAST)
    window = Window(padding=(1, 1, 1, 1))
    exact_c = window.convolve(x.double(), weight.double()).contiguous(memory_format=LAST)
    vectors = [torch.rand(200, 1, 1, device=CUDA) + 0.5 for _ in range(4)]
    # The last operand, an fp32 residual, comes through the ring of stages.
    operands = [*vectors, torch.randn_like(exact_c, dtype=torch.float32)]
    out = torch.empty_like(exact_c, dtype=torch.bfloat16)
    run(one, x, weight, window, out, None, operands, [1e-5])
    graph = captured(lambda: run(one, x, weight, window, out, None, operands, [1e-5]))
    for _ in range(3):
        weight.normal_(0, 1 / 26)
        graph.replay()
        exact_c = window.convolve(x.double(), weight.double())
        exact = one[0].reference(exact_c, operands, [1e-5])
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    if not replays_agree(graph, [out], 10_000):
        failures.append("launches differ")


def refusals(failures: list[str]) -> None:
    """Calls that the kernel does not take are refused, and nothing is written."""

    def images(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA).bfloat16().contiguous(memory_format=LAST)

    x, weight = images(2, 16, 9, 10), images(24, 16, 3, 3)
    odd = images(2, 17, 9, 10)[:, 1:]
    for what, a, b, window, layout in (
        ("another layout of x", x.contiguous(), weight, Window(), LAST),
        ("another layout of the weight", x, weight.contiguous(), Window(), LAST),
        ("another layout of the result", x, weight, Window(), torch.contiguous_format),
        ("channels that are no vectors", images(2, 12, 9, 10), images(8, 12, 3, 3), Window(), LAST),
        ("pixels that begin within vectors", odd, weight, Window(), LAST),
        ("negative padding", x, weight, Window(padding=(-1, 0, 0, 0)), LAST),
        ("no output", x[..., :2], weight, Window(), LAST),
        ("no sample", x[:0], weight, Window(), LAST),
        ("a window too wide", x, weight, Window(dilation=(1, 2**14)), LAST),
    ):
        one = ALONE[torch.bfloat16, True]
        sizes = (len(a), len(b), *(max(n - 2, 1) for n in a.shape[2:]))
        out = torch.full(sizes, 7.0, device=CUDA, dtype=torch.bfloat16)
        out = out.contiguous(memory_format=layout)
        geometry = ([*window.stride], [*window.padding], [*window.dilation])
        if kernels.implicit(spec_of(*one), a, b, *geometry, out, None, [], []):
            failures.append(f"{what} was not refused")
        if not bool((out == 7).all()):
            failures.append(f"{what}: something was written")
    alone = spec_of(*ALONE[torch.bfloat16, False])
    out = torch.empty_like(x)
    if kernels.implicit(alone, x, weight, [1, 1], [1] * 4, [1, 1], out[:, :24], None, [], []):
        failures.append("a window was not refused by the kernel of 1 x 1")
