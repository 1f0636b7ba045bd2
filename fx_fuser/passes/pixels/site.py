"""One 1 x 1 convolution of Inductor's graph with the statistics of its result: may the kernel
compute it, what takes its place, and is that faster?"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.graph.read.nodes import argument_of
from fx_fuser.kernels import pixels
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.pixels import MOMENTS
from fx_fuser.passes.attention_split import items_of
from fx_fuser.passes.graph_pass import call
from fx_fuser.planning import bench_ops, contest
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.pixels")

_aten = torch.ops.aten
CONVOLUTION = _aten.convolution.default
_CAST = torch.ops.prims.convert_element_type.default
_VAR_MEAN = _aten.var_mean.correction
_OVER = {0, 2, 3}
_VARIANCE, _MEAN = range(2)  # of var_mean's results
_PLACES = {_MEAN: 1, _VARIANCE: 2}  # where the function has them


@dataclass(frozen=True)
class Site:
    """A convolution and the statistics of its result. items: index of var_mean → the node that
    takes it."""

    node: Node
    statistics: Node
    items: Mapping[int, Node]

    @classmethod
    def of(cls, node: Node, device: str) -> Site | str:
        """Of this convolution, on such a device; or why it stays as it is."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = {a.name: argument_of(node, i, a.name) for i, a in enumerate(schema)}
        fault = _fault_of_numbers(given) or _fault_of_tensors(
            [given["input"].meta.get("val"), given["weight"].meta.get("val"), node.meta["val"]],
            device,
        )
        if fault:
            return fault
        found = [user for cast in node.users if _is_cast_up(cast) for user in cast.users]
        statistics = [user for user in found if _is_statistics(user)]
        if len(statistics) != 1:
            return "nothing asks for its statistics, or several do"
        items = items_of(statistics[0])
        if not items:
            return "its statistics are not used one by one"
        return cls(node, statistics[0], items)

    @property
    def _tensors(self) -> tuple[Node, Node]:
        return self.node.args[0], self.node.args[1]  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.node.meta["val"].dtype
        return found

    @property
    def device(self) -> torch.device:
        found: torch.device = self.node.meta["val"].device
        return found

    @property
    def spec(self) -> KernelSpec:
        return pixels.spec_of(self.dtype)

    def replace(self, shape: int) -> None:
        """shape: of the kernel's tiles. Raises RuntimeError, and replaces nothing, if a result
        would have another form."""
        graph, node = self.node.graph, self.node
        with graph.inserting_before(node):
            arguments = run.arguments(MOMENTS, (*self._tensors, self.spec.name, shape))
            made = call(graph, node, run.MANY, *arguments)
            z = call(graph, node, operator.getitem, made, 0)
            new = {
                i: call(graph, item, operator.getitem, made, _PLACES[i])
                for i, item in self.items.items()
            }
        for old, one in [(node, z), *((self.items[i], new[i]) for i in new)]:
            forms = [_form_without_ones(n.meta["val"]) for n in (old, one)]
            if forms[0] != forms[1]:
                raise RuntimeError(f"{old} would be {forms[1]}, not {forms[0]}")
        for i, item in self.items.items():
            item.replace_all_uses_with(new[i])
        for item in list(self.statistics.users):
            graph.erase_node(item)
        cast = self.statistics.args[0]
        graph.erase_node(self.statistics)
        if isinstance(cast, Node) and not cast.users:
            graph.erase_node(cast)
        node.replace_all_uses_with(z)
        graph.erase_node(node)

    # ---- is it faster? ---------------------------------------------------------------------------

    def shape_that_gains(self) -> int | None:
        """The tiles with which it is fastest, if that is faster than the library's convolution and
        one pass over its result."""
        forms = [bench_ops.form_of_value(n.meta["val"]) for n in self._tensors]
        if None in forms:
            return None
        key = (MOMENTS, *map(str, forms), self.spec.name)
        make = functools.partial(self._candidates, forms)  # type: ignore[arg-type]
        found = contest.times(key, make, self.device)
        if isinstance(found, str):
            log.info("%s is left: %s", self.node, found)
            return None
        library, *ours = (took.gpu for took in found)
        best = min(range(len(ours)), key=ours.__getitem__)
        log.info("%s of %s: library %.4g ms, ours %.4g", MOMENTS, forms, library, ours[best])
        return best if contest.gains(ours[best], library) else None

    def _candidates(self, forms: Sequence[TensorForm]) -> list[Candidate]:
        """The library's, then ours with each shape of tiles.

        The library's has a sum of all of z instead of its statistics: a pass that reads as much, in
        fewer instructions than Inductor's.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        deviation = forms[1].size[1] ** -0.5
        values = [form.random(generator, d) for form, d in zip(forms, (1.0, deviation))]
        ours = [functools.partial(self._ours, values, shape) for shape in range(len(pixels.SHAPES))]
        for one in ours:
            bench_ops.compare([functools.partial(_exact, values), one], MOMENTS, self.dtype)
        return [Candidate(functools.partial(_read_once, values)), *map(Candidate, ours)]

    def _ours(self, values: Sequence[Tensor], shape: int) -> Sequence[Tensor]:
        return run.MANY(*run.arguments(MOMENTS, (*values, self.spec.name, shape)))


def _library(values: Sequence[Tensor]) -> Tensor:
    x, weight = values
    made: Tensor = CONVOLUTION(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return made


def _read_once(values: Sequence[Tensor]) -> Tensor:
    return _library(values).sum(dtype=torch.float32)


def _exact(values: Sequence[Tensor]) -> Sequence[Tensor]:
    return run.IN_TORCH(*run.arguments(MOMENTS, (*values, "", 0)))


def _form_without_ones(value: Tensor) -> tuple[Any, ...]:
    """Strides of dimensions of one element do not matter."""
    strides = [step for n, step in zip(value.shape, value.stride()) if n != 1]
    return [*value.shape], strides, value.dtype, value.device


def _is_cast_up(node: Node) -> bool:
    return node.target is _CAST and node.args[1] is torch.float32


def _is_statistics(node: Node) -> bool:
    if node.target is not _VAR_MEAN:
        return False
    over = argument_of(node, 1, "dim")
    named = node.kwargs
    if over is None or {d % 4 for d in over} != _OVER or named.get("keepdim") is not True:
        return False
    correction = named.get("correction")
    return isinstance(correction, (int, float)) and correction == 0


def _fault_of_numbers(given: Mapping[str, Any]) -> str:
    """Why the kernel does not compute it; empty if it does."""
    if given["transposed"] is not False or any(n != 0 for n in given["output_padding"]):
        return "it is transposed"
    for name, wanted in (("stride", 1), ("padding", 0)):
        if [*given[name]] != [wanted, wanted]:
            return f"its {name} is {given[name]}"
    if given["groups"] != 1:
        return "it has groups"
    return "" if given["bias"] is None else "it has a bias"


def _fault_of_tensors(values: Sequence[Any], device: str) -> str:
    """values: x, the weight and z."""
    if not all(isinstance(v, Tensor) and v.layout == torch.strided for v in values):
        return "an operand is not a dense tensor"
    x, weight, z = values
    if weight.ndim != 4 or [*weight.shape[2:]] != [1, 1]:
        return "its window has more than one pixel"
    if {v.device.type for v in values} != {device}:
        return f"it is not on {device}"
    if {v.dtype for v in values} != {z.dtype} or z.dtype not in pixels.DTYPES:
        return "it is not of one 16-bit dtype"
    if any(bench_ops.form_of_value(v) is None for v in values):
        return "a size is not known when compiling"
    if any(n == 0 for n in z.shape):
        return "it is empty"
    if not pixels.takes(*weight.shape[:2]):
        return f"its channels are not multiples of {pixels.WIDTH}"
    if not all(v.is_contiguous(memory_format=torch.channels_last) for v in (x, z)):
        return "it is not in channels_last"
    is_dense = weight.stride(0) == weight.shape[1] and weight.stride(1) == 1
    return "" if is_dense else "its weight is not dense"
