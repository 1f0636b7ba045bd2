"""First layers' convolution by itself: builds it, checks it against float64, times it.

    python -m benchmarks.stem [--skip-checks] [--skip-timing] [--cases 200] [--seed 0]

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
from benchmarks.conv_cases import COPY, FORMATS, Padding, Results, framed, tables
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
from fx_fuser.native.kernel_spec import KernelSpec, stem

Sizes = tuple[int, int, int, int, int]  # channels, kernel's height and width, stride, outputs
SIZES: tuple[Sizes, ...] = (
    *((3, 7, 7, 2, 64), (3, 3, 3, 2, 32), (3, 3, 3, 2, 16), (3, 6, 6, 2, 48)),
    *((3, 4, 4, 4, 96), (1, 7, 5, 2, 5), (4, 3, 3, 3, 70), (2, 1, 7, 4, 300), (4, 7, 7, 4, 64)),
)


def spec_of(example: Example, sizes: Sizes) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    return build.example(stem(*sizes), example.name, example.scalars, *types)


def _examples() -> list[tuple[Example, Sizes]]:
    """All sizes in every dtype, by turns with each epilogue."""
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


def rounded(example: Example) -> float:
    """How large an error may be: of the result's dtype, or TF32's, or of sums that truncate."""
    of_x = 6e-4 if example.x == torch.float32 else 5e-6
    return max(ROUNDED[example.out], of_x)


def convolve(x: Tensor, weight: Tensor, padding: Padding, stride: int) -> Tensor:
    return F.conv2d(F.pad(x, padding), weight, None, stride)


def run(
    example: Example,
    sizes: Sizes,
    x: Tensor,
    weight: Tensor,
    padding: Padding,
    out: Tensor | None,
    c: Tensor | None = None,
    operands: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
) -> None:
    stride = [sizes[3]] * 2
    taken = kernels.stem(
        spec_of(example, sizes), x, weight, stride, padding, out, c, operands, scalars
    )
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"


# ---- what must be right --------------------------------------------------------------------------


def _drawn(
    choose: random.Random, sizes: Sizes, dtype: torch.dtype, side: int
) -> tuple[Tensor, Tensor, Padding]:
    channels, height, width, _, outputs = sizes
    usual = (width // 2, width // 2, height // 2, height // 2)
    padding = choose.choice((usual, usual, (0, 0, 0, 0), (0, 2, 3, 1), (9, 0, 0, 12)))
    h = choose.choice((height, choose.randint(height, side), choose.randint(height, side)))
    w = choose.choice((choose.randint(width, side), choose.randint(width, 2 * side), 32, 64, 96))
    shape = choose.randint(1, 9), channels, h, w
    # Begins anywhere in a vector, now and then.
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


def sweep(cases: int, seed: int, failures: list[str], side: int = 120) -> None:
    """Random sizes, layouts, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example, sizes = choose.choice(EXAMPLES)
        x, weight, padding = _drawn(choose, sizes, example.x, side)
        exact_c = convolve(x.double(), weight.double(), padding, sizes[3])
        # As torch's own result lies.
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
    """Infinities and NaN at edges and inside, and denormals, as IEEE's products give them."""
    inf, nan = float("inf"), float("nan")

    def same(what: str, x: Tensor, weight: Tensor, sizes: Sizes, padding: Padding) -> None:
        example = conv_sm90.of_dtype(IDENTITY, dtype)
        # On the CPU, as plain multiplications: fast algorithms spread an infinity around.
        windows = F.unfold(F.pad(x.double().cpu(), padding), sizes[1:3], stride=sizes[3])
        like = convolve(x.double(), weight.double(), padding, sizes[3])
        exact = (weight.flatten(1).double().cpu() @ windows).view(like.shape).to(CUDA, dtype)
        finite = exact.isfinite()
        for layout in FORMATS:
            out, _ = framed(like.contiguous(memory_format=layout), dtype, 64)
            a, b = (v.contiguous(memory_format=layout) for v in (x, weight))
            run(example, sizes, a, b, padding, out)
            name = f"{what}, {dtype}, {layout}, {sizes}, padding {padding}"
            found, wanted = (v.nan_to_num(0, 1, -1)[~finite] for v in (out, exact))
            if not torch.equal(out.isfinite(), finite) or not torch.equal(found, wanted):
                failures.append(f"{name}: other infinities or NaN than IEEE's")
            usual = [torch.where(finite, v, 0).double() for v in (out, exact)]
            if not relative(*usual) <= rounded(example):
                failures.append(f"{name}: error {relative(*usual):.2e} where finite")

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
    graph = torch.cuda.CUDAGraph()
    run(example, sizes, x, weight, padding, out)
    with torch.cuda.graph(graph):
        run(example, sizes, x, weight, padding, out)
    for _ in range(3):
        weight.normal_()
        graph.replay()
        exact = convolve(x.double(), weight.double(), padding, 2)
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    first, differ = out.clone(), torch.zeros((), dtype=torch.bool, device=CUDA)
    for _ in range(300):
        graph.replay()
        differ |= (out != first).any()
    if bool(differ):
        failures.append("launches differ")


def refusals(failures: list[str]) -> None:
    """Of calls that are not of the kernel's sizes."""
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


# ---- time ----------------------------------------------------------------------------------------

# name, samples, side, sizes, padding, epilogue
LAYERS: tuple[tuple[str, int, int, Sizes, int, Example], ...] = (
    ("ResNet-50", 128, 224, SIZES[0], 3, NORM),
    ("EfficientNet-B0", 128, 224, SIZES[1], 1, NORM_SILU),
    ("MobileNetV3", 128, 224, SIZES[2], 1, NORM_SILU),
    ("YOLOv5m", 16, 640, SIZES[3], 2, NORM_SILU),
    ("ConvNeXt", 128, 224, SIZES[4], 0, IDENTITY),
)
KINDS = [(dtype, layout) for dtype in (torch.bfloat16, torch.float32) for layout in FORMATS]


def timing(failures: list[str]) -> list[list[object]]:
    table: list[list[object]] = []
    for name, samples, side, sizes, pad, epilogue in LAYERS:
        for dtype, layout in KINDS:
            channels, height, width, stride, outputs = sizes
            x = torch.randn(samples, channels, side, side, device=CUDA)
            x = x.to(dtype, memory_format=layout)
            weight = torch.randn(outputs, channels, height, width, device=CUDA) / height
            weight = weight.to(dtype, memory_format=layout)
            mean, beta = torch.randn(2, outputs, device=CUDA)
            var, gamma = torch.rand(2, outputs, device=CUDA) + 0.5
            factor = torch.ones(outputs, device=CUDA)
            vectors = (mean, var, gamma, beta, factor)
            example = dataclasses.replace(epilogue, x=dtype, out=dtype)
            operands = [v.view(-1, 1, 1) for v in vectors[: len(example.operands)]]
            scalars = [1e-5] * example.scalars
            out, _ = framed(F.conv2d(x, weight, None, stride, pad), dtype, 64)
            padding: Padding = (pad, pad, pad, pad)

            def ours() -> None:
                run(example, sizes, x, weight, padding, out, None, operands, scalars)  # noqa: B023

            def library() -> Tensor:
                return F.conv2d(x, weight, None, stride, pad)  # noqa: B023

            ours()
            few = slice(None, None, 16)
            exact = convolve(x[few].double(), weight.double(), padding, stride)
            if operands:
                exact = F.batch_norm(exact, *(v.double() for v in vectors[:4]))
            if example.name == NORM_SILU.name:
                exact = F.silu(exact)
            error = relative(out[few], exact)
            kind = "NHWC" if layout is FORMATS[0] else "NCHW"
            title = f"{name}, {str(dtype).removeprefix('torch.')} {kind}"
            if not error <= rounded(example) or bool(out.isnan().any()):
                failures.append(f"{title}: error {error:.1e}")
            floor = (x.nbytes + out.nbytes) / COPY * 1e3
            torch.backends.cudnn.benchmark = True
            alone = gpu_ms({"library": library}, [], CUDA)["library"]
            torch.backends.cudnn.benchmark = False  # float64's plans would take seconds
            # Inductor's pass takes a copy's time at best.
            least = alone + bool(operands) * 2 * out.nbytes / COPY * 1e3
            ms = gpu_ms({"ours": ours}, [], CUDA)["ours"]
            table.append([title, floor, alone, least, ms, ms / floor, least / ms, error])
    return table


def main() -> int:
    chosen = harness.parser("stem", cases=200).parse_args()
    done = harness.progress()
    timed = [
        (dataclasses.replace(layer[-1], x=dtype, out=dtype), layer[3])
        for layer in LAYERS
        for dtype in (torch.bfloat16, torch.float32)
    ]
    wanted = timed if chosen.skip_checks else [*EXAMPLES, *ALONE, *timed]
    load.prepare([spec_of(*one) for one in wanted], CUDA)
    done(f"built {len(wanted)}")
    failures: list[str] = []
    times: list[list[object]] = []
    with float32_settings("fp32"):  # in which cuDNN may take TF32
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
