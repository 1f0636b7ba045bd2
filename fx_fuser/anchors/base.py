"""What an anchor provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fx_fuser.graph.epilogue import Epilogue
from fx_fuser.graph.read.sites import Site
from fx_fuser.native.kernel_spec import POINTWISE, Family, KernelSpec
from fx_fuser.options import Options

Operands = Mapping[str, Any]  # name → Tensor, or None where the operand is optional
Config = Mapping[str, Any]
# Every anchor's configuration has these choices of `plan`: `product` and `backward` name the
# backend on CUDA of forward and backward: "library", or one that the anchors' files name ("split",
# "dense"; a convolution's "direct", "folded" …);
# `again`: c is not saved, backward recomputes it.
LIBRARY = "library"


class Case(Protocol):
    """One site and the options, as `Anchor.candidates` sees them."""

    @property
    def options(self) -> Options: ...

    @property
    def site(self) -> Site: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def out(self) -> torch.dtype: ...

    @property
    def acc(self) -> torch.dtype:
        """The dtype of the epilogue's arithmetic."""

    @property
    def tensors(self) -> list[Tensor]:
        """c's fake tensor, then those of all operands."""

    @property
    def recomputes(self) -> bool:
        """Is c to be computed again in backward?"""

    def operand(self, name: str) -> Tensor:
        """The fake tensor of an operand of the anchor."""

    @property
    def epilogue(self) -> Epilogue: ...

    @property
    def t(self) -> list[Tensor]:
        """The fake tensors that the epilogue calls t0…."""

    @property
    def is_channels_last(self) -> bool:
        """Does the site run in channels_last, in the graph as the user wrote it?"""

    def specs(self, choices: Config) -> list[KernelSpec]:
        """The kernels that the site needs with these choices."""

    def has_backward(self) -> bool:
        """Is any gradient asked for?"""

    def gradients(self) -> dict[str, bool]:
        """Operand of the anchor → is its gradient asked for?"""

    def may_have_fused_backward(self) -> bool:
        """Can a fused kernel make the gradients from dy, without c?"""


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
        """Why the op does not take the site's ranks and attributes; empty if it does."""

    def leaf_counts(self, site: Site) -> tuple[int, int]:
        """How many tensors and how many numbers z is made of, at most."""
        vectors = [n for n, o in site.operands.items() if o is not None and n != "x"]
        return len(vectors), 0  # c in place of the weight

    @abstractmethod
    def shape_of_z(self, y: Tensor, operands: Operands) -> Sequence[int]:
        """The shape of z; y: the result or its gradient."""

    @abstractmethod
    def candidates(self, case: Case) -> list[dict[str, Any]]:
        """The choices that `plan` has at a site, the library's first.

        Raises OptionError if an option asks for what torch's own setting forbids.
        """

    def kernel_operands(self, operands: Operands, config: Config) -> list[Tensor | None]:
        """The operands, in order, without those that the kernel op does not read."""
        return list(operands.values())

    def kernels(self, operands: Operands, config: Config) -> tuple[Family, ...]:
        """The op's kernels on CUDA: the epilogue alone, then gemm or convolution with epilogue.

        operands: of which the weight's shape may choose the kernel.

        The first is launched if there is no second, or if the second does not take the tensors.
        """
        return (POINTWISE,)

    def backward_specs(self, config: Config) -> list[KernelSpec]:
        """The kernels that `backward` and `recompute` launch on CUDA."""
        return []

    @abstractmethod
    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """The main operation by the library: its outputs.

        The kernel op on CUDA does not call this (kernels_cu/host/linear.h, conv.h).
        """

    @abstractmethod
    def forward_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        """Outputs of the right shape, stride and dtype, for fake tensors."""

    @abstractmethod
    def recompute(self, operands: Operands, config: Config) -> Tensor:
        """c, for a backward for which it was not saved."""

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
    ) -> dict[str, Tensor]:
        """Gradients of the operands that need one; dz is in the accumulation dtype."""
