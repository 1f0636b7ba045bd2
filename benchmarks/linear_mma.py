"""Times of the split fp32 gemm with mma.sync, on any GPU from Ampere on, compared with the library
and, on Hopper, with the wgmma kernel.

    python -m benchmarks.linear_mma [--compiled] [--once]

Medians with the L2 cache cleared before each call, on random data, including the splitting of x;
each result is compared with float64's. `FX_FUSER_SPLIT_LOOP=mma python -m pytest
tests/kernels/test_linear_sm90.py` checks the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, linear_sm90
from benchmarks.linear_sm90 import Example
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import CUDA, FLOOR, n_major, relative
from fx_fuser.kernels.split import LINEAR_SPLIT, LINEAR_SPLIT_MMA
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import Family

HALVES = 990e12  # FLOP/s of fp16 that an H200 has by its datasheet
COPY = 4.28e12  # its bytes/s


@dataclass(frozen=True)
class Timing:
    """ms of the mma.sync kernel, of the wgmma one if the GPU has it, of the library in eager mode
    and of torch.compile; the least that bytes and tensor cores need; errors against float64.
    """

    problem: str
    mma: float
    wgmma: float | None
    eager: float
    compiled: float | None
    floor: float
    error: float
    eager_error: float


@dataclass(frozen=True)
class Problem:
    name: str
    example: Example
    m: int
    k: int
    n: int
    n_major: bool = False

    def run_once(self) -> None:
        x = torch.rand(self.m, self.k, device=CUDA)
        linear = torch.nn.Linear(self.k, self.n, device=CUDA)
        example = of_family(self.example, LINEAR_SPLIT_MMA)
        linear_sm90.run(example, x, linear.weight.detach(), linear.bias.detach())
        torch.cuda.synchronize()

    def measure(self, failures: list[str], compiles: bool) -> Timing:
        m, n, k = self.m, self.n, self.k
        x = torch.rand(m, k, device=CUDA)
        linear = torch.nn.Linear(k, n, device=CUDA)
        weight, bias = linear.weight.detach(), linear.bias.detach()
        if self.n_major:
            weight = n_major(weight)
        out = torch.full((m, n), float("nan"), device=CUDA)

        def ours(family: Family = LINEAR_SPLIT_MMA) -> Tensor:
            return linear_sm90.run(of_family(self.example, family), x, weight, bias, out=out)

        def eager() -> Tensor:
            return self.example.reference(F.linear(x, weight, bias), [], [2.0])

        exact = F.linear(x.double(), weight.double(), bias.double())
        exact = self.example.reference(exact, [], [2.0])
        error, eager_error = relative(ours(), exact), relative(eager(), exact)
        del exact
        if not error <= max(1.5 * eager_error, FLOOR):
            failures.append(f"{self.name}: error {error:.2e}, eager's {eager_error:.2e}")
        bytes_moved = 4 * (m * k + n * k + m * n)
        floor = 1e3 * max(6 * m * n * k / HALVES, bytes_moved / COPY)
        wgmma = _median(lambda: ours(LINEAR_SPLIT)) if has_wgmma() else None
        compiled = None
        if compiles and self.name in ("#59", "#70"):
            compiled = _median(torch.compile(eager))
        times = (_median(ours), wgmma, _median(eager), compiled)
        return Timing(self.name, *times, floor, error, eager_error)


def problems() -> tuple[Problem, ...]:
    identity = linear_sm90.IDENTITY
    return (
        Problem("#70", linear_sm90.RESIDUAL, 1024, 8192, 8192),
        Problem("#59", linear_sm90.SWISH, 128, 32768, 32768),
        Problem("#70, n_major", identity, 1024, 8192, 8192, n_major=True),
        Problem("ViT-B up", identity, 12608, 768, 3072),
        Problem("ViT-B down", identity, 12608, 3072, 768),
        Problem("4096", identity, 4096, 4096, 4096),
    )


def has_wgmma() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def of_family(example: Example, family: Family) -> Example:
    return replace(example, spec=replace(example.spec, family=family))


def _median(step: Callable[[], Tensor]) -> float:
    return median_ms(step, [], CUDA, 20, 60)


def main() -> int:
    parser = harness.parser("linear_mma")
    parser.add_argument("--compiled", action="store_true", help="time torch.compile too")
    parser.add_argument("--once", action="store_true", help="#70 and #59 once each, for ncu")
    chosen = parser.parse_args()
    done = harness.progress()
    if chosen.once:
        for problem in problems()[:2]:
            problem.run_once()
        return 0
    families = [LINEAR_SPLIT_MMA, *[LINEAR_SPLIT] * has_wgmma()]
    examples = {problem.example for problem in problems()}
    load.prepare([of_family(e, family).spec for e in examples for family in families], CUDA)
    done("built")
    failures: list[str] = []
    with float32_settings("fp32"):
        times = [problem.measure(failures, chosen.compiled) for problem in problems()]
        done("timing")
    heads = ["", "mma", "wgmma", "eager", "compiled", "floor", "error", "eager's"]
    formats = ["", ".4f", ".4f", ".3f", ".3f", ".4f", ".1e", ".1e"]
    return harness.report([tabulate(map(astuple, times), heads, floatfmt=formats)], failures)


if __name__ == "__main__":
    sys.exit(main())
