"""One 16-bit convolution of Inductor's graph, forward or backward, that functions of `run` may
compute: what takes its place, and is that faster?"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.graph.read.nodes import argument_of
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.passes.attention_split import items_of
from fx_fuser.passes.graph_pass import call
from fx_fuser.planning import bench_ops, contest
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.convolution")

_aten = torch.ops.aten
CONVOLUTION = _aten.convolution.default
CONVOLUTION_BACKWARD = _aten.convolution_backward.default
DX, DW, DB = range(3)  # of the backward's results
_NUMBERS = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
# Calls an operation, of nodes in a graph or of tensors.
Emit = Callable[..., Any]


@dataclass(frozen=True)
class Parts:
    """What a node of a convolution reads and makes.

    tensors: name → node of what it reads. items: index → the node that takes this one of the
    results; of a convolution the node itself. numbers: name → its others.
    """

    tensors: Mapping[str, Node]
    items: Mapping[int, Node]
    numbers: Mapping[str, Any]

    @classmethod
    def of(cls, node: Node) -> Parts | None:
        """None if its results are not used one by one."""
        is_backward = node.target is CONVOLUTION_BACKWARD
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = {a.name: argument_of(node, i, a.name) for i, a in enumerate(schema)}
        names = ("grad_output", "input", "weight") if is_backward else ("input", "weight", "bias")
        tensors = {name: given[name] for name in names if isinstance(given[name], Node)}
        items = items_of(node) if is_backward else {0: node}
        if items is None or not items.keys() & {DX, DW}:
            return None
        numbers = {name: _of_each(given[name], tensors.get("weight")) for name in _NUMBERS}
        return cls(tensors, items, numbers)

    def fault(self, device: str, dtypes: Sequence[torch.dtype]) -> str:
        """Why no kernel takes these tensors; empty if one may."""
        values = [node.meta.get("val") for node in self.tensors.values()]
        if not all(isinstance(v, Tensor) and v.layout == torch.strided for v in values):
            return "an operand is not a dense tensor"
        if self.tensors.keys() < {"input", "weight"}:
            return "an operand is missing"
        found: list[Any] = values
        if {v.device.type for v in found} != {device}:
            return f"it is not on {device}"
        of_all = {v.dtype for v in found}
        if len(of_all) != 1 or not of_all <= {*dtypes}:
            return "it is not of one 16-bit dtype"
        if any(bench_ops.form_of_value(v) is None for v in found):
            return "a size is not known when compiling"
        if any(n == 0 for v in found for n in v.shape if isinstance(n, int)):
            return "it is empty"
        return ""

    def fault_of_numbers(self, dimensions: int) -> str:
        """Of a convolution that is not transposed, along so many dimensions; empty if it is one."""
        if len(self.numbers["stride"]) != dimensions:
            return "it has another number of dimensions"
        if self.numbers["transposed"] is not False or any(self.numbers["output_padding"]):
            return "it is transposed"
        if any(type(n) is not int for n in (*self.numbers["padding"], self.numbers["groups"])):
            return "its padding or its groups are not known when compiling"
        return ""

    def results(self) -> dict[int, Any]:
        return {i: item.meta.get("val") for i, item in self.items.items()}


def _of_each(number: Any, weight: Node | None) -> Any:
    """A list has a number for each dimension; one may stand for all, as with padding="valid"."""
    value = None if weight is None else weight.meta.get("val")
    is_one = isinstance(number, (list, tuple)) and len(number) == 1
    return [*number] * (value.ndim - 2) if is_one and isinstance(value, Tensor) else number


@dataclass(frozen=True)
class Site(ABC):
    """A node that functions of `fx_fuser.ops` can compute. FUNCTION: one of them, for messages."""

    FUNCTION: ClassVar[str]

    node: Node
    parts: Parts

    @property
    def tensors(self) -> Mapping[str, Node]:
        return self.parts.tensors

    @property
    def items(self) -> Mapping[int, Node]:
        return self.parts.items

    @property
    def groups(self) -> int:
        groups: int = self.parts.numbers["groups"]
        return groups

    @property
    def weight(self) -> Tensor:
        """Fake."""
        value: Tensor = self.tensors["weight"].meta["val"]
        return value

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def is_backward(self) -> bool:
        return self.node.target is CONVOLUTION_BACKWARD

    @abstractmethod
    def _spec(self, of: int | None) -> KernelSpec:
        """The kernel of the convolution (None) or of this one of the backward's results."""

    def specs(self) -> list[KernelSpec]:
        """All kernels that it needs."""
        if not self.is_backward:
            return [self._spec(None)]
        return [*dict.fromkeys(self._spec(of) for of in self.items if of != DB)]

    # ---- what takes its place --------------------------------------------------------------------

    @abstractmethod
    def made(self, emit: Emit, tensors: Mapping[str, Any]) -> dict[int, Any]:
        """Index → result, of tensors or nodes by the names of `tensors`."""

    def run(self, emit: Emit, function: str, *given: Any) -> Any:
        return emit(run.ONE, *run.arguments(function, given))

    def plus_bias(self, emit: Emit, z: Any, tensors: Mapping[str, Any]) -> Any:
        """As Inductor has it: what reads the sum is mostly fused with it."""
        if "bias" not in tensors:
            return z
        sizes = [1, self.weight.shape[0], *[1] * (self.weight.ndim - 2)]
        return emit(_aten.add.Tensor, z, emit(_aten.view.default, tensors["bias"], sizes))

    def bias_gradient(self, emit: Emit, tensors: Mapping[str, Any]) -> Any:
        """As Inductor makes it."""
        dz = tensors["grad_output"]
        along = [0, *range(2, self.weight.ndim)]
        return emit(_aten.sum.dim_IntList, dz, along)

    def replace(self) -> None:
        """Raises RuntimeError, and replaces nothing, if a result would have another form."""
        graph, node = self.node.graph, self.node
        with graph.inserting_before(node):
            new = self.made(functools.partial(call, graph, node), self.tensors)
        for i, item in self.items.items():
            forms = [bench_ops.form_of_value(n.meta["val"]) for n in (item, new[i])]
            if forms[0] != forms[1]:
                raise RuntimeError(f"result {i} would be {forms[1]}, not {forms[0]}")
        for i, item in self.items.items():
            item.replace_all_uses_with(new[i])
        for item in list(node.users):
            graph.erase_node(item)
        graph.erase_node(node)

    # ---- is it faster? ---------------------------------------------------------------------------

    def gains(self) -> bool:
        """Is it faster than the library's, at these sizes and strides, with all copies?"""
        forms = {name: bench_ops.form_of_value(n.meta["val"]) for name, n in self.tensors.items()}
        if None in forms.values():
            return False
        said = (f"{name} {form}" for name, form in forms.items())
        asked = [self.parts.numbers, *sorted(self.items), *(spec.name for spec in self.specs())]
        key = str(self.node.target), *said, *map(str, asked)
        make = functools.partial(self._candidates, forms)  # type: ignore[arg-type]
        found = contest.times(key, make, self.device)
        if isinstance(found, str):
            log.info("%s is left: %s", self.node, found)
            return False
        library, ours = (took.gpu for took in found)
        log.info("%s of %s: library %.4g ms, ours %.4g", self.node.target,
                 [*forms.values()], library, ours)  # fmt: skip
        return contest.gains(ours, library)

    def _candidates(self, forms: Mapping[str, TensorForm]) -> list[Candidate]:
        """The library's, and ours."""
        generator = torch.Generator(self.device).manual_seed(0)
        deviation = self.weight[0].numel() ** -0.5
        values = {
            name: form.random(generator, deviation if name == "weight" else 1.0)
            for name, form in forms.items()
        }
        runs = [functools.partial(self._library, values), functools.partial(self._ours, values)]
        bench_ops.compare(runs, self.FUNCTION, self.weight.dtype)
        return [*map(Candidate, runs)]

    def _ours(self, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        made = self.made(lambda target, *given, **named: target(*given, **named), values)
        return [made[i] for i in sorted(self.items)]

    def _library(self, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        numbers = self.parts.numbers.values()
        x, weight = values["input"], values["weight"]
        if not self.is_backward:
            return [CONVOLUTION(x, weight, values.get("bias"), *numbers)]
        asked = [i in self.items for i in range(3)]
        sizes = [weight.shape[0]]
        made = CONVOLUTION_BACKWARD(values["grad_output"], x, weight, sizes, *numbers, asked)
        return [made[i] for i in sorted(self.items)]


# ---- layouts -------------------------------------------------------------------------------------

_VECTOR = 8  # elements that an access has


def is_last(image: Tensor) -> bool:
    """Has it the strides that channels_last gives?"""
    _, c, h, w = image.shape
    return image.stride() == (c * h * w, 1, w * c, c)


def as_last(emit: Emit, value: Any) -> Any:
    """In channels_last, copied where it is not, or begins in the middle of a vector."""
    fake = value.meta["val"] if isinstance(value, Node) else value
    if is_last(fake) and fake.storage_offset() % _VECTOR == 0:
        return value
    return emit(_aten.clone.default, value, memory_format=torch.channels_last)
