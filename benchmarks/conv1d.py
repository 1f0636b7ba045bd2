"""Times of the positional convolution of Wav2Vec2 and its like, 128 taps in 16 groups, beside the
library's and beside unfold with bmm:

    python -m benchmarks.conv1d [--only WORD] [--dtype bf16] [--out FILE]

GPU time in ms, medians, by turns, with the L2 cache cleared before each call, on random data:
forward, and the gradients of x (dx) and of the weight (dw). `ours`: the kernel on operands as it
reads them. `copied`: with all copies that `fx_fuser.passes.conv1d` puts around it, none of them
fused with what makes or reads a tensor. `unfold`: the frames that each frame sees side by side in
memory, and a gemm a group. `kill`: the time above which the kernels are given up (issue 45). Errors
are relative to float64, of the first and the last group.
`python -m pytest -m gpu tests/kernels/test_conv1d.py` checks the kernels.
"""

from __future__ import annotations

import argparse
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
from torch import Tensor

from benchmarks import conv1d_kernels, measure, results
from benchmarks.conv1d_kernels import from_taps, in_taps, turned
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels import conv1d
from fx_fuser.native import load

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROUPS, TAPS, PADDING = 16, 128, 64
PASSES = "forward", "dx", "dw"
KILL = 0.35  # of the forward, of a gradient: three of them are half of unfold with bmm
_aten = torch.ops.aten
_NUMBERS = [1], [PADDING], [1], False, [0], GROUPS


@dataclass(frozen=True)
class Size:
    name: str
    batch: int
    length: int
    channels: int

    @property
    def operations(self) -> float:
        """Of one pass."""
        frames = self.batch * (self.length + 1)
        return 2.0 * frames * self.channels * (self.channels // GROUPS) * TAPS


SIZES = (
    Size("base, 8 x 249", 8, 249, 768),
    Size("large, 8 x 249", 8, 249, 1024),
    Size("base, 2 x 1499", 2, 1499, 768),
    Size("base, 1 x 249", 1, 249, 768),
)


def unfolded(rows: Tensor, padding: int) -> Tensor:
    """[batch, frame, channel] → [group, frame of a batch, in channel and tap], copied."""
    seen = F.pad(rows.mT, (padding, padding)).unflatten(1, (GROUPS, -1)).unfold(-1, TAPS, 1)
    return seen.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


def in_groups(rows: Tensor) -> Tensor:
    """[batch, frame, channel] → [group, frame of a batch, channel of a group]."""
    return rows.flatten(0, 1).unflatten(1, (GROUPS, -1)).transpose(0, 1)


class Call:
    """One size's tensors, as the kernels read them; results are written anew each time."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        of_group = size.channels // GROUPS
        self.x = torch.randn(size.batch, size.length, size.channels, device=CUDA).to(dtype)
        self.dz = torch.randn(size.batch, size.length + 1, size.channels, device=CUDA).to(dtype)
        weight = torch.randn(size.channels, of_group, TAPS, device=CUDA) * (of_group * TAPS) ** -0.5
        self.weight = weight.to(dtype)
        self.bias = torch.randn(size.channels, device=CUDA).to(dtype)
        self.taps, self.turned = in_taps(self.weight, GROUPS), turned(in_taps(self.weight, GROUPS))
        self.z, self.dx = torch.empty_like(self.dz), torch.empty_like(self.x)
        self.dw = torch.empty_like(self.taps)
        self.spec = conv1d.spec_of(of_group, dtype)
        self.weight_spec = conv1d.weight_spec_of(of_group, of_group, dtype)
        load.prepare([self.spec, self.weight_spec], CUDA)

    def forward(self) -> None:
        given = self.spec, self.x, self.taps, self.bias, self.z, PADDING
        assert conv1d_kernels.conv1d(*given)

    def gradient_by_x(self) -> None:
        given = self.spec, self.dz, self.turned, None, self.dx, TAPS - 1 - PADDING
        assert conv1d_kernels.conv1d(*given)

    def gradient_by_weight(self) -> None:
        assert conv1d_kernels.conv1d_weight(self.weight_spec, self.x, self.dz, self.dw, PADDING)

    @property
    def ours(self) -> dict[str, Callable[[], object]]:
        return dict(zip(PASSES, (self.forward, self.gradient_by_x, self.gradient_by_weight)))

    def copied(self) -> dict[str, Callable[[], object]]:
        """dz is contiguous as [batch, channel, frame], as Inductor leaves it."""
        dz = self.dz.mT.contiguous()

        def forward() -> Tensor:
            self.taps = in_taps(self.weight, GROUPS)
            self.forward()
            return self.z.mT.contiguous()

        def by_x() -> Tensor:
            self.dz, self.turned = dz.mT.contiguous(), turned(in_taps(self.weight, GROUPS))
            self.gradient_by_x()
            return self.dx.mT.contiguous()

        def by_weight() -> Tensor:
            self.dz = dz.mT.contiguous()
            self.gradient_by_weight()
            return from_taps(self.dw)

        return dict(zip(PASSES, (forward, by_x, by_weight)))

    def library(self) -> dict[str, Callable[[], object]]:
        x, dz = self.x.mT, self.dz.mT.contiguous()

        def backward(asked: list[bool]) -> Any:
            sizes = [self.weight.shape[0]]
            given = dz, x, self.weight, sizes
            return _aten.convolution_backward.default(*given, *_NUMBERS, asked)

        forward = functools.partial(_aten.convolution.default, x, self.weight, self.bias, *_NUMBERS)
        by_x = functools.partial(backward, [True, False, False])
        by_weight = functools.partial(backward, [False, True, False])
        return dict(zip(PASSES, (forward, by_x, by_weight)))

    def unfold(self) -> dict[str, Callable[[], Tensor]]:
        """Results by groups."""

        def product(rows: Tensor, taps: Tensor, padding: int) -> Tensor:
            return unfolded(rows, padding) @ taps.permute(0, 3, 1, 2).flatten(1, 2)

        def by_weight() -> Tensor:
            return in_groups(self.dz).mT @ unfolded(self.x, PADDING)

        forward = functools.partial(product, self.x, self.taps, PADDING)
        by_x = functools.partial(product, self.dz, self.turned, TAPS - 1 - PADDING)
        return dict(zip(PASSES, (forward, by_x, by_weight)))

    def errors(self) -> dict[str, float]:
        """Relative to float64."""
        few = [0, GROUPS - 1]

        def wide(rows: Tensor, padding: int) -> Tensor:
            return unfolded(rows, padding)[few].double()

        def flat(taps: Tensor) -> Tensor:
            return taps[few].double().permute(0, 3, 1, 2).flatten(1, 2)

        bias = self.bias.double().unflatten(0, (GROUPS, 1, -1))[few]
        z = wide(self.x, PADDING) @ flat(self.taps) + bias
        dx = wide(self.dz, TAPS - 1 - PADDING) @ flat(self.turned)
        dw = in_groups(self.dz)[few].double().mT @ wide(self.x, PADDING)
        found = in_groups(self.z)[few], in_groups(self.dx)[few]
        of_weight = self.dw[few].permute(0, 2, 3, 1).flatten(2)
        made = zip((*found, of_weight), (z, dx, dw))
        return dict(zip(PASSES, (relative(*one) for one in made)))


def median(call: Callable[[], object], times: int) -> float:
    return measure.median_ms(call, [], CUDA, 2, times)


def timed(size: Size, dtype: torch.dtype) -> list[dict[str, Any]]:
    call = Call(size, dtype)
    for step in call.ours.values():
        step()
    errors = call.errors()
    columns: dict[str, Any] = {
        "ours": call.ours, "copied": call.copied(), "unfold": call.unfold(),
        "library": call.library(),
    }  # fmt: skip
    timers = {
        (column, one): functools.partial(median, step, 5 if column == "library" else 20)
        for column, steps in columns.items()
        for one, step in steps.items()
    }
    ms: Any = measure.interleaved(timers, 3)  # type: ignore[arg-type]
    return [
        {
            "size": size.name, "pass": one, **{column: ms[column, one] for column in columns},
            "kill": KILL, "tflops": size.operations / ms["ours", one] / 1e9, "error": errors[one],
        }
        for one in PASSES
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    chosen = [size for size in SIZES if options.only in size.name]
    rows = [row for size in chosen for row in timed(size, DTYPES[options.dtype])]
    columns = "ours", "copied", "unfold", "library"
    shown = [
        [row["size"], row["pass"], *(f"{row[n]:.4f}" for n in columns),
         f"{row['library'] / row['copied']:.1f}×", f"{row['tflops']:.0f}", f"{row['error']:.1e}"]
        for row in rows
    ]  # fmt: skip
    head = ["", "", *columns, "library/copied", "TFLOP/s", "error"]
    print(tabulate(shown, head))
    slow = [r for r in rows if r["size"] == SIZES[0].name and not r["ours"] <= r["kill"]]
    wrong = [r for r in rows if not r["error"] <= 2**-8]
    for row in slow + wrong:
        print("kill:" if row in slow else "wrong:", row)
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
