"""Planes in fp16 of fp32 tensors, and products from them, as `fx_fuser.ops.plain` has them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fx_fuser.kernels.planes import PLANES, order_of
from fx_fuser.native import load

# Tests put the emulated GPU's functions here.
make_plane: Callable[..., Any] = torch.ops.fx_fuser.plane.default
multiply_planes: Callable[..., Any] = torch.ops.fx_fuser.planes_product.default


@dataclass(frozen=True)
class Plane:
    """tensor: times 2^exponent it is `values`, which lie as it does, in lines of whole vectors."""

    tensor: Tensor
    values: Tensor
    facts: Tensor

    @classmethod
    def of(cls, tensor: Tensor, largest: Tensor | None = None) -> Plane:
        """largest: as of the op. Raises ValueError if there is no plane of the tensor."""
        order = order_of(tensor)
        if order is None:
            raise ValueError(f"{tuple(tensor.shape)} of strides {tensor.stride()} has no plane")
        return cls(tensor, *make_plane(tensor, largest, order, PLANES.name))

    @property
    def mT(self) -> Plane:
        """Of the transposed matrices: the same memory."""
        return Plane(self.tensor.mT, self.values.mT, self.facts)

    @property
    def exponent(self) -> int:
        return int(self.facts[0])

    @property
    def has_lost(self) -> bool:
        blocks = int(self.facts[1])
        return bool(self.facts[2 : 2 + blocks].any())


_uses = itertools.count()


def fresh(device: torch.device) -> str:
    """A kernel that no data have made take the library for its next calls."""
    spec = dataclasses.replace(PLANES, use=f"benchmarks {next(_uses)}")
    load.prepare([spec], device)
    return spec.name


def scaled_product(a: Plane, b: Plane, kernel: str = PLANES.name) -> tuple[Tensor, Tensor]:
    """a b with both scales in it, and two factors that take them away."""
    factors = a.values, b.values, a.facts, b.facts
    made: tuple[Tensor, Tensor] = multiply_planes(a.tensor, b.tensor, *factors, kernel)
    return made


def product(a: Plane, b: Plane, kernel: str = PLANES.name) -> Tensor:
    """a b in fp32."""
    sums, factors = scaled_product(a, b, kernel)
    return sums * factors[0] * factors[1]
