"""Convolutions to check kernels with: data families, random sizes and operands."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from checks import SENTINEL, error_of
from torch import Tensor

from benchmarks.conv_cases import NONE, Padding
from benchmarks.sm90 import CUDA, normal, relative, spread, uniform
from fx_fuser.kernels.direct import conv_direct_cut


def families(x: tuple[int, ...], weight: tuple[int, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The data of the accuracy contract."""

    fan_in = weight[1] * weight[2] * weight[3]
    layer = (uniform(*weight) * 2 - 1) / fan_in**0.5
    yield "as nn.Conv2d", uniform(*x), layer
    yield "normal", normal(*x), normal(*weight)
    yield "all positive", uniform(*x), uniform(*weight)
    yield "mean 1e4, deviation 1", normal(*x) + 1e4, layer
    yield "heavy-tailed", normal(*x) * spread(4, *x), normal(*weight) * spread(4, *weight)
    samples = normal(*x) * spread(6, x[0], 1, 1, 1)
    yield "scaled samples and filters", samples, normal(*weight) * spread(6, weight[0], 1, 1, 1)
    rows = normal(*x) * spread(3, 1, 1, x[2], 1)
    yield "scaled rows", rows, normal(*weight)


def framed(like: Tensor, dtype: torch.dtype, before: int) -> tuple[Tensor, Tensor]:
    """A result like `like`, filled with NaN, and the memory with sentinels around it."""
    frame = torch.full((before + like.numel() + 64,), SENTINEL, device=like.device, dtype=dtype)
    result = frame[before:-64].as_strided(like.shape, like.stride())
    return result.fill_(float("nan")), frame


@dataclass(frozen=True)
class Results:
    """Tensors of NaN for a kernel to fill: the result, between sentinels, and perhaps c."""

    out: Tensor
    frame: Tensor
    before: int
    c: Tensor | None

    @classmethod
    def like(
        cls,
        exact: Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
        choose: random.Random,
        into: Sequence[int],
    ) -> Results:
        """dtypes: of the result and the convolution. into: where in a vector a result may begin."""
        before = 64 + choose.choice(into)
        out, frame = framed(exact, dtypes[0], before)
        c = framed(exact, dtypes[1], 64)[0] if choose.random() < 0.4 else None
        return cls(out, frame, before, c)

    def faults(self, exact: Tensor, exact_c: Tensor, most: float, most_of_c: float) -> list[str]:
        """Descriptions of what is wrong; most: the largest errors allowed."""
        found = []
        around = (self.frame[: self.before], self.frame[-64:])
        if not all(bool((part == SENTINEL).all()) for part in around):
            found.append("wrote outside the result")
        error = error_of(self.out, exact)
        error_of_c = 0.0 if self.c is None else relative(self.c, exact_c)
        if not error <= most or not error_of_c <= most_of_c:
            found.append(f"error {error:.2e}, of c {error_of_c:.2e}")
        return found


def random_operand(shape: torch.Size, dtype: torch.dtype, choose: random.Random) -> Tensor:
    n, o, h, w = shape
    chosen = choose.choice(
        (*(((o, 1, 1),) * 4), (), (n, o, 1, 1), (n, 1, 1, 1), (h, w), (n, o, h, w), (1, 1, h, 1))
    )
    values = torch.randn(chosen, device=CUDA)
    values = values > 0 if dtype == torch.bool else values.to(dtype)
    if chosen == (n, o, h, w) and choose.random() < 0.5:
        values = values.to(memory_format=torch.channels_last)
    return values


def random_case(choose: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Padding]:
    return _random_case(choose, dtype, 140, (128, 700), 200, 9)


def small_case(choose: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Padding]:
    """For the sanitizers, under which everything is slow."""
    return _random_case(choose, dtype, 12, (30, 270), 70, 2)


def wide_case(choose: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Padding]:
    """So few values that the kernel divides them otherwise when a block has many units: into wide
    units of statistics (a stem's are half rows) or, in 16 bits, units that share slots."""
    gpu = torch.cuda.get_device_properties(CUDA)
    out_bytes = choose.choice((0, 2)) if dtype.itemsize == 2 else 0
    is_stem = out_bytes == 0 and choose.random() < 0.3
    while True:
        kernel = choose.choice(((3, 3), (1, 1), (2, 2), (1, 3)))
        size = choose.randint(1, 4), choose.randint(60, 90), choose.randint(20, 99)
        x, count = (choose.randint(9, 20), *size), choose.choice((1, 8, 66))
        padding = choose.choice((NONE, (1, 1, 1, 1)))
        if is_stem:
            x, kernel, count = (8, 3, 224, 224), (3, 3), 8
        weight = count, x[1], *kernel
        usual, cut = (
            conv_direct_cut(x, weight, padding, out_bytes, 0, dtype.itemsize, multiprocessors)
            for multiprocessors in (2**20, gpu.multi_processor_count)
        )
        if cut != usual:
            return *_values(x, weight, dtype), padding


def _random_case(
    choose: random.Random,
    dtype: torch.dtype,
    side: int,
    widths: tuple[int, ...],
    outputs: int,
    samples: int,
) -> tuple[Tensor, Tensor, Padding]:
    while True:
        kernel = choose.choice(((3, 3), (3, 3), (1, 1), (4, 5), (1, 3), (2, 2), (4, 1), (5, 5)))
        channels = choose.randint(1, 8)
        height = choose.choice((1, choose.randint(1, 12), choose.randint(1, side)))
        width = choose.choice((choose.randint(1, 20), choose.randint(1, side + 10), *widths))
        count = choose.choice((1, 64, choose.randint(1, 70), choose.randint(65, max(outputs, 65))))
        batch = choose.choice((1, 2, choose.randint(1, samples)))
        padding = choose.choice((NONE, (1, 1, 1, 1), (0, 2, 3, 1)))
        x, weight = (batch, channels, height, width), (count, channels, *kernel)
        if conv_direct_cut(x, weight, padding, 4, 0, dtype.itemsize):
            return *_values(x, weight, dtype), padding


def _values(x: Sequence[int], weight: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(x, device=CUDA).to(dtype),
        (torch.randn(weight, device=CUDA) * 0.1).to(dtype),
    )
