"""z = x · weightᵀ + bias        x: [*, K], weight: [N, K], bias: [N] or None, z: [*, N]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.base import Anchor, Config, Operands
from fx_fuser.epilogue import POINTWISE, Kernel
from fx_fuser.sites import Site
from fx_fuser.spell import Arg, Operand

LIBRARY = "library"
SPLIT = "split"
# Who multiplies on CUDA, and in which kernel, if it is ours: cuBLAS; three fp16 products that make
# an fp32 one.
PRODUCTS: dict[str, Kernel | None] = {
    LIBRARY: None,
    SPLIT: Kernel("linear_split_sm90.cuh", "FX_FUSER_LINEAR_SPLIT"),
}


class Linear(Anchor):
    kind = "linear"
    schema = "Tensor x, Tensor weight, Tensor? bias, str product"

    def config(self, site: Site) -> dict[str, Any]:
        return {}

    def kernels(self, config: Config) -> tuple[Kernel, ...]:
        own = PRODUCTS[config["product"]]
        return (POINTWISE,) if own is None else (POINTWISE, own)

    def product(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (F.linear(operands["x"], operands["weight"], operands["bias"]),)

    product_like = product
    reference = product

    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return c.new_empty(shape, dtype=dtype)

    def z(self, operands: Operands, config: Config) -> Operand:
        return Arg("c")

    def leaves(
        self, operands: Operands, products: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        return {"c": products[0]}

    def read_by_backward(self, needs: Mapping[str, bool]) -> tuple[str, ...]:
        return (*(("x",) if needs["weight"] else ()), *(("weight",) if needs["x"] else ()))

    def backward(
        self,
        operands: Operands,
        products: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
    ) -> dict[str, Tensor]:
        x, weight, bias = (operands[n] for n in self.operands)
        grads: dict[str, Tensor] = {}
        if needs["bias"] and bias is not None:
            grads["bias"] = _matrix(dz).sum(0).to(bias.dtype)
        dz = dz.to(x.dtype)
        if needs["x"]:
            grads["x"] = dz @ weight
        if needs["weight"]:
            grads["weight"] = _matrix(dz).t() @ _matrix(x)
        return grads


def _matrix(x: Tensor) -> Tensor:
    """[*, K] as [M, K]. `reshape(-1, K)` cannot tell M where K is 0."""
    return x.unsqueeze(0).flatten(0, -2)
