"""What an anchor provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser.graph.epilogue import Epilogue
from fx_fuser.graph.read.sites import Site

Operands = Mapping[str, Any]  # name → Tensor, or None where the operand is optional
Config = Mapping[str, Any]
Multiply = Callable[[Tensor, Tensor], Tensor]  # a bᵀ
# Every anchor's configuration has these choices of `plan`: `product` and `backward` name the
# backend on CUDA of forward and backward, "library" or one of `fx_fuser.kernels`; `again`: c is not
# saved, backward recomputes it.
LIBRARY = "library"


def library_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ"""
    return a @ b.mT


class Anchor(ABC):
    """One main operation. See the package's docstring for the vocabulary.

    kind: name in `graph.read.sites`. title: the layer that makes such a site, for the user.
    role_of_z: what z is to the user. may_be_gate: may a z of one column be broadcast along its last
    dimension? operands: names of its tensors, in schema order.
    schema: operand and configuration arguments of its ops. outputs: names, `c` first.
    cast: operands that autocast casts to the compute dtype.
    """

    kind: str
    title: str
    role_of_z: str = "inner value"
    may_be_gate: bool = False
    operands: tuple[str, ...] = ("x", "weight", "bias")
    schema: str
    outputs: tuple[str, ...] = ("c",)
    cast: tuple[str, ...] = ("x", "weight", "bias")

    @abstractmethod
    def config(self, site: Site) -> dict[str, Any]:
        """The configuration arguments of the op call for `site`, without plan's choices."""

    @abstractmethod
    def form_fault(self, site: Site) -> str:
        """Why the op does not support the site's ranks and attributes; empty if it does."""

    def leaf_counts(self, site: Site) -> tuple[int, int]:
        """How many tensors and how many numbers z is made of, at most."""
        vectors = [n for n, o in site.operands.items() if o is not None and n != "x"]
        return len(vectors), 0  # c in place of the weight

    @abstractmethod
    def shape_of_z(self, y: Tensor, operands: Operands) -> Sequence[int]:
        """The shape of z; y: the result or its gradient."""

    def kernel_operands(self, operands: Operands, config: Config) -> list[Tensor | None]:
        """The operands, in order, without those that the kernel op does not read."""
        return list(operands.values())

    @abstractmethod
    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """The main operation by the library: its outputs.

        The kernel op on CUDA does not call this (kernels_cu/host/linear.h, conv.h).
        """

    @abstractmethod
    def forward_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """Outputs of the right shape, stride and dtype, for fake tensors."""

    @abstractmethod
    def recompute(
        self, operands: Operands, config: Config, multiply: Multiply = library_gemm
    ) -> Tensor:
        """c, for a backward for which it was not saved. multiply: computes it if it is a gemm."""

    @abstractmethod
    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the result, in the memory format of c."""

    @abstractmethod
    def z(self, operands: Operands, config: Config) -> Epilogue:
        """z as steps over the names of `leaves`."""

    @abstractmethod
    def leaves(
        self, operands: Operands, outputs: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        """The values that z's expression reads, `c` first, shaped to broadcast against c."""

    @abstractmethod
    def reference(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """(z, statistics…) in the plain torch ops a user would write; differentiable."""

    def read_by_backward(self, needs: Mapping[str, bool], config: Config) -> tuple[str, ...]:
        """The operands whose values, not only shapes, `leaves` or `backward` read."""
        return self.operands

    def reads_c(self, needs: Mapping[str, bool], config: Config) -> bool:
        """Does `backward` read c?  (The epilogue's derivative may read it, too.)"""
        return False

    def statistics_of_z(
        self, statistics: Sequence[Tensor], operands: Operands, config: Config
    ) -> Sequence[Tensor]:
        """The statistics that `reference` returns, from the outputs that follow c."""
        return statistics

    def results(
        self, y: Tensor, statistics: Sequence[Tensor], operands: Operands, config: Config
    ) -> list[Tensor]:
        """What the op returns to the graph: y, then the new running statistics if there are any."""
        return [y]

    @abstractmethod
    def backward(
        self,
        operands: Operands,
        outputs: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
        multiply: Multiply = library_gemm,
    ) -> dict[str, Tensor]:
        """Gradients of the operands that need one; dz is in the accumulation dtype.

        multiply: computes those that are gemms.
        """
