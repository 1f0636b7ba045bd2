"""Rows of logits to their losses and, in place, to the gradients of these.

kernels_cu/loss/head_loss.cuh, launched by kernels_cu/host/head_loss.h. `fx_fuser.ops.head_loss`
calls it, which has no site: a loss is no anchor.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import FLOATS
from fx_fuser.native.kernel_spec import Family, KernelSpec

HEAD_LOSS = Family("loss/head_loss.cuh", "FX_FUSER_HEAD_LOSS", "head_loss")


@functools.cache
def spec_of(logits: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": logits}, (), logits, HEAD_LOSS)


def examples() -> list[KernelSpec]:
    """What CI compiles for every architecture."""
    return [spec_of(dtype) for dtype in FLOATS]
