"""Times of the bf16, fp16 and TF32 linear kernels of sm_90a by themselves:

    python -m benchmarks.linear_dense_sm90 [--only WORD] [--compiled]

Medians with the L2 cache cleared before each call, on random data; each result is compared with
float64's. `two` is F.linear and the pointwise kernel; `--compiled` adds torch.compile's default and
max-autotune. `python -m pytest tests/kernels/test_linear_dense_sm90.py` checks the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.measure import float32_settings, median_ms
from benchmarks.sm90 import CUDA, host_us, relative, sustained_ms
from fx_fuser.kernels import base
from fx_fuser.kernels.dense import LINEAR_DENSE
from fx_fuser.native import launch, load
from fx_fuser.native.kernel_spec import POINTWISE, Family, KernelSpec


@dataclass(frozen=True)
class Example:
    """An epilogue of examples.cuh, and the same in torch ops, as f(z, operands, scalars)."""

    name: str
    reference: Callable[[Tensor, list[Tensor], list[float]], Tensor]
    scalars: int = 0
    operands: tuple[torch.dtype | None, ...] = ()  # None: the dtype of x
    out: torch.dtype | None = None

    def spec(self, dtype: torch.dtype, family: Family = LINEAR_DENSE) -> KernelSpec:
        types = (t or dtype for t in (self.out, None, *self.operands))
        return base.example(family, self.name, self.scalars, torch.float32, *types)


IDENTITY = Example("Identity", lambda z, t, s: z)
SWISH = Example("Swish", lambda z, t, s: z * torch.sigmoid(z) * s[0], 1)
RESIDUAL = Example("Residual", lambda z, t, s: torch.sigmoid(z) * s[0] + z, 1)
SILU_MUL = Example("SiluMul", lambda z, t, s: F.silu(z) * t[0], 0, (None,))
OPERANDS = Example(
    "ThreeOperands",
    lambda z, t, s: F.silu(z) * t[0].to(z.dtype) + t[1].to(z.dtype) * t[2].to(z.dtype) - s[0],
    *(1, (torch.float32, torch.bfloat16, torch.bool)),
)


def run(
    example: Example,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    operands: list[Tensor] | None = None,
    scalars: list[float] | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = x.new_empty((*x.shape[:-1], len(weight)), dtype=example.out)
    scalars = [2.0] * example.scalars if scalars is None else scalars
    spec = example.spec(x.dtype)
    taken = kernels.linear_dense(spec, x, weight, bias, out, z, operands or [], scalars)
    assert taken, f"{tuple(x.shape)} by {tuple(weight.shape)} was refused"
    return out


# ---- time ----------------------------------------------------------------------------------------

# name, epilogue, M, K, N, dtype
TIMED = (
    ("#70 bf16", RESIDUAL, 1024, 8192, 8192, torch.bfloat16),
    ("#70 fp16", RESIDUAL, 1024, 8192, 8192, torch.float16),
    ("#70 tf32", RESIDUAL, 1024, 8192, 8192, torch.float32),
    ("#59 bf16", SWISH, 128, 32768, 32768, torch.bfloat16),
    ("#59 tf32", SWISH, 128, 32768, 32768, torch.float32),
    ("Llama 1", SILU_MUL, 1, 4096, 14336, torch.bfloat16),
    ("Llama 16", SILU_MUL, 16, 4096, 14336, torch.bfloat16),
    ("Llama 64", SILU_MUL, 64, 4096, 14336, torch.bfloat16),
    ("Llama 128", SILU_MUL, 128, 4096, 14336, torch.bfloat16),
    ("Llama 512", SILU_MUL, 512, 4096, 14336, torch.bfloat16),
    ("Llama 4096", SILU_MUL, 4096, 4096, 14336, torch.bfloat16),
)


def timing(only: str, compiled: bool, failures: list[str]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, example, m, k, n, dtype in TIMED:
        if only not in name:
            continue
        x = torch.rand(m, k, device=CUDA).to(dtype)
        weight = torch.empty(n, k, device=CUDA, dtype=dtype).uniform_(-(k**-0.5), k**-0.5)
        bias = None
        if example is not SILU_MUL:
            bias = torch.empty(n, device=CUDA, dtype=dtype).uniform_(-(k**-0.5), k**-0.5)
        operands = [torch.randn(m, n, device=CUDA, dtype=dtype) for _ in example.operands]
        scalars = [2.0] * example.scalars
        out = torch.empty(m, n, device=CUDA, dtype=dtype).fill_(float("nan"))

        def eager(
            x: Tensor, weight: Tensor, e: Example = example, b: Tensor | None = bias,
            o: list[Tensor] = operands, s: list[float] = scalars,
        ) -> Tensor:  # fmt: skip
            return e.reference(F.linear(x, weight, b), o, s)

        pointwise = example.spec(dtype, POINTWISE)

        def two() -> None:
            z = F.linear(x, weight, bias)  # noqa: B023
            launch.pointwise(pointwise, z, [z, *operands], scalars)  # noqa: B023

        systems: dict[str, Callable[[], object]] = {
            "ours": lambda: run(example, x, weight, bias, operands, out=out),  # noqa: B023
            "two": two,
            "linear": lambda: F.linear(x, weight, bias),  # noqa: B023
            "eager": lambda: eager(x, weight),  # noqa: B023
        }
        if compiled:
            torch._dynamo.reset()
            default = torch.compile(eager)
            tuned = torch.compile(eager, mode="max-autotune-no-cudagraphs")
            systems["default"] = lambda: default(x, weight)  # noqa: B023
            systems["tuned"] = lambda: tuned(x, weight)  # noqa: B023
        systems["again"] = systems["ours"]
        exact = example.reference(
            F.linear(x.double(), weight.double(), None if bias is None else bias.double()),
            *(operands, scalars),
        )
        systems["ours"]()
        error, eager_error = relative(out, exact), relative(eager(x, weight), exact)
        del exact
        if not error <= (2 if dtype.itemsize == 2 else 1.5) * eager_error:
            failures.append(f"{name}: error {error:.2e}, eager's {eager_error:.2e}")
        rep = 60 if compiled else 100
        ms = {s: median_ms(step, [], CUDA, 20, rep) for s, step in systems.items()}
        sustained = sustained_ms(systems["ours"], ms["ours"])
        rate = 2e-9 * m * n * k / ms["ours"]
        rows.append([name, *(ms.get(s) for s in COLUMNS), sustained, rate, error, eager_error])
    x, weight = (torch.randn(8, 64, device=CUDA).bfloat16() for _ in range(2))
    out = x.new_empty(8, 8)
    rows.append(["host, µs", host_us(lambda: run(SWISH, x, weight, out=out))])
    rows.append(["F.linear, µs", host_us(lambda: F.linear(x, weight))])
    return rows


COLUMNS = ("ours", "again", "two", "linear", "eager", "default", "tuned")


def main() -> int:
    parser = harness.parser("linear_dense_sm90")
    parser.add_argument("--compiled", action="store_true", help="time torch.compile, too")
    parser.add_argument("--only", default="", help="time those whose name has this in it")
    chosen = parser.parse_args()
    done = harness.progress()
    timed = [(e, dtype) for name, e, _, _, _, dtype in TIMED if chosen.only in name]
    specs = [e.spec(dtype, family) for e, dtype in timed for family in (LINEAR_DENSE, POINTWISE)]
    load.prepare(specs, CUDA)
    done("built")
    failures: list[str] = []
    with float32_settings("tf32"):
        times = timing(chosen.only, chosen.compiled, failures)
        done("timing")
    heads = ["", *COLUMNS, "sustained", "TFLOP/s", "error", "eager's"]
    formats = ["", *[".4f"] * (len(COLUMNS) + 1), ".0f", ".1e", ".1e"]
    return harness.report([tabulate(times, heads, floatfmt=formats)], failures)


if __name__ == "__main__":
    sys.exit(main())
