"""Times of first layers' convolution by itself: python -m benchmarks.stem

Medians with the L2 cache cleared before each call, on random data; each result is compared with
float64's. `python -m pytest tests/kernels/test_stem.py` checks the kernel.
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
from benchmarks.conv_sm90 import CUDA, IDENTITY, NORM, NORM_SILU, ROUNDED, Example
from benchmarks.measure import float32_settings, gpu_ms
from benchmarks.sm90 import relative
from fx_fuser.kernels import base
from fx_fuser.kernels.stem import stem
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

Sizes = tuple[int, int, int, int, int]  # channels, kernel's height and width, stride, outputs
SIZES: tuple[Sizes, ...] = (
    *((3, 7, 7, 2, 64), (3, 3, 3, 2, 32), (3, 3, 3, 2, 16), (3, 6, 6, 2, 48)),
    *((3, 4, 4, 4, 96), (1, 7, 5, 2, 5), (4, 3, 3, 3, 70), (2, 1, 7, 4, 300), (4, 7, 7, 4, 64)),
)


def spec_of(example: Example, sizes: Sizes) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    return base.example(stem(*sizes), example.name, example.scalars, *types)


def rounded(example: Example) -> float:
    """How large an error may be: by the result's dtype, TF32, or sums that truncate."""
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
            out = torch.full_like(F.conv2d(x, weight, None, stride, pad), float("nan"))
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
            # Inductor's pass takes at least as long as a copy.
            least = alone + bool(operands) * 2 * out.nbytes / COPY * 1e3
            ms = gpu_ms({"ours": ours}, [], CUDA)["ours"]
            table.append([title, floor, alone, least, ms, ms / floor, least / ms, error])
    return table


def main() -> int:
    harness.parser("stem").parse_args()
    done = harness.progress()
    timed = [
        (dataclasses.replace(layer[-1], x=dtype, out=dtype), layer[3])
        for layer in LAYERS
        for dtype in (torch.bfloat16, torch.float32)
    ]
    load.prepare([spec_of(*one) for one in timed], CUDA)
    done(f"built {len(timed)}")
    failures: list[str] = []
    with float32_settings("fp32"):  # in which cuDNN may take TF32
        times = timing(failures)
    return harness.report(tables(times), failures)


if __name__ == "__main__":
    sys.exit(main())
