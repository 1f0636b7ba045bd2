"""One grouped convolution of Inductor's graph, forward or backward: may the kernels compute it, and
what takes its place?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.kernels import grouped
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.grouped import FORWARD, OF_INPUT, OF_WEIGHT
from fx_fuser.passes.convolution.site import DB, DW, DX, Emit, Parts, Site, as_last, is_last

_aten = torch.ops.aten


@dataclass(frozen=True)
class GroupedSite(Site):
    """A node that the functions of `fx_fuser.ops.grouped` can compute."""

    FUNCTION = FORWARD

    @classmethod
    def of(cls, node: Node, device: str) -> GroupedSite | str:
        """Of this node, on such a device; or why it stays as it is."""
        parts = Parts.of(node)
        if parts is None:
            return "its results are not used one by one"
        fault = parts.fault_of_numbers(dimensions=2) or parts.fault(device, SIXTEEN_BITS)
        if fault:
            return fault
        found = cls(node, parts)
        return _fault_of_sizes(found) or _fault_of_results(found) or found

    @property
    def numbers(self) -> tuple[list[int], list[int], list[int], int]:
        """Stride, padding, dilation, groups."""
        stride, padding, dilation = (
            [*self.parts.numbers[name]] for name in ("stride", "padding", "dilation")
        )
        return stride, padding, dilation, self.groups

    def _spec(self, of: int | None) -> KernelSpec:
        inputs, outputs = self.weight.shape[1], self.weight.shape[0] // self.groups
        if of == DX:
            return grouped.spec_of(outputs, inputs, self.weight.dtype)
        kind = grouped.weight_spec_of if of == DW else grouped.spec_of
        return kind(inputs, outputs, self.weight.dtype)

    def made(self, emit: Emit, tensors: Mapping[str, Any]) -> dict[int, Any]:
        if not self.is_backward:
            return {0: self._forward(emit, tensors)}
        found: dict[int, Any] = {}
        dz = as_last(emit, tensors["grad_output"])
        if DX in self.items:
            size = [*map(int, self.tensors["input"].meta["val"].shape[2:])]
            given = dz, tensors["weight"], self._spec(DX).name, *self.numbers
            found[DX] = self.run(emit, OF_INPUT, *given, size)
        if DW in self.items:
            x, window = as_last(emit, tensors["input"]), [*map(int, self.weight.shape[2:])]
            given = x, dz, self._spec(DW).name, *self.numbers
            in_last = is_last(self.items[DW].meta["val"])
            found[DW] = self.run(emit, OF_WEIGHT, *given, window, in_last)
        if DB in self.items:
            found[DB] = self.bias_gradient(emit, tensors)
        return found

    def _forward(self, emit: Emit, tensors: Mapping[str, Any]) -> Any:
        x = as_last(emit, tensors["input"])
        z = self.run(emit, FORWARD, x, tensors["weight"], self._spec(None).name, *self.numbers)
        return self.plus_bias(emit, z, tensors)


def _fault_of_sizes(site: GroupedSite) -> str:
    x, weight = site.tensors["input"].meta["val"], site.weight
    inputs, outputs, groups = weight.shape[1], weight.shape[0] // site.groups, site.groups
    if x.shape[1] != inputs * groups or weight.shape[0] != outputs * groups:
        return "its channels are not those of its groups"
    if not grouped.takes(inputs, outputs, groups):
        return f"its {groups} groups have {inputs} and {outputs} channels"
    stride, padding, dilation, _ = site.numbers
    window = weight.shape[2:]
    if any(p < 0 or p > d * (k - 1) for p, d, k in zip(padding, dilation, window)):
        return f"its padding is {padding}"
    makes_dx = site.is_backward and DX in site.items
    if makes_dx and any(s > 1 and (d > 1 or k < s) for s, d, k in zip(stride, dilation, window)):
        return f"its stride is {stride}, its dilation {dilation}"
    return ""


def _fault_of_results(site: GroupedSite) -> str:
    for i, value in site.parts.results().items():
        if not isinstance(value, Tensor):
            return "its results are not used one by one"
        if site.is_backward and i == DB:
            continue
        if site.is_backward and i == DW:
            dense = torch.empty(value.shape, device="meta").stride()
            if value.stride() != dense and not is_last(value):
                return "the gradient of its weight is not dense"
        elif not is_last(value):
            return "its results are not in channels_last"
    return ""
