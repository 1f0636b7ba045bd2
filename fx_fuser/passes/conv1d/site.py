"""One convolution along one dimension of Inductor's graph, forward or backward: may the kernels
compute it, what takes its place, and is that faster?"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read.nodes import argument_of
from fx_fuser.kernels import conv1d
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.conv1d import FORWARD, OF_WEIGHT
from fx_fuser.passes.attention_split import items_of
from fx_fuser.passes.graph_pass import call
from fx_fuser.planning import bench_ops, contest
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.conv1d")

_aten = torch.ops.aten
CONVOLUTION = _aten.convolution.default
CONVOLUTION_BACKWARD = _aten.convolution_backward.default
_REVERSE = torch.ops.prims.rev.default  # Inductor has decomposed `flip` by then
# The library has kernels for shorter windows.
FEWEST_TAPS = 16
_OF_X, _OF_WEIGHT, _OF_BIAS = range(3)  # of the backward's results
_CONTIGUOUS = {"memory_format": torch.contiguous_format}
# Calls an operation, of nodes in a graph or of tensors.
Emit = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """A node that the functions of `fx_fuser.ops.conv1d` can compute.

    tensors: name → node of what it reads. items: index → the node that takes this one of the
    results; of a convolution the node itself.
    """

    node: Node
    tensors: Mapping[str, Node]
    items: Mapping[int, Node]
    groups: int
    padding: int

    @classmethod
    def of(cls, node: Node, device: str) -> Site | str:
        """Of this node, on such a device; or why it stays as it is."""
        is_backward = node.target is CONVOLUTION_BACKWARD
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = {a.name: argument_of(node, i, a.name) for i, a in enumerate(schema)}
        fault = _fault_of_numbers(given)
        if fault:
            return fault
        names = ("grad_output", "input", "weight") if is_backward else ("input", "weight", "bias")
        tensors = {name: given[name] for name in names if isinstance(given[name], Node)}
        fault = _fault_of_tensors(tensors, device)
        if fault:
            return fault
        groups, padding = given["groups"], given["padding"][0]
        fault = _fault_of_sizes(tensors["weight"].meta["val"], groups, padding)
        if fault:
            return fault
        items = items_of(node) if is_backward else {0: node}
        if items is None or not items.keys() & {_OF_X, _OF_WEIGHT}:
            return "its results are not used one by one"
        results = [item.meta.get("val") for item in items.values()]
        if not all(isinstance(v, Tensor) and v.is_contiguous() for v in results):
            return "a result is not contiguous"
        return cls(node, tensors, items, groups, padding)

    @property
    def weight(self) -> Tensor:
        """[out channel, in channel of a group, tap], fake."""
        value: Tensor = self.tensors["weight"].meta["val"]
        return value

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def is_backward(self) -> bool:
        return self.node.target is CONVOLUTION_BACKWARD

    def _channels(self) -> tuple[int, int]:
        """Of a group: of the result, of x."""
        return self.weight.shape[0] // self.groups, self.weight.shape[1]

    def _spec(self, of: int | None) -> KernelSpec:
        """The kernel of the convolution (None) or of this one of the backward's results."""
        out, into = self._channels()
        if of == _OF_WEIGHT:
            return conv1d.weight_spec_of(out, into, self.weight.dtype)
        return conv1d.spec_of(out if of is None else into, self.weight.dtype)

    def specs(self) -> list[KernelSpec]:
        """All that it needs."""
        if not self.is_backward:
            return [self._spec(None)]
        return [*dict.fromkeys(self._spec(of) for of in self.items if of != _OF_BIAS)]

    # ---- what takes its place --------------------------------------------------------------------

    def _taps(self, emit: Emit, weight: Any, turned: bool = False) -> Any:
        """The weight in taps; turned: as the gradient by x reads it."""
        out, into = self._channels()
        sizes = [self.groups, out, into, self.weight.shape[2]]
        grouped = emit(_aten.view.default, weight, sizes)
        if turned:
            grouped = emit(_REVERSE, grouped, [3])
        order = [0, 3, 2, 1] if turned else [0, 3, 1, 2]
        return emit(_aten.clone.default, emit(_aten.permute.default, grouped, order), **_CONTIGUOUS)

    def _run(self, emit: Emit, function: str, *given: Any) -> Any:
        return emit(run.ONE, *run.arguments(function, given))

    def made(self, emit: Emit, tensors: Mapping[str, Any]) -> dict[int, Any]:
        """Index → result, of tensors or nodes by the names of `tensors`."""
        weight = tensors["weight"]
        if not self.is_backward:
            given = _rows(emit, tensors["input"]), self._taps(emit, weight), tensors.get("bias")
            z = self._run(emit, FORWARD, *given, self._spec(None).name, self.padding)
            return {0: _transposed(emit, z)}
        found: dict[int, Any] = {}
        dz = _rows(emit, tensors["grad_output"])
        if _OF_X in self.items:
            taps = self._taps(emit, weight, turned=True)
            padding = self.weight.shape[2] - 1 - self.padding
            dx = self._run(emit, FORWARD, dz, taps, None, self._spec(_OF_X).name, padding)
            found[_OF_X] = _transposed(emit, dx)
        if _OF_WEIGHT in self.items:
            numbers = self._spec(_OF_WEIGHT).name, self.groups, self.padding
            x = _rows(emit, tensors["input"])
            dw = self._run(emit, OF_WEIGHT, x, dz, *numbers)
            laid = emit(_aten.permute.default, dw, [0, 2, 3, 1])
            laid = emit(_aten.clone.default, laid, **_CONTIGUOUS)
            found[_OF_WEIGHT] = emit(_aten.view.default, laid, [*self.weight.shape])
        if _OF_BIAS in self.items:
            found[_OF_BIAS] = emit(_aten.sum.dim_IntList, tensors["grad_output"], [0, 2])
        return found

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
        key = (str(self.node.target), *said, self.groups, self.padding, *sorted(self.items))
        key = (*key, *(spec.name for spec in self.specs()))
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
        deviation = (self.weight.shape[1] * self.weight.shape[2]) ** -0.5
        values = {
            name: form.random(generator, deviation if name == "weight" else 1.0)
            for name, form in forms.items()
        }
        runs = [functools.partial(self._library, values), functools.partial(self._ours, values)]
        bench_ops.compare(runs, FORWARD, self.weight.dtype)
        return [*map(Candidate, runs)]

    def _ours(self, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        made = self.made(lambda target, *given, **named: target(*given, **named), values)
        return [made[i] for i in sorted(self.items)]

    def _library(self, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
        numbers = [1], [self.padding], [1], False, [0], self.groups
        x, weight = values["input"], values["weight"]
        if not self.is_backward:
            return [CONVOLUTION(x, weight, values.get("bias"), *numbers)]
        asked = [i in self.items for i in range(3)]
        sizes = [weight.shape[0]]
        made = CONVOLUTION_BACKWARD(values["grad_output"], x, weight, sizes, *numbers, asked)
        return [made[i] for i in sorted(self.items)]


def _rows(emit: Emit, value: Any) -> Any:
    """[batch, channel, frame] as [batch, frame, channel], copied where channels are not adjacent or
    rows and batches are no multiples of 16 bytes."""
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


def _fault_of_numbers(given: Mapping[str, Any]) -> str:
    """Why the kernels do not compute it; empty if they do."""
    if len(given["stride"]) != 1:
        return "it has another number of dimensions"
    if given["transposed"] is not False or [*given["output_padding"]] != [0]:
        return "it is transposed"
    for name in ("stride", "dilation"):
        if [*given[name]] != [1]:
            return f"its {name} is {given[name]}"
    padding, groups = given["padding"][0], given["groups"]
    if type(padding) is not int or type(groups) is not int:
        return "its padding or its groups are not known when compiling"
    return "" if groups > 1 else "it has one group"


def _fault_of_tensors(tensors: Mapping[str, Node], device: str) -> str:
    values = [node.meta.get("val") for node in tensors.values()]
    if not all(isinstance(v, Tensor) and v.layout == torch.strided for v in values):
        return "an operand is no dense tensor"
    if tensors.keys() < {"input", "weight"}:
        return "an operand is missing"
    found: list[Any] = values
    if {v.device.type for v in found} != {device}:
        return f"it is not on {device}"
    dtypes = {v.dtype for v in found}
    if len(dtypes) != 1 or not dtypes <= {*conv1d.DTYPES}:
        return "it is not of one 16-bit dtype"
    if any(bench_ops.form_of_value(v) is None for v in found):
        return "a size is not known when compiling"
    if any(n == 0 for v in found for n in v.shape if isinstance(n, int)):
        return "it is empty"
    return ""


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
