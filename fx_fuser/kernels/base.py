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

GEMM_KINDS = frozenset({"linear", "matmul", "bmm"})  # anchors that are gemms
CONVOLUTION_KINDS = frozenset({"conv2d", "conv2d_batchnorm"})
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *SIXTEEN_BITS)  # for which an fp32 accumulator is enough


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
        """Does backward compute c again?"""

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
        """Is any gradient needed?"""

    def gradients(self) -> dict[str, bool]:
        """Operand of the anchor → is its gradient needed?"""

    def may_have_fused_backward(self, kernel: str) -> bool:
        """Can this kernel's backward make the gradients from dy, without c?"""


class Kernel(ABC):
    """A backend of an anchor's forward."""

    # What an op's configuration calls it.
    name: str
    # What it is for, in a user's words.
    sites: str
    # The only architecture that has it; None: all.
    arch: str | None = None
    # The kinds of anchors whose sites it may take.
    kinds: frozenset[str] = frozenset()
    # The dtypes of c.
    dtypes: tuple[torch.dtype, ...] = FLOATS
    # Does it run on CUDA only?
    needs_cuda: bool = True
    # Is it only for inference where times decide? In training the inner compiler's passes differ,
    # and the gain is not measured.
    for_inference: bool = False
    # May it gain where no named pattern fits?
    grows: bool = False
    # Does it multiply fp32 operands in TF32?
    in_tf32: bool = False
    # Does it run in the graph's layout, so that it is timed there and its operands are converted
    # with the graph?
    any_layout: bool = False
    # Must the weight of a window then be in x's layout, too?
    weight_follows: bool = False
    # The kernels that make all gradients from dy, without c.
    backward_family: Family | None = None

    @property
    def multiply(self) -> Multiply:
        """Computes a bᵀ: for gradients, and for a c that backward computes again."""
        return library_gemm

    @abstractmethod
    def takes(self, case: Case) -> bool:
        """Does it take the site? Called only for sites of its `kinds`.

        Raises OptionError if an option contradicts torch's own setting.
        """

    def backwards(self, case: Case) -> tuple[str, ...]:
        """The backends that can compute the backward of a site that it takes."""
        return (LIBRARY,)

    def family(self, operands: Operands, config: Config) -> Family | None:
        """The main loop of a call. None: the library's."""
        return None

    def plain_specs(self) -> list[KernelSpec]:
        """The kernel without epilogue that `multiply` launches."""
        return []

    def is_too_small(self, case: Case) -> bool:
        """Is the library done before this kernel would have begun?"""
        return False

    def title(self, device: torch.device) -> str:
        """Its name in `explain`."""
        return self.name

    @abstractmethod
    def examples(self, arch: str) -> Sequence[KernelSpec]:
        """What CI compiles for an architecture and tests run; the first represents all."""


def is_float64(case: Case) -> bool:
    """Is an operand or the arithmetic in float64? Main loops accumulate in fp32."""
    return torch.float64 in (case.acc, *(t.dtype for t in case.tensors))


def known_sizes(*tensors: Tensor) -> list[list[int]] | None:
    """The tensors' sizes; None if one is unknown when compiling."""
    found = [[hint_of(size) for size in tensor.shape] for tensor in tensors]
    return None if any(None in sizes for sizes in found) else found  # type: ignore[return-value]


def short_of_16_bytes(size: int, dtype: torch.dtype) -> int:
    """How many elements a row of this size lacks to a multiple of 16 bytes. Only for such multiples
    does the library have fast 16-bit kernels."""
    return -size % (16 // dtype.itemsize)


def odd_rows(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[int]:
    """The lengths of their rows in memory that are not multiples of 16 bytes in this dtype, at the
    sizes of this trace."""
    found = set[int]()
    for t in tensors:
        sizes, strides = ([hint_of(n) for n in v] for v in (t.shape, t.stride()))
        length = 1 if not sizes else sizes[-2] if strides[-1] != 1 and t.ndim > 1 else sizes[-1]
        if length is not None and length > 1 and short_of_16_bytes(length, dtype):
            found.add(length)
    return sorted(found)


def spec_of_site(case: Case, name: str) -> KernelSpec:
    """The main loop of this kernel with the site's epilogue."""
    choices = {"tf32": False, "product": name, "backward": LIBRARY, "again": False}
    *_, spec = case.specs(choices)
    return spec


@functools.cache  # also caches the spec's text and name
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
