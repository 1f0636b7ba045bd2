"""Attention of float32 operands with fp16 halves, as exact as in float32 arithmetic.

kernels_cu/attention/attention_split_sm90.cuh and attention_backward_sm90.cuh, launched by
kernels_cu/host/attention_split.h and attention_backward.h. `fx_fuser.passes.attention_split` puts
it into graphs.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.native.kernel_spec import Family, KernelSpec

# Of kAttentionShapes: the largest head, a block's queries and a tile's keys. The contract of
# kernels_cu/host/contract.h compares them when the shim is loaded.
SHAPES = ((64, 128, 128), (128, 128, 64))

# Of kAttentionBackwardShapes, likewise: a block's rows, queries or keys, and a tile's.
BACKWARD_SHAPES = ((64, 128, 64), (128, 128, 64))

# kDropoutSteps and kMostDropped, likewise: dropout is a number of the former, at most the latter.
DROPOUT_STEPS = 1 << 15
MOST_DROPPED = 0x7C00

# Largest head → the shape that graphs run; the last with dropout.
_FORWARD_OF = {64: 0, 128: 1}
_BACKWARD_OF = {64: 0, 128: 1}
_DROPPING_OF = {64: 0}


@functools.cache
def attention_split(shape: int, dropout: bool) -> Family:
    """shape: index in SHAPES."""
    return Family(
        "attention/attention_split_sm90.cuh",
        "FX_FUSER_ATTENTION_SPLIT",
        "attention_split",
        "sm_90a",
        sizes=(shape, int(dropout)),
    )


@functools.cache
def spec_of(shape: int, dropout: bool = False) -> KernelSpec:
    family = attention_split(shape, dropout)
    return kernel_spec(Epilogue(), {"z": torch.float32}, (), torch.float32, family)


@functools.cache
def attention_backward(shape: int, dropout: bool) -> Family:
    """shape: index in BACKWARD_SHAPES."""
    return Family(
        "attention/attention_backward_sm90.cuh",
        "FX_FUSER_ATTENTION_BACKWARD",
        "attention_backward",
        "sm_90a",
        sizes=(shape, int(dropout)),
    )


@functools.cache
def backward_spec_of(shape: int, dropout: bool = False) -> KernelSpec:
    family = attention_backward(shape, dropout)
    return kernel_spec(Epilogue(), {"z": torch.float32}, (), torch.float32, family)


def steps_of(dropout: float) -> int:
    """The share that is dropped, as kernels and torch's formula round it."""
    return round(dropout * DROPOUT_STEPS)


def spec_for(d: int, backward: bool = False, dropout: float = 0.0) -> KernelSpec | None:
    """The kernel for heads of d elements; None if there is none."""
    of, made = (_BACKWARD_OF, backward_spec_of) if backward else (_FORWARD_OF, spec_of)
    if dropout != 0:
        of = _DROPPING_OF if 0 < steps_of(dropout) <= MOST_DROPPED else {}
    fits = (most for most in sorted(of) if 0 < d <= most and d % 8 == 0)
    return next((made(of[most], dropout != 0) for most in fits), None)


def offered() -> list[KernelSpec]:
    """All kernels that `spec_for` returns."""
    backward = map(backward_spec_of, _BACKWARD_OF.values())
    return [*map(spec_of, _FORWARD_OF.values()), *backward, *_dropping()]


def _dropping() -> list[KernelSpec]:
    shapes = _DROPPING_OF.values()
    return [made(shape, True) for made in (spec_of, backward_spec_of) for shape in shapes]


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for an architecture."""
    if arch != "sm_90a":
        return []
    forward = [spec_of(shape) for shape in range(len(SHAPES))]
    backward = [backward_spec_of(shape) for shape in range(len(BACKWARD_SHAPES))]
    return [*forward, *backward, *_dropping()]
