"""One kernel as a value, which Python passes to the compiler, the cache and the loader.

A family is a main loop of `kernels_cu/`; a functor is the epilogue plugged into it. The translation
units and the shim's arguments are all generated from the spec, and none is ever parsed.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from fx_fuser.errors import OptionError

CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}

# The room in a kernel's argument block: kMaxInputs, the anchor's value included, and kMaxScalars of
# kernels_cu/common/operands.h.
MAX_TENSORS = 16
MAX_NUMBERS = 8


@dataclass(frozen=True)
class Family:
    """A main loop. header: below kernels_cu; macro: of the header, instantiates the kernels.

    loader: the op of `torch.ops.fx_fuser_native` that loads them. arch: the only architecture they
    exist for, or None if they run everywhere. sizes: the macro's first arguments, over which loops
    are unrolled. common: the macro of kernels that are the same for all functors, given the type of
    the first input; the loader gets their cubin as well.
    """

    header: str
    macro: str
    loader: str
    arch: str | None = None
    sizes: tuple[int, ...] = ()
    common: str | None = None


POINTWISE = Family("pointwise/pointwise.cuh", "FX_FUSER_POINTWISE", "load_pointwise")
# The split product by mma.sync, which every GPU has.
LINEAR_SPLIT_MMA = Family(
    "linear/linear_split_mma.cuh",
    "FX_FUSER_LINEAR_SPLIT_MMA",
    "load_linear_split_mma",
    common="FX_FUSER_LINEAR_SPLIT_MMA_COMMON",
)
# By wgmma on Hopper, elsewhere the same kernels as LINEAR_SPLIT_MMA's.
LINEAR_SPLIT_AUTO = Family(
    "linear/linear_split.cuh",
    "FX_FUSER_LINEAR_SPLIT",
    "load_linear_split",
    common="FX_FUSER_LINEAR_SPLIT_COMMON",
)


_SPLIT_LOOP = os.environ.get("FX_FUSER_SPLIT_LOOP")  # "mma" on Hopper too
LINEAR_SPLIT = LINEAR_SPLIT_MMA if _SPLIT_LOOP == "mma" else LINEAR_SPLIT_AUTO


def check_split_loop() -> None:
    """Not at import, where it would stop programs that run no kernel.

    Raises:
        OptionError: FX_FUSER_SPLIT_LOOP says anything but "mma".
    """
    if _SPLIT_LOOP not in (None, "", "mma"):
        raise OptionError(f"FX_FUSER_SPLIT_LOOP is {_SPLIT_LOOP!r}; give 'mma', or leave it unset")


LINEAR_DENSE = Family(
    "linear/linear_dense_sm90.cuh", "FX_FUSER_LINEAR_DENSE", "load_linear", "sm_90a"
)
LINEAR_EXACT = Family(
    "linear/linear_exact_sm90.cuh", "FX_FUSER_LINEAR_EXACT", "load_linear_exact", "sm_90a"
)
FOLD = Family("conv/fold.cuh", "FX_FUSER_FOLD", "load_fold")
CONV_DIRECT = Family(
    "conv/conv_direct_sm90.cuh",
    "FX_FUSER_CONV_DIRECT",
    "load_conv_direct",
    "sm_90a",
    common="FX_FUSER_CONV_DIRECT_COMMON",
)
CONV_DIRECT_BACKWARD = Family(
    "conv/conv_direct_backward_sm90.cuh",
    "FX_FUSER_CONV_DIRECT_BACKWARD",
    "load_conv_direct_backward",
    "sm_90a",
)


@functools.cache
def depthwise(kernel_h: int, kernel_w: int, stride: int) -> Family:
    """The depthwise convolutions with this window."""
    return Family(
        "conv/depthwise.cuh",
        "FX_FUSER_DEPTHWISE",
        "load_depthwise",
        sizes=(kernel_h, kernel_w, stride),
    )


@functools.cache
def stem(channels: int, kernel_h: int, kernel_w: int, stride: int, outputs: int) -> Family:
    """The convolution of a first layer with these sizes; `stem_cut` says whether it exists."""
    sizes = (channels, kernel_h, kernel_w, stride, outputs)
    return Family("conv/stem.cuh", "FX_FUSER_STEM", "load_stem", sizes=sizes)


_COLUMNS = (32, 64, 96, 128)  # that a tile of implicit.cuh may have


@functools.cache
def implicit(outputs: int, is_window: bool, leaves: int) -> Family:
    """The convolution of channels_last 16-bit tensors as an implicit gemm.

    outputs: its channels. is_window: is the kernel more than 1 × 1, or is there padding? leaves:
    how many of the epilogue's first tensors are one number a channel.
    """
    sizes = (implicit_columns(outputs), int(is_window), leaves)
    return Family("conv/implicit.cuh", "FX_FUSER_IMPLICIT", "load_implicit", sizes=sizes)


def implicit_columns(outputs: int) -> int:
    """Output channels of a tile: what costs least. Each part of them costs its columns, and reads
    the pixels again."""
    of_part = 48  # columns' worth
    return min((-(-outputs // n) * (n + of_part), -(-outputs // n) * n, n) for n in _COLUMNS)[-1]


@dataclass(frozen=True)
class KernelSpec:
    """A family's main loop with one functor.

    functor: its C++ name; definition: the C++ text that defines it, an #include or a struct.
    inputs: dtypes of the tensors that the functor reads, the anchor's value first. scalars: how
    many numbers it reads. acc: dtype of its arithmetic, out: of the result.
    """

    family: Family
    functor: str
    definition: str = field(repr=False)
    scalars: int
    acc: torch.dtype
    out: torch.dtype
    inputs: tuple[torch.dtype, ...]

    @property
    def signature(self) -> list[str]:
        """The macro's arguments; the shim gets the same."""
        types = (CUDA_TYPES[dtype] for dtype in (self.acc, self.out, *self.inputs))
        return [*map(str, self.family.sizes), self.functor, str(self.scalars), *types]

    @functools.cached_property
    def text(self) -> str:
        """The translation unit of the kernels that have the functor."""
        has_16_bits = self.out in (torch.float16, torch.bfloat16)
        coarse = "#define FX_FUSER_16_BIT_RESULT\n" if has_16_bits else ""  # epilogue_math.cuh
        return (
            f'{coarse}#include "{self.family.header}"\n{self.definition}\n'
            f"{self.family.macro}({', '.join(self.signature)})\n"
        )

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """All translation units, in the order in which the loader takes their cubins."""
        family = self.family
        if family.common is None:
            return (self.text,)
        of_all = f'#include "{family.header}"\n{family.common}({CUDA_TYPES[self.inputs[0]]})\n'
        return self.text, of_all

    @functools.cached_property
    def name(self) -> str:
        """The name by which a graph finds the kernel: the hash of its texts."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()[:32]


def texts_of(specs: Iterable[KernelSpec]) -> list[str]:
    """What is compiled for these kernels, each translation unit once."""
    return list(dict.fromkeys(text for spec in specs for text in spec.texts))
