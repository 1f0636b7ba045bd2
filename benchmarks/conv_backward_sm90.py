"""Times of the backward of sm_90a's direct convolution by itself:

    python -m benchmarks.conv_backward_sm90

Medians with the L2 cache cleared before each call, on random data.
`python -m pytest tests/kernels/test_conv_backward_sm90.py` checks the kernels.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, kernels
from benchmarks.conv_cases import NONE, Padding, convolve
from benchmarks.conv_sm90 import CUDA, DTYPES
from benchmarks.kernels import Normalisation
from benchmarks.measure import float32_settings, median_ms
from fx_fuser.kernels import base
from fx_fuser.kernels.direct import CONV_DIRECT_BACKWARD
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

EPS = 1e-5


@dataclass(frozen=True)
class Problem:
    """What the backward is of: y = BatchNorm(conv2d(x, weight)) · factors.

    x, weight and dy are of one dtype, the vectors of a BatchNorm float32.
    """

    x: Tensor
    weight: Tensor
    dy: Tensor
    mode: str = "training"
    padding: Padding = NONE
    gamma: Tensor | None = None
    bias: Tensor | None = None
    mean: Tensor | None = None  # running
    variance: Tensor | None = None
    operands: tuple[Tensor, ...] = ()
    scalars: tuple[float, ...] = ()

    def to(self, dtype: torch.dtype) -> Problem:
        """The same with x, weight and dy in this dtype."""
        named = {"x": self.x, "weight": self.weight, "dy": self.dy}
        return replace(self, **{name: v.to(dtype) for name, v in named.items()})  # type: ignore[arg-type]

    def statistics(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """In training, those of the convolution, as the forward kernels leave them."""
        c = convolve(self.x.to(dtype), self.weight.to(dtype), self.padding)
        variance, mean = torch.var_mean(c, (0, 2, 3), correction=0)
        return mean.float(), variance.float()

    def in_torch(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The gradients by autograd, in the order of NAMES.

        dtype: of all; if it has 16 bits, of all but a BatchNorm's vectors, as under autocast.
        """
        count = len(self.weight)
        wide = torch.promote_types(dtype, torch.float32)

        def leaf(value: Tensor, dtype: torch.dtype = wide) -> Tensor:
            return value.detach().to(dtype).requires_grad_()

        x, weight = leaf(self.x, dtype), leaf(self.weight, dtype)
        gamma = leaf(torch.ones(count, device=CUDA) if self.gamma is None else self.gamma)
        beta = leaf(torch.zeros(count, device=CUDA))
        z = convolve(x, weight, self.padding)
        if self.bias is not None:
            z = z + self.bias.to(dtype).view(-1, 1, 1)
        if self.mode == "plain":
            z = z * gamma.to(dtype).view(-1, 1, 1) + beta.to(dtype).view(-1, 1, 1)
        else:
            mean, variance = (v if v is None else v.to(wide) for v in (self.mean, self.variance))
            z = F.batch_norm(z, mean, variance, gamma, beta, self.mode == "training", 0.0, EPS)
        for factor in self.operands:
            z = z * factor.to(dtype)
        for number in self.scalars:
            z = z * number
        # Aligned: with a 16-bit dy at an arbitrary address eager's backward has stopped
        # (kernels_cu/conv/NOTES.md).
        return torch.autograd.grad(z, (x, weight, gamma, beta), self.dy.to(dtype, copy=True))


def _examples(name: str, scalars: int, *operands: torch.dtype) -> dict[torch.dtype, KernelSpec]:
    """The kernel for each dtype of x."""

    def spec(of_x: torch.dtype) -> KernelSpec:
        types = (torch.float32, of_x, of_x, *operands)
        return base.example(CONV_DIRECT_BACKWARD, name, scalars, *types)

    return {dtype: spec(dtype) for dtype in DTYPES}


IDENTITY = _examples("Identity", 0)
SCALED = _examples("Scaled", 1, torch.float32, torch.bfloat16)


def run(
    problem: Problem,
    dx: Tensor | None,
    dweight: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes dx and dweight; returns dgamma and dbeta."""
    norm = None
    if problem.mode == "training":
        mean, variance = statistics or problem.statistics()
        norm = Normalisation(mean, variance, problem.gamma, None, EPS, True)
    elif problem.mode == "evaluation":
        assert problem.mean is not None and problem.variance is not None
        of_norm = (problem.mean, problem.variance, problem.gamma, problem.bias)
        norm = Normalisation(*of_norm, EPS, False)
    dgamma, dbeta = torch.full((2, len(problem.weight)), float("nan"), device=CUDA)
    taken = kernels.conv_direct_backward(
        (SCALED if problem.operands else IDENTITY)[problem.x.dtype],
        *(problem.dy, problem.x, problem.weight, problem.padding, norm),
        *(dx, dweight, dgamma, dbeta),
        *(list(problem.operands), list(problem.scalars)),
    )
    assert taken, f"{tuple(problem.x.shape)} by {tuple(problem.weight.shape)} was refused"
    return dgamma, dbeta


# ---- timing --------------------------------------------------------------------------------------


def timing() -> list[list[object]]:
    table: list[list[object]] = []
    for (name, shape, count, padding), dtype in itertools.product(
        (
            ("#73", (128, 8, 128, 128), 64, NONE),
            ("[32, 3, 224, 224] padded", (32, 3, 224, 224), 32, (1, 1, 1, 1)),
            ("127 x 127 padded", (128, 8, 127, 127), 64, (1, 1, 1, 1)),
        ),
        DTYPES,
    ):
        torch.manual_seed(0)
        x = torch.rand(shape, device=CUDA)
        weight = (torch.rand(count, shape[1], 3, 3, device=CUDA) * 2 - 1) / (9 * shape[1]) ** 0.5
        dy = torch.randn_like(convolve(x, weight, padding))
        trained = Problem(x, weight, dy, padding=padding).to(dtype)
        del dy
        mean, variance = trained.statistics(torch.float32)
        evaluated = replace(trained, mode="evaluation", mean=mean, variance=variance)
        dx, dweight = torch.empty_like(trained.x), torch.empty_like(weight)

        for what, problem, to in (
            ("training", trained, (dx, dweight)),
            ("training, no dx", trained, (None, dweight)),
            ("evaluation", evaluated, (dx, dweight)),
            ("evaluation, no dx", evaluated, (None, dweight)),
            ("sums", evaluated, (None, None)),
        ):

            def way(
                p: Problem = problem,
                to: tuple[Tensor | None, ...] = to,
                found: tuple[Tensor, Tensor] = (mean, variance),
            ) -> Tensor:
                return run(p, to[0], to[1], found)[0]

            ms = median_ms(way, [], CUDA, 25, 100)
            of_dtype = str(dtype).removeprefix("torch.")
            table.append([f"{name} {what}", of_dtype, ms, median_ms(way, [], CUDA, 25, 100)])
    return table


def main() -> int:
    harness.parser("conv_backward_sm90").parse_args()
    done = harness.progress()
    load.prepare(list(IDENTITY.values()), CUDA)
    done("built")
    with float32_settings("fp32", cudnn_tf32=False):
        times = timing()
    return harness.report([tabulate(times, ["", "", "ms", "again"], floatfmt=".4f")], None)


if __name__ == "__main__":
    sys.exit(main())
