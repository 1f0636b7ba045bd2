"""Times of the depthwise convolutions of ConvNeXt-T, MobileNetV3-L and EfficientNet-B0 in training,
beside the library's:

    python -m benchmarks.depthwise_training [--only WORD] [--dtype bf16] [--out FILE]

Time of a call's kernels in us by torch's profiler, medians of calls by turns, with the L2 cache
cleared before each, on random images in channels_last: forward, and the gradients of x (dx) and of
the weight (dw). No time between kernels counts, which dw has between its two. `floor`: the larger
of the bytes at 3.0 TB/s and the products at 60 TFLOP/s. Errors are relative to float64, of eight
samples; the table has ours over the library's.
`python -m pytest -m gpu tests/kernels/test_depthwise_gradients.py` checks the kernels.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import measure, results
from benchmarks.depthwise_kernels import convolution, gradients
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA, relative
from fx_fuser.compare import turns
from fx_fuser.kernels.depthwise import training
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.depthwise import FORWARD, OF_INPUT, OF_WEIGHT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = "forward", "dx", "dw"
BYTES, PRODUCTS = 3.0e12, 30e12  # a second
FEW = 8  # samples whose errors are found


@dataclass(frozen=True)
class Layer:
    """count: how often the net has it."""

    net: str
    samples: int
    channels: int
    side: int
    window: int
    stride: int
    count: int = 1

    @property
    def out(self) -> int:
        return (self.side - 1) // self.stride + 1  # of padding window // 2

    @property
    def floor(self) -> float:
        """Of one pass, in us."""
        results = self.samples * self.channels * self.out**2
        moved = 2 * (self.samples * self.channels * self.side**2 + results)
        return max(moved / BYTES, results * self.window**2 / PRODUCTS) * 1e6


def _layers(net: str, samples: int, *rows: tuple[int, ...]) -> list[Layer]:
    return [Layer(net, samples, *row) for row in rows]


# channels, side, window, stride, count
LAYERS = [
    *_layers(
        *("ConvNeXt-T", 64, (96, 56, 7, 1, 3), (192, 28, 7, 1, 3)),
        *((384, 14, 7, 1, 9), (768, 7, 7, 1, 3)),
    ),
    *_layers(
        *("MobileNetV3-L", 128, (16, 112, 3, 1), (64, 112, 3, 2), (72, 56, 3, 1)),
        *((72, 56, 5, 2), (120, 28, 5, 1, 2), (240, 28, 3, 2), (200, 14, 3, 1)),
        *((184, 14, 3, 1, 2), (480, 14, 3, 1), (672, 14, 3, 1), (672, 14, 5, 2), (960, 7, 5, 1, 2)),
    ),
    *_layers(
        *("EfficientNet-B0", 64, (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1)),
        *((144, 56, 5, 2), (240, 28, 5, 1), (240, 28, 3, 2), (480, 14, 3, 1, 2), (480, 14, 5, 1)),
        *((672, 14, 5, 1, 2), (672, 14, 5, 2), (1152, 7, 5, 1, 3), (1152, 7, 3, 1)),
    ),
]


def _last(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA).contiguous(memory_format=torch.channels_last)


class Call:
    """One layer's tensors; results are written anew each time."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        window, self.stride = (layer.window, layer.window), layer.stride
        self.padding = [layer.window // 2] * 2
        self.x = _last(layer.samples, layer.channels, layer.side, layer.side).to(dtype)
        self.dz = _last(layer.samples, layer.channels, layer.out, layer.out).to(dtype)
        self.weight = (torch.randn(layer.channels, 1, *window, device=CUDA) / layer.window).to(
            dtype
        )
        given = window, layer.stride, dtype
        self.specs = [
            training.spec_of(*given),
            training.input_spec_of(*given),
            training.weight_spec_of(*given),
        ]

    def steps(self) -> dict[str, Callable[[], Tensor]]:
        """As graphs call them."""
        forward, by_x, by_weight = (spec.name for spec in self.specs)
        x, dz, weight, padding, stride = self.x, self.dz, self.weight, self.padding, self.stride
        window = [*weight.shape[2:]]
        turned = [k - 1 - p for k, p in zip(window, padding)]
        of_x: tuple[str, tuple[Any, ...]] = (FORWARD, (dz, weight, by_x, turned, 1, True))
        if stride > 1:
            of_x = (OF_INPUT, (dz, weight, by_x, padding, [*x.shape[2:]]))
        calls = {
            "forward": (FORWARD, (x, weight, forward, padding, stride, False)),
            "dx": of_x,
            "dw": (OF_WEIGHT, (x, dz, by_weight, padding, window, stride)),
        }
        return {
            name: functools.partial(run.ONE, *run.arguments(*call)) for name, call in calls.items()
        }

    def library(self) -> dict[str, Callable[[], object]]:
        given = self.dz, self.x, self.weight, self.padding, self.stride
        forward = functools.partial(convolution, self.x, self.weight, self.padding, self.stride)
        return {
            "forward": forward,
            "dx": functools.partial(gradients, *given, (True, False)),
            "dw": functools.partial(gradients, *given, (False, True)),
        }

    def errors(self) -> dict[str, tuple[float, float]]:
        """Ours, the library's."""
        self.x, self.dz = self.x[:FEW], self.dz[:FEW]
        numbers = self.padding, self.stride

        def by_torch(x: Tensor, dz: Tensor, weight: Tensor) -> list[Tensor]:
            made = gradients(dz, x, weight, *numbers, (True, True))
            return [convolution(x, weight, *numbers), *made]

        given = self.x, self.dz, self.weight
        exact, usual = by_torch(*(t.double() for t in given)), by_torch(*given)
        ours = [step() for step in self.steps().values()]
        found = [
            tuple(relative(t, wanted) for t in pair) for *pair, wanted in zip(ours, usual, exact)
        ]
        return dict(zip(PASSES, found))  # type: ignore[arg-type]


def medians(steps: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Of each step's kernels, in us."""
    size = torch.cuda.get_device_properties(CUDA).L2_cache_size
    flush = torch.empty(size, dtype=torch.int16, device=CUDA)  # twice as large

    def all_of_them() -> None:
        for _ in range(times):
            for step in steps:
                flush.fill_(1)
                step()

    found: list[float] = []
    for name, ms in turns.kernels_of(all_of_them, CUDA):
        if "FillFunctor<short>" in name:
            found.append(0.0)
        elif found:
            found[-1] += ms * 1e3
    if len(found) != times * len(steps):
        raise RuntimeError(f"the profiler saw {len(found)} of {times * len(steps)} calls")
    return [statistics.median(found[i :: len(steps)]) for i in range(len(steps))]


def timed(layers: Sequence[Layer], dtype: torch.dtype, times: int) -> list[dict[str, Any]]:
    """Of one net."""
    calls = [Call(layer, dtype) for layer in layers]
    steps = [
        step
        for call in calls
        for column in (call.steps(), call.library())
        for step in column.values()
    ]
    for step in steps:
        step()
    us = iter(medians(steps, times))
    rows: list[dict[str, Any]] = []
    for layer, call in zip(layers, calls):
        ours, library = ([next(us) for _ in PASSES] for _ in range(2))
        errors = call.errors()
        name = f"{layer.channels} x {layer.side}², {layer.window}/{layer.stride}"
        rows += [
            {
                "net": layer.net, "layer": name, "count": layer.count, "pass": one,
                "floor": layer.floor, "ours": own, "library": other, "errors": errors[one],
            }
            for one, own, other in zip(PASSES, ours, library)
        ]  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Of one net."""
    for first in rows[:: len(PASSES)]:
        three = [row for row in rows if row["layer"] == first["layer"]]
        times = "".join(f"{row['ours']:14.1f}{row['library']:10.1f}" for row in three)
        errors = " ".join(f"{a / max(b, 1e-9):.2f}" for a, b in (row["errors"] for row in three))
        name = f"{first['net'][:10]} {first['layer']}"
        print(f"{name:30}{first['floor']:8.1f}{times}   errors {errors}")
    print(tabulate(sums(rows), ["", "", "floor", "ours", "library", "best", "/ floor", ""]))
    sys.stdout.flush()


def _refused(*given: object) -> list[Tensor]:
    raise RuntimeError(f"no kernel takes {given}")


def sums(rows: list[dict[str, Any]]) -> list[list[object]]:
    """Of each net and pass, and of both gradients, in us."""
    table: list[list[object]] = []
    for net in dict.fromkeys(row["net"] for row in rows):
        for passes in (("forward",), ("dx",), ("dw",), ("dx", "dw")):
            of_net = [row for row in rows if row["net"] == net and row["pass"] in passes]
            total = {
                column: sum(row[column] * row["count"] for row in of_net)
                for column in ("floor", "ours", "library")
            }
            best = sum(min(row["ours"], row["library"]) * row["count"] for row in of_net)
            table.append(
                [net, " + ".join(passes), *(f"{v:.0f}" for v in (*total.values(), best)),
                 f"{total['ours'] / total['floor']:.2f}",
                 f"{total['library'] / total['ours']:.2f}×"]
            )  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="nets with this in their name")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--times", type=int, default=15, help="calls of each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = DTYPES[options.dtype]
    for function in (FORWARD, OF_INPUT, OF_WEIGHT):
        run.define(function, _refused, _refused)
    chosen = [layer for layer in LAYERS if options.only in layer.net]
    kinds = {((layer.window, layer.window), layer.stride, dtype) for layer in chosen}
    functions = training.spec_of, training.input_spec_of, training.weight_spec_of
    load.prepare([*dict.fromkeys(f(*kind) for kind in kinds for f in functions)], CUDA)
    print(
        f"{'layer':30}{'floor':>8}" + "".join(f"{p + ': ours, library':>24}" for p in PASSES),
        flush=True,
    )
    rows = []
    for net in dict.fromkeys(layer.net for layer in chosen):
        of_net = timed([layer for layer in chosen if layer.net == net], dtype, options.times)
        show(of_net)
        rows += of_net
    wrong = [r for r in rows if not r["errors"][0] <= max(1.5 * r["errors"][1], 1e-6)]
    for row in wrong:
        print("wrong:", row)
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
