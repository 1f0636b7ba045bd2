"""The convolution along one dimension in groups, of 16-bit tensors, and the gradient of its weight.

kernels_cu/conv/conv1d.cuh and conv1d_weight.cuh, launched by kernels_cu/host/conv1d.h.
`fx_fuser.passes.conv1d` puts them into Inductor's graphs; no site is found for them.
"""

from __future__ import annotations

import functools

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.native.kernel_spec import Family, KernelSpec

DTYPES = torch.bfloat16, torch.float16
CHUNK = 8  # channels of a group are copied by so many
# Of a group. More than one tile of channels reads the frames once a tile.
MOST_CHANNELS = 128
_MOST_COLUMNS = 64  # of a tile
_STEP = 16
# Of the weight's gradient: 16 rows and columns of a warp's tile, with two of which, of different
# taps, a thread has 144 sums at most.
_MOST_TILE = 9


@functools.cache
def conv1d(columns: int) -> Family:
    """columns: a tile's channels of the result."""
    return Family("conv/conv1d.cuh", "FX_FUSER_CONV1D", "conv1d", sizes=(columns,))


@functools.cache
def conv1d_weight(rows: int, columns: int) -> Family:
    """rows, columns: 16 channels of the result and of x in a tile."""
    sizes = rows, columns
    return Family("conv/conv1d_weight.cuh", "FX_FUSER_CONV1D_WEIGHT", "conv1d_weight", sizes=sizes)


@functools.cache
def _spec(family: Family, dtype: torch.dtype) -> KernelSpec:
    return kernel_spec(Epilogue(), {"z": dtype}, (), dtype, family)


def _tile(channels: int, most: int) -> int:
    """Sixteens of channels of the fewest equal tiles that have at most so many."""
    tiles = -(-channels // (_STEP * most))
    return -(-channels // (_STEP * tiles))


def spec_of(out_channels: int, dtype: torch.dtype) -> KernelSpec:
    """The convolution's kernel. out_channels: of a group. Its gradient of x has those of x."""
    columns = _STEP * _tile(out_channels, _MOST_COLUMNS // _STEP)
    return _spec(conv1d(columns), dtype)


def weight_spec_of(out_channels: int, in_channels: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel of the weight's gradient. Channels of a group."""
    rows = _tile(out_channels, _MOST_COLUMNS // _STEP)
    columns = _tile(in_channels, min(_MOST_TILE // rows, 3))
    return _spec(conv1d_weight(rows, columns), dtype)


def takes(out_channels: int, in_channels: int, dtype: torch.dtype) -> bool:
    """Are there kernels for so many channels of a group?"""
    channels = out_channels, in_channels
    return dtype in DTYPES and all(0 < n <= MOST_CHANNELS and n % CHUNK == 0 for n in channels)


def offered() -> list[KernelSpec]:
    """All that the functions above give for what is taken."""
    all_channels = range(CHUNK, MOST_CHANNELS + 1, CHUNK)
    pairs = [(out, into) for out in all_channels for into in all_channels]
    found = [spec_of(out, dtype) for out in all_channels for dtype in DTYPES]
    found += [weight_spec_of(*pair, dtype) for pair in pairs for dtype in DTYPES]
    return [*dict.fromkeys(found)]


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for each architecture: those of 48 and of 64 channels, and the smallest."""
    bf16, f16 = DTYPES
    return [
        spec_of(48, bf16),
        weight_spec_of(48, 48, bf16),
        spec_of(64, f16),
        weight_spec_of(64, 64, f16),
        spec_of(8, bf16),
    ]
