"""Inductor's graph of ATen operations → the same, with fp32 gemms from planes, where torch's
settings ask for TF32 and that is faster.

A matrix's plane (kernels_cu/linear/linear_planes.cuh) serves all gemms of the graph that read it,
turned around or not: of a backward pass the gradients of input and weight, of forward the
projections of one input. So a plane is an operation of its own, and gemms are chosen together.

Nothing runs this pass before a GPU has run its kernels (issue 44).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fx_fuser.errors import BuildError
from fx_fuser.kernels.planes import MAKE_PLANE, PLANES_GEMMS, has_plane, is_along
from fx_fuser.kernels.precision import matmul_tf32_requested
from fx_fuser.native import limits, load
from fx_fuser.passes.graph_pass import GEMMS, GraphPass, call, leave
from fx_fuser.passes.planes.choice import Offer, chosen
from fx_fuser.planning import bench_ops, contest
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.planes")

COUNTERS = "fx_fuser_planes"  # in `torch._dynamo.utils.counters`: operation → how many replaced
_aten = torch.ops.aten
_PLANE = torch.ops.fx_fuser.plane.default
_PRODUCT = torch.ops.fx_fuser.planes_product.default
_LEAST = 2**28  # multiply-adds: with fewer the library is done when planes are made


class Factors(NamedTuple):
    """a and right of a · right, and the matrices whose planes they read."""

    a: Node
    right: Node
    planes: tuple[Node, Node]


@dataclass(frozen=True)
class PlaneProducts(GraphPass):
    """fp32 gemms from planes."""

    COUNTERS = COUNTERS
    TARGETS = (_aten.mm.default, _aten.addmm.default)

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), MAKE_PLANE.name, *(spec.name for spec in PLANES_GEMMS.values())

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        found = {node: f for node in graph.nodes if (f := self.factors(node)) is not None}
        try:
            taken = set(found) if self.on_cpu else _faster(found)
        except Exception as error:
            leave(error, self.strict)
            taken = set()
        planes: dict[Node, Node] = {}

        def replace(node: Node) -> str | None:
            if node not in taken:
                return None
            _put(graph, node, found[node], planes)
            return ""

        return replace

    def factors(self, node: Node) -> Factors | None:
        """Of an fp32 gemm of matrices that have planes; else None."""
        if node.op != "call_function" or node.target not in self.TARGETS or node.kwargs:
            return None
        a, right = (node.args[i] for i in GEMMS[node.target])
        if not isinstance(a, Node) or not isinstance(right, Node):
            return None
        planes = _unturned(a), _unturned(right)
        values: list[Any] = [n.meta.get("val") for n in (*planes, a, right)]
        if any(not isinstance(v, Tensor) or v.layout != torch.strided for v in values):
            return None
        if not all(has_plane(v) and min(v.shape) > 1 for v in values):
            return None
        forms = [bench_ops.form_of_value(v) for v in values]
        if None in forms:  # of sizes that are not known
            return None
        if values[0].device.type != "cuda":
            return Factors(a, right, planes) if self.on_cpu else None
        if math.prod((*values[2].shape, values[3].shape[1])) < _LEAST:
            return None
        if not load.runs_on(next(iter(PLANES_GEMMS.values())), values[0].device):
            return None
        return Factors(a, right, planes)


def _unturned(node: Node) -> Node:
    """The matrix whose transpose this is, or itself."""
    while node.op == "call_function":
        turns = node.target == _aten.t.default
        if node.target == _aten.permute.default:
            turns = [d % 2 for d in node.args[1]] == [1, 0] and len(node.args[1]) == 2  # type: ignore
        elif node.target == _aten.transpose.int:
            value = node.meta.get("val")
            dims = {d % 2 for d in node.args[1:]}  # type: ignore[operator]
            turns = isinstance(value, Tensor) and value.ndim == 2 and len(dims) == 2
        if not turns:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _put(graph: Graph, node: Node, factors: Factors, planes: dict[Node, Node]) -> None:
    """planes: matrix → its plane, as far as they are made; receives the others."""
    with graph.inserting_before(node):
        for matrix in factors.planes:
            if matrix not in planes:
                planes[matrix] = call(graph, node, _PLANE, matrix, MAKE_PLANE.name)
        b = call(graph, node, _aten.permute.default, factors.right, [1, 0])
        form = is_along(factors.a.meta["val"]), is_along(b.meta["val"])
        of_both = (planes[matrix] for matrix in factors.planes)
        result = call(graph, node, _PRODUCT, factors.a, b, *of_both, PLANES_GEMMS[form].name)
        if GEMMS[node.target][0]:
            result = call(graph, node, _aten.add.Tensor, result, node.args[0])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


# ---- times ---------------------------------------------------------------------------------------


def prepare(device: torch.device) -> None:
    """Loads the kernels, where the device has them."""
    if load.runs_on(next(iter(PLANES_GEMMS.values())), device):
        load.prepare([MAKE_PLANE, *PLANES_GEMMS.values()], device)


def _faster(found: Mapping[Node, Factors]) -> set[Node]:
    offers: dict[Node, Offer] = {}
    costs: dict[Any, float] = {}
    for node, factors in found.items():
        forms = [bench_ops.form_of_value(n.meta["val"]) for n in (*factors[:2], *factors.planes)]
        a, right, *of_planes = forms
        assert a is not None and right is not None
        try:
            prepare(a.device)
        except BuildError as error:
            log.info("gemms are left to the library: %s", error)
            return set()
        times = _gemm_ms(a, right)
        for matrix, form in zip(factors.planes, of_planes):
            if matrix not in costs and form is not None:
                costs[matrix] = _plane_ms(form)
        if times is None or any(matrix not in costs for matrix in factors.planes):
            continue
        library, ours = times
        if GEMMS[node.target][0]:  # the addition is one more pass at worst
            bytes_of_result = a.size[0] * right.size[1] * a.dtype.itemsize
            ours += 1e3 * 2 * bytes_of_result / limits.of(a.device).bandwidth
        offers[node] = Offer(library, ours, frozenset(factors.planes))
    return chosen(offers, costs)


def _gemm_ms(a: TensorForm, right: TensorForm) -> tuple[float, float] | None:
    """The library's, and ours from planes; None if they are not known."""
    key = ("planes product", str(a), str(right), matmul_tf32_requested())
    times = contest.times(key, functools.partial(_ways, a, right), a.device)
    return None if isinstance(times, str) else (times[0].gpu, times[1].gpu)


def _plane_ms(form: TensorForm) -> float:
    def ways() -> list[Candidate]:
        matrix = form.random(torch.Generator(form.device).manual_seed(0))
        return [Candidate(functools.partial(_PLANE, matrix, MAKE_PLANE.name))]

    times = contest.times(("plane", str(form)), ways, form.device)
    return math.inf if isinstance(times, str) else times[0].gpu


def _ways(a: TensorForm, right: TensorForm) -> list[Candidate]:
    generator = torch.Generator(a.device).manual_seed(0)
    left, other = a.random(generator), right.random(generator, a.size[1] ** -0.5)
    planes = [_PLANE(matrix, MAKE_PLANE.name) for matrix in (left, other)]
    name = PLANES_GEMMS[is_along(left), is_along(other.mT)].name

    def ours() -> Sequence[Tensor]:
        return (_PRODUCT(left, other.mT, *planes, name),)

    def library() -> Sequence[Tensor]:
        return (left @ other,)

    bench_ops.compare([library, ours], "planes", a.dtype, in_tf32=True)
    candidates: list[Callable[[], object]] = [library, ours]
    return [*map(Candidate, candidates)]
