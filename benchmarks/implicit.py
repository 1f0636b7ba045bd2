"""The implicit gemm of channels_last convolutions by itself: builds it, checks it against float64,
times it on the layers of three nets.

    python -m benchmarks.implicit [--skip-checks] [--skip-timing] [--cases 200] [--seed 0]

Exits with 1 where a check failed. Timings are medians with the L2 cache cleared before each call,
on random data. Beside them: the library's convolution with a pointwise kernel, which stands for
Inductor's code (the same within 3 %), and the library's fused call on folded weights.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import conv_sm90, harness, kernels
from benchmarks.conv_cases import COPY, NONE, Padding, Results, framed, random_operand
from benchmarks.conv_layers import NETS, SAMPLES, Layer
from benchmarks.conv_sm90 import CUDA, HALVES, IDENTITY, NORM, OPERANDS, ROUNDED, SWISH, Example
from benchmarks.measure import float32_settings, gpu_ms
from benchmarks.sm90 import relative
from benchmarks.stem import rounded
from fx_fuser import build
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.epilogue import parse
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec, implicit
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
    """How a convolution goes over an image; pairs are down and across."""

    stride: tuple[int, int] = (1, 1)
    padding: Padding = NONE
    dilation: tuple[int, int] = (1, 1)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = F.pad(x, self.padding)
        return F.conv2d(wide, weight, None, self.stride, 0, self.dilation)


def spec_of(example: Example, form: Form) -> KernelSpec:
    types = (torch.float32, example.out, example.x, *example.operands)
    family = implicit(form.columns, form.is_window, form.leaves)
    return build.example(family, example.name, example.scalars, *types)


def _examples() -> list[tuple[Example, Form]]:
    """Each number of columns with and without a window, by turns with each epilogue."""
    epilogues = ((NORM, 5), (NORM, 4), (OPERANDS, 0), (SWISH, 0), (OPERANDS, 1))
    found = []
    for i, columns in enumerate(COLUMNS):
        for j, is_window in enumerate((False, True)):
            for k, dtype in enumerate(HALVES):
                example, leaves = epilogues[(2 * i + j + 3 * k) % len(epilogues)]
                form = Form(columns, is_window, leaves)
                found.append((conv_sm90.of_dtype(example, dtype), form))
    other = dataclasses.replace(NORM, x=torch.bfloat16)  # with a result in fp32
    found.append((other, Form(128, True, 4)))
    found.append((other, Form(96, False, 3)))
    mixed = dataclasses.replace(OPERANDS, x=torch.float16, out=torch.bfloat16)
    found.append((mixed, Form(64, False, 0)))
    return found


EXAMPLES = _examples()
ALONE = {
    (dtype, is_window): (conv_sm90.of_dtype(IDENTITY, dtype), Form(64, is_window, 0))
    for dtype in HALVES
    for is_window in (False, True)
}


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


# ---- what must be right --------------------------------------------------------------------------


def _drawn(
    choose: random.Random, form: Form, dtype: torch.dtype, side: int
) -> tuple[Tensor, Tensor, Window]:
    channels = 8 * choose.choice((1, 2, 3, 5, 8, 9, choose.randint(1, 40)))
    outputs = choose.choice((form.columns, 8 * choose.randint(1, 40), choose.randint(1, 260)))
    kernel, window = (1, 1), Window(stride=choose.choice(((1, 1), (1, 1), (2, 2), (3, 1))))
    if form.is_window:
        kernel = choose.choice(((3, 3), (3, 3), (1, 1), (5, 2), (1, 7), (2, 3)))
        channels = min(channels, 96)
        usual = (kernel[1] // 2, kernel[1] // 2, kernel[0] // 2, kernel[0] // 2)
        window = Window(
            choose.choice(((1, 1), (2, 2), (1, 2), (3, 2))),
            choose.choice((usual, usual, NONE, (0, 2, 3, 1), (9, 0, 0, 12))),
            choose.choice(((1, 1), (1, 1), (2, 2), (1, 3))),
        )
    least = [d * (k - 1) + 1 for d, k in zip(window.dilation, kernel)]
    h, w = (
        choose.choice((n, choose.randint(n, side + n), choose.randint(n, 9 + n))) for n in least
    )
    shape = choose.randint(1, 9), channels, h, w
    x = torch.randn(shape, device=CUDA).to(dtype, memory_format=LAST)
    if choose.random() < 0.2:  # some of a pixel's channels, of a wider image's inside
        wide = F.pad(x, (2, 1, 0, 3, 8, 16)).contiguous(memory_format=LAST)
        x = wide[:, 8 : 8 + channels, :h, 2 : 2 + w]
    fan_in = channels * kernel[0] * kernel[1]
    weight = torch.randn(outputs, channels, *kernel, device=CUDA) / fan_in**0.5
    if kernel != (1, 1) or choose.random() < 0.5:
        weight = weight.contiguous(memory_format=LAST)
    return x, weight.to(dtype), window


def _operands(choose: random.Random, one: tuple[Example, Form], shape: torch.Size) -> list[Tensor]:
    example, form = one
    found = []
    for i, dtype in enumerate(example.operands):
        if i < form.leaves:
            leaf = choose.choice(((shape[1], 1, 1), (shape[1], 1, 1), ()))
            values = torch.randn(leaf, device=CUDA)
            found.append(values > 0 if dtype == torch.bool else values.to(dtype))
        elif choose.random() < 0.4:
            values = torch.randn(shape, device=CUDA)
            values = values > 0 if dtype == torch.bool else values.to(dtype)
            found.append(values.contiguous(memory_format=LAST))
        else:
            found.append(random_operand(shape, dtype, choose))
    if example.name == NORM.name:
        found[1] = found[1].abs() + 0.1
    return found


def sweep(cases: int, seed: int, failures: list[str], side: int = 60) -> None:
    """Random sizes, layouts, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        one = example, form = choose.choice(EXAMPLES)
        x, weight, window = _drawn(choose, form, example.x, side)
        exact_c = window.convolve(x.double(), weight.double()).contiguous(memory_format=LAST)
        operands = _operands(choose, one, exact_c.shape)
        scalars = [choose.uniform(0.1, 2) for _ in range(example.scalars)]
        results = Results.like(exact_c, (example.out, example.x), choose, (0, 0, 0, 4, 1))
        run(one, x, weight, window, results.out, results.c, operands, scalars)

        exact = example.reference(exact_c, operands, scalars)
        what = (
            f"case {case}: {tuple(x.shape)} {x.stride()} by {tuple(weight.shape)}, {window}, "
            f"{', '.join(spec_of(*one).signature)}, "
            f"operands {[(tuple(t.shape), t.stride()) for t in operands]}"
        )
        of_c = rounded(dataclasses.replace(example, out=example.x))
        found = results.faults(exact, exact_c, rounded(example), of_c)
        failures += [f"{what}: {fault}" for fault in found]


def special_values(failures: list[str], dtype: torch.dtype) -> None:
    """Infinities and NaN at edges and inside, and denormals, as IEEE's products give them."""
    inf, nan = float("inf"), float("nan")

    def same(what: str, x: Tensor, weight: Tensor, window: Window) -> None:
        one = ALONE[dtype, weight.shape[2] > 1]
        # On the CPU, as plain multiplications: fast algorithms spread an infinity around.
        wide = F.pad(x.double().cpu(), window.padding)
        size = weight.shape[2], weight.shape[3]
        taps = F.unfold(wide, size, dilation=window.dilation, stride=window.stride)
        like = window.convolve(x.double(), weight.double()).contiguous(memory_format=LAST)
        products = weight.flatten(1).double().cpu() @ taps
        exact = products.view(like.shape).to(CUDA, dtype)
        finite = exact.isfinite()
        out, _ = framed(like, dtype, 64)
        run(one, x, weight, window, out)
        name = f"{what}, {dtype}, {tuple(weight.shape)}, {window}"
        found, wanted = (v.nan_to_num(0, 1, -1)[~finite] for v in (out, exact))
        if not torch.equal(out.isfinite(), finite) or not torch.equal(found, wanted):
            failures.append(f"{name}: other infinities or NaN than IEEE's")
        usual = [torch.where(finite, v, 0).double() for v in (out, exact)]
        if not relative(*usual) <= ROUNDED[dtype]:
            failures.append(f"{name}: error {relative(*usual):.2e} where finite")

    around = (1, 1, 1, 1)
    for kernel, window in ((1, Window()), (3, Window()), (3, Window((2, 1), around, (1, 2)))):
        x = torch.randn(3, 24, 11, 13, device=CUDA).to(dtype, memory_format=LAST)
        weight = torch.randn(70, 24, kernel, kernel, device=CUDA)
        weight = weight.to(dtype, memory_format=LAST)
        if dtype == torch.float16:
            same("denormal x", x * 1e-6, weight * 1e2, window)
        for n, i, j, value in ((0, 0, 0, inf), (1, 10, 12, -inf), (2, 0, 12, nan), (0, 10, 9, inf)):
            x[n, (7 * i + j) % 24, i, j] = value
        same("in x", x, weight, window)
        last = kernel - 1
        weight[5, 0, last, 0], weight[9, 22, 0, last], weight[69, 23, 0, 0] = inf, nan, -inf
        same("in both", x, weight, window)


def repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches agree bit for bit."""
    one = conv_sm90.of_dtype(NORM, torch.bfloat16), Form(128, True, 4)
    x = torch.randn(8, 72, 60, 61, device=CUDA).to(torch.bfloat16, memory_format=LAST)
    weight = torch.randn(200, 72, 3, 3, device=CUDA) / 26
    weight = weight.to(torch.bfloat16, memory_format=LAST)
    window = Window(padding=(1, 1, 1, 1))
    exact_c = window.convolve(x.double(), weight.double()).contiguous(memory_format=LAST)
    vectors = [torch.rand(200, 1, 1, device=CUDA) + 0.5 for _ in range(4)]
    # The last operand comes through the ring: as its dtype is a kernel's, an fp32 residual.
    operands = [*vectors, torch.randn_like(exact_c, dtype=torch.float32)]
    out = torch.empty_like(exact_c, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    run(one, x, weight, window, out, None, operands, [1e-5])
    with torch.cuda.graph(graph):
        run(one, x, weight, window, out, None, operands, [1e-5])
    for _ in range(3):
        weight.normal_(0, 1 / 26)
        graph.replay()
        exact_c = window.convolve(x.double(), weight.double())
        exact = one[0].reference(exact_c, operands, [1e-5])
        if not relative(out, exact) <= ROUNDED[out.dtype]:
            failures.append("graph replay")
    first, differ = out.clone(), torch.zeros((), dtype=torch.bool, device=CUDA)
    for _ in range(10_000):
        graph.replay()
        differ |= (out != first).any()
    if bool(differ):
        failures.append("launches differ")


def refusals(failures: list[str]) -> None:
    """Of calls that the kernel does not take; nothing is written."""

    def images(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA).bfloat16().contiguous(memory_format=LAST)

    x, weight = images(2, 16, 9, 10), images(24, 16, 3, 3)
    odd = images(2, 17, 9, 10)[:, 1:]
    for what, a, b, window, layout in (
        ("another layout of x", x.contiguous(), weight, Window(), LAST),
        ("another layout of the weight", x, weight.contiguous(), Window(), LAST),
        ("another layout of the result", x, weight, Window(), torch.contiguous_format),
        ("channels that are no vectors", images(2, 12, 9, 10), images(8, 12, 3, 3), Window(), LAST),
        ("pixels that begin within vectors", odd, weight, Window(), LAST),
        ("negative padding", x, weight, Window(padding=(-1, 0, 0, 0)), LAST),
        ("no output", x[..., :2], weight, Window(), LAST),
        ("no sample", x[:0], weight, Window(), LAST),
        ("a window too wide", x, weight, Window(dilation=(1, 2**14)), LAST),
    ):
        one = ALONE[torch.bfloat16, True]
        sizes = (len(a), len(b), *(max(n - 2, 1) for n in a.shape[2:]))
        out = torch.full(sizes, 7.0, device=CUDA, dtype=torch.bfloat16)
        out = out.contiguous(memory_format=layout)
        geometry = ([*window.stride], [*window.padding], [*window.dilation])
        if kernels.implicit(spec_of(*one), a, b, *geometry, out, None, [], []):
            failures.append(f"{what} was not refused")
        if not bool((out == 7).all()):
            failures.append(f"{what}: something was written")
    alone = spec_of(*ALONE[torch.bfloat16, False])
    out = torch.empty_like(x)
    if kernels.implicit(alone, x, weight, [1, 1], [1] * 4, [1, 1], out[:, :24], None, [], []):
        failures.append("a window was not refused by the kernel of 1 x 1")


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
        """Of these samples."""
        c = self.window.convolve(self.x[few].double(), self.weight.double())
        z = F.batch_norm(c, *(v.double() for v in self.vectors))
        return self.tail.reference(z, *(v[few].double() for v in self.t))

    def error(self) -> float:
        """Of our result, of some samples, against float64."""
        few = slice(None, None, 32)
        self.out.fill_(float("nan"))
        self.ours()
        is_filled = not bool(self.out.isnan().any())
        return relative(self.out[few], self.exact(few)) if is_filled else float("nan")


def timing(failures: list[str]) -> list[str]:
    """A table for each net, of which the last line is the sum over its layers."""
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
    """ms: by bytes, of the convolution alone, with a pass, folded, ours; and our error."""
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
    chosen = harness.parser("implicit", cases=200).parse_args()
    done = harness.progress()
    wanted: list[KernelSpec] = []
    if not chosen.skip_checks:
        repeated = conv_sm90.of_dtype(NORM, torch.bfloat16), Form(128, True, 4)
        wanted += [spec_of(*one) for one in (*EXAMPLES, *ALONE.values(), repeated)]
    if not chosen.skip_timing:
        layers = {layer for net in NETS.values() for layer in net()}
        meta = torch.device("meta")
        wanted += [spec for layer in layers for spec in Timed(layer, meta).specs()]
    wanted = list(dict.fromkeys(wanted))
    load.prepare(wanted, CUDA)
    done(f"built {len(wanted)}")
    failures: list[str] = []
    tables: list[str] = []
    with float32_settings("fp32"):
        if not chosen.skip_checks:
            sweep(chosen.cases, chosen.seed, failures)
            done(f"{chosen.cases} random cases")
            refusals(failures)
            for dtype in HALVES:
                special_values(failures, dtype)
            repeats(failures)
            done("refusals, special values, repeats")
        if not chosen.skip_timing:
            tables = timing(failures)
            done("timing")
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
