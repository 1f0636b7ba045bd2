"""One depthwise convolution of Inductor's graph, forward or backward: may the kernels compute it,
and what takes its place?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.kernels.depthwise import training
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.depthwise import FORWARD, OF_INPUT, OF_WEIGHT
from fx_fuser.passes.convolution.site import DB, DW, DX, Emit, Parts, Site, as_last, is_last

_aten = torch.ops.aten


@dataclass(frozen=True)
class DepthwiseSite(Site):
    """A node that the functions of `fx_fuser.ops.depthwise` can compute. Its weight is [channel, 1,
    height, width]."""

    FUNCTION = FORWARD

    @classmethod
    def of(cls, node: Node, device: str) -> DepthwiseSite | str:
        """Of this node, on such a device; or why it stays as it is."""
        parts = Parts.of(node)
        if parts is None:
            return "its results are not used one by one"
        fault = _fault_of_numbers(parts) or parts.fault(device, training.DTYPES)
        if fault:
            return fault
        found = cls(node, parts)
        return _fault_of_sizes(found) or _fault_of_results(found) or found

    @property
    def window(self) -> list[int]:
        return [*map(int, self.weight.shape[2:])]

    @property
    def padding(self) -> list[int]:
        return [*self.parts.numbers["padding"]]

    @property
    def stride(self) -> int:
        stride: int = self.parts.numbers["stride"][0]
        return stride

    def _spec(self, of: int | None) -> KernelSpec:
        kinds = {None: training.spec_of, DX: training.input_spec_of, DW: training.weight_spec_of}
        return kinds[of](self.window, self.stride, self.weight.dtype)

    def made(self, emit: Emit, tensors: Mapping[str, Any]) -> dict[int, Any]:
        if not self.is_backward:
            return {0: self._forward(emit, tensors)}
        found: dict[int, Any] = {}
        dz = as_last(emit, tensors["grad_output"])
        if DX in self.items:
            found[DX] = self._of_input(emit, dz, tensors["weight"])
        if DW in self.items:
            x = as_last(emit, tensors["input"])
            numbers = self._spec(DW).name, self.padding, self.window, self.stride
            dw = self.run(emit, OF_WEIGHT, x, dz, *numbers)
            found[DW] = self._laid(emit, dw, self.items[DW].meta["val"])
        if DB in self.items:
            found[DB] = self.bias_gradient(emit, tensors)
        return found

    def _forward(self, emit: Emit, tensors: Mapping[str, Any]) -> Any:
        x, numbers = as_last(emit, tensors["input"]), (self.padding, self.stride, False)
        z = self.run(emit, FORWARD, x, tensors["weight"], self._spec(None).name, *numbers)
        return self.plus_bias(emit, z, tensors)

    def _of_input(self, emit: Emit, dz: Any, weight: Any) -> Any:
        kernel = self._spec(DX).name
        if self.stride == 1:
            padding = [k - 1 - p for k, p in zip(self.window, self.padding)]
            return self.run(emit, FORWARD, dz, weight, kernel, padding, 1, True)
        size = [*map(int, self.tensors["input"].meta["val"].shape[2:])]
        return self.run(emit, OF_INPUT, dz, weight, kernel, self.padding, size)

    def _laid(self, emit: Emit, dw: Any, like: Tensor) -> Any:
        """With strides as torch has them: in channels_last that of the one input channel is 1."""
        if like.stride() == _contiguous(self):
            return dw
        seen = emit(_aten.view.default, dw, [self.groups, *self.window, 1])
        return emit(_aten.permute.default, seen, [0, 3, 1, 2])


def _contiguous(site: DepthwiseSite) -> tuple[int, ...]:
    """The weight's strides where it is contiguous."""
    height, width = site.window
    return height * width, height * width, width, 1


def _fault_of_numbers(parts: Parts) -> str:
    """Why the kernels do not compute it; empty if they do."""
    fault = parts.fault_of_numbers(dimensions=2)
    if fault:
        return fault
    stride = [*parts.numbers["stride"]]
    if stride[0] != stride[1] or stride[0] not in training.STRIDES:
        return f"its stride is {stride}"
    if [*parts.numbers["dilation"]] != [1, 1]:
        return f"its dilation is {parts.numbers['dilation']}"
    return ""


def _fault_of_sizes(site: DepthwiseSite) -> str:
    x, weight = site.tensors["input"].meta["val"], site.weight
    channels = site.groups
    if tuple(weight.shape[:2]) != (channels, 1) or x.shape[1] != channels:
        return "it is not depthwise"
    if not weight.is_contiguous():
        return "its weight is not contiguous"
    if not training.takes(site.window, site.stride, channels, weight.dtype):
        return f"its window is {site.window}, of {channels} channels"
    if not all(0 <= p < k for p, k in zip(site.padding, site.window)):
        return f"its padding is {site.padding}"
    return ""


def _fault_of_results(site: DepthwiseSite) -> str:
    for i, value in site.parts.results().items():
        if not isinstance(value, Tensor):
            return "its results are not used one by one"
        if site.is_backward and i == DB:
            continue
        if site.is_backward and i == DW:
            taps, _, width, _ = _contiguous(site)
            if value.stride() not in (_contiguous(site), (taps, 1, width, 1)):
                return "the gradient of its weight is not contiguous"
        elif not is_last(value):
            return "its results are not in channels_last"
    return ""
