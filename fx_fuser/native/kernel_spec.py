"""One kernel as a value, which Python passes to the compiler, the cache and the loader.

A family is a main loop of `kernels_cu/` (`fx_fuser.kernels`); a functor is the epilogue plugged
into it. The translation units and the shim's arguments are all generated from the spec. The shim
reads one of its parts, the signature.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

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

# The limits of a kernel's argument block: kMaxInputs, with the anchor's value, and kMaxScalars of
# kernels_cu/common/operands.h.
MAX_TENSORS = 16
MAX_NUMBERS = 8


@dataclass(frozen=True)
class Family:
    """A main loop. header: below kernels_cu; macro: of the header, instantiates the kernels.

    loader: its name in the shim (kernels_cu/host/kernel.h). arch: the only architecture that has
    it, or None if it runs everywhere. sizes: the macro's first arguments, over which loops are
    unrolled. common: a macro of kernels that are the same for all functors, given the type of the
    first input; the loader gets their cubin as well.
    """

    header: str
    macro: str
    loader: str
    arch: str | None = None
    sizes: tuple[int, ...] = ()
    common: str | None = None


# The epilogue alone, which goes with every kernel.
POINTWISE = Family("pointwise/pointwise.cuh", "FX_FUSER_POINTWISE", "pointwise")


@dataclass(frozen=True)
class KernelSpec:
    """A family's main loop with one functor.

    functor: its C++ name; definition: the C++ text that defines it, an #include or a struct.
    many numbers it reads. acc: dtype of its arithmetic, out: of the result. use: what the kernel is
    for. It is loaded once per use: what it remembers of its calls, such as data that splits badly,
    does not hold for other uses of the same texts.
    """

    family: Family
    functor: str
    definition: str = field(repr=False)
    scalars: int
    acc: torch.dtype
    out: torch.dtype
    inputs: tuple[torch.dtype, ...]
    use: str = ""

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
        """All translation units, in the order of the loader's cubins."""
        family = self.family
        if family.common is None:
            return (self.text,)
        of_all = f'#include "{family.header}"\n{family.common}({CUDA_TYPES[self.inputs[0]]})\n'
        return self.text, of_all

    @functools.cached_property
    def name(self) -> str:
        """The name by which a graph finds the kernel: a hash of its texts and its use."""
        parts = [*self.texts, *([self.use] if self.use else [])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def texts_of(specs: Iterable[KernelSpec]) -> list[str]:
    """The translation units of these kernels, each once."""
    return list(dict.fromkeys(text for spec in specs for text in spec.texts))
