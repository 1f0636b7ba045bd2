"""What the benchmarks of single kernels share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

CUDA = torch.device("cuda")
FLOOR = 4e-7  # of the accuracy contract: errors below it pass
GUESSED = 256  # columns; at least as many as the guess of a weight row's scale reads


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def worst_row(value: Tensor, exact: Tensor) -> float:
    error = (value.double() - exact).norm(dim=1)
    return float((error / exact.norm(dim=1).clamp_min(1e-300)).max())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA)


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, device=CUDA)


def spread(decades: float, *shape: int) -> Tensor:
    """Factors over this many decades, up and down."""
    return 10.0 ** ((uniform(*shape) * 2 - 1) * decades)


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
