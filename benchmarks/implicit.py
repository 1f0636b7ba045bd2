"""Times of the implicit gemm of channels_last convolutions on the layers of three nets:

    python -m benchmarks.implicit

Medians with the L2 cache cleared before each call, on random data; each result is compared with
float64's. Compared with: the library's convolution with a pointwise kernel, which stands for
Inductor's code (the same within 3 %), and the library's fused call on folded weights.
`python -m pytest tests/kernels/test_implicit.py` checks the kernel.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.conv_cases import COPY, NONE, Padding
from benchmarks.conv_layers import NETS, SAMPLES, Layer
from benchmarks.conv_sm90 import CUDA, ROUNDED, Example
from benchmarks.measure import float32_settings, gpu_ms
from benchmarks.sm90 import relative
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.epilogue import parse
from fx_fuser.kernels import base
from fx_fuser.kernels.implicit import implicit
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import folded
from fx_fuser.ops.library import FusedCall

LAST = torch.channels_last
COLUMNS = (32, 64, 96, 128)


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    columns: int
    is_window: bool
    leaves: int


@dataclass(frozen=True)
class Window:
    """How a convolution moves over an image; pairs are down and across."""

    stride: tuple[int, int] = (1, 1)
    padding: Padding = NONE
    dilation: tuple[int, int] = (1, 1)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = F.pad(x, self.padding)
        return F.conv2d(wide, weight, None, self.stride, 0, self.dilation)


def spec_of(example: Example, form: Form) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    family = implicit(form.columns, form.is_window, form.leaves)
    return base.example(family, example.name, example.scalars, *types)


def run(
    one: tuple[Example, Form],
    x: Tensor,
    weight: Tensor,
    window: Window,
    out: Tensor,
    c: Tensor | None = None,
    operands: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
) -> None:
    geometry = ([*window.stride], [*window.padding], [*window.dilation])
    spec = spec_of(*one)
    taken = kernels.implicit(spec, x, weight, *geometry, out, c, operands, scalars)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tail:
    """What follows BatchNorm, in torch ops and as an epilogue's text.

    adds: is there a residual? folds: does the library have it in its fused call?
    """

    reference: Callable[..., Tensor]
    text: str = ""
    adds: bool = False
    folds: bool = False


TAILS = {
    "": Tail(lambda z: z),
    "relu": Tail(F.relu, "v0 = relu(z)", folds=True),
    "silu": Tail(F.silu, "v0 = silu(z)"),
    "hardswish": Tail(F.hardswish, "v0 = hardswish(z)"),
    "add": Tail(torch.add, "v0 = add(z, t0)", adds=True),
    "add, relu": Tail(
        lambda z, t: F.relu(z + t), "v0 = add(z, t0); v1 = relu(v0)", adds=True, folds=True
    ),
}


class Timed:
    """A layer on random bf16 tensors: our kernel, and what it is compared with."""

    def __init__(self, layer: Layer, device: torch.device = CUDA, samples: int = SAMPLES) -> None:
        self.tail, self.layer, self.device = TAILS[layer.tail], layer, device
        self.anchor, self.epilogue = ANCHORS["conv2d_batchnorm"], parse(self.tail.text)
        kernel, pad = (layer.kernel, layer.kernel), layer.kernel // 2
        self.window = Window((layer.stride, layer.stride), (pad, pad, pad, pad))
        self.x = self._image(samples, layer.channels, layer.side, layer.side)
        fan_in = layer.channels * layer.kernel**2
        self.weight = self._image(layer.outputs, layer.channels, *kernel) / fan_in**0.5
        mean, beta = torch.randn(2, layer.outputs, device=device)
        var, gamma = torch.rand(2, layer.outputs, device=device) + 0.5
        self.vectors = (mean, var, gamma, beta)
        side = (layer.side - 1) // layer.stride + 1
        self.out = self._image(samples, layer.outputs, side, side)
        self.t = [torch.randn_like(self.out)] if self.tail.adds else []
        moved = (self.x, self.weight, self.out, *self.t)
        self.floor = sum(v.nbytes for v in moved) / COPY * 1e3

    def _image(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(torch.bfloat16, memory_format=LAST)

    def operands(self) -> dict[str, Tensor | None]:
        names = ("x", "weight", "bias", "running_mean", "running_var", "gamma", "beta")
        return dict(zip(names, (self.x, self.weight, None, *self.vectors)))

    def config(self, product: str) -> dict[str, Any]:
        return {
            "stride": [*self.window.stride],
            "padding": [*self.window.padding],
            "dilation": [1, 1],
            "groups": 1,
            "tf32": False,
            "product": product,
            "backward": "library",
            "again": False,
            "training": False,
            "momentum": 0.0,
            "eps": 1e-5,
        }

    def call(self, product: str) -> FusedCall:
        return FusedCall(self.anchor, self.config(product), self.epilogue, [], torch.bfloat16)

    def specs(self) -> list[KernelSpec]:
        """The epilogue's kernel, and ours."""
        return self.call("implicit").specs([*self.operands().values()], self.t)

    def ours(self) -> None:
        given = [*(v.view(-1, 1, 1) for v in self.vectors), *self.t]
        one = self.specs()[1], self.x, self.weight
        geometry = ([*self.window.stride], [*self.window.padding], [1, 1])
        taken = kernels.implicit(*one, *geometry, self.out, None, given, [1e-5])
        assert taken, f"{self.layer} was refused"

    def alone(self) -> Tensor:
        (pad, *_), (stride, _) = self.window.padding, self.window.stride
        return F.conv2d(self.x, self.weight, None, stride, pad)

    def with_a_pass(self) -> Callable[[], object]:
        return self.call("library").bound([*self.operands().values()], self.t, save=False)

    def folded(self) -> Callable[[], Tensor]:
        given = (self.config("folded"), self.epilogue, self.t, torch.bfloat16)
        return folded.bound(self.operands(), *given, folded.fold_in_torch)

    def exact(self, few: slice = slice(None)) -> Tensor:
        """The exact result for these samples."""
        c = self.window.convolve(self.x[few].double(), self.weight.double())
        z = F.batch_norm(c, *(v.double() for v in self.vectors))
        return self.tail.reference(z, *(v[few].double() for v in self.t))

    def error(self) -> float:
        """Our result's error for some samples, against float64."""
        few = slice(None, None, 32)
        self.out.fill_(float("nan"))
        self.ours()
        is_filled = not bool(self.out.isnan().any())
        return relative(self.out[few], self.exact(few)) if is_filled else float("nan")


def timing(failures: list[str]) -> list[str]:
    """A table for each net, whose last line is the sum over its layers."""
    counts = {net: collections.Counter(layers()) for net, layers in NETS.items()}
    known: dict[Layer, list[float]] = {}
    tables = []
    for net, counted in counts.items():
        rows: list[list[object]] = []
        sums = [0.0] * 5
        for layer, count in counted.items():
            if layer not in known:
                known[layer] = _times(layer, failures)
            floor, alone, apart, call, ours, error = known[layer]
            name = (
                f"{layer.channels} → {layer.outputs}, {layer.side}², {layer.kernel} × "
                f"{layer.kernel} / {layer.stride}, {layer.tail or 'norm'}"
            )
            best = min(apart, call)
            rows.append(
                [name, count, floor, alone, apart, call, ours, ours / floor, best / ours, error]
            )
            for i, ms in enumerate((floor, alone, apart, best, ours)):
                sums[i] += count * ms
        floor, alone, apart, best, ours = sums
        rows.append(
            [net, counted.total(), floor, alone, apart, best, ours, ours / floor, best / ours, 0.0]
        )
        heads = ["", "count", "bytes, ms", "convolution", "and a pass", "folded", "ours"]
        formats = ["", "d", ".4f", ".4f", ".4f", ".4f", ".4f", ".2f", ".2f", ".1e"]
        heads += ["× bytes", "gain", "error"]
        tables.append(tabulate(rows, heads, floatfmt=formats))
    return tables


def _times(layer: Layer, failures: list[str]) -> list[float]:
    """ms: by bytes, of the bare convolution, with a pass, folded, ours; and our error."""
    timed = Timed(layer)
    error = timed.error()
    if not error <= ROUNDED[torch.bfloat16]:
        failures.append(f"{layer}: error {error:.1e}")
    calls: dict[str, Callable[[], object]] = {
        "alone": timed.alone,
        "apart": timed.with_a_pass(),
        "ours": timed.ours,
    }
    if timed.tail.folds:
        calls["folded"] = timed.folded()
    ms = {"folded": float("inf"), **gpu_ms(calls, [], CUDA)}
    return [timed.floor, ms["alone"], ms["apart"], ms["folded"], ms["ours"], error]


def main() -> int:
    harness.parser("implicit").parse_args()
    done = harness.progress()
    layers = {layer for net in NETS.values() for layer in net()}
    meta = torch.device("meta")
    wanted = list({spec: 0 for layer in layers for spec in Timed(layer, meta).specs()})
    load.prepare(wanted, CUDA)
    done(f"built {len(wanted)}")
    failures: list[str] = []
    with float32_settings("fp32"):
        tables = timing(failures)
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
