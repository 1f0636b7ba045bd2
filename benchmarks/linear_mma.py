"""The split fp32 product by mma.sync by itself, on any GPU from Ampere on: checked against float64,
timed beside the library and, on Hopper, beside the kernel of wgmma.

    python -m benchmarks.linear_mma [--skip-checks] [--skip-timing] [--cases 60] [--seed 0]
        [--compiled] [--once]

Exits with 1 where a check failed. Timings are medians with the L2 cache cleared before each call,
on random data, the splitting of x included.
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
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import LINEAR_SPLIT, LINEAR_SPLIT_MMA, Family

CHECKS = (
    linear_sm90.special_values,
    linear_sm90.wrong_guesses,
    linear_sm90.imprecise_neighbours,
    linear_sm90.refusals,
    linear_sm90.graphs_and_repeats,
)
HALVES = 990e12  # FLOP/s of fp16 that an H200 has by its datasheet
COPY = 4.28e12  # its bytes/s


@dataclass(frozen=True)
class Timing:
    """ms of mma.sync's kernel, of wgmma's where the GPU has it, of the library in eager mode and of
    torch.compile; what bytes and tensor cores ask for at least; errors against float64.
    """

    problem: str
    mma: float
    wgmma: float | None
    eager: float
    compiled: float | None
    floor: float
    error: float
    eager_error: float


def chunks(failures: list[str]) -> None:
    """Chunks of K, either operand first, and scales found ahead."""
    choose = torch.Generator().manual_seed(0)
    for m, n, k in ((200, 300, 500), (16, 1000, 4100), (700, 90, 3000), (1, 5, 2000)):
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
        exact = x.double() @ weight.double().T
        for parts in (1, 3, int(torch.randint(4, 30, (), generator=choose))):
            for first in ("x", "weight"):
                for form, b in (("", weight), (", n_major", n_major(weight))):
                    for ahead in (False, True):
                        out = torch.full((m, n), float("nan"), device=CUDA)
                        linear_sm90.run(
                            linear_sm90.IDENTITY, x, b, out=out, chunks=parts, first=first,
                            exact=ahead,
                        )  # fmt: skip
                        error = relative(out, exact)
                        if not error <= FLOOR:
                            what = f"{m} x {n} x {k}{form}, {parts} chunks, {first} first, {ahead}"
                            failures.append(f"{what}: error {error:.2e}")


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
        linear_sm90.run(self.example, x, linear.weight.detach(), linear.bias.detach())
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
            example = replace(self.example, spec=replace(self.example.spec, family=family))
            return linear_sm90.run(example, x, weight, bias, out=out)

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


def _median(step: Callable[[], Tensor]) -> float:
    return median_ms(step, [], CUDA, 20, 60)


def main() -> int:
    parser = harness.parser("linear_mma", cases=60)
    parser.add_argument("--compiled", action="store_true", help="time torch.compile too")
    parser.add_argument("--once", action="store_true", help="#70 and #59 once each, for ncu")
    chosen = parser.parse_args()
    done = harness.progress()
    linear_sm90.choose_family(LINEAR_SPLIT_MMA)
    if chosen.once:
        for problem in problems()[:2]:
            problem.run_once()
        return 0
    specs = [e.spec for e in linear_sm90.EXAMPLES]
    if not chosen.skip_timing and has_wgmma():
        specs += [replace(spec, family=LINEAR_SPLIT) for spec in specs[:3]]
    load.prepare(specs, CUDA)
    done("built")
    failures: list[str] = []
    tables = []
    with float32_settings("fp32"):
        if not chosen.skip_checks:
            largest = linear_sm90.sweep(chosen.cases, chosen.seed, failures)
            done(f"{chosen.cases} random cases, largest error {largest:.1e}")
            chunks(failures)
            done("chunks")
            for check in CHECKS:
                check(failures)
                done(check.__name__)
            heads = ["K", "data", "kernel", "SGEMM", "worst row", "SGEMM's"]
            errors = linear_sm90.accuracy(failures)
            tables.append(tabulate(map(astuple, errors), heads, floatfmt=".1e"))
            done("accuracy")
        if not chosen.skip_timing:
            heads = ["", "mma", "wgmma", "eager", "compiled", "floor", "error", "eager's"]
            formats = ["", ".4f", ".4f", ".3f", ".3f", ".4f", ".1e", ".1e"]
            times = [problem.measure(failures, chosen.compiled) for problem in problems()]
            tables.append(tabulate(map(astuple, times), heads, floatfmt=formats))
            done("timing")
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
