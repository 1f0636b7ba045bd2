"""Checks of the grouped convolution: benchmarks/grouped.py calls and times it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from checks import as_ieee, captured, replays_agree
from conv_checks import Results, framed, random_operand
from torch import Tensor

from benchmarks import conv_sm90
from benchmarks.conv_cases import NONE
from benchmarks.conv_sm90 import HALVES, IDENTITY, NORM, OPERANDS, ROUNDED, SWISH, Example
from benchmarks.grouped import Form, grouped_input, grouped_weight, run, spec_of
from benchmarks.implicit import LAST, Window
from benchmarks.sm90 import CUDA, relative
from benchmarks.stem import rounded
from fx_fuser.kernels.grouped import grouped_cut, grouped_tiles, unit_of, weight_spec_of
from fx_fuser.kernels.grouped import spec_of as plain_spec_of

# Channels of a group, of x and of the result.
GROUPS = (
    *((n, n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)),
    *((8, 16), (16, 8), (4, 8), (8, 24), (24, 32), (2, 4), (12, 4), (64, 8), (8, 64), (44, 36)),
)
EPILOGUES = ((NORM, 5), (NORM, 4), (OPERANDS, 0), (SWISH, 0), (OPERANDS, 1))


def _example(number: int, dtype: torch.dtype) -> tuple[Example, int]:
    """An epilogue, and how many of its operands are leaves."""
    example, leaves = EPILOGUES[number % len(EPILOGUES)]
    of_type = conv_sm90.of_dtype(example, dtype)
    if number // len(EPILOGUES) == 1:
        of_type = dataclasses.replace(of_type, out=torch.float32)
    return of_type, leaves


def _examples() -> list[tuple[Example, Form]]:
    """Each form, with each epilogue in turn."""
    forms = dict.fromkeys(Form.of(*channels, 0) for channels in GROUPS)
    found = []
    for i, form in enumerate(forms):
        for j, dtype in enumerate(HALVES):
            for number in (i + 2 * j, i + 5 * j + 3):
                example, leaves = _example(number % (2 * len(EPILOGUES)), dtype)
                found.append((example, dataclasses.replace(form, leaves=leaves)))
    return list(dict.fromkeys(found))


EXAMPLES = _examples()
ALONE = {
    (dtype, form): (conv_sm90.of_dtype(IDENTITY, dtype), form)
    for dtype in HALVES
    for form in (Form.of(4, 4, 0), Form.of(8, 8, 0), Form.of(24, 24, 0), Form.of(12, 12, 0))
}


def convolve(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    wide = F.pad(x, window.padding)
    return F.conv2d(wide, weight, None, window.stride, 0, window.dilation, groups)


def _channels_of(form: Form) -> list[tuple[int, int]]:
    """Of groups of which it is the kernel."""
    return [one for one in GROUPS if Form.of(*one, form.leaves) == form]


def _drawn(
    choose: random.Random, form: Form, dtype: torch.dtype, side: int
) -> tuple[Tensor, Tensor, Window, int]:
    inputs, outputs = choose.choice(_channels_of(form))
    unit = unit_of(inputs, outputs)
    groups = unit * choose.choice((1, 2, 3, choose.randint(1, 9), max(1, 64 // (unit * inputs))))
    groups = max(groups, 2)
    kernel = choose.choice(((3, 3), (3, 3), (3, 3), (1, 1), (5, 2), (1, 7), (7, 7)))
    if inputs * kernel[0] * kernel[1] * unit > 1200:
        kernel = (3, 3)
    usual = (kernel[1] // 2, kernel[1] // 2, kernel[0] // 2, kernel[0] // 2)
    window = Window(
        choose.choice(((1, 1), (1, 1), (2, 2), (1, 2), (3, 2))),
        choose.choice((usual, usual, NONE, (0, 2, 3, 1), (9, 0, 0, 12))),
        choose.choice(((1, 1), (1, 1), (2, 2), (1, 3))),
    )
    least = [d * (k - 1) + 1 for d, k in zip(window.dilation, kernel)]
    h, w = (
        choose.choice((n, choose.randint(n, side + n), choose.randint(n, 9 + n))) for n in least
    )
    channels = groups * inputs
    x = torch.randn(choose.randint(1, 9), channels, h, w, device=CUDA).to(dtype, memory_format=LAST)
    if choose.random() < 0.2:  # a slice of the channels and pixels of a larger image
        wide = F.pad(x, (2, 1, 0, 3, 8, 16)).contiguous(memory_format=LAST)
        x = wide[:, 8 : 8 + channels, :h, 2 : 2 + w]
    weight = torch.randn(groups * outputs, inputs, *kernel, device=CUDA)
    weight = weight / (inputs * kernel[0] * kernel[1]) ** 0.5
    if choose.random() < 0.7:
        weight = weight.contiguous(memory_format=LAST)
    return x, weight.to(dtype), window, groups


def _operands(choose: random.Random, one: tuple[Example, Form], shape: torch.Size) -> list[Tensor]:
    example, form = one
    found = []
    for i, dtype in enumerate(example.operands):
        if i < form.leaves:
            leaf = choose.choice(((shape[1], 1, 1), (shape[1], 1, 1), ()))
            values = torch.randn(leaf, device=CUDA)
            found.append(values > 0 if dtype == torch.bool else values.to(dtype))
        else:
            found.append(random_operand(shape, dtype, choose))
    if example.name == NORM.name:
        found[1] = found[1].abs() + 0.1
    return found


def sweep(
    failures: list[str],
    cases: int,
    seed: int,
    side: int = 60,
    examples: Sequence[tuple[Example, Form]] = tuple(EXAMPLES),
) -> None:
    """Random sizes, layouts, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    done = 0
    while done < cases:
        one = example, form = choose.choice(examples)
        x, weight, window, groups = _drawn(choose, form, example.x, side)
        exact_c = convolve(x.double(), weight.double(), window, groups)
        exact_c = exact_c.contiguous(memory_format=LAST)
        operands = _operands(choose, one, exact_c.shape)
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        results = Results.like(exact_c, (example.out, example.x), choose, (0, 0, 0, 8))
        done += 1
        what = (
            f"case {done}: {tuple(x.shape)} {x.stride()} by {tuple(weight.shape)}, {window}, "
            f"{groups} groups, {', '.join(spec_of(*one).signature)}, "
            f"operands {[(tuple(t.shape), t.stride()) for t in operands]}"
        )
        taken = run(one, x, weight, window, groups, results.out, results.c, operands, scalars)
        if not taken:
            failures.append(f"{what}: refused")
            continue
        exact = example.reference(exact_c, operands, scalars)
        of_c = rounded(dataclasses.replace(example, out=example.x))
        found = results.faults(exact, exact_c, rounded(example), of_c)
        failures += [f"{what}: {fault}" for fault in found]


def divisors(failures: list[str], channels: int, side: int = 9) -> None:
    """Every number of groups of so many channels that the kernel takes."""
    torch.manual_seed(channels)
    for groups in range(2, channels + 1):
        inputs = channels // groups
        if channels % groups or unit_of(inputs, inputs) * inputs > 128:
            continue
        one = conv_sm90.of_dtype(IDENTITY, torch.bfloat16), Form.of(inputs, inputs, 0)
        x = torch.randn(2, channels, side, side, device=CUDA)
        x = x.to(torch.bfloat16, memory_format=LAST)
        weight = torch.randn(channels, inputs, 3, 3, device=CUDA) / (9 * inputs) ** 0.5
        weight = weight.to(torch.bfloat16, memory_format=LAST)
        window = Window(padding=(1, 1, 1, 1))
        exact = convolve(x.double(), weight.double(), window, groups)
        out, _ = framed(exact.contiguous(memory_format=LAST), torch.bfloat16, 64)
        if not run(one, x, weight, window, groups, out):
            failures.append(f"{groups} groups of {inputs} were refused")
        elif not relative(out, exact) <= ROUNDED[torch.bfloat16]:
            failures.append(f"{groups} groups of {inputs}: error {relative(out, exact):.2e}")


def tiles(failures: list[str], cases: int, seed: int) -> None:
    """The result does not depend on how the work is divided."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for inputs in (4, 8, 16, 24, 48):
        groups = 6 * unit_of(inputs, inputs)
        form = Form.of(inputs, inputs, 0)
        one = conv_sm90.of_dtype(IDENTITY, torch.float16), form
        x = torch.randn(3, groups * inputs, 13, 17, device=CUDA)
        x = x.to(torch.float16, memory_format=LAST)
        weight = torch.randn(groups * inputs, inputs, 3, 3, device=CUDA) / (9 * inputs) ** 0.5
        weight = weight.to(torch.float16, memory_format=LAST)
        window = Window((choose.randint(1, 2),) * 2, (1, 1, 1, 1))
        exact = convolve(x.double(), weight.double(), window, groups)
        wanted, taken = None, 0
        for _ in range(cases):
            units = choose.randint(1, 3) * max(1, 4 // form.tiles if form.tiles <= 2 else 1)
            whole = unit_of(inputs, inputs) * inputs // 8
            of_unit = choose.choice((whole, form.tiles))
            tile = [units if of_unit == whole else 1, of_unit, choose.randint(1, 3)]
            tile += [choose.randint(1, 14), choose.randint(1, 8), choose.randint(1, 2)]
            out, _ = framed(exact.contiguous(memory_format=LAST), torch.float16, 64)
            if not run(one, x, weight, window, groups, out, tile=tile):
                continue  # its patches do not fit
            taken += 1
            if not relative(out, exact) <= ROUNDED[torch.float16]:
                failures.append(f"groups of {inputs} in tiles {tile}: {relative(out, exact):.2e}")
            wanted = out if wanted is None else wanted
            if not torch.equal(out, wanted):
                failures.append(f"groups of {inputs} in tiles {tile} differ")
        if taken < cases / 2:
            failures.append(f"groups of {inputs}: {taken} of {cases} tiles were taken")


def special_values(failures: list[str], dtype: torch.dtype) -> None:
    """Infinities and NaN at edges and inside, and denormals, as IEEE products give them; none comes
    into another group."""
    inf, nan = float("inf"), float("nan")

    def same(what: str, x: Tensor, weight: Tensor, window: Window, groups: int) -> None:
        inputs = weight.shape[1]
        one = ALONE[dtype, Form.of(inputs, len(weight) // groups, 0)]
        # On the CPU, by plain products: fast algorithms spread an infinity to other elements.
        wide = F.pad(x.double().cpu(), window.padding)
        size = weight.shape[2], weight.shape[3]
        parts = []
        for part, filters in zip(wide.split(inputs, 1), weight.chunk(groups)):
            taps = F.unfold(part, size, dilation=window.dilation, stride=window.stride)
            parts.append(filters.flatten(1).double().cpu() @ taps)
        like = convolve(x.double(), weight.double(), window, groups)
        like = like.contiguous(memory_format=LAST)
        exact = torch.cat(parts, 1).view(like.shape).to(CUDA, dtype)
        out, _ = framed(like, dtype, 64)
        if not run(one, x, weight, window, groups, out):
            failures.append(f"{what}: refused")
        name = f"{what}, {dtype}, {tuple(weight.shape)}, {groups} groups, {window}"
        as_ieee(name, out, exact, ROUNDED[dtype], failures)

    around = (1, 1, 1, 1)
    windows = ((1, Window()), (3, Window()), (3, Window((2, 1), around, (1, 2))))
    for inputs, groups in ((4, 10), (8, 5), (12, 4), (24, 3)):
        for kernel, window in windows:
            channels = inputs * groups
            x = torch.randn(3, channels, 11, 13, device=CUDA).to(dtype, memory_format=LAST)
            weight = torch.randn(channels, inputs, kernel, kernel, device=CUDA)
            weight = weight.to(dtype, memory_format=LAST)
            if dtype == torch.float16:
                same("denormal x", x * 1e-6, weight * 1e2, window, groups)
            places = ((0, 0, 0, inf), (1, 10, 12, -inf), (2, 0, 12, nan), (0, 10, 9, inf))
            for n, i, j, value in places:
                x[n, (7 * i + j) % channels, i, j] = value
            same("in x", x, weight, window, groups)
            last = kernel - 1
            weight[5, 0, last, 0], weight[9, 2, 0, last], weight[-1, 3, 0, 0] = inf, nan, -inf
            same("in both", x, weight, window, groups)


def repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches agree bit for bit."""
    one = conv_sm90.of_dtype(NORM, torch.bfloat16), Form.of(24, 24, 4)
    x = torch.randn(8, 216, 60, 61, device=CUDA).to(torch.bfloat16, memory_format=LAST)
    weight = torch.randn(216, 24, 3, 3, device=CUDA) / 15
    weight = weight.to(torch.bfloat16, memory_format=LAST)
    window = Window(padding=(1, 1, 1, 1))
    exact_c = convolve(x.double(), weight.double(), window, 9).contiguous(memory_format=LAST)
    vectors = [torch.rand(216, 1, 1, device=CUDA) + 0.5 for _ in range(4)]
    operands = [*vectors, torch.randn_like(exact_c, dtype=torch.float32)]
    out = torch.empty_like(exact_c, dtype=torch.bfloat16)
    given = one, x, weight, window, 9, out, None, operands, [1e-5]
    run(*given)
    graph = captured(lambda: run(*given))
    for _ in range(3):
        weight.normal_(0, 1 / 15)
        graph.replay()
        exact_c = convolve(x.double(), weight.double(), window, 9)
        exact = one[0].reference(exact_c, operands, [1e-5])
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    if not replays_agree(graph, [out], 10_000):
        failures.append("launches differ")


def refusals(failures: list[str]) -> None:
    """Calls that the kernel does not take are refused, and nothing is written."""

    def images(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA).bfloat16().contiguous(memory_format=LAST)

    x, weight = images(2, 16, 9, 10), images(16, 8, 3, 3)
    odd, far = images(2, 17, 9, 10)[:, 1:], Window(dilation=(150, 150))
    for what, a, b, window, groups, layout in (
        ("another layout of x", x.contiguous(), weight, Window(), 2, LAST),
        ("another layout of the result", x, weight, Window(), 2, torch.contiguous_format),
        ("one group", x, images(16, 16, 3, 3), Window(), 1, LAST),
        ("groups of another kernel", x, images(16, 4, 3, 3), Window(), 4, LAST),
        ("more tiles than the kernel's", x, images(32, 8, 3, 3), Window(), 2, LAST),
        ("no vectors", images(2, 12, 9, 10), images(12, 6, 3, 3), Window(), 2, LAST),
        ("pixels that begin within vectors", odd, weight, Window(), 2, LAST),
        ("negative padding", x, weight, Window(padding=(-1, 0, 0, 0)), 2, LAST),
        ("no output", x[..., :2], weight, Window(), 2, LAST),
        ("no sample", x[:0], weight, Window(), 2, LAST),
        ("a window too wide", x, weight, Window(dilation=(1, 2**14)), 2, LAST),
        ("a patch too large", images(1, 16, 400, 400), weight, far, 2, LAST),
    ):
        one = ALONE[torch.bfloat16, Form.of(8, 8, 0)]
        reach = [d * 2 for d in window.dilation]
        sizes = (len(a), len(b), *(max(n - r, 1) for n, r in zip(a.shape[2:], reach)))
        out = torch.full(sizes, 7.0, device=CUDA, dtype=torch.bfloat16)
        out = out.contiguous(memory_format=layout)
        if run(one, a, b, window, groups, out):
            failures.append(f"{what} was not refused")
        if not bool((out == 7).all()):
            failures.append(f"{what}: something was written")


# ---- gradients -----------------------------------------------------------------------------------


def _gradients(
    x: Tensor, weight: Tensor, dz: Tensor, window: Window, groups: int
) -> tuple[Tensor, Tensor]:
    """Of x and the weight, in float64."""
    wide = F.pad(x.double(), window.padding)
    numbers = [*window.stride], [0, 0], [*window.dilation], False, [0, 0], groups
    asked = [True, True, False]
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dz.double(), wide, weight.double(), None, *numbers, asked
    )
    left, _, top, _ = window.padding
    return dx[..., top : top + x.shape[2], left : left + x.shape[3]], dw


def gradients(failures: list[str], cases: int, seed: int, side: int = 60) -> None:
    """Random sizes and layouts. The weight's gradient is the same bit for bit once more."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    forms = [dataclasses.replace(form, leaves=0) for _, form in EXAMPLES]
    for case in range(cases):
        dtype = choose.choice(HALVES)
        x, weight, window, groups = _drawn(choose, choose.choice(forms), dtype, side)
        outputs, inputs = len(weight) // groups, weight.shape[1]
        like = convolve(x.double(), weight.double(), window, groups)
        dz = torch.randn_like(like).to(dtype, memory_format=LAST)
        dx_exact, dw_exact = _gradients(x, weight, dz, window, groups)
        what = (
            f"case {case}: {tuple(x.shape)} {x.stride()} by {tuple(weight.shape)}, {window}, "
            f"{groups} groups, {dtype}"
        )
        dx, _ = framed(dx_exact.contiguous(memory_format=LAST), dtype, 64)
        taken = grouped_input(plain_spec_of(outputs, inputs, dtype), dz, weight, window, groups, dx)
        has_phases = all(
            s == 1 or (d == 1 and k >= s)
            for s, d, k in zip(window.stride, window.dilation, weight.shape[2:])
        )
        if taken != has_phases:
            failures.append(f"{what}: dx taken {taken}")
        if taken and not relative(dx, dx_exact) <= ROUNDED[dtype]:
            failures.append(f"{what}: error of dx {relative(dx, dx_exact):.2e}")
        like = dw_exact.contiguous(memory_format=choose.choice((LAST, torch.contiguous_format)))
        results = [framed(like, dtype, 64)[0] for _ in range(2)]
        spec = weight_spec_of(inputs, outputs, dtype)
        takes = [grouped_weight(spec, x, dz, window, groups, dw) for dw in results]
        numbers = window.stride, window.padding, window.dilation, groups
        cut = grouped_cut(x.shape, weight.shape, *numbers, of_weight=True)
        if takes[0] != bool(cut):
            failures.append(f"{what}: dw taken {takes[0]}, but {cut}")
        if not takes[0]:
            continue
        if not relative(results[0], dw_exact) <= ROUNDED[dtype]:
            failures.append(f"{what}: error of dw {relative(results[0], dw_exact):.2e}")
        if not torch.equal(*results):
            failures.append(f"{what}: dw differs from launch to launch")


assert all(grouped_tiles(unit_of(*one) * one[1]) <= 4 for one in GROUPS)
