"""The depthwise convolution and its gradients in training, of 16-bit images in channels_last.

The convolution, and its gradient of x where it has no stride, is kernels_cu/conv/depthwise.cuh;
that gradient with stride 2 is depthwise_input.cuh, the gradient of the weight
depthwise_weight.cuh; kernels_cu/host/depthwise_gradients.h launches them.
`fx_fuser.passes.depthwise` puts them into Inductor's graphs; no site is found for them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.depthwise import depthwise
from fx_fuser.native.kernel_spec import Family, KernelSpec

DTYPES = torch.bfloat16, torch.float16
WINDOWS = [(side, side) for side in range(3, 12, 2)]
STRIDES = 1, 2


@functools.cache
def depthwise_input(kernel_h: int, kernel_w: int) -> Family:
    """The gradients of x, with stride 2."""
    sizes = kernel_h, kernel_w
    header, macro = "conv/depthwise_input.cuh", "FX_FUSER_DEPTHWISE_INPUT"
    return Family(header, macro, "depthwise_input", sizes=sizes)


@functools.cache
def depthwise_weight(kernel_h: int, kernel_w: int, stride: int) -> Family:
    """The gradients of the weight."""
    sizes = kernel_h, kernel_w, stride
    header, macro = "conv/depthwise_weight.cuh", "FX_FUSER_DEPTHWISE_WEIGHT"
    return Family(header, macro, "depthwise_weight", sizes=sizes)


@functools.cache
def _spec(family: Family, dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, family)


def spec_of(window: Sequence[int], stride: int, dtype: torch.dtype) -> KernelSpec:
    """The convolution's kernel."""
    return _spec(depthwise(*window, stride), dtype)


def input_spec_of(window: Sequence[int], stride: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel of the gradient of x."""
    if stride == 1:
        return spec_of(window, 1, dtype)
    return _spec(depthwise_input(*window), dtype)


def weight_spec_of(window: Sequence[int], stride: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel of the gradient of the weight."""
    return _spec(depthwise_weight(*window, stride), dtype)


def takes(window: Sequence[int], stride: int, channels: int, dtype: torch.dtype) -> bool:
    """Are there kernels for such a convolution?  Windows are square."""
    is_window = tuple(window) in WINDOWS
    return dtype in DTYPES and is_window and stride in STRIDES and channels % 2 == 0


def offered() -> list[KernelSpec]:
    """All that the functions above give for what is taken."""
    kinds = spec_of, input_spec_of, weight_spec_of
    found = [
        kind(window, stride, dtype)
        for kind in kinds
        for window in WINDOWS
        for stride in STRIDES
        for dtype in DTYPES
    ]
    return [*dict.fromkeys(found)]


def examples() -> list[KernelSpec]:
    """What CI compiles for each architecture."""
    bf16, f16 = DTYPES
    found = [weight_spec_of((n, n), s, bf16) for n, s in ((7, 1), (3, 1), (5, 2), (11, 1))]
    found += [input_spec_of((n, n), 2, f16) for n in (3, 7)]
    return [*found, *(spec_of((n, n), 1, bf16) for n in (7, 11))]
