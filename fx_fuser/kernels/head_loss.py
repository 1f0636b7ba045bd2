"""Rows of logits become their losses and, in place, the gradients of the losses.

kernels_cu/loss/head_loss.cuh, launched by kernels_cu/host/head_loss.h. `fx_fuser.ops.head_loss`
calls it. It has no site: a loss is not an anchor.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.graph.read.heads import PLAIN, Tail
from fx_fuser.kernels.base import FLOATS
from fx_fuser.native.kernel_spec import Family, KernelSpec

_HEADER = "loss/head_loss.cuh"
HEAD_LOSS = Family(_HEADER, "FX_FUSER_HEAD_LOSS", "head_loss")
HEAD_LOSS_TAIL = Family(_HEADER, "FX_FUSER_HEAD_LOSS_TAIL", "head_loss_tail")


@functools.cache
def spec_of(logits: torch.dtype, tail: Tail = PLAIN) -> KernelSpec:
    family = HEAD_LOSS if tail.is_plain else HEAD_LOSS_TAIL
    return kernel_spec(Epilogue(), {"z": logits}, (), logits, family)


def examples() -> list[KernelSpec]:
    """What CI compiles for every architecture."""
    return [spec_of(dtype, tail) for dtype in FLOATS for tail in (PLAIN, Tail(smoothing=0.1))]
