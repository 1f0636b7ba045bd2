"""Rows of logits to their losses and, in place, to the gradients of these.

kernels_cu/loss/head_loss.cuh, launched by kernels_cu/host/head_loss.h. `fx_fuser.ops.head_loss`
calls it, which has no site: a loss is no anchor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import FLOATS
from fx_fuser.native.kernel_spec import Family, KernelSpec

_HEADER = "loss/head_loss.cuh"
HEAD_LOSS = Family(_HEADER, "FX_FUSER_HEAD_LOSS", "head_loss")
HEAD_LOSS_TAIL = Family(_HEADER, "FX_FUSER_HEAD_LOSS_TAIL", "head_loss_tail")


class Tail(NamedTuple):
    """What stands between a Linear and its loss: values are `before` times the logits, with a soft
    cap `after` times the tanh of that. after: 0 without a cap. smoothing: of labels."""

    before: float = 1.0
    after: float = 0.0
    smoothing: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self == Tail()


PLAIN = Tail()


@functools.cache
def spec_of(logits: torch.dtype, tail: Tail = PLAIN) -> KernelSpec:
    family = HEAD_LOSS if tail.is_plain else HEAD_LOSS_TAIL
    return kernel_spec(Epilogue(), {"z": logits}, (), logits, family)


def examples() -> list[KernelSpec]:
    """What CI compiles for every architecture."""
    return [spec_of(dtype, tail) for dtype in FLOATS for tail in (PLAIN, Tail(smoothing=0.1))]
