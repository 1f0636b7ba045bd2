"""z = x · weightᵀ + bias        x: [*, K], weight: [N, K], bias: [N] or None, z: [*, N]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.base import LIBRARY, Anchor, Case, Config, Operands
from fx_fuser.errors import OptionError
from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import (
    LINEAR_DENSE,
    LINEAR_EXACT,
    LINEAR_SPLIT,
    POINTWISE,
    Family,
    KernelSpec,
)
from fx_fuser.options import Options

Multiply = Callable[[Tensor, Tensor], Tensor]  # a bᵀ
SPLIT = "split"
DENSE = "dense"
# The backends on CUDA beside the library. "split": an fp32 gemm as three gemms of fp16 halves, on
# every GPU; "dense": one gemm in the operands' 16-bit dtype, or of fp32 in TF32, on Hopper.
FAMILIES = {SPLIT: LINEAR_SPLIT, DENSE: LINEAR_DENSE}
SPLIT_GEMM = kernel_spec(Epilogue(), {"z": torch.float32}, (), torch.float32, LINEAR_SPLIT)
# fp32 gemms of operands that were cast up from this 16-bit dtype: both operands, or one of them.
EXACT_GEMMS, MIXED_GEMMS = (
    {
        dtype: kernel_spec(Epilogue(), {"z": dtype}, (), torch.float32, family)
        for dtype in (torch.bfloat16, torch.float16)
    }
    for family in (LINEAR_EXACT, LINEAR_SPLIT)
)


def matmul_tf32_requested() -> bool:
    """Did the user ask for TF32 gemms?  `high` and `medium` matmul precision do.

    Only the new settings are read: the getters of before torch 2.9 raise once those were used.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def asked_precision(options: Options) -> str:
    """What option "fp32" asks of an fp32 gemm: "split", "ieee" or "tf32"."""
    if options.fp32 != "follow":
        return options.fp32
    return "tf32" if matmul_tf32_requested() else SPLIT


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
            return f"x has rank {x.ndim} and the weight {weight.ndim}; at least 1 and 2"
        bias = site.operands["bias"]
        if bias is not None and meta_tensor(bias).ndim != 1:  # type: ignore[union-attr]
            return "the bias is no vector"
        return ""

    def leaf_counts(self, site: Site) -> tuple[int, int]:
        return 1, 0  # c, with its bias

    def shape_of_z(self, y: Tensor, operands: Operands) -> Sequence[int]:
        return (*y.shape[:-1], self.rows(operands["weight"]).shape[-2])

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as [N, K], in a batch as [*, N, K]; a view."""
        return weight

    def candidates(self, case: Case) -> list[dict[str, Any]]:
        again = case.recomputes
        library = {"product": LIBRARY, "backward": LIBRARY, "again": again}
        maker = self._fused_gemm(case)
        if maker is None or case.device.type != "cuda":
            return [library]
        backward = SPLIT if maker == SPLIT else LIBRARY
        fused = {"product": maker, "backward": backward, "again": again}
        fits = all(load.runs_on(spec, case.device) for spec in case.specs(fused))
        return [library, fused] if fits else [library]

    def _fused_gemm(self, case: Case) -> str | None:
        """The backend of the fused gemm in the precision that is asked for, or None."""
        c = case.tensors[0]
        # The kernels' accumulators are float, and so is what the epilogue reads beside them.
        if not c.is_contiguous() or torch.float64 in (case.acc, *(t.dtype for t in case.tensors)):
            return None
        if c.dtype != torch.float32:
            return self._dense(case)
        precision = asked_precision(case.options)
        if precision == "ieee" and case.device.type == "cuda" and matmul_tf32_requested():
            raise OptionError(
                "option 'fp32' is 'ieee', but torch.backends.cuda.matmul.fp32_precision is 'tf32', "
                "which cuBLAS follows; set it to 'ieee', or give 'split' or 'follow'"
            )
        return {SPLIT: SPLIT, "tf32": self._dense(case)}.get(precision)

    def _dense(self, case: Case) -> str | None:
        """The backend of 16-bit and TF32 gemms, if its kernel takes these operands."""
        return DENSE

    def kernels(self, operands: Operands, config: Config) -> tuple[Family, ...]:
        maker = config["product"]
        return (POINTWISE,) if maker == LIBRARY else (POINTWISE, FAMILIES[maker])

    def backward_specs(self, config: Config) -> list[KernelSpec]:
        again = config["again"] and config["product"] == SPLIT
        return [SPLIT_GEMM] if config["backward"] == SPLIT or again else []

    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (F.linear(operands["x"], self.rows(operands["weight"]), operands["bias"]),)

    forward_like = forward
    reference = forward

    def recompute(self, operands: Operands, config: Config) -> Tensor:
        bias = operands.get("bias")
        if config["product"] != SPLIT:
            return self.forward(operands, config)[0]
        c = split_gemm(operands["x"], self.rows(operands["weight"]))
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
    ) -> dict[str, Tensor]:
        x, weight, bias = operands["x"], operands["weight"], operands.get("bias")
        grads: dict[str, Tensor] = {}
        if bias is not None and needs["bias"]:
            grads["bias"] = matrix(dz).sum(0).to(bias.dtype)
        dz = dz.to(x.dtype)
        multiply = split_gemm if config["backward"] == SPLIT else library_gemm
        if needs["x"]:
            grads["x"] = multiply(dz, self.rows(weight).mT)
        if needs["weight"]:
            grads["weight"] = self.weight_gradient(multiply, dz, x)
        return grads

    def weight_gradient(self, multiply: Multiply, dz: Tensor, x: Tensor) -> Tensor:
        """The weight's gradient, in the layout of the weight."""
        return multiply(matrix(dz).t(), matrix(x).t())


def library_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ"""
    return a @ b.mT


def split_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in fp32 on tensor cores. b is a matrix, or a and b are batches of one size."""
    c: Tensor = torch.ops.fx_fuser.split_product.default(a, b, SPLIT_GEMM.name)
    return c


def matrix(x: Tensor) -> Tensor:
    """[*, K] as [M, K]. `reshape(-1, K)` cannot tell M where K is 0."""
    return x.unsqueeze(0).flatten(0, -2)
