"""Inductor's graph of ATen operations → the same, with fp32 gemms by the library's gemm of planes
in fp16, where torch's settings ask for TF32 and that is faster.

A tensor's plane (kernels_cu/linear/linear_planes.cuh) serves all gemms of the graph that read it,
turned around or not: of a backward pass the gradients of input and weight, of forward the
projections of one input. So a plane is an operation of its own, which Inductor frees behind its
last reader, and gemms are chosen together.

A plane takes one pass over its tensor if the largest value is known. Where Inductor makes the
tensor by code of its own, the largest of each line is a reduction that it fuses with that. A
product has both planes' scales in it: what takes them away are two multiplications, which Inductor
fuses with what follows.

`kernels.planes.OFFERED` says whether anything runs this pass.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.fx_utils import get_node_storage
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.errors import BuildError
from fx_fuser.kernels.planes import PLANES, is_asked, order_of
from fx_fuser.kernels.precision import matmul_tf32_requested
from fx_fuser.native import limits, load
from fx_fuser.options import LAST_PASS, Options
from fx_fuser.passes.graph_pass import ATEN_VIEWS, GEMMS, GraphPass, call, leave
from fx_fuser.passes.planes.choice import Offer, chosen
from fx_fuser.planning import bench_ops, contest, plan
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.planes")

COUNTERS = "fx_fuser_planes"  # in `torch._dynamo.utils.counters`: operation → how many replaced
_aten = torch.ops.aten
_PLANE = torch.ops.fx_fuser.plane.default
_PRODUCT = torch.ops.fx_fuser.planes_product.default
_LEAST = 2**28  # multiply-adds: with fewer the library is done when planes are made
# A plane for times: what the data of a run have shown it, that of timing does not know.
_TIMED = dataclasses.replace(PLANES, use="timing")


class Use(NamedTuple):
    """How a gemm reads a tensor. key: of the tensor's plane. root: the node whose memory it is.
    order: of the dimensions, as it is read where `is_turned` is false, else with the last two
    changed over."""

    node: Node
    root: Node
    key: tuple[object, ...]
    order: tuple[int, ...]
    is_turned: bool
    form: TensorForm

    @classmethod
    def of(cls, node: Any) -> Use | None:
        """None if the tensor has no plane, or none that pays."""
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, Tensor) or value.ndim not in (2, 3):
            return None
        order, form = order_of(value), None
        if order is not None:
            form = bench_ops.form_of_value(value)
        if order is None or form is None or min(form.size[-2:]) < 2:
            return None
        is_turned = order[0] == value.ndim - 2
        if is_turned:
            order = order_of(value.mT)
            value, form = value.mT, turned(form)
        if order is None or order[0] != value.ndim - 1:  # lines along a batch
            return None
        root = _root(node)
        key = root, str(value.shape), str(value.stride()), str(value.storage_offset())
        return cls(node, root, key, tuple(order), is_turned, form)

    @property
    def has_known_largest(self) -> bool:
        """Does Inductor make all of the tensor, and no more, by code that a reduction can join?"""
        target = self.root.target
        if self.root.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return False
        values = self.root.meta["val"], self.node.meta["val"]
        is_whole = statically_known_true(values[0].numel() == values[1].numel())
        return torch.Tag.pointwise in target.tags and bool(is_whole)


def turned(form: TensorForm) -> TensorForm:
    size, stride = ((*v[:-2], v[-1], v[-2]) for v in (form.size, form.stride))
    return dataclasses.replace(form, size=size, stride=stride)


def _is_view(node: Node) -> bool:
    if node.op != "call_function" or node.target not in ATEN_VIEWS:
        return False
    storage = get_node_storage(node)
    return storage is not None and storage == get_node_storage(node.args[0])  # type: ignore[arg-type]


def _root(node: Node) -> Node:
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


@dataclass(frozen=True)
class PlaneProducts(GraphPass):
    """fp32 gemms from planes."""

    COUNTERS = COUNTERS

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), PLANES.name

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        found = {node: uses for node in graph.nodes if (uses := self.uses(node)) is not None}
        try:
            taken = set(found) if self.on_cpu else _faster(found)
        except Exception as error:
            leave(error, self.strict)
            taken = set()
        made: dict[tuple[object, ...], tuple[Node, Node]] = {}

        def replace(node: Node) -> str | None:
            if node not in taken:
                return None
            _put(graph, node, found[node], made)
            return ""

        return replace

    def uses(self, node: Node) -> tuple[Use, Use] | None:
        """Of both factors of an fp32 gemm that have planes; else None."""
        if node.op != "call_function" or node.target not in self.TARGETS or node.kwargs:
            return None
        left, right = (Use.of(node.args[i]) for i in GEMMS[node.target])
        if left is None or right is None or torch.backends.cuda.matmul.allow_fp16_accumulation:
            return None
        device = left.form.device
        if device.type != "cuda":
            return (left, right) if self.on_cpu else None
        n = _as_read(right).size[-1]
        if math.prod(left.form.size) * n < _LEAST or not load.runs_on(PLANES, device):
            return None
        return left, right


def _as_read(use: Use) -> TensorForm:
    return turned(use.form) if use.is_turned else use.form


def pass_for(options: Options, inputs: Sequence[Any], before: Any) -> PlaneProducts | None:
    """The pass over Inductor's graphs of a graph with these inputs, if options and devices allow.
    Loads the kernels, which the pass cannot if Inductor's cache has the graph. before: as in
    `GraphPass`."""
    used = devices_for(options, inputs)
    if used is None:
        return None
    try:
        for device in used:
            prepare(device)
    except BuildError as error:
        if options.strict:
            raise
        warnings.warn(
            f"fx_fuser leaves TF32 gemms to the library: {error}; please report it", stacklevel=2
        )
        return None
    return PlaneProducts(options.strict, not used, before)


def devices_for(options: Options, inputs: Sequence[Any]) -> set[torch.device] | None:
    """The GPUs on which fp32 gemms may be made of planes, none where a CPU stands for them; None if
    nothing may."""
    if not is_asked(options) or options.inner != "inductor" or not options.grows:
        return None
    tensors = [v for v in inputs if isinstance(v, Tensor) and v.dtype == torch.float32]
    used = {value.device for value in tensors if value.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return None
    if not used:
        return set() if tensors and options.cpu_ops else None
    return {device for device in used if load.runs_on(PLANES, device)} or None


def prepare(device: torch.device) -> None:
    load.prepare([PLANES, _TIMED], device)


# ---- the graph -----------------------------------------------------------------------------------


def _put(
    graph: Graph,
    node: Node,
    uses: tuple[Use, Use],
    made: dict[tuple[object, ...], tuple[Node, Node]],
) -> None:
    """made: key → a plane's values and facts, as far as there are any; receives the others."""
    left, right = (node.args[i] for i in GEMMS[node.target])
    with graph.inserting_before(node):
        for use in uses:
            if use.key not in made:
                made[use.key] = _plane(graph, node, use)
        values = (
            _turned(graph, node, made[use.key][0]) if use.is_turned else made[use.key][0]
            for use in uses
        )
        facts = (made[use.key][1] for use in uses)
        both = call(graph, node, _PRODUCT, left, right, *values, *facts, PLANES.name)
        result, factors = (call(graph, node, operator.getitem, both, i) for i in range(2))
        for i in range(2):
            factor = call(graph, node, _aten.select.int, factors, 0, i)
            result = call(graph, node, _aten.mul.Tensor, result, factor)
        if GEMMS[node.target][0]:
            result = call(graph, node, _aten.add.Tensor, result, node.args[0])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _turned(graph: Graph, like: Node, node: Node) -> Node:
    rank = node.meta["val"].ndim
    return call(graph, like, _aten.permute.default, node, [*range(rank - 2), rank - 1, rank - 2])


def _plane(graph: Graph, like: Node, use: Use) -> tuple[Node, Node]:
    tensor = _turned(graph, like, use.node) if use.is_turned else use.node
    largest = None
    if use.has_known_largest:
        size = call(graph, like, _aten.abs.default, tensor)
        is_finite = call(graph, like, _aten.lt.Scalar, size, math.inf)
        finite = call(graph, like, _aten.where.ScalarOther, is_finite, size, 0.0)
        of_lines = call(graph, like, _aten.amax.default, finite, [-1])
        largest = call(graph, like, _aten.reshape.default, of_lines, [-1])
    both = call(graph, like, _PLANE, tensor, largest, list(use.order), PLANES.name)
    values, facts = (call(graph, like, operator.getitem, both, i) for i in range(2))
    return values, facts


def _joins_what_follows(node: Node) -> bool:
    """Is each of its readers, views looked through, code of Inductor's own?"""
    for reader in node.users:
        if reader.op != "call_function" or not isinstance(reader.target, torch._ops.OpOverload):
            return False
        if _is_view(reader):
            if not _joins_what_follows(reader):
                return False
        elif not {torch.Tag.pointwise, torch.Tag.reduction} & {*reader.target.tags}:
            return False
    return True


# ---- times ---------------------------------------------------------------------------------------


def _faster(found: Mapping[Node, tuple[Use, Use]]) -> set[Node]:
    offers: dict[Node, Offer] = {}
    costs: dict[Any, float] = {}
    for node, uses in found.items():
        a, right = map(_as_read, uses)
        try:
            prepare(a.device)
        except BuildError as error:
            log.info("gemms are left to the library: %s", error)
            return set()
        times = _gemm_ms(a, right)
        if times is None:
            continue
        for use in uses:
            if use.key not in costs:
                costs[use.key] = _plane_ms(use.form, use.order, use.has_known_largest)
        library, ours = times
        if not _joins_what_follows(node):  # a pass, for the scales and what is added
            result = math.prod(a.size[:-1]) * right.size[-1] * a.dtype.itemsize
            ours += 1e3 * 2 * result / limits.of(a.device).bandwidth
        log.info("%s %s %s: library %s, from planes %s", node, a.size, right.size, library, ours)
        offers[node] = Offer(library, ours, frozenset(use.key for use in uses))
    return chosen(offers, costs)


def _gemm_ms(a: TensorForm, right: TensorForm) -> tuple[float, float] | None:
    """The library's, and ours from planes; None if they are not known."""
    key = ("planes product", str(a), str(right), matmul_tf32_requested())
    times = contest.times(key, functools.partial(_ways, a, right), a.device)
    return None if isinstance(times, str) else (times[0].gpu, times[1].gpu)


def _plane_ms(form: TensorForm, order: Sequence[int], knows_largest: bool) -> float:
    def ways() -> list[Candidate]:
        tensor = form.random(torch.Generator(form.device).manual_seed(0))
        largest = tensor.abs().amax(-1).flatten() if knows_largest else None
        return [Candidate(functools.partial(_PLANE, tensor, largest, list(order), _TIMED.name))]

    times = contest.times(("plane", str(form), knows_largest), ways, form.device)
    return math.inf if isinstance(times, str) else times[0].gpu


def _ways(a: TensorForm, right: TensorForm) -> list[Candidate]:
    generator = torch.Generator(a.device).manual_seed(0)
    left, other = a.random(generator), right.random(generator, a.size[-1] ** -0.5)
    made = [_PLANE(t, None, order_of(t), _TIMED.name) for t in (left, other)]
    values, facts = zip(*made)

    def ours() -> Sequence[Tensor]:
        sums, factors = _PRODUCT(left, other, *values, *facts, _TIMED.name)
        return sums, factors

    def library() -> Sequence[Tensor]:
        return (left @ other,)

    def scaled() -> Sequence[Tensor]:
        sums, factors = ours()
        return (sums * factors[0] * factors[1],)

    bench_ops.compare([library, scaled], "planes", a.dtype, in_tf32=True)
    candidates: list[Callable[[], object]] = [library, ours]
    return [*map(Candidate, candidates)]


def behind(found: Mapping[str, Any], options: Options, inputs: Sequence[Any]) -> dict[str, Any]:
    """Inductor's settings with this pass behind the last of these."""
    last = found.get(LAST_PASS, options.users_pass(LAST_PASS))
    made = pass_for(options, inputs, last)
    return {**found, **({} if made is None else {LAST_PASS: made})}
