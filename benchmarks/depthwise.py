"""Times of the depthwise convolution by itself: python -m benchmarks.depthwise

Medians with the L2 cache cleared before each call, on random data; each result is compared with
float64's. `python -m pytest tests/kernels/test_depthwise.py` checks the kernel.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.conv_cases import COPY, FORMATS, Padding, tables
from benchmarks.conv_sm90 import CUDA, NORM_SILU, ROUNDED, Example
from benchmarks.measure import float32_settings, gpu_ms
from benchmarks.sm90 import relative
from fx_fuser.kernels import base
from fx_fuser.kernels.depthwise import depthwise
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

Window = tuple[int, int, int]  # height, width, stride
WINDOWS: tuple[Window, ...] = (
    *((3, 3, 1), (3, 3, 2), (5, 5, 1), (5, 5, 2)),
    *((7, 7, 1), (7, 7, 2), (4, 6, 2), (3, 7, 1), (9, 9, 2), (11, 11, 1)),
)


def spec_of(example: Example, window: Window) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    return base.example(depthwise(*window), example.name, example.scalars, *types)


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
        out = torch.full_like(like, float("nan"))
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
        # Inductor's pass takes at least as long as a copy.
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
    harness.parser("depthwise").parse_args()
    done = harness.progress()
    timed = {(dtype, layer[2]) for layer, dtype, _ in CASES}
    wanted = [(dataclasses.replace(NORM_SILU, x=d, out=d), window) for d, window in timed]
    load.prepare([spec_of(*one) for one in wanted], CUDA)
    done(f"built {len(wanted)}")
    failures: list[str] = []
    with float32_settings("fp32", cudnn_tf32=False):
        times = timing(failures)
    return harness.report(tables(times), failures)


if __name__ == "__main__":
    sys.exit(main())
