"""The depthwise convolution by itself: builds it, checks it against float64, times it.

    python -m benchmarks.depthwise [--skip-checks] [--skip-timing] [--cases 200] [--seed 0]

Exits with 1 where a check failed. Timings are medians with the L2 cache cleared before each call,
on random data.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import conv_sm90, harness, kernels
from benchmarks.conv_cases import (
    COPY,
    FORMATS,
    Padding,
    Results,
    framed,
    random_operand,
    tables,
)
from benchmarks.conv_sm90 import (
    CUDA,
    DTYPES,
    IDENTITY,
    NORM,
    NORM_SILU,
    OPERANDS,
    ROUNDED,
    SWISH,
    Example,
)
from benchmarks.measure import float32_settings, gpu_ms
from benchmarks.sm90 import relative
from fx_fuser import build
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec, depthwise

Window = tuple[int, int, int]  # height, width, stride
WINDOWS: tuple[Window, ...] = (
    *((3, 3, 1), (3, 3, 2), (5, 5, 1), (5, 5, 2)),
    *((7, 7, 1), (7, 7, 2), (4, 6, 2), (3, 7, 1)),
)


def spec_of(example: Example, window: Window) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    return build.example(depthwise(*window), example.name, example.scalars, *types)


def _examples() -> list[tuple[Example, Window]]:
    """Every window in every dtype, by turns with operands of any shape and a BatchNorm's."""
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


def convolve(x: Tensor, weight: Tensor, padding: Padding, stride: int) -> Tensor:
    return F.conv2d(F.pad(x, padding), weight, None, stride, groups=x.shape[1])


def run(
    example: Example,
    window: Window,
    x: Tensor,
    weight: Tensor,
    padding: Padding,
    out: Tensor,
    c: Tensor | None = None,
    operands: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
) -> None:
    taken = kernels.depthwise(
        spec_of(example, window), x, weight, padding, out, c, operands, scalars
    )
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"


# ---- what must be right --------------------------------------------------------------------------


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


def sweep(cases: int, seed: int, failures: list[str], side: int = 90) -> None:
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
    """Infinities, NaN and denormals at edges and inside, as IEEE's products give them."""
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
        finite = exact.isfinite()
        for layout in FORMATS:
            out, _ = framed(like.contiguous(memory_format=layout), dtype, 64)
            run(example, window, x.contiguous(memory_format=layout), weight, padding, out)
            name = f"{what}, {dtype}, {layout}, {window}"
            given, wanted = (v.nan_to_num(0, 1, -1)[~finite] for v in (out, exact))
            if not torch.equal(out.isfinite(), finite) or not torch.equal(given, wanted):
                failures.append(f"{name}: other infinities or NaN than IEEE's")
            usual = [torch.where(finite, v, 0).double() for v in (out, exact)]
            if not relative(*usual) <= ROUNDED[dtype]:
                failures.append(f"{name}: error {relative(*usual):.2e} where finite")

    for window, padding in (((3, 3, 1), (1, 1, 1, 1)), ((5, 5, 2), (2, 2, 2, 2))):
        x = torch.randn(3, 10, 17, 30, device=CUDA).to(dtype)
        weight = torch.randn(10, 1, *window[:2], device=CUDA).to(dtype)
        small, large = (1e-6, 1e2) if dtype == torch.float16 else (1e-40, 1e4)
        same("denormal x", x * small, weight * large, window, padding)
        for n, i, j, value in ((0, 0, 0, inf), (1, 16, 29, -inf), (2, 0, 29, nan), (0, 16, 9, inf)):
            x[n, (3 * i + j) % 10, i, j] = value
        same("in x", x, weight, window, padding)
        none = (0, 0, 0, 0)  # what weights times padding are is the library's choice, too
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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(example, window, x, weight, padding, out, scalars=[2.0])
    for _ in range(3):
        weight.normal_()
        graph.replay()
        exact = F.silu(convolve(x.double(), weight.double(), padding, 1)) * 2
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    first, differ = out.clone(), torch.zeros((), dtype=torch.bool, device=CUDA)
    for _ in range(500):
        graph.replay()
        differ |= (out != first).any()
    if bool(differ):
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


# ---- time ----------------------------------------------------------------------------------------

# channels, side, window: EfficientNet-B0's layers, 128 images of 224 x 224, then others
LAYERS: tuple[tuple[int, int, Window], ...] = (
    *((32, 112, (3, 3, 1)), (96, 112, (3, 3, 2)), (144, 56, (3, 3, 1)), (144, 56, (5, 5, 2))),
    *((240, 28, (5, 5, 1)), (240, 28, (3, 3, 2)), (480, 14, (3, 3, 1)), (480, 14, (5, 5, 1))),
    *((672, 14, (5, 5, 1)), (672, 14, (5, 5, 2)), (1152, 7, (5, 5, 1)), (1152, 7, (3, 3, 1))),
)
OTHERS: tuple[tuple[int, int, Window], ...] = ((96, 56, (7, 7, 1)), (384, 14, (7, 7, 1)))
CASES = [(layer, torch.bfloat16, FORMATS[0]) for layer in (*LAYERS, *OTHERS)]
CASES += [
    (layer, dtype, layout)
    for layer in (LAYERS[2], LAYERS[4], LAYERS[9])
    for dtype, layout in (
        (torch.float32, FORMATS[0]),
        (torch.float32, FORMATS[1]),
        (torch.bfloat16, FORMATS[1]),
    )
]


def timing(failures: list[str]) -> list[list[object]]:
    table: list[list[object]] = []
    sums = [0.0, 0.0, 0.0, 0.0]
    for (channels, side, window), dtype, layout in CASES:
        height, width, stride = window
        x = torch.randn(128, channels, side, side, device=CUDA)
        x = x.to(dtype, memory_format=layout)
        weight = (torch.randn(channels, 1, height, width, device=CUDA) / height).to(dtype)
        mean, beta = torch.randn(2, channels, device=CUDA)
        var, gamma = torch.rand(2, channels, device=CUDA) + 0.5
        padding: Padding = (width // 2, width // 2, height // 2, height // 2)
        like = F.conv2d(x, weight, None, stride, height // 2, 1, channels)
        out, _ = framed(like, dtype, 64)
        example = dataclasses.replace(NORM_SILU, x=dtype, out=dtype)
        operands = [v.view(-1, 1, 1) for v in (mean, var, gamma, beta)]

        def ours() -> None:
            run(example, window, x, weight, padding, out, None, operands, [1e-5])  # noqa: B023

        def library() -> Tensor:
            return F.conv2d(x, weight, None, stride, height // 2, 1, channels)  # noqa: B023

        def tail(c: Tensor) -> Tensor:
            vectors = (v.double() for v in (mean, var, gamma, beta))  # noqa: B023
            return F.silu(F.batch_norm(c, *vectors))

        ours()
        few = slice(None, None, 16)
        exact = tail(convolve(x[few].double(), weight.double(), padding, stride))
        error = relative(out[few], exact)
        if not error <= ROUNDED[dtype] or bool(out.isnan().any()):
            failures.append(f"{channels} x {side}, {window}, {dtype}, {layout}: {error:.1e}")
        floor = (x.nbytes + out.nbytes) / COPY * 1e3
        took = gpu_ms({"library": library, "ours": ours}, [], CUDA)
        alone, ms = took["library"], took["ours"]
        # Inductor's pass takes a copy's time at best.
        least = alone + 2 * out.nbytes / COPY * 1e3
        kind = "NHWC" if layout is FORMATS[0] else "NCHW"
        name = f"{channels} x {side}², {height} x {width} / {stride}, {dtype} {kind}"
        table.append([name, floor, alone, least, ms, ms / floor, least / ms, error])
        if (channels, side, window) in LAYERS and kind == "NHWC" and dtype == torch.bfloat16:
            sums = [a + b for a, b in zip(sums, (floor, alone, least, ms))]
    floor, alone, least, ms = sums
    table.append(["EfficientNet-B0's 12", *sums, ms / floor, least / ms, 0.0])
    return table


def main() -> int:
    chosen = harness.parser("depthwise", cases=200).parse_args()
    done = harness.progress()
    timed = {(dtype, layer[2]) for layer, dtype, _ in CASES}
    norms = [(dataclasses.replace(NORM_SILU, x=d, out=d), window) for d, window in timed]
    swish = (conv_sm90.of_dtype(SWISH, torch.bfloat16), (3, 3, 1))
    wanted = norms if chosen.skip_checks else [*EXAMPLES, *ALONE, swish, *norms]
    load.prepare([spec_of(*one) for one in wanted], CUDA)
    done(f"built {len(wanted)}")
    failures: list[str] = []
    times: list[list[object]] = []
    with float32_settings("fp32", cudnn_tf32=False):
        if not chosen.skip_checks:
            sweep(chosen.cases, chosen.seed, failures)
            done(f"{chosen.cases} random cases")
            refusals(failures)
            for dtype in DTYPES:
                special_values(failures, dtype)
            repeats(failures)
            done("refusals, special values, repeats")
        if not chosen.skip_timing:
            times = timing(failures)
            done("timing")
    return harness.report(tables(times), failures)


if __name__ == "__main__":
    sys.exit(main())
