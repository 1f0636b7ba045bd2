"""z = x · weight        x: [*, M, K], weight: [*, K, N], z: [*, M, N], of equal leading sizes.

`torch.bmm`, `q @ k.mT` and every other batched gemm. The weight is an operand like x: neither need
be a parameter, and both may be permuted views.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.anchors.base import Config, Multiply, Operands
from fx_fuser.anchors.matmul import MatMul
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site


class BatchMatMul(MatMul):
    kind = "bmm"
    title = "batched matmul"
    may_be_gate = False
    operands = ("x", "weight")
    schema = "Tensor x, Tensor weight, str product, str backward, bool again"
    cast = ("x", "weight")

    def form_fault(self, site: Site) -> str:
        x, weight = (meta_tensor(site.operands[n]) for n in self.operands)  # type: ignore[arg-type]
        assert x is not None and weight is not None
        if x.ndim != weight.ndim or x.ndim < 3:
            return (
                f"its operands have ranks {x.ndim} and {weight.ndim}; a batched matmul needs "
                "equal ranks, 3 or more"
            )
        leading = zip(x.shape[:-2], weight.shape[:-2])
        if not all(statically_known_true(a == b) for a, b in leading):
            return (
                f"its operands have the leading sizes {tuple(x.shape[:-2])} and "
                f"{tuple(weight.shape[:-2])}, which are not known to be equal when compiling"
            )
        return ""

    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (torch.matmul(operands["x"], operands["weight"]),)

    forward_like = forward
    reference = forward

    def weight_gradient(self, multiply: Multiply, dz: Tensor, x: Tensor) -> Tensor:
        return multiply(x.mT, dz.mT)
