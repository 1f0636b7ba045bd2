"""The 1 x 1 convolution of 16-bit images in channels_last, with the statistics of its result, which
a BatchNorm in training asks for.

kernels_cu/conv/pixels_sm90.cuh, launched by kernels_cu/host/pixels.h. `fx_fuser.passes.pixels` puts
it into Inductor's graphs; no site is found for it.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.native.kernel_spec import Family, KernelSpec

DTYPES = torch.bfloat16, torch.float16
WIDTH = 8  # elements of a vector: channels of both images are multiples
PIXELS = Family("conv/pixels_sm90.cuh", "FX_FUSER_PIXELS", "pixels", "sm_90a")
# kPixelsShapes of kernels_cu/conv/pixels_args.h: pixels and channels of a tile.
SHAPES = ("128x256", "128x128", "256x64", "256x128")


def takes(inputs: int, outputs: int) -> bool:
    """Is there a kernel for so many channels?"""
    return inputs % WIDTH == outputs % WIDTH == 0


@functools.cache
def spec_of(dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, PIXELS)


def offered() -> list[KernelSpec]:
    return [*map(spec_of, DTYPES)]


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for each architecture."""
    return offered() if arch == PIXELS.arch else []
