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

from fx_fuser import build, native, plan, rehearse, timing
from fx_fuser.anchors.linear import (
    PRODUCT_ALONE,
    SPLIT,
    asked_product,
    matmul_tf32_requested,
    split_product,
)
from fx_fuser.errors import BuildError
from fx_fuser.nodes import hint_of
from fx_fuser.options import Options
from fx_fuser.plan import BANDWIDTH, gains, is_small
from fx_fuser.rehearse import TensorForm
from fx_fuser.timing import Way

log = logging.getLogger("fx_fuser.products")

COUNTERS = "fx_fuser_products"  # of `torch._dynamo.utils.counters`: operation → how many are ours
_aten = torch.ops.aten
# Operation → places of its factors; what stands before them is added.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}


@dataclass(frozen=True)
class Products(CustomGraphPass):
    """The pass. strict: raise what fails. before: another pass of the user's, which runs first."""

    strict: bool = False
    on_cpu: bool = False
    before: Any = None

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _PRODUCTS:
                continue
            try:
                if self._is_ours(node):
                    _replace(graph, node)
                    counters[COUNTERS][node.target._schema.name.removeprefix("aten::")] += 1
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
        known = build.fingerprint(), self.strict, self.on_cpu, PRODUCT_ALONE.name
        if self.before is None:
            return known
        others = self.before.uuid() if hasattr(self.before, "uuid") else None
        return None if others is None else (*known, others)

    def _is_ours(self, node: Node) -> bool:
        factors = [node.args[i] for i in _PRODUCTS[node.target]]
        values: list[Any] = [f.meta.get("val") for f in factors if isinstance(f, Node)]
        if len(values) != 2 or any(not isinstance(v, Tensor) for v in values) or node.kwargs:
            return False
        if any(v.dtype != torch.float32 or v.layout != torch.strided for v in values):
            return False
        forms = [rehearse.form_of_value(v) for v in values]
        device = values[0].device
        if None in forms or any(0 in form.size for form in forms):  # type: ignore[union-attr]
            return False
        if device.type != "cuda":
            return self.on_cpu
        if not native.runs_on(PRODUCT_ALONE, device):
            return False
        a, b = forms
        if is_small(a.size, b.size):  # type: ignore[union-attr]
            return False
        return _gains(node.target, a, b, device)  # type: ignore[arg-type]


def pass_for(options: Options, inputs: Sequence[Any]) -> Products | None:
    """The pass over what becomes of a graph with these inputs, where options and devices allow."""
    if options.inner != "inductor" or not options.grows or asked_product(options) != SPLIT:
        return None
    tensors = [v for v in inputs if isinstance(v, Tensor) and v.dtype == torch.float32]
    on_cuda = {value.device for value in tensors if value.device.type == "cuda"}
    for device in on_cuda:
        if plan.unavailable(device) is not None:
            return None
        try:
            prepare(device)
        except BuildError as error:
            if options.strict:
                raise
            warnings.warn(
                f"fx_fuser leaves the products of Inductor's graph to the library: {error}; "
                "please report it",
                stacklevel=2,
            )
            return None
    if not on_cuda and not (tensors and options.cpu_ops):
        return None
    return Products(options.strict, not on_cuda, options.users_pass)


def prepare(device: torch.device) -> None:
    """Loads the kernel: where Inductor's cache has the graph, the pass does not run."""
    if native.runs_on(PRODUCT_ALONE, device):
        native.prepare([PRODUCT_ALONE], device)


def _replace(graph: Graph, node: Node) -> None:
    left, right = (node.args[i] for i in _PRODUCTS[node.target])
    assert isinstance(left, Node) and isinstance(right, Node)
    with graph.inserting_before(node):
        rank = right.meta["val"].ndim
        turn = [*range(rank - 2), rank - 1, rank - 2]
        rows = _call(graph, node, _aten.permute.default, right, turn)
        target = torch.ops.fx_fuser.split_product.default
        result = _call(graph, node, target, left, rows, PRODUCT_ALONE.name)
        if _PRODUCTS[node.target][0]:
            result = _call(graph, node, _aten.add.Tensor, result, node.args[0])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _call(graph: Graph, like: Node, target: Any, *args: Any) -> Node:
    made = graph.call_function(target, args)
    made.meta = {k: v for k, v in like.meta.items() if k in ("stack_trace", "original_aten")}
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with like.meta["val"].fake_mode:
        made.meta["val"] = target(*values)
    return made


def _gains(target: Any, a: TensorForm, b: TensorForm, device: torch.device) -> bool:
    """Is our product faster than the library's, on sizes and strides as these?"""
    try:
        prepare(device)
    except BuildError as error:
        log.info("products are left to the library: %s", error)
        return False
    key = ("product", str(a), str(b), matmul_tf32_requested())  # which the library follows
    try:
        times = timing.medians(key, functools.partial(_ways, a, b), device)
    except rehearse.DisagreementError as error:
        warnings.warn(f"fx_fuser: {error}; please report it", stacklevel=2)
        return False
    if times is None:
        return False
    library, ours = (took.gpu for took in times)
    if _PRODUCTS[target][0]:  # what is added takes a pass of its own at worst
        result = math.prod(a.size[:-1]) * b.size[-1] * a.dtype.itemsize
        ours += 2 * result / BANDWIDTH
    log.info("%s %s %s: library %.4g ms, split %.4g ms", target, a.size, b.size, library, ours)
    return gains(ours, library)


def _ways(a: TensorForm, b: TensorForm) -> list[Way]:
    generator = torch.Generator(a.device).manual_seed(0)
    left, right = a.random(generator), b.random(generator, hint_of(b.size[-2]) ** -0.5)  # type: ignore[operator]
    native.wake([PRODUCT_ALONE], a.device)

    def ours() -> Sequence[Tensor]:
        return (split_product(left, right.mT),)

    def library() -> Sequence[Tensor]:
        return (left @ right,)

    rehearse.compare([library, ours], [{"product": SPLIT}], a.dtype)
    ways: list[Callable[[], object]] = [library, ours]
    return [*map(Way, ways)]
