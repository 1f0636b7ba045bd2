"""Times of the grouped convolution and its gradients on the layers of two nets:

    python -m benchmarks.grouped

Medians with the L2 cache cleared before each call, on random data; each result is compared with
float64's. Compared with the library's convolution alone, and with a pointwise kernel behind it,
which stands for Inductor's code. `python -m pytest tests/kernels/test_grouped.py` checks the
kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.conv_sm90 import CUDA, ROUNDED, Example
from benchmarks.implicit import LAST, TAILS, Window
from benchmarks.measure import float32_settings, gpu_ms
from benchmarks.sm90 import relative
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.epilogue import parse
from fx_fuser.kernels import base
from fx_fuser.kernels.grouped import grouped, grouped_tiles, unit_of, weight_spec_of
from fx_fuser.kernels.grouped import spec_of as plain_spec_of
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.library import FusedCall

SAMPLES = 128
BYTES_PER_MS = 3.0e9  # what the acceptance counts with
MULTIPLY_ADDS_PER_MS = 450e9 / 2


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    tiles: int
    is_mixed: bool
    leaves: int

    @classmethod
    def of(cls, inputs: int, outputs: int, leaves: int) -> Form:
        """Of groups of so many channels."""
        groups = unit_of(inputs, outputs)
        return cls(grouped_tiles(groups * outputs), groups > 1, leaves)


def spec_of(example: Example, form: Form) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    family = grouped(form.tiles, form.is_mixed, form.leaves)
    return base.example(family, example.name, example.scalars, *types)


def grouped_kernel(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    window: Window,
    groups: int,
    out: Tensor,
    c: Tensor | None = None,
    operands: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
    tile: Sequence[int] = (),
) -> bool:
    """Like `benchmarks.kernels.implicit`, in groups.

    Args:
        spec: a kernel of a family `kernels.grouped.grouped`, see kernels_cu/conv/grouped.cuh.
        weight: [O, C/groups, kh, kw], any strides; C and O are multiples of 8.
        tile: how the work is divided, the first numbers of `grouped_cut`; by default what the
            kernel's model finds best.
    """
    geometry = ([*window.stride], [*window.padding], [*window.dilation], groups)
    given = (*geometry, out, c, [*operands], [*scalars], [*tile])
    return kernels.taken("grouped", spec, out, x, weight, *given)


def grouped_input(
    spec: KernelSpec, dz: Tensor, weight: Tensor, window: Window, groups: int, dx: Tensor
) -> bool:
    """dx = the gradient by `grouped_kernel`'s x. spec: of `kernels.grouped.spec_of`."""
    geometry = ([*window.stride], [*window.padding], [*window.dilation], groups)
    return kernels.taken("grouped_input", spec, dx, dz, weight, *geometry, dx)


def grouped_weight(
    spec: KernelSpec,
    x: Tensor,
    dz: Tensor,
    window: Window,
    groups: int,
    dw: Tensor,
    tile: Sequence[int] = (),
) -> bool:
    """dw = the gradient by its weight. spec: of `kernels.grouped.weight_spec_of`."""
    geometry = ([*window.stride], [*window.padding], [*window.dilation], groups)
    return kernels.taken("grouped_weight", spec, dw, x, dz, *geometry, dw, [*tile])


def run(one: tuple[Example, Form], *given: Any, **named: Any) -> bool:
    """The same, of an example."""
    return grouped_kernel(spec_of(*one), *given, **named)


def _gradients(
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    window: Window,
    groups: int,
    by_x: bool,
    by_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The library's. Padding is even."""
    left, _, top, _ = window.padding
    numbers = [*window.stride], [top, left], [*window.dilation], False, [0, 0], groups
    asked = [by_x, by_weight, False]
    return torch.ops.aten.convolution_backward(dz, x, weight, None, *numbers, asked)


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A 3 × 3 convolution of as many outputs, BatchNorm and relu. side: of its input."""

    channels: int
    groups: int
    side: int
    stride: int = 1


def _net(
    stages: Sequence[tuple[int, int, int, int]], groups_of: Callable[[int], int]
) -> dict[Layer, int]:
    """stages: channels, side, the first layer's stride, layers."""
    found: dict[Layer, int] = {}
    for width, side, stride, count in stages:
        groups = groups_of(width)
        first, rest = Layer(width, groups, side, stride), Layer(width, groups, side // stride)
        for layer in (first, *[rest] * (count - 1)):
            found[layer] = found.get(layer, 0) + 1
    return found


NETS = {
    "RegNet-Y-1.6GF": lambda: _net(
        ((48, 112, 2, 2), (120, 56, 2, 6), (336, 28, 2, 17), (888, 14, 2, 2)),
        lambda width: width // 24,
    ),
    "ResNeXt-50": lambda: _net(
        ((128, 56, 1, 3), (256, 56, 2, 4), (512, 28, 2, 6), (1024, 14, 2, 3)), lambda width: 32
    ),
    "measured.md": lambda: {
        Layer(128, 32, 56): 1,
        Layer(256, 32, 28): 1,
        Layer(384, 16, 14): 1,
        Layer(96, 4, 56): 1,
    },
}


class Timed:
    """A layer on random bf16 tensors: our kernel, and what it is compared with."""

    def __init__(self, layer: Layer, device: torch.device = CUDA, samples: int = SAMPLES) -> None:
        self.layer, self.device = layer, device
        self.anchor, self.epilogue = ANCHORS["conv2d_batchnorm"], parse(TAILS["relu"].text)
        self.window = Window((layer.stride, layer.stride), (1, 1, 1, 1))
        self.x = self._image(samples, layer.channels, layer.side, layer.side)
        inputs = layer.channels // layer.groups
        self.weight = self._image(layer.channels, inputs, 3, 3) / (9 * inputs) ** 0.5
        mean, beta = torch.randn(2, layer.channels, device=device)
        var, gamma = torch.rand(2, layer.channels, device=device) + 0.5
        self.vectors = (mean, var, gamma, beta)
        side = (layer.side - 1) // layer.stride + 1
        self.out = self._image(samples, layer.channels, side, side)
        self.dx, self.dw = torch.empty_like(self.x), torch.empty_like(self.weight)
        moved = sum(v.nbytes for v in (self.x, self.weight, self.out))
        products = self.out.numel() * inputs * 9
        self.floor = max(moved / BYTES_PER_MS, products / MULTIPLY_ADDS_PER_MS)

    def _image(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(torch.bfloat16, memory_format=LAST)

    def operands(self) -> dict[str, Tensor | None]:
        names = ("x", "weight", "bias", "running_mean", "running_var", "gamma", "beta")
        return dict(zip(names, (self.x, self.weight, None, *self.vectors)))

    def call(self, product: str) -> FusedCall:
        config: dict[str, Any] = {
            "stride": [*self.window.stride],
            "padding": [*self.window.padding],
            "dilation": [1, 1],
            "groups": self.layer.groups,
            "tf32": False,
            "product": product,
            "backward": "library",
            "again": False,
            "training": False,
            "momentum": 0.0,
            "eps": 1e-5,
        }
        return FusedCall(self.anchor, config, self.epilogue, [], torch.bfloat16)

    def specs(self) -> list[KernelSpec]:
        """The epilogue's kernel, and ours."""
        return self.call("grouped").specs([*self.operands().values()], [])

    def ours(self, tile: Sequence[int] = ()) -> None:
        given = [v.view(-1, 1, 1) for v in self.vectors]
        one = self.specs()[1], self.x, self.weight, self.window, self.layer.groups
        taken = grouped_kernel(*one, self.out, None, given, [1e-5], tile)
        assert taken, f"{self.layer} was refused"

    def gradient_specs(self) -> list[KernelSpec]:
        """Of the gradients of x and of the weight."""
        inputs = self.layer.channels // self.layer.groups
        given = inputs, inputs, torch.bfloat16
        return [plain_spec_of(*given), weight_spec_of(*given)]

    def gradient(self, of_weight: bool, tile: Sequence[int] = ()) -> None:
        """Of `out` as dz."""
        spec, window, groups = self.gradient_specs()[of_weight], self.window, self.layer.groups
        if of_weight:
            taken = grouped_weight(spec, self.x, self.out, window, groups, self.dw, tile)
        else:
            taken = grouped_input(spec, self.out, self.weight, window, groups, self.dx)
        assert taken, f"a gradient of {self.layer} was refused"

    def librarys(self, of_weight: bool) -> Tensor:
        given = self.out, self.x, self.weight
        return _gradients(*given, self.window, self.layer.groups, not of_weight, of_weight)[
            of_weight
        ]

    def errors_of_gradients(self) -> list[float]:
        """Against float64, in so few samples that it takes no time: others' dz is 0."""
        few = slice(None, None, 32)
        dz = torch.zeros_like(self.out)
        dz[few] = torch.randn_like(self.out[few])
        self.out.copy_(dz)
        self.dx.fill_(float("nan"))
        self.dw.fill_(float("nan"))
        for of_weight in (False, True):
            self.gradient(of_weight)
        given = dz[few].double(), self.x[few].double(), self.weight.double()
        exact = _gradients(*given, self.window, self.layer.groups, True, True)
        return [relative(self.dx[few], exact[0]), relative(self.dw, exact[1])]

    def alone(self) -> Tensor:
        (pad, *_), (stride, _) = self.window.padding, self.window.stride
        return F.conv2d(self.x, self.weight, None, stride, pad, 1, self.layer.groups)

    def with_a_pass(self) -> Callable[[], object]:
        return self.call("library").bound([*self.operands().values()], [], save=False)

    def exact(self, few: slice = slice(None)) -> Tensor:
        """The exact result for these samples."""
        (pad, *_), (stride, _) = self.window.padding, self.window.stride
        x, weight = self.x[few].double(), self.weight.double()
        c = F.conv2d(x, weight, None, stride, pad, 1, self.layer.groups)
        return F.relu(F.batch_norm(c, *(v.double() for v in self.vectors)))

    def error(self) -> float:
        """Our result's error for some samples, against float64."""
        few = slice(None, None, 32)
        self.out.fill_(float("nan"))
        self.ours()
        is_filled = not bool(self.out.isnan().any())
        return relative(self.out[few], self.exact(few)) if is_filled else float("nan")


def timing(failures: list[str], nets: Sequence[str]) -> list[str]:
    """A table for each net, whose last line is the sum over its layers."""
    heads = ["", "count", "floor, ms", "convolution", "and a pass", "ours", "dx", "ours", "dw"]
    tables = []
    for net in nets:
        rows: list[list[object]] = []
        sums = [0.0] * 8
        for layer, count in NETS[net]().items():
            times = _times(layer, failures)
            name = f"{layer.groups} × {layer.channels // layer.groups}, {layer.side}²"
            rows.append([f"{name} / {layer.stride}", count, *times])
            sums = [total + count * ms for total, ms in zip(sums, times)]
        rows.append([net, sum(NETS[net]().values()), *sums])
        tables.append(tabulate(rows, [*heads, "ours"], floatfmt=".4f"))
    return tables


def _times(layer: Layer, failures: list[str]) -> list[float]:
    """ms: the floor; the library's convolution, with a pass, ours; of each gradient the library's
    and ours."""
    timed = Timed(layer)
    for error in (timed.error(), *timed.errors_of_gradients()):
        if not error <= ROUNDED[torch.bfloat16]:
            failures.append(f"{layer}: error {error:.1e}")
    calls: list[Callable[[], object]] = [timed.alone, timed.with_a_pass(), timed.ours]
    for of_weight in (False, True):
        calls += [partial(timed.librarys, of_weight), partial(timed.gradient, of_weight)]
    ms = gpu_ms({str(i): call for i, call in enumerate(calls)}, [], CUDA)
    return [timed.floor, *ms.values()]


def main() -> int:
    parser = harness.parser("grouped")
    parser.add_argument("--net", action="append", choices=NETS, help="by default, all")
    args = parser.parse_args()
    nets = args.net or list(NETS)
    done = harness.progress()
    layers = {layer for net in nets for layer in NETS[net]()}
    meta = torch.device("meta")
    timed = [Timed(layer, meta) for layer in layers]
    wanted = [*dict.fromkeys(spec for t in timed for spec in (*t.specs(), *t.gradient_specs()))]
    load.prepare(wanted, CUDA)
    done(f"built {len(wanted)}")
    failures: list[str] = []
    with float32_settings("fp32"):
        tables = timing(failures, nets)
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
