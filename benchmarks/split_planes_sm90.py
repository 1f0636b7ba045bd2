"""Times of the split fp32 gemm on batches, chunks of K and any strides:

    python -m benchmarks.split_planes_sm90

Measured as in benchmarks/linear_sm90.py, which has one dense matrix; each result is compared with
float64's. `library` is cuBLAS, whatever layouts it gets.
`python -m pytest tests/kernels/test_split_planes.py` checks the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness
from benchmarks.linear_sm90 import IDENTITY, First, run
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import CUDA, normal, relative
from fx_fuser.native import load

ROLES: tuple[First, ...] = ("", "x", "weight")


@dataclass(frozen=True)
class Timing:
    problem: str
    ms: float
    x_first: float
    weight_first: float
    library: float
    tflops: float
    error: float


Step = Callable[[], Tensor]


def problems() -> list[tuple[str, Tensor, Tensor]]:
    """Names, and a and b of a bᵀ."""

    found = [
        (f"M = {m}, {n} x {k}", normal(m, k), normal(n, k))
        for m, n, k in ((16, 8192, 8192), (64, 4096, 4096), (128, 4096, 14336), (64, 768, 3072))
    ]
    found += [
        (f"dW of {n} x {k}, M = 6304", normal(6304, n).t(), normal(6304, k).t())
        for n, k in ((768, 768), (3072, 768), (768, 3072))
    ]
    found += [
        (f"ViT, M = 12608, {n} x {k}", normal(12608, k), normal(n, k))
        for n, k in ((768, 768), (2304, 768), (3072, 768), (768, 3072))
    ]
    found += [
        ("256 x 256, K = 524288", normal(256, 524288), normal(256, 524288)),
        ("8205 x 2949 x 5921", normal(8205, 2949), normal(2949, 5921).t()),
        ("dW of #70", normal(1024, 8192).t(), normal(1024, 8192).t()),
        ("dW of #59", normal(128, 32768).t(), normal(128, 32768).t()),
        ("128 batches, 512 x 2048 x 1024", normal(128, 512, 1024), normal(128, 1024, 2048).mT),
    ]
    for length in (512, 2048):
        q, k, v = (normal(8, length, 12, 64).transpose(1, 2) for _ in range(3))
        found.append((f"q kᵀ, 96 heads, {length}", q, k))
        found.append((f"p v, 96 heads, {length}", normal(8, 12, length, length), v.mT))
    found += [(f"32768 x 32768, K = {k}", normal(32768, k), normal(32768, k)) for k in (16, 64)]
    return found


def timing(failures: list[str]) -> list[Timing]:
    rows: list[Timing] = []
    for name, a, b in problems():
        out = a.new_full((*a.shape[:-1], b.shape[-2]), float("nan"))

        def ours(first: First, a: Tensor = a, b: Tensor = b, out: Tensor = out) -> Tensor:
            return run(IDENTITY, a, b, out=out, first=first)

        def library(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> Tensor:
            return torch.matmul(a, b.mT, out=out)

        part = ours("")[..., :128, :].double()
        exact = a[..., :128, :].double() @ b.double().mT
        error = relative(part, exact)
        if not error <= 1e-6:
            failures.append(f"{name}: error {error:.2e}")
        operations = 2 * out.numel() * a.shape[-1]
        del part, exact
        ways: list[Step] = [*(partial(ours, first) for first in ROLES), library]
        ms, *others = (median_ms(step, [], CUDA, 20, 80) for step in ways)
        speed = operations / ms * 1e-9
        rows.append(Timing(name, ms, others[0], others[1], others[2], speed, error))
    return rows


def main() -> int:
    harness.parser("split_planes_sm90").parse_args()
    done = harness.progress()
    load.prepare([IDENTITY.spec], CUDA)
    done("built")
    failures: list[str] = []
    with float32_settings("fp32"):
        times = timing(failures)
    heads = ["", "ms", "x first", "weight first", "library", "TFLOP/s", "error"]
    formats = ["", ".4f", ".4f", ".4f", ".4f", ".0f", ".1e"]
    return harness.report([tabulate(map(astuple, times), heads, floatfmt=formats)], failures)


if __name__ == "__main__":
    sys.exit(main())
