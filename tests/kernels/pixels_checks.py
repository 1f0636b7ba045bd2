"""Checks of the 1 x 1 convolution with the statistics of its result, as graphs call it, on a GPU
and on the CPU emulator alike."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.sm90 import CUDA
from fx_fuser.kernels import pixels
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.pixels import MOMENTS

# Calls a function of `fx_fuser::run`: its results, and how many kernels were launched.
Called = Callable[..., tuple[list[Tensor], int]]
LAUNCHES = 2  # the convolution, and what adds up the blocks' statistics
# One rounding of z, of z; and what sums may be off by, of the sum of what is added without signs.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUMS = 2.0**-16
# A mean is a few roundings of values that are as large as the largest one. A variance is a sum of
# squares, off by a few hundred roundings; and each rounding of a mean of some pixels, whose
# deviation from the mean of all is squared, counts twice, as often as deviations are smaller.
MEAN = 2.0**-22
VARIANCE = 2.0**-18
VARIANCE_OF_MEAN = 2.0**-24


class Sizes(NamedTuple):
    batch: int
    height: int
    width: int
    k: int
    channels: int

    @property
    def pixels(self) -> int:
        return self.batch * self.height * self.width


def random_sizes(choose: random.Random, most_pixels: int, most_channels: int) -> Sizes:
    height, width = choose.choice(((1, 1), (7, 7), (5, 13), (1, 33)))
    batch = choose.randint(1, max(1, most_pixels // (height * width)))
    k, channels = (8 * choose.randint(1, most_channels // 8) for _ in range(2))
    return Sizes(batch, height, width, k, channels)


def operands(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, height, width, k, channels = sizes
    x = torch.randn(batch, height, width, k, device=CUDA).to(dtype).permute(0, 3, 1, 2)
    weight = (torch.randn(channels, k, 1, 1, device=CUDA) * k**-0.5).to(dtype)
    return x, weight


def check(
    failures: list[str],
    called: Called,
    sizes: Sizes,
    x: Tensor,
    weight: Tensor,
    shape: int,
    what: str = "",
) -> None:
    what = f"{sizes} of {x.dtype}, tiles {pixels.SHAPES[shape]}{what}"
    kernel = pixels.spec_of(x.dtype).name
    (z, mean, variance), launches = called(MOMENTS, x, weight, kernel, shape)
    if launches != LAUNCHES:
        failures.append(f"{what}: {launches} launches")
        return
    _check_z(failures, what, x, weight, z)
    rows = z.permute(0, 2, 3, 1).reshape(-1, sizes.channels).double()
    of_rows, mean_of_rows = torch.var_mean(rows, 0, correction=0)
    largest = rows.abs().amax(0).clamp(min=1e-30)
    off = (mean.flatten() - mean_of_rows).abs() / largest
    if not bool((off <= MEAN).all()):
        failures.append(f"{what}: a mean is off by {float(off.max()):.3g} of the largest value")
    off = (variance.flatten() - of_rows).abs() / of_rows.clamp(min=1e-30)
    if not bool((off <= VARIANCE + VARIANCE_OF_MEAN * largest / of_rows.sqrt()).all()):
        failures.append(f"{what}: a variance is off by {float(off.max()):.3g}")
    again, _ = called(MOMENTS, x, weight, kernel, shape)
    if not all(map(torch.equal, (z, mean, variance), again)):
        failures.append(f"{what}: a second call gives other bits")


def _check_z(failures: list[str], what: str, x: Tensor, weight: Tensor, z: Tensor) -> None:
    matrix = weight.flatten(1).double()
    rows = x.permute(0, 2, 3, 1).double()
    exact, unsigned = rows @ matrix.T, rows.abs() @ matrix.abs().T
    found = z.permute(0, 2, 3, 1)
    if not found.is_contiguous() or found.shape != exact.shape:
        failures.append(f"{what}: z has shape {[*z.shape]} and strides {z.stride()}")
        return
    bound = ROUNDING[x.dtype] * exact.abs() + SUMS * unsigned + torch.finfo(x.dtype).tiny
    off = (found.double() - exact).abs()
    if not bool((off <= bound).all()):
        wrong = int((~(off <= bound)).sum())
        failures.append(f"{what}: {wrong} of {off.numel()} elements are off")


def sweep(
    failures: list[str],
    called: Called,
    count: int,
    seed: int,
    most_pixels: int,
    most_channels: int,
) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for i in range(count):
        sizes = random_sizes(choose, most_pixels, most_channels)
        dtype = choose.choice(pixels.DTYPES)
        x, weight = operands(sizes, dtype)
        check(failures, called, sizes, x, weight, i % len(pixels.SHAPES))


def families(
    failures: list[str], called: Called, shapes: Sequence[int], batch: int, channels: int
) -> None:
    """Of fp16, whose values differ where bf16's would all be equal."""
    torch.manual_seed(0)
    sizes = Sizes(batch, 3, 5, 64, channels)
    for shape in shapes:
        x, weight = operands(sizes, torch.float16)
        x[:, 0], weight[:, 0] = 1.0, 1000.0  # means of 1000 deviations
        check(failures, called, sizes, x, weight, shape, ", far from 0")
        x[:, 0] = 0.0
        x[0, 0, 0, 0] = 30.0  # the pivot of a group is an outlier of 30,000
        check(failures, called, sizes, x, weight, shape, ", an outlier")
        x = x[:, :, :1, :1].expand_as(x).contiguous(memory_format=torch.channels_last)
        x[:] = x[:1]
        _constant(failures, called, sizes, x, weight, shape)


def _constant(
    failures: list[str], called: Called, sizes: Sizes, x: Tensor, weight: Tensor, shape: int
) -> None:
    """Of a channel of equal values the mean is exactly that value, and the variance 0."""
    (z, mean, variance), _ = called(MOMENTS, x, weight, pixels.spec_of(x.dtype).name, shape)
    if bool(variance.any()) or not torch.equal(mean.flatten(), z[0, :, 0, 0].float()):
        failures.append(f"{sizes}, {pixels.SHAPES[shape]}: a constant channel is not exact")


def refusals(failures: list[str], called: Called) -> None:
    """What the kernel does not take runs by the library."""
    x, weight = operands(Sizes(2, 3, 5, 16, 24), torch.bfloat16)
    kernel = pixels.spec_of(torch.bfloat16).name
    odd = operands(Sizes(2, 3, 5, 12, 24), torch.bfloat16)
    narrow = operands(Sizes(2, 3, 5, 16, 20), torch.bfloat16)
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)
    cases = {
        "k": odd,
        "channels": narrow,
        "layout": (x.contiguous(), weight),
        "weight": (x, turned),
    }
    for what, (given, by) in cases.items():
        found, launches = called(MOMENTS, given, by, kernel, 0)
        if launches:
            failures.append(f"{what}: the kernel ran")
        exact = torch.nn.functional.conv2d(given.double(), by.double())
        if not bool(((found[0].double() - exact).abs() <= 2**-6 * exact.abs() + 1e-2).all()):
            failures.append(f"{what}: wrong")


def on_gpu(function: str, *arguments: Any) -> tuple[list[Tensor], int]:
    """All results, and how many kernels were launched: none where torch's operations ran."""
    load.prepare(pixels.offered(), "cuda")
    known = run._functions[function]
    fallback = mock.Mock(wraps=known.in_torch)
    counted = dataclasses.replace(known, in_torch=fallback)
    with mock.patch.dict(run._functions, {function: counted}):
        found = run.MANY(*run.arguments(function, arguments))
    return found, 0 if fallback.called else LAUNCHES
