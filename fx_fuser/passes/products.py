"""Inductor's graph of ATen operations → the same, with fp32 products by our kernel where it is
faster.

Dynamo's graph has the user's operations; what those consist of shows only here: the products in
`F.multi_head_attention_forward`, in an attention that is computed as written, in an einsum or an
LSTM, and those of every backward. There is no tail to fuse, so no match: a pass that Inductor runs
last over each of its graphs (`post_grad_custom_post_pass`) replaces `mm`, `bmm`, `addmm` and
`baddbmm` of fp32 matrices by `fx_fuser::split_product`, each timed once for its sizes and strides
beside the library's.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.anchors.linear import (
    EXACT_PRODUCTS,
    MIXED_PRODUCTS,
    PRODUCT_ALONE,
    SPLIT,
    asked_product,
    matmul_tf32_requested,
    split_product,
)
from fx_fuser.errors import BuildError
from fx_fuser.graph.nodes import hint_of
from fx_fuser.native import binaries, launch, limits, load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.options import LAST_PASS, Options
from fx_fuser.planning import plan, rehearse, timing
from fx_fuser.planning.plan import gains, is_small
from fx_fuser.planning.rehearse import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.products")

COUNTERS = "fx_fuser_products"  # of `torch._dynamo.utils.counters`: operation → how many are ours
_aten = torch.ops.aten
# Operation → places of its factors; what stands before them is added.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}
SPLIT_PRODUCT = torch.ops.fx_fuser.split_product.default
_OF_VALUE = ("val", "tensor_meta", "eager_input_vals")  # what a node's meta says of its own value


@dataclass(frozen=True)
class Products(CustomGraphPass):
    """The pass. strict: raise what fails. before: another pass of the user's, which runs first."""

    strict: bool = False
    on_cpu: bool = False
    before: Any = None

    def __call__(self, graph: Graph) -> None:
        for users in self.befores():
            users(graph)
        replace = self.replacing(graph)
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _PRODUCTS:
                continue
            try:
                replaced = replace(node)
                if replaced is not None:
                    name = node.target._schema.name.removeprefix("aten::")
                    counters[COUNTERS][name + replaced] += 1
            except Exception as error:
                if self.strict:
                    raise
                warnings.warn(
                    f"fx_fuser leaves a product to the library: {type(error).__name__}: {error}; "
                    "please report it",
                    stacklevel=2,
                )

    def uuid(self) -> Any:
        """Inductor's caches keep what the pass made of a graph."""
        others = [p.uuid() if hasattr(p, "uuid") else None for p in self.befores()]
        return None if None in others else (*self.settings(), *others)

    def befores(self) -> Sequence[Any]:
        """The user's own passes, of which Inductor takes one or several."""
        several = isinstance(self.before, (list, tuple))
        return self.before if several else [] if self.before is None else [self.before]

    def settings(self) -> tuple[Any, ...]:
        return binaries.fingerprint(), self.strict, self.on_cpu, PRODUCT_ALONE.name

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        """What puts a product of ours in a node's place, if that is faster: it returns what to add
        to the node's name where it is counted; else None."""
        return functools.partial(self._replace, graph)

    def _replace(self, graph: Graph, node: Node) -> str | None:
        found = self.factors(node)
        if found is None:
            return None
        if not self.on_cpu:
            a, b = (rehearse.form_of_value(f.meta["val"]) for f in found)
            if not _gains(node.target, a, b):  # type: ignore[arg-type]
                return None
        put(graph, node, SPLIT_PRODUCT, found, PRODUCT_ALONE)
        return ""

    def factors(self, node: Node) -> tuple[Node, Node] | None:
        """Of a product in fp32 that a kernel of ours may gain at."""
        factors = [node.args[i] for i in _PRODUCTS[node.target]]
        values: list[Any] = [f.meta.get("val") for f in factors if isinstance(f, Node)]
        if len(values) != 2 or any(not isinstance(v, Tensor) for v in values) or node.kwargs:
            return None
        if any(v.dtype != torch.float32 or v.layout != torch.strided for v in values):
            return None
        forms = [rehearse.form_of_value(v) for v in values]
        device = values[0].device
        if None in forms or any(0 in form.size for form in forms):  # type: ignore[union-attr]
            return None
        if device.type != "cuda":
            return tuple(factors) if self.on_cpu else None  # type: ignore[return-value]
        a, b = forms
        if not load.runs_on(PRODUCT_ALONE, device) or is_small(a.size, b.size):  # type: ignore[union-attr]
            return None
        return tuple(factors)  # type: ignore[return-value]


def pass_for(
    options: Options, inputs: Sequence[Any], narrow: Sequence[torch.dtype] = ()
) -> Products | None:
    """The pass over what becomes of a graph with these inputs, where options and devices allow.

    narrow: as of `kernels_for`, which are loaded.
    """
    kernels = kernels_for(options, inputs, narrow)
    if kernels is None:
        return None
    for device in kernels:
        try:
            prepare(device, *narrow)
        except BuildError as error:
            if options.strict:
                raise
            warnings.warn(
                f"fx_fuser leaves the products of Inductor's graph to the library: {error}; "
                "please report it",
                stacklevel=2,
            )
            return None
    return Products(options.strict, not kernels, options.users_pass(LAST_PASS))


def kernels_for(
    options: Options, inputs: Sequence[Any], narrow: Sequence[torch.dtype] = ()
) -> dict[torch.device, list[KernelSpec]] | None:
    """What the pass over what becomes of a graph with these inputs will call, by GPU; None where
    there is to be no pass.

    narrow: dtypes from which the graph casts operands of fp32 products up
    (`fx_fuser.passes.provenance`, whose kernels are among these).
    """
    if options.inner != "inductor" or not options.grows or asked_product(options) != SPLIT:
        return None
    dtypes = {torch.float32, *narrow}
    tensors = [v for v in inputs if isinstance(v, Tensor) and v.dtype in dtypes]
    used = {value.device for value in tensors if value.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return None
    on_cuda = {device for device in used if load.runs_on(PRODUCT_ALONE, device)}
    if used and not on_cuda:
        return None
    if not on_cuda and not (tensors and options.cpu_ops):
        return None
    return {device: _specs(narrow) for device in on_cuda}


def _specs(narrow: Sequence[torch.dtype]) -> list[KernelSpec]:
    of_narrow = (made[dtype] for made in (EXACT_PRODUCTS, MIXED_PRODUCTS) for dtype in narrow)
    return [PRODUCT_ALONE, *of_narrow]


def prepare(device: torch.device, *narrow: torch.dtype) -> None:
    """Loads the kernels: where Inductor's cache has the graph, no pass runs."""
    if load.runs_on(PRODUCT_ALONE, device):
        load.prepare(_specs(narrow), device)


def put(
    graph: Graph,
    node: Node,
    op: Any,
    factors: Sequence[Node],
    spec: KernelSpec,
    dense: bool = False,
) -> None:
    """The factors' product by an op of ours, and what the node adds to its product, in its place.

    dense: rows of K that are not adjacent in memory are copied.
    """

    def laid(rows: Node) -> Node:
        if not dense or rows.meta["val"].stride(-1) == 1:
            return rows
        form = {"memory_format": torch.contiguous_format}
        return call(graph, node, _aten.clone.default, rows, **form)

    left, right = factors
    with graph.inserting_before(node):
        rank = right.meta["val"].ndim
        turn = [*range(rank - 2), rank - 1, rank - 2]
        rows = call(graph, node, _aten.permute.default, right, turn)
        result = call(graph, node, op, laid(left), laid(rows), spec.name)
        if _PRODUCTS[node.target][0]:
            result = call(graph, node, _aten.add.Tensor, result, node.args[0])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def call(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node, which belongs where `like` does: to forward or backward, to the same module."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k not in _OF_VALUE}
    values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
    with like.meta["val"].fake_mode:
        made.meta["val"] = target(*values, **named)
    return made


def _gains(target: Any, a: TensorForm, b: TensorForm) -> bool:
    """Is our product faster than the library's, on sizes and strides as these?"""
    try:
        prepare(a.device)
    except BuildError as error:
        log.info("products are left to the library: %s", error)
        return False
    key = ("product", str(a), str(b))
    return fastest(target, a, b, key, functools.partial(_ways, a, b)) == 0


def fastest(
    target: Any,
    a: TensorForm,
    b: TensorForm,
    key: Sequence[Any],
    make_candidates: Callable[[], Sequence[Candidate]],
) -> int | None:
    """Which of fx_fuser's candidates is the fastest, if it beats the library's, the first of all.

    a, b: the factors in fp32. key: all that the times depend on, beside the machine and torch's
    settings.
    """
    key = (*key, matmul_tf32_requested())  # which the library follows
    try:
        times = timing.medians(key, make_candidates, a.device)
    except rehearse.DisagreementError as error:
        warnings.warn(f"fx_fuser: {error}; please report it", stacklevel=2)
        return None
    if times is None:
        return None
    library, *ours = (took.gpu for took in times)
    best = min(range(len(ours)), key=ours.__getitem__)
    log.info("%s %s %s: library %.4g ms, ours %s", target, a.size, b.size, library, ours)
    added = 0.0
    if _PRODUCTS[target][0]:  # what is added takes a pass of its own at worst
        result = math.prod(a.size[:-1]) * b.size[-1] * a.dtype.itemsize
        added = 1e3 * 2 * result / limits.of(a.device).bandwidth
    return best if gains(ours[best] + added, library) else None


def _ways(a: TensorForm, b: TensorForm) -> list[Candidate]:
    generator = torch.Generator(a.device).manual_seed(0)
    left, right = a.random(generator), b.random(generator, hint_of(b.size[-2]) ** -0.5)  # type: ignore[operator]
    launch.reset_fallback([PRODUCT_ALONE], a.device)

    def ours() -> Sequence[Tensor]:
        return (split_product(left, right.mT),)

    def library() -> Sequence[Tensor]:
        return (left @ right,)

    rehearse.compare([library, ours], [{"product": SPLIT}], a.dtype)
    candidates: list[Callable[[], object]] = [library, ours]
    return [*map(Candidate, candidates)]
