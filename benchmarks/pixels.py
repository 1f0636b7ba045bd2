"""Times of ResNet-50's 1 x 1 convolutions with the statistics of their results, 128 images, beside
the library's convolution and a pass that reads the result once:

    python -m benchmarks.pixels [--only WORD] [--dtype bf16] [--blocks] [--out FILE]

GPU time in ms, of calls with a cold L2 cache. `read`: a sum of the result, in which a separate pass
for the statistics cannot do less. A layer pays (`go`, issue 46) where ours takes at most the
library's time and half of that pass. `--blocks`: a training step of a bottleneck of each stage
under autocast, by Inductor and by fx_fuser with the kernel switched on, which takes a minute.
`python -m pytest -m gpu tests/kernels/test_pixels.py` checks the kernel.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks import measure, results
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA
from fx_fuser.kernels import pixels
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.pixels import MOMENTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
IMAGES = 128
LAST = torch.channels_last


@dataclass(frozen=True)
class Layer:
    """count: how often ResNet-50 has it. side: of its images."""

    count: int
    side: int
    k: int
    channels: int

    @property
    def name(self) -> str:
        return f"{self.k} to {self.channels} at {self.side} x {self.side}"

    @property
    def bytes(self) -> int:
        return 2 * IMAGES * self.side**2 * (self.k + self.channels)


# All of one stride.
LAYERS = (
    *(Layer(1, 56, 64, 64), Layer(4, 56, 64, 256), Layer(2, 56, 256, 64), Layer(1, 56, 256, 128)),
    *(Layer(4, 28, 128, 512), Layer(3, 28, 512, 128), Layer(1, 28, 512, 256)),
    *(Layer(6, 14, 256, 1024), Layer(5, 14, 1024, 256), Layer(1, 14, 1024, 512)),
    *(Layer(3, 7, 512, 2048), Layer(2, 7, 2048, 512)),
)


def timed(layer: Layer, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.randn(IMAGES, layer.k, layer.side, layer.side, device=CUDA).to(dtype)
    x = x.contiguous(memory_format=LAST)
    weight = torch.randn(layer.channels, layer.k, 1, 1, device=CUDA) * layer.k**-0.5
    weight = weight.to(dtype)
    spec = pixels.spec_of(dtype)
    load.prepare([spec], CUDA)
    z = F.conv2d(x, weight)

    def ours(shape: int) -> object:
        return run.MANY(*run.arguments(MOMENTS, (x, weight, spec.name, shape)))

    steps: dict[str, Callable[[], object]] = {
        "library": lambda: F.conv2d(x, weight),
        "read": lambda: z.sum(dtype=torch.float32),
        **{name: functools.partial(ours, i) for i, name in enumerate(pixels.SHAPES)},
    }
    ms = measure.gpu_ms(steps, [], CUDA)
    best = min(pixels.SHAPES, key=ms.__getitem__)
    allowed = ms["library"] + ms["read"] / 2
    return {
        "layer": layer.name, "count": layer.count, **ms, "ours": ms[best], "tiles": best,
        "tb_s": layer.bytes / ms[best] / 1e9, "go": ms[best] <= allowed,
    }  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4 * width, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + x)


def blocks() -> list[list[Any]]:
    rows = []
    for width, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
        model = Bottleneck(width).to(CUDA).to(memory_format=LAST)
        x = torch.randn(IMAGES, 4 * width, side, side, device=CUDA).contiguous(memory_format=LAST)
        x.requires_grad_()

        def step(f: Any, x: Tensor = x) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                y = f(x)
            y.backward(torch.ones_like(y))

        calls = {
            "inductor": torch.compile(copy.deepcopy(model)),
            "fx_fuser": torch.compile(copy.deepcopy(model), backend="fx_fuser"),
        }
        ms = measure.gpu_ms(
            {who: functools.partial(step, f) for who, f in calls.items()}, [x], CUDA
        )
        ratio = ms["inductor"] / ms["fx_fuser"]
        rows.append([f"{width} at {side} x {side}", ms["inductor"], ms["fx_fuser"], ratio])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.blocks:
        print(tabulate(blocks(), ["block", "inductor", "fx_fuser", "ratio"], floatfmt=".3f"))
        return 0
    dtype = DTYPES[options.dtype]
    rows = [timed(layer, dtype) for layer in LAYERS if options.only in layer.name]
    columns = "library", "read", *pixels.SHAPES
    shown = [
        [row["layer"], row["count"], *(f"{row[n]:.4f}" for n in columns), f"{row['tb_s']:.2f}",
         "go" if row["go"] else "no"]
        for row in rows
    ]  # fmt: skip
    print(tabulate(shown, ["layer", "of them", *columns, "TB/s", ""]))
    before = sum(row["count"] * (row["library"] + row["read"]) for row in rows)
    after = sum(row["count"] * min(row["ours"], row["library"] + row["read"]) for row in rows)
    print(f"over the net: {before:.3f} ms, {after:.3f} where the faster one runs")
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
