"""What a kernel's file says: see the package's docstring."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fx_fuser.anchors.base import LIBRARY, Config, Multiply, Operands, library_gemm
from fx_fuser.graph.epilogue import Epilogue
from fx_fuser.graph.read.nodes import hint_of
from fx_fuser.graph.read.sites import Site
from fx_fuser.native.kernel_spec import Family, KernelSpec
from fx_fuser.options import Options

GEMMS = frozenset({"linear", "matmul", "bmm"})  # kinds of anchors
CONVOLUTIONS = frozenset({"conv2d", "conv2d_batchnorm"})
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)  # that an accumulator of fp32 is enough for


class Case(Protocol):
    """One site and the options, as a kernel sees them."""

    @property
    def options(self) -> Options: ...

    @property
    def site(self) -> Site: ...

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the anchor's op, without plan's choices."""

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

    def may_have_fused_backward(self, kernel: str) -> bool:
        """Can this kernel's backward make the gradients from dy, without c?"""


class Kernel(ABC):
    """A backend of an anchor's forward.

    name: what an op's configuration calls it. sites: what it is for, to a user. arch: the only
    architecture that has it, or None. kinds: of the anchors whose sites it may take.
    for_inference: in training it is not offered where times decide, since the inner compiler's
    passes are others there and what is gained is not measured. needs_cuda: it runs nowhere else.
    in_tf32: are fp32 operands multiplied in TF32? any_layout: does it take channels_last as well as
    contiguous tensors, and return what it gets? weight_follows: is a window's weight to be in the
    layout of x? grows: may it gain where no named pattern fits?
    dtypes: of c. backward_family: the kernels that make all gradients from dy, without c, if there
    are such.
    """

    name: str
    sites: str
    arch: str | None = None
    kinds: frozenset[str] = frozenset()
    for_inference: bool = False
    needs_cuda: bool = True
    in_tf32: bool = False
    any_layout: bool = False
    weight_follows: bool = False
    grows: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    backward_family: Family | None = None

    @property
    def multiply(self) -> Multiply:
        """a bᵀ, by which it makes a gemm without an epilogue."""
        return library_gemm

    @abstractmethod
    def takes(self, case: Case) -> bool:
        """Does it take the site? Asked of its `kinds` alone.

        Raises OptionError if an option asks for what torch's own setting forbids.
        """

    def backwards(self, case: Case) -> tuple[str, ...]:
        """The backends of backward that go with it at a site that it takes."""
        return (LIBRARY,)

    def family(self, operands: Operands, config: Config) -> Family | None:
        """The main loop of a call; of the operands, shapes may matter. None: the library's."""
        return None

    def plain_specs(self) -> list[KernelSpec]:
        """The kernel without epilogue that `multiply` launches."""
        return []

    def is_too_small(self, case: Case) -> bool:
        """Does the library take no longer for the site than this kernel needs to begin?"""
        return False

    def title(self, device: torch.device) -> str:
        """As `explain` names it."""
        return self.name

    @abstractmethod
    def examples(self, arch: str) -> Sequence[KernelSpec]:
        """What CI compiles for an architecture and tests run; the first stands for all."""


def is_float64(case: Case) -> bool:
    """Is anything in float64, for which no main loop has an accumulator?"""
    return torch.float64 in (case.acc, *(t.dtype for t in case.tensors))


def known_sizes(*tensors: Tensor) -> list[list[int]] | None:
    """The tensors' sizes; None if one is not known when compiling."""
    found = [[hint_of(size) for size in tensor.shape] for tensor in tensors]
    return None if any(None in sizes for sizes in found) else found  # type: ignore[return-value]


def spec_of_site(case: Case, name: str) -> KernelSpec:
    """The main loop of this kernel with the site's epilogue."""
    choices = {"tf32": False, "product": name, "backward": LIBRARY, "again": False}
    *_, spec = case.specs(choices)
    return spec


@functools.cache  # and with the spec its text and name
def example(
    family: Family,
    functor: str,
    scalars: int,
    acc: torch.dtype,
    out: torch.dtype,
    *inputs: torch.dtype,
) -> KernelSpec:
    """A kernel with the epilogue `functor` of kernels_cu/common/examples.cuh."""
    include = '#include "common/examples.cuh"'
    name = f"fx_fuser::examples::{functor}"
    return KernelSpec(family, name, include, scalars, acc, out, inputs)
