"""Times of the fp32 gemms of sm_90a whose operands were cast up from 16 bits:

    python -m benchmarks.narrow_sm90

Two 16-bit operands make one gemm ("exact"), one makes two ("mixed"). Medians with the L2 cache
cleared before each call: the library's fp32 gemm of the cast tensors, the split gemm of them, and
this kernel's of the 16-bit tensors. `python -m pytest tests/kernels/test_narrow_sm90.py` checks the
kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import CUDA
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.split import MIXED_GEMMS, SPLIT_GEMM, split_gemm
from fx_fuser.native import load

DTYPES = tuple(EXACT_GEMMS)
WAYS = ("exact", "mixed x", "mixed weight")  # which operand has 16 bits


def cast(way: str, dtype: torch.dtype, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Casts to 16 bits the operands that this way has in 16 bits."""
    x = x if way == "mixed weight" else x.to(dtype)
    return x, weight if way == "mixed x" else weight.to(dtype)


def by_op(way: str, dtype: torch.dtype, x: Tensor, weight: Tensor) -> Tensor:
    load.load_shim()
    ops = torch.ops.fx_fuser
    if way == "exact":
        made: Tensor = ops.exact_product.default(x, weight, EXACT_GEMMS[dtype].name)
    else:
        made = ops.split_product.default(x, weight, MIXED_GEMMS[dtype].name)
    return made


def by_kernel(
    way: str,
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    chunks: int = 0,
) -> Tensor:
    """The kernel itself; the op may use the library."""
    if out is None:
        out = torch.full((*x.shape[:-1], weight.shape[-2]), float("nan"), device=x.device)
    if way == "exact":
        spec = EXACT_GEMMS[dtype]
        taken = kernels.linear_dense(spec, x, weight, None, out, None, [], [])
    else:
        spec = MIXED_GEMMS[dtype]
        taken = kernels.linear_split(spec, x, weight, None, out, None, [], [], chunks)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


# ---- time ----------------------------------------------------------------------------------------

CASES = (
    ("a router", 4096, 256, 7168),
    ("a small router", 16384, 8, 4096),
    ("a head, some tokens", 512, 32000, 4096),
    ("a head, one token", 1, 128256, 4096),
    ("a square", 4096, 4096, 4096),
    ("#70", 1024, 8192, 8192),
    ("the gradient of a router's weight", 256, 7168, 4096),
)


def took(step: Callable[[], object]) -> float:
    return median_ms(step, [], CUDA, 50, 200)


def timing() -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, m, n, k in CASES:
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA) / k**0.5
        times = [
            took(functools.partial(F.linear, x, weight)),
            took(functools.partial(split_gemm, x, weight)),
        ]
        for way in WAYS:
            operands = cast(way, torch.bfloat16, x, weight)
            times.append(took(functools.partial(by_op, way, torch.bfloat16, *operands)))
        rows.append((f"{name}: {m} x {n} x {k}", *times))
    return rows


def main() -> int:
    harness.parser("narrow_sm90").parse_args()
    done = harness.progress()
    load.prepare([SPLIT_GEMM, *EXACT_GEMMS.values(), *MIXED_GEMMS.values()], CUDA)
    done("built")
    with float32_settings("fp32"):
        times = timing()
    heads = ["ms", "library", "split", *WAYS]
    return harness.report([tabulate(times, heads, floatfmt=".4f")], None)


if __name__ == "__main__":
    sys.exit(main())
