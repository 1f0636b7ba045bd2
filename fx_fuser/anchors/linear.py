"""z = x · weightᵀ + bias        x: [*, K], weight: [N, K], bias: [N] or None, z: [*, N]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser import native
from fx_fuser.anchors.base import LIBRARY, Anchor, Config, Operands
from fx_fuser.epilogue import POINTWISE, Kernel, Z, cuda_source
from fx_fuser.sites import Site
from fx_fuser.spell import Arg, Operand

SPLIT = "split"
DENSE = "dense"
# Who multiplies on CUDA: the library, or a kernel of ours. "split": three products of fp16 halves,
# which make an fp32 one; "dense": one product in the operands' own 16 bits, or of fp32 in TF32.
PRODUCTS = {
    SPLIT: Kernel("linear_split_sm90.cuh", "FX_FUSER_LINEAR_SPLIT"),
    DENSE: Kernel("linear_dense_sm90.cuh", "FX_FUSER_LINEAR"),
}
PRODUCT_ALONE = cuda_source(
    Z, {Z.name: torch.float32}, (), torch.float32, "the backward of linear", PRODUCTS[SPLIT]
)


def matmul_tf32_requested() -> bool:
    """Did the user ask for TF32 products?  `high` and `medium` matmul precision do.

    The getters of before torch 2.9 raise once the new settings were used, so only the new ones
    are read.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Linear(Anchor):
    kind = "linear"
    schema = "Tensor x, Tensor weight, Tensor? bias, str product, str backward, bool again"

    def config(self, site: Site) -> dict[str, Any]:
        return {}

    def kernels(self, config: Config) -> tuple[Kernel, ...]:
        product = config["product"]
        return (POINTWISE,) if product == LIBRARY else (POINTWISE, PRODUCTS[product])

    def backward_sources(self, config: Config) -> list[str]:
        again = config["again"] and config["product"] == SPLIT
        return [PRODUCT_ALONE] if config["backward"] == SPLIT or again else []

    def product(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (F.linear(operands["x"], operands["weight"], operands["bias"]),)

    product_like = product
    reference = product

    def product_again(self, operands: Operands, config: Config) -> Tensor:
        x, weight, bias = (operands[n] for n in self.operands)
        if config["product"] != SPLIT:
            return F.linear(x, weight, bias)
        c = _split_product(x, weight)
        return c if bias is None else c.add_(bias)

    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return c.new_empty(shape, dtype=dtype)

    def z(self, operands: Operands, config: Config) -> Operand:
        return Arg("c")

    def leaves(
        self, operands: Operands, products: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        return {"c": products[0]}

    def read_by_backward(self, needs: Mapping[str, bool], config: Config) -> tuple[str, ...]:
        if config["again"]:
            return self.operands
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
        multiply = _split_product if config["backward"] == SPLIT else _library_product
        if needs["x"]:
            grads["x"] = multiply(dz, weight.t())
        if needs["weight"]:
            grads["weight"] = multiply(_matrix(dz).t(), _matrix(x).t())
        return grads


def _library_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ"""
    return a @ b.t()


def _split_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in fp32, on tensor cores."""
    kernel = native.kernel_name(PRODUCT_ALONE)
    product: Tensor = torch.ops.fx_fuser.split_product.default(a, b, kernel)
    return product


def _matrix(x: Tensor) -> Tensor:
    """[*, K] as [M, K]. `reshape(-1, K)` cannot tell M where K is 0."""
    return x.unsqueeze(0).flatten(0, -2)
