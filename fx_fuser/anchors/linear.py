"""z = x · weightᵀ + bias        x: [*, K], weight: [N, K], bias: [N] or None, z: [*, N]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.base import Anchor, Config, Multiply, Operands, library_gemm
from fx_fuser.graph.epilogue import Epilogue
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site


class Linear(Anchor):
    kind = "linear"
    title = "Linear"
    role_of_z = "pre-activation"
    may_be_gate = True
    schema = "Tensor x, Tensor weight, Tensor? bias, str product, str backward, bool again"

    def config(self, site: Site) -> dict[str, Any]:
        return {}

    def form_fault(self, site: Site) -> str:
        x, weight = (meta_tensor(site.operands[n]) for n in ("x", "weight"))  # type: ignore[arg-type]
        assert x is not None and weight is not None
        if weight.ndim != 2 or x.ndim < 1:
            return f"x has rank {x.ndim} and the weight {weight.ndim}, not 1 or more and 2"
        bias = site.operands["bias"]
        if bias is not None and meta_tensor(bias).ndim != 1:  # type: ignore[union-attr]
            return "the bias is not a vector"
        return ""

    def leaf_counts(self, site: Site) -> tuple[int, int]:
        return 1, 0  # c, with its bias

    def shape_of_z(self, y: Tensor, operands: Operands) -> Sequence[int]:
        return (*y.shape[:-1], self.rows(operands["weight"]).shape[-2])

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as [N, K], in a batch as [*, N, K]; a view."""
        return weight

    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (F.linear(operands["x"], self.rows(operands["weight"]), operands["bias"]),)

    forward_like = forward
    reference = forward

    def recompute(
        self, operands: Operands, config: Config, multiply: Multiply = library_gemm
    ) -> Tensor:
        bias = operands.get("bias")
        if multiply is library_gemm:  # with its bias, as in forward
            return self.forward(operands, config)[0]
        c = multiply(operands["x"], self.rows(operands["weight"]))
        return c if bias is None else c.add_(bias)

    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return c.new_empty(shape, dtype=dtype)

    def z(self, operands: Operands, config: Config) -> Epilogue:
        return Epilogue(start="c")

    def leaves(
        self, operands: Operands, outputs: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        return {"c": outputs[0]}

    def read_by_backward(self, needs: Mapping[str, bool], config: Config) -> tuple[str, ...]:
        if config["again"]:
            return self.operands
        return (*(("x",) if needs["weight"] else ()), *(("weight",) if needs["x"] else ()))

    def backward(
        self,
        operands: Operands,
        outputs: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
        multiply: Multiply = library_gemm,
    ) -> dict[str, Tensor]:
        x, weight, bias = operands["x"], operands["weight"], operands.get("bias")
        grads: dict[str, Tensor] = {}
        if bias is not None and needs["bias"]:
            grads["bias"] = matrix(dz).sum(0).to(bias.dtype)
        dz = dz.to(x.dtype)
        if needs["x"]:
            grads["x"] = multiply(dz, self.rows(weight).mT)
        if needs["weight"]:
            grads["weight"] = self.weight_gradient(multiply, dz, x)
        return grads

    def weight_gradient(self, multiply: Multiply, dz: Tensor, x: Tensor) -> Tensor:
        """The weight's gradient, in the layout of the weight."""
        return multiply(matrix(dz).t(), matrix(x).t())


def matrix(x: Tensor) -> Tensor:
    """[*, K] as [M, K]. `reshape(-1, K)` cannot tell M where K is 0."""
    return x.unsqueeze(0).flatten(0, -2)
