"""One convolution along one dimension of Inductor's graph, forward or backward: may the kernels
compute it, and what takes its place?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.kernels import conv1d
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.conv1d import FORWARD, OF_WEIGHT
from fx_fuser.passes.convolution.site import DB, DW, DX, Emit, Parts, Site

_aten = torch.ops.aten
_REVERSE = torch.ops.prims.rev.default  # Inductor has decomposed `flip` by then
# The library has kernels for shorter windows.
FEWEST_TAPS = 16
_CONTIGUOUS = {"memory_format": torch.contiguous_format}


@dataclass(frozen=True)
class Conv1dSite(Site):
    """A node that the functions of `fx_fuser.ops.conv1d` can compute. Its weight is
    [out channel, in channel of a group, tap]."""

    FUNCTION = FORWARD

    @classmethod
    def of(cls, node: Node, device: str) -> Conv1dSite | str:
        """Of this node, on such a device; or why it stays as it is."""
        parts = Parts.of(node)
        if parts is None:
            return "its results are not used one by one"
        fault = _fault_of_numbers(parts) or parts.fault(device, conv1d.DTYPES)
        if fault:
            return fault
        found = cls(node, parts)
        fault = _fault_of_sizes(found.weight, found.groups, found.padding)
        if fault:
            return fault
        if not all(isinstance(v, Tensor) and v.is_contiguous() for v in parts.results().values()):
            return "a result is not contiguous"
        return found

    @property
    def padding(self) -> int:
        padding: int = self.parts.numbers["padding"][0]
        return padding

    def _channels(self) -> tuple[int, int]:
        """Of a group: of the result, of x."""
        return self.weight.shape[0] // self.groups, self.weight.shape[1]

    def _spec(self, of: int | None) -> KernelSpec:
        out, into = self._channels()
        if of == DW:
            return conv1d.weight_spec_of(out, into, self.weight.dtype)
        return conv1d.spec_of(out if of is None else into, self.weight.dtype)

    def _taps(self, emit: Emit, weight: Any, turned: bool = False) -> Any:
        """The weight in taps; turned: as the gradient of x reads it."""
        out, into = self._channels()
        sizes = [self.groups, out, into, self.weight.shape[2]]
        grouped = emit(_aten.view.default, weight, sizes)
        if turned:
            grouped = emit(_REVERSE, grouped, [3])
        order = [0, 3, 2, 1] if turned else [0, 3, 1, 2]
        return emit(_aten.clone.default, emit(_aten.permute.default, grouped, order), **_CONTIGUOUS)

    def made(self, emit: Emit, tensors: Mapping[str, Any]) -> dict[int, Any]:
        weight = tensors["weight"]
        if not self.is_backward:
            given = _rows(emit, tensors["input"]), self._taps(emit, weight), tensors.get("bias")
            z = self.run(emit, FORWARD, *given, self._spec(None).name, self.padding)
            return {0: _transposed(emit, z)}
        found: dict[int, Any] = {}
        dz = _rows(emit, tensors["grad_output"])
        if DX in self.items:
            taps = self._taps(emit, weight, turned=True)
            padding = self.weight.shape[2] - 1 - self.padding
            dx = self.run(emit, FORWARD, dz, taps, None, self._spec(DX).name, padding)
            found[DX] = _transposed(emit, dx)
        if DW in self.items:
            numbers = self._spec(DW).name, self.groups, self.padding
            x = _rows(emit, tensors["input"])
            dw = self.run(emit, OF_WEIGHT, x, dz, *numbers)
            laid = emit(_aten.permute.default, dw, [0, 2, 3, 1])
            laid = emit(_aten.clone.default, laid, **_CONTIGUOUS)
            found[DW] = emit(_aten.view.default, laid, [*self.weight.shape])
        if DB in self.items:
            found[DB] = self.bias_gradient(emit, tensors)
        return found


def _rows(emit: Emit, value: Any) -> Any:
    """[batch, channel, frame] as [batch, frame, channel], copied where channels are not adjacent or
    rows and batches are not multiples of 16 bytes."""
    seen = emit(_aten.permute.default, value, [0, 2, 1])
    fake = value.meta["val"] if isinstance(value, Node) else value
    is_laid = statically_known_true(fake.stride(1) == 1) and all(
        statically_known_true(n % conv1d.CHUNK == 0)
        for n in (fake.stride(0), fake.stride(2), fake.storage_offset())
    )
    return seen if is_laid else emit(_aten.clone.default, seen, **_CONTIGUOUS)


def _transposed(emit: Emit, rows: Any) -> Any:
    """[batch, channel, frame], contiguous, as torch's results are. What reads it is mostly fused
    with the copy."""
    seen = emit(_aten.permute.default, rows, [0, 2, 1])
    return emit(_aten.clone.default, seen, **_CONTIGUOUS)


def _fault_of_numbers(parts: Parts) -> str:
    """Why the kernels do not compute it; empty if they do."""
    fault = parts.fault_of_numbers(dimensions=1)
    if fault:
        return fault
    for name in ("stride", "dilation"):
        if [*parts.numbers[name]] != [1]:
            return f"its {name} is {parts.numbers[name]}"
    return "" if parts.numbers["groups"] > 1 else "it has one group"


def _fault_of_sizes(weight: Tensor, groups: int, padding: int) -> str:
    if not all(isinstance(n, int) for n in weight.shape) or not weight.is_contiguous():
        return "its weight is not contiguous"
    taps, out, into = weight.shape[2], weight.shape[0] // groups, weight.shape[1]
    if taps < FEWEST_TAPS:
        return f"the library has kernels for {taps} taps"
    if not 0 <= padding < taps:
        return f"its padding is {padding}"
    if not conv1d.takes(out, into, weight.dtype):
        return f"its groups have {into} and {out} channels"
    return ""
