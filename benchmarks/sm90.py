"""What the harnesses of sm_90a kernels share: data, errors, and times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CUDA = torch.device("cuda")
FLOOR = 4e-7  # of the accuracy contract: errors below it pass
ROW_FLOOR = 1e-6
GUESSED = 256  # columns; no fewer than those from which a row of the weight has its scale guessed
SENTINEL = 12345.0  # beside results, where nothing may be written


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def worst_row(value: Tensor, exact: Tensor) -> float:
    error = (value.double() - exact).norm(dim=1)
    return float((error / exact.norm(dim=1).clamp_min(1e-300)).max())


def strided(rows: int, columns: int, choose: random.Random) -> Tensor:
    """Random values with 16-byte aligned rows, some with a gap between them."""
    padded = -(-columns // 4) * 4 + choose.choice((0, 0, 4, 12))
    return torch.randn(rows, padded, device=CUDA)[:, :columns]


def n_major(matrix: Tensor) -> Tensor:
    """The same values with adjacent columns."""
    return matrix.mT.contiguous().mT


def sustained_ms(step: Callable[[], object], one_ms: float) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = max(1, round(400 / one_ms))
    for _ in range(count // 2):
        step()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count


def host_us(step: Callable[[], object]) -> float:
    step()
    torch.cuda.synchronize()
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(10):
            step()
        samples.append((time.perf_counter() - start) / 10 * 1e6)
        torch.cuda.synchronize()
    return sorted(samples)[len(samples) // 2]


def random_operand(m: int, n: int, dtype: torch.dtype, choose: random.Random) -> Tensor:
    shape = choose.choice(((n,), (m, 1), (1, n), (m, n), (1, 1), ()))
    values = torch.randn(shape, device=CUDA)
    values = values > 0 if dtype == torch.bool else values.to(dtype)
    if shape == (m, n) and choose.random() < 0.5:
        values = values.T.contiguous().T
    return values


def misleading(n: int, k: int) -> Iterator[tuple[str, Tensor]]:
    """Weights whose first columns say little of the others."""
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
