"""Inductor's graph of ATen operations → the same, with fp32 gemms by the split kernel if faster.

Some gemms show only in this graph: those in `F.multi_head_attention_forward`, in an attention
computed as written, in an einsum or an LSTM, and those of every backward. They have no tail to
fuse, so there is no match. A pass that Inductor runs last over each of its graphs
(`post_grad_custom_post_pass`) replaces `mm`, `bmm`, `addmm` and `baddbmm` of fp32 matrices by
`fx_fuser::split_product`. It is timed once against the library's gemm for each combination of sizes
and strides.
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
from torch.fx import Graph, Node

from fx_fuser.errors import BuildError
from fx_fuser.graph.read.nodes import hint_of
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.precision import SPLIT, asked_precision, matmul_tf32_requested
from fx_fuser.kernels.split import MIXED_GEMMS, SPLIT_GEMM, is_small, reset_fallback, split_gemm
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.options import LAST_PASS, Options
from fx_fuser.passes.graph_pass import GEMMS, GraphPass, call
from fx_fuser.planning import bench_ops, contest, plan
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate, Timing

log = logging.getLogger("fx_fuser.passes.products")

COUNTERS = "fx_fuser_products"  # in `torch._dynamo.utils.counters`: operation → how many replaced
_aten = torch.ops.aten
SPLIT_PRODUCT = torch.ops.fx_fuser.split_product.default


@dataclass(frozen=True)
class Products(GraphPass):
    """fp32 gemms by the split kernel."""

    COUNTERS = COUNTERS

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), SPLIT_GEMM.name

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        return functools.partial(self._replace, graph)

    def _replace(self, graph: Graph, node: Node) -> str | None:
        found = self.factors(node)
        if found is None:
            return None
        if not self.on_cpu:
            a, b = (bench_ops.form_of_value(f.meta["val"]) for f in found)
            if not _gains(node.target, a, b):  # type: ignore[arg-type]
                return None
        put(graph, node, SPLIT_PRODUCT, found, SPLIT_GEMM)
        return ""

    def factors(self, node: Node) -> tuple[Node, Node] | None:
        """The factors of an fp32 gemm at which the split kernel may gain; else None."""
        factors = [node.args[i] for i in GEMMS[node.target]]
        values: list[Any] = [f.meta.get("val") for f in factors if isinstance(f, Node)]
        if len(values) != 2 or any(not isinstance(v, Tensor) for v in values) or node.kwargs:
            return None
        if any(v.dtype != torch.float32 or v.layout != torch.strided for v in values):
            return None
        forms = [bench_ops.form_of_value(v) for v in values]
        device = values[0].device
        if None in forms or any(0 in form.size for form in forms):  # type: ignore[union-attr]
            return None
        if device.type != "cuda":
            return tuple(factors) if self.on_cpu else None  # type: ignore[return-value]
        a, b = forms
        if not load.runs_on(SPLIT_GEMM, device) or is_small(a.size, b.size, device):  # type: ignore[union-attr]
            return None
        return tuple(factors)  # type: ignore[return-value]


def pass_for(
    options: Options, inputs: Sequence[Any], narrow: Sequence[torch.dtype] = ()
) -> Products | None:
    """The pass over Inductor's graphs of a graph with these inputs, if options and devices allow.

    Loads the kernels. narrow: as in `kernels_for`.
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
                f"fx_fuser leaves the gemms of Inductor's graph to the library: {error}; "
                "please report it",
                stacklevel=2,
            )
            return None
    return Products(options.strict, not kernels, options.users_pass(LAST_PASS))


def kernels_for(
    options: Options, inputs: Sequence[Any], narrow: Sequence[torch.dtype] = ()
) -> dict[torch.device, list[KernelSpec]] | None:
    """GPU → the kernels of the passes over Inductor's graphs; None if no pass is to run.

    inputs: the graph's. narrow: 16-bit dtypes from which it casts operands of fp32 gemms up; the
    kernels of `fx_fuser.passes.provenance` are for these.
    """
    if options.inner != "inductor" or not options.grows or asked_precision(options) != SPLIT:
        return None
    dtypes = {torch.float32, *narrow}
    tensors = [v for v in inputs if isinstance(v, Tensor) and v.dtype in dtypes]
    used = {value.device for value in tensors if value.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return None
    on_cuda = {device for device in used if load.runs_on(SPLIT_GEMM, device)}
    if used and not on_cuda:
        return None
    if not on_cuda and not (tensors and options.cpu_ops):
        return None
    return {device: _specs(narrow) for device in on_cuda}


def _specs(narrow: Sequence[torch.dtype]) -> list[KernelSpec]:
    of_narrow = (made[dtype] for made in (EXACT_GEMMS, MIXED_GEMMS) for dtype in narrow)
    return [SPLIT_GEMM, *of_narrow]


def prepare(device: torch.device, *narrow: torch.dtype) -> None:
    """Loads the kernels. The pass cannot: it does not run if Inductor's cache has the graph."""
    if load.runs_on(SPLIT_GEMM, device):
        load.prepare(_specs(narrow), device)


def put(
    graph: Graph,
    node: Node,
    op: Any,
    factors: Sequence[Node],
    spec: KernelSpec,
    dense: bool = False,
) -> None:
    """Replace the node by `op` of the factors, then the sum, if the node adds something.

    dense: copy factors whose K is not adjacent in memory.
    """

    def laid(rows: Node) -> Node:
        if not dense or rows.meta["val"].stride(-1) == 1:
            return rows
        form = {"memory_format": torch.contiguous_format}
        return call(graph, node, _aten.clone.default, rows, **form)

    left, right = factors
    with graph.inserting_before(node):
        rank = right.meta["val"].ndim
        transposed = [*range(rank - 2), rank - 1, rank - 2]
        rows = call(graph, node, _aten.permute.default, right, transposed)
        result = call(graph, node, op, laid(left), laid(rows), spec.name)
        if GEMMS[node.target][0]:
            result = call(graph, node, _aten.add.Tensor, result, node.args[0])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _gains(target: Any, a: TensorForm, b: TensorForm) -> bool:
    """Is the split gemm faster than the library's, at these sizes and strides?"""
    try:
        prepare(a.device)
    except BuildError as error:
        log.info("gemms are left to the library: %s", error)
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
    """The index of the fastest fused candidate, if it beats the library's; else None.

    a, b: the factors in fp32. key: what the times depend on besides machine and torch's settings.
    make_candidates: the library's, then the fused ones.
    """
    key = (*key, matmul_tf32_requested())  # the library follows it
    times = contest.times(key, make_candidates, a.device)
    if isinstance(times, str):
        return None
    library, *fused = (Timing(took.gpu) for took in times)
    log.info("%s %s %s: library %s, fused %s", target, a.size, b.size, library, fused)
    added = 0.0
    if GEMMS[target][0]:  # the addition is one more pass at worst
        result = math.prod(a.size[:-1]) * b.size[-1] * a.dtype.itemsize
        added = 1e3 * 2 * result / limits.of(a.device).bandwidth
    return contest.winner(fused, library.gpu, [added] * len(fused)).place


def _ways(a: TensorForm, b: TensorForm) -> list[Candidate]:
    generator = torch.Generator(a.device).manual_seed(0)
    left, right = a.random(generator), b.random(generator, hint_of(b.size[-2]) ** -0.5)  # type: ignore[operator]
    reset_fallback([SPLIT_GEMM], a.device)

    def fused() -> Sequence[Tensor]:
        return (split_gemm(left, right.mT),)

    def library() -> Sequence[Tensor]:
        return (left @ right,)

    bench_ops.compare([library, fused], SPLIT, a.dtype)
    candidates: list[Callable[[], object]] = [library, fused]
    return [*map(Candidate, candidates)]
