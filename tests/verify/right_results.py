"""Results that are right, and differ from eager's only in how they were rounded: what `verify` must
not call wrong.

A gemm, a tail, and gradients that are sums. Eager rounds after each operation, the fused result
once, as kernels do; their sums run in other orders, in float32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.verify.accuracy import NEIGHBOURS, Observed, neighbour_of

TAILS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate": lambda z, a: F.silu(z) * a,
    "residual": lambda z, a: z + torch.sigmoid(z) * 2.0,
    "relu": lambda z, a: torch.relu(z * 0.5 + a),
    "cube": lambda z, a: z * z * z,
    "nearly zero": lambda z, a: (z + a) - z,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Rounded:
    """One program on one set of operands. shape: rows, terms of a sum, columns."""

    tail: str
    dtype: torch.dtype
    operands: dict[str, Tensor]

    @classmethod
    def draw(cls, seed: int, shape: tuple[int, int, int], spread: float) -> Rounded:
        """spread: of the logarithms of the rows' magnitudes."""
        pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows, terms, columns = shape

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        operands = {
            "x": normal(rows, terms) * torch.exp(spread * normal(rows, 1)),
            "weight": normal(terms, columns) / terms**0.5,
            "a": normal(columns),
            "dy": normal(rows, columns),
        }
        dtype = pick.choice(DTYPES)
        return cls(pick.choice([*TAILS]), dtype, {n: v.to(dtype) for n, v in operands.items()})

    def exact(self) -> Observed:
        return _run(self, {n: v.double() for n, v in self.operands.items()}, Tensor.double, 0)

    def eager(self, operands: dict[str, Tensor] | None = None) -> Observed:
        return _run(self, operands or self.operands, lambda t: t.to(self.dtype), 0)

    def fused(self, seed: int) -> Observed:
        """As a kernel computes it: float32 until the end, but for c where it is kept."""
        wide = {n: v.float() for n, v in self.operands.items()}
        seen = _run(self, wide, Tensor.float, seed, c=self.dtype if seed % 2 else torch.float32)
        for part in (seen.outputs, seen.grads):
            part.update({n: v.to(self.dtype) for n, v in part.items()})
        return seen

    def peers(self) -> Iterator[Observed]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(NEIGHBOURS):
            yield self.eager({n: neighbour_of(v, generator) for n, v in self.operands.items()})


def _run(
    case: Rounded,
    operands: dict[str, Tensor],
    rounded: Callable[[Tensor], Tensor],
    order: int,
    c: torch.dtype | None = None,
) -> Observed:
    x, weight, a, dy = operands.values()
    z = rounded(_gemm(x, weight, order))
    z = (z if c is None else z.to(c).to(z.dtype)).requires_grad_()
    a = a.detach().requires_grad_()
    y = TAILS[case.tail](z, a)
    (dz,) = torch.autograd.grad(y, z, dy)
    dz = rounded(dz)
    grads = {"x": _gemm(dz, weight.t(), order), "weight": _gemm(x.t(), dz, order)}
    grads["bias"] = _gemm(torch.ones(1, len(dz), dtype=dz.dtype), dz, order)[0]
    grads["scalar"] = _gemm(dz.reshape(1, -1), y.detach().reshape(-1, 1), order)[0, 0]
    return Observed({"y": y.detach()}, {n: rounded(g) for n, g in grads.items()})


def _gemm(x: Tensor, weight: Tensor, order: int) -> Tensor:
    """The sum in one of many orders, all as good, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(wide), weight.to(wide)
    shuffled = torch.randperm(len(weight), generator=torch.Generator().manual_seed(order))
    parts = shuffled.tensor_split(min(3, len(weight)))
    total = x[:, parts[0]] @ weight[parts[0]]
    for part in parts[1:]:
        total = total + x[:, part] @ weight[part]
    return total
