"""Shared by the checks of kernels: data, memory for results, comparisons, repeated launches.

A check appends to the list `failures`, its argument. Tests run it on a GPU (test_<kernel>.py) and
on the CPU emulator (test_emulated_*.py). This folder has no __init__.py: with one, transformers
would mistake it for Hugging Face's package `kernels`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.sm90 import CUDA, GUESSED, relative

SENTINEL = 12345.0  # around results, where nothing may be written
Sizes = Callable[[random.Random], tuple[int, int, int]]  # m, n, K


def passes(check: Callable[..., object], *arguments: object, **named: object) -> None:
    failures: list[str] = []
    check(failures, *arguments, **named)
    assert not failures, "\n".join(failures)


# ---- data ----------------------------------------------------------------------------------------


def strided(rows: int, columns: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    """Random values with 16-byte aligned rows, some with a gap between them."""
    unit = 16 // dtype.itemsize
    padded = (-(-columns // unit) + choose.choice((0, 0, 1, 3))) * unit
    return torch.randn(rows, padded, device=CUDA).to(dtype)[:, :columns]


def random_operand(m: int, n: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    shape = choose.choice(((n,), (m, 1), (1, n), (m, n), (1, 1), ()))
    values = torch.randn(shape, device=CUDA)
    values = values > 0 if dtype == torch.bool else values.to(dtype)
    if shape == (m, n) and choose.random() < 0.5:
        values = values.T.contiguous().T
    return values


def misleading(n: int, k: int) -> Iterator[tuple[str, Tensor]]:
    """Weights whose first columns are a bad guess for the others."""
    for what, factor, every in (
        ("first columns zero", 0.0, 1),
        ("first columns zero in some rows", 0.0, 150),
        ("first columns 1e-6 of the rest", 1e-6, 1),
        ("first columns 1e-6 of the rest in some rows", 1e-6, 7),
        ("first columns 1e6 times the rest", 1e6, 1),
        ("first columns 1e6 times the rest in some rows", 1e6, 7),
    ):
        weight = torch.randn(n, k, device=CUDA)
        weight[::every, :GUESSED] *= factor
        yield what, weight
    for what, rows in (("a late outlier", slice(n // 2, n // 2 + 1)), ("late outliers", slice(n))):
        weight = torch.randn(n, k, device=CUDA)
        weight[rows, k - 3] = 1e5
        yield what, weight


def small_sizes(choose: random.Random) -> tuple[int, int, int]:
    """For the sanitizers, under which a gemm takes minutes."""
    return choose.choice((1, 17, 130, 260)), choose.randint(1, 300), choose.randint(1, 300)


# ---- results -------------------------------------------------------------------------------------


def framed_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A poisoned matrix, or batch of matrices, in a frame of sentinels. Returns (frame, matrix)."""
    *lead, m, n = shape
    frame = torch.full((*lead, m + 2, n + 5), SENTINEL, device=CUDA, dtype=dtype)
    return frame, frame[..., 1:-1, 3 : 3 + n].fill_(float("nan"))


def is_untouched(frame: Tensor, result: Tensor) -> bool:
    """Whether the frame around the result is unchanged. Overwrites the result."""
    result.fill_(SENTINEL)
    return bool((frame == SENTINEL).all())


def error_of(value: Tensor, exact: Tensor) -> float:
    """Relative to the exact result, or to one whose elements are 1e-3."""
    exact = exact.double()
    return float((value.double() - exact).norm() / (exact.norm() + 1e-3 * exact.numel() ** 0.5))


def judge(
    failures: list[str], what: str, checked: Iterable[tuple[Tensor, Tensor, Tensor, str]],
    small: float,
) -> None:  # fmt: skip
    """Fails unless our error is at most twice torch's, or `small`, for each result: ours, the exact
    one, torch's, and its name."""
    for ours, exact, torchs, name in checked:
        error, bound = error_of(ours, exact), max(2 * error_of(torchs, exact), small)
        if not error <= bound:
            failures.append(f"{what}: {name}'s error {error:.2e}, bound {bound:.2e}")


def as_ieee(what: str, ours: Tensor, exact: Tensor, most: float, failures: list[str]) -> None:
    """Whether infinities and NaN are the exact result's, and the error elsewhere at most `most`."""
    finite = exact.isfinite()
    found, wanted = (v.nan_to_num(0, 1, -1)[~finite] for v in (ours, exact))
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(found, wanted):
        failures.append(f"{what}: other infinities or NaN than IEEE's")
    usual = [torch.where(finite, v, 0).double() for v in (ours, exact)]
    if not relative(*usual) <= most:
        failures.append(f"{what}: error {relative(*usual):.2e} where finite")


# ---- repeated launches ---------------------------------------------------------------------------


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what is launched."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replays_agree(graph: torch.cuda.CUDAGraph, results: Sequence[Tensor], times: int) -> bool:
    """Whether each replay writes the same bits."""
    first = [value.clone() for value in results]
    differ = torch.zeros((), dtype=torch.bool, device=CUDA)
    for _ in range(times):
        graph.replay()
        for value, before in zip(results, first):
            differ |= (value != before).any()
    return not bool(differ)


def agree_over_two_streams(
    step: Callable[[], Sequence[Tensor]], first: Sequence[Tensor], times: int
) -> bool:
    """Whether all launches over two concurrent streams give these bits."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    differ = [torch.zeros((), dtype=torch.bool, device=CUDA) for _ in streams]
    torch.cuda.synchronize()
    for i in range(times):
        with torch.cuda.stream(streams[i % 2]):
            for value, before in zip(step(), first):
                differ[i % 2] |= (value != before).any()
    torch.cuda.synchronize()
    return not any(map(bool, differ))
