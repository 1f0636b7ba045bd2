"""What the direct convolution's backward is checked with, and autograd's answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.conv_cases import NONE, Padding, convolve
from benchmarks.sm90 import CUDA

EPS = 1e-5
MODES = ("training", "evaluation", "plain")
NAMES = ("dx", "dweight", "dgamma", "dbeta")


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

    @classmethod
    def random(
        cls, x: Tensor, weight: Tensor, padding: Padding, mode: str, choose: random.Random
    ) -> Problem:
        count = len(weight)

        def vector() -> Tensor:
            return torch.randn(count, device=CUDA)

        dy = torch.randn_like(convolve(x, weight, padding))
        gamma = vector() if mode != "plain" and choose.random() < 0.7 else None
        bias = vector() if mode == "evaluation" and choose.random() < 0.5 else None
        running = (vector(), vector().abs() + 0.1) if mode == "evaluation" else (None, None)
        problem = cls(x, weight, dy, mode, padding, gamma, bias, *running)
        if choose.random() < 0.5:
            return problem
        shape = choose.choice(((count, 1, 1), (1, count, 1, 1), (1,)))
        factors = (torch.randn(shape, device=CUDA), vector().bfloat16().view(-1, 1, 1))
        return replace(problem, operands=factors, scalars=(choose.uniform(0.5, 2),))

    def to(self, dtype: torch.dtype) -> Problem:
        """The same with x, weight and dy in this dtype."""
        named = {"x": self.x, "weight": self.weight, "dy": self.dy}
        return replace(self, **{name: v.to(dtype) for name, v in named.items()})  # type: ignore[arg-type]

    def statistics(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """In training of the convolution, as the forward kernels leave them."""
        c = convolve(self.x.to(dtype), self.weight.to(dtype), self.padding)
        variance, mean = torch.var_mean(c, (0, 2, 3), correction=0)
        return mean.float(), variance.float()

    def in_torch(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The gradients by autograd, in the order of NAMES.

        dtype: of all or, of 16 bits, of all but a BatchNorm's vectors, as under autocast.
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
        # Aligned: with a 16-bit dy that begins anywhere eager's backward has stopped
        # (kernels_cu/conv/NOTES.md).
        return torch.autograd.grad(z, (x, weight, gamma, beta), self.dy.to(dtype, copy=True))
