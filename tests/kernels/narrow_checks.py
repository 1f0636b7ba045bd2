"""Checks of fp32 gemms of operands that were cast up: benchmarks/narrow_sm90.py times them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from checks import (
    Sizes,
    agree_over_two_streams,
    captured,
    error_of,
    framed_matrix,
    is_untouched,
    strided,
)
from linear_split_checks import compare, special_values
from torch import Tensor

from benchmarks.linear_sm90 import families
from benchmarks.narrow_sm90 import DTYPES, WAYS, by_kernel, by_op, cast
from benchmarks.sm90 import CUDA, GUESSED, n_major, relative


def every_way() -> Iterator[tuple[str, torch.dtype]]:
    yield from ((way, dtype) for way in WAYS for dtype in DTYPES)


def accuracy(failures: list[str]) -> None:
    """The accuracy contract's data, without that which overflows fp16."""
    for k in (64, 1024, 8192, 32768):
        for name, wide_x, wide_weight in families(256, 384, k):
            for way, dtype in every_way():
                x, weight = cast(way, dtype, wide_x, wide_weight)
                if not (x.isfinite().all() and weight.isfinite().all()):
                    continue
                exact = x.double() @ weight.double().T
                ours, sgemm = by_kernel(way, dtype, x, weight), F.linear(x.float(), weight.float())
                what = f"K = {k}, {name}, {way}, {dtype}"
                compare(what, ours, sgemm, exact, failures)


def sizes(choose: random.Random) -> tuple[int, int, int]:
    m, n = choose.choice((1, 2, choose.randint(1, 700))), choose.randint(1, 700)
    return m, n, choose.choice((choose.randint(1, 64), choose.randint(1, 3000)))


def sweep(failures: list[str], cases: int, seed: int, sizes: Sizes = sizes) -> None:
    """Random sizes, strides and alignments; NaN where the result goes, sentinels around it."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        way, dtype = choose.choice([*every_way()])
        m, n, k = sizes(choose)
        types = [t.dtype for t in cast(way, dtype, torch.empty(0), torch.empty(0))]
        x, weight = strided(m, k, types[0], choose), strided(n, k, types[1], choose)
        if way != "exact":
            x = n_major(x) if choose.random() < 0.3 else x
            weight = n_major(weight) if choose.random() < 0.3 else weight
            if choose.random() < 0.2:
                (weight if way == "mixed x" else x)[:, :GUESSED] *= choose.choice((0.0, 1e-4))
            if choose.random() < 0.2 and k > 1:  # rows that begin at any element
                x, weight = x[:, 1:], weight[:, 1:]
        chunks = choose.choice((0, 0, 1, 3))
        frame, out = framed_matrix((m, n), torch.float32)
        by_kernel(way, dtype, x, weight, out, chunks)
        exact = x.double() @ weight.double().T
        error = error_of(out, exact)
        what = f"case {case}: {way}, {dtype}, {m} x {n} x {k}, strides {x.stride()}"
        if not is_untouched(frame, out):
            failures.append(f"{what}: wrote outside the result")
        if not error <= 2e-6:
            failures.append(f"{what}: error {error:.2e}")


def in_aligned_rows(matrix: Tensor) -> Tensor:
    """The same values in aligned rows, as the exact kernel needs, with NaN between them."""
    rows, columns = matrix.shape
    padded = matrix.new_full((rows, -(-columns // 8) * 8), float("nan"))
    return padded[:, :columns].copy_(matrix)


def specials(failures: list[str]) -> None:
    """Infinities, NaN, zeros, denormals and extremes; n_major operands too."""

    def multiply(way: str, dtype: torch.dtype, x: Tensor, weight: Tensor) -> Tensor:
        if way == "exact":
            x, weight = in_aligned_rows(x), in_aligned_rows(weight)
        return by_kernel(way, dtype, x, weight)

    for way, dtype in every_way():
        found: list[str] = []
        gemm = functools.partial(multiply, way, dtype)
        special_values(found, cast=functools.partial(cast, way, dtype), multiply=gemm)
        failures += [f"{way}, {dtype}: {what}" for what in found]


def graphs_and_repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches on two streams agree bit for bit."""
    for way, dtype in every_way():
        x, weight = cast(way, dtype, *(torch.randn(n, 1000, device=CUDA) for n in (300, 1500)))
        out = by_kernel(way, dtype, x, weight)
        step = functools.partial(by_kernel, way, dtype, x, weight)
        graph = captured(lambda: step(out))  # noqa: B023
        weight.normal_()
        graph.replay()
        if not torch.equal(out, by_kernel(way, dtype, x, weight)):
            failures.append(f"{way}, {dtype}: graph replay differs")
        if not agree_over_two_streams(lambda: (step(),), (out,), 400):  # noqa: B023
            failures.append(f"{way}, {dtype}: launches over two streams differ")


def through_the_ops(failures: list[str]) -> None:
    """Calls that go to the library, batches, and K too long for one sum."""
    for way, dtype in every_way():
        for what, x_shape, weight_shape in (
            ("an odd K", (130, 1003), (300, 1003)),
            ("a long K", (130, 40000), (260, 40000)),
            ("leading dimensions", (3, 50, 512), (260, 512)),
            ("batches", (3, 500, 512), (3, 600, 512)),
            ("no rows", (0, 64), (32, 64)),
            ("no K", (16, 0), (32, 0)),
        ):
            if what == "batches" and way == "exact":
                continue
            wide = (torch.randn(shape, device=CUDA) for shape in (x_shape, weight_shape))
            x, weight = cast(way, dtype, *wide)
            exact = x.double() @ weight.double().mT
            ours = by_op(way, dtype, x, weight)
            if ours.shape != exact.shape or ours.dtype != torch.float32:
                failures.append(f"{way}, {dtype}, {what}: {ours.dtype} {tuple(ours.shape)}")
            elif not relative(ours, exact) <= 1e-6:
                failures.append(f"{way}, {dtype}, {what}: error {relative(ours, exact):.2e}")


CHECKS = (specials, graphs_and_repeats, through_the_ops)
