"""Times of the direct convolution of sm_90a by itself: python -m benchmarks.conv_sm90

Medians with the L2 cache cleared before each call, on random data; results are compared with
float64's. `python -m pytest tests/kernels/test_conv_sm90.py` checks the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks import harness, kernels
from benchmarks.conv_cases import NONE, Padding
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import FLOOR, relative, sustained_ms
from fx_fuser.kernels import base
from fx_fuser.kernels.direct import CONV_DIRECT
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Example:
    """An epilogue of examples.cuh, and the same in torch ops, as f(c, operands, scalars)."""

    name: str
    reference: Callable[[Tensor, list[Tensor], list[float]], Tensor]
    operands: tuple[torch.dtype, ...] = ()
    scalars: int = 0
    x: torch.dtype = torch.float32  # and of the weight and c
    out: torch.dtype = torch.float32

    @functools.cached_property
    def spec(self) -> KernelSpec:
        types = (torch.float32, self.out, self.x, *self.operands)
        return base.example(CONV_DIRECT, self.name, self.scalars, *types)


def _batch_norm_mul(c: Tensor, t: list[Tensor], s: list[float]) -> Tensor:
    mean, var, gamma, beta, scale = (v.to(c.dtype) for v in t)
    return ((c - mean) * torch.rsqrt(var.abs() + s[0]) * gamma + beta) * scale


IDENTITY = Example("Identity", lambda c, t, s: c)
SWISH = Example("Swish", lambda c, t, s: F.silu(c) * s[0], scalars=1)
NORM = Example("BatchNormMul", _batch_norm_mul, (torch.float32,) * 5, scalars=1)
OPERANDS = Example(
    "ThreeOperands",
    lambda c, t, s: F.silu(c) * t[0].to(c.dtype) + t[1].to(c.dtype) * t[2].to(c.dtype) - s[0],
    (torch.float32, torch.bfloat16, torch.bool),
    scalars=1,
)
# silu(batch_norm(c)) as the backend writes it, without a bias
NORM_SILU = Example("NormSilu", lambda c, t, s: c, (torch.float32,) * 4, scalars=1)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)


@functools.cache
def of_dtype(example: Example, dtype: torch.dtype) -> Example:
    """The same with x, weight and result in this dtype."""
    return dataclasses.replace(example, x=dtype, out=dtype)


def run(
    example: Example,
    x: Tensor,
    weight: Tensor,
    padding: Padding = NONE,
    operands: list[Tensor] | None = None,
    scalars: list[float] | None = None,
    out: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    if out is None:
        left, right, top, bottom = padding
        height = x.shape[2] + top + bottom - weight.shape[2] + 1
        width = x.shape[3] + left + right - weight.shape[3] + 1
        out = x.new_empty((len(x), len(weight), height, width), dtype=example.out)
    taken = kernels.conv_direct(
        *(example.spec, x, weight, padding, out, c),
        operands or [],
        scalars or [2.0] * example.scalars,
    )
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


def statistics(x: Tensor, weight: Tensor, padding: Padding = NONE) -> tuple[Tensor, Tensor]:
    mean, variance = torch.full((2, len(weight)), float("nan"), device=CUDA)
    spec = of_dtype(IDENTITY, x.dtype).spec
    taken = kernels.conv_direct_statistics(spec, x, weight, padding, mean, variance)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return mean, variance


def exact_statistics(c: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(c.double(), (0, 2, 3), correction=0)
    return mean, variance


def allowed(eagers: float, dtype: torch.dtype, factor: float = 1.5) -> float:
    """The accuracy contract: how large an error may be, given eager's."""
    return max(factor * eagers, FLOOR) if dtype == torch.float32 else 2 * eagers


ROUNDED = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


# ---- time ----------------------------------------------------------------------------------------


def timing(failures: list[str]) -> list[list[object]]:
    table: list[list[object]] = []
    seed = ("#73", (128, 8, 128, 128), (64, 8, 3, 3), NONE)
    stem = ("stem", (32, 3, 224, 224), (32, 3, 3, 3), (1, 1, 1, 1))
    odd = ("127", (128, 8, 127, 127), (64, 8, 3, 3), (1, 1, 1, 1))
    cases = [(case, torch.float32) for case in (seed, stem, odd)]
    cases += [(seed, torch.float16), *((case, torch.bfloat16) for case in (seed, stem, odd))]
    for (name, shape, weight_shape, padding), dtype in cases:
        name += f" {str(dtype).removeprefix('torch.')}"
        x = torch.rand(shape, device=CUDA).to(dtype)
        conv = nn.Conv2d(shape[1], weight_shape[0], 3, padding=padding[0], bias=False, device=CUDA)
        conv.to(dtype)
        norm = nn.BatchNorm2d(weight_shape[0], device=CUDA)
        weight = conv.weight.detach()
        norm.running_mean, norm.running_var = exact_statistics(conv(x).detach())
        norm.float()
        vectors = [norm.running_mean, norm.running_var, norm.weight, norm.bias]
        per_channel = [v.detach().view(-1, 1, 1) for v in vectors]
        per_channel.append(torch.tensor(2.0, device=CUDA))

        def ours(
            x: Tensor = x, w: Tensor = weight, p: Padding = padding, v: list[Tensor] = per_channel
        ) -> Tensor:
            return run(of_dtype(NORM, x.dtype), x, w, p, v, [1e-5])

        def measured(x: Tensor = x, w: Tensor = weight, p: Padding = padding) -> Tensor:
            return statistics(x, w, p)[0]

        def training(
            x: Tensor = x, w: Tensor = weight, p: Padding = padding, v: list[Tensor] = per_channel
        ) -> Tensor:
            found = [s.view(-1, 1, 1) for s in statistics(x, w, p)]
            return run(of_dtype(NORM, x.dtype), x, w, p, [*found, *v[2:]], [1e-5])

        def eager(x: Tensor = x, c: nn.Module = conv, n: nn.Module = norm) -> Tensor:
            with torch.no_grad():
                result: Tensor = n(c(x)) * 2.0
            return result

        ways: tuple[tuple[str, Callable[[], Tensor]], ...]
        ways = ("eval", ours), ("statistics", measured), ("training", training)
        for mode, way in ways:
            norm.train(mode == "training")
            error = eager_error = 0.0
            if mode != "statistics" and shape[2] == 128:
                conv64, norm64 = nn.Conv2d(8, 64, 3, bias=False), nn.BatchNorm2d(64)
                conv64.load_state_dict(conv.state_dict())
                norm64.load_state_dict(norm.state_dict())
                norm64.train(mode == "training")
                few = slice(None, None, 8) if mode == "eval" else slice(None)
                exact = eager(x[few].double(), conv64.to(CUDA).double(), norm64.to(CUDA).double())
                error = relative(way()[few], exact)
                eager_error = relative(eager()[few], exact)
                del exact
                if not error <= allowed(eager_error, dtype):
                    failures.append(f"{name} {mode}: error {error:.2e}, eager's {eager_error:.2e}")
            ms = median_ms(way, [], CUDA, 25, 100)
            row: list[object] = [f"{name} {mode}", ms, median_ms(way, [], CUDA, 25, 100)]
            row.append(sustained_ms(way, ms))
            if mode != "statistics":
                eager_ms = median_ms(eager, [], CUDA, 10, 50)
                row += [eager_ms, eager_ms / ms, error, eager_error]
            table.append(row)
    return table


def main() -> int:
    harness.parser("conv_sm90").parse_args()
    done = harness.progress()
    examples = (of_dtype(e, dtype) for e in (IDENTITY, NORM) for dtype in DTYPES)
    load.prepare([e.spec for e in examples], CUDA)
    load.prepare_batch_stats(CUDA)
    done("built")
    failures: list[str] = []
    with float32_settings("fp32", cudnn_tf32=False):
        times = timing(failures)
    heads = ["", "ms", "again", "sustained", "eager", "×", "error", "eager's"]
    formats = ["", ".4f", ".4f", ".4f", ".3f", ".2f", ".1e", ".1e"]
    return harness.report([tabulate(times, heads, floatfmt=formats)], failures)


if __name__ == "__main__":
    sys.exit(main())
