"""Inductor's graph of forward and backward → the same, where kernels that read the 16-bit tensors
compute fp32 gemms of operands that were cast up from 16 bits.

`x.float() @ w.float().t()`, as in routers and heads, sums in fp32. Its products of two 16-bit
values are exact in fp32, so one gemm on the tensor cores is enough (`LINEAR_EXACT`); two fp32
operands need three. If one operand was cast up, as in the backward of such a gemm, two are enough.
A graph of ATen operations is functional, so the result of a cast equals its operand wherever it is
read.

The pass runs before the graph is partitioned into forward and backward (`joint_custom_post_pass`),
so what is kept for backward is in 16 bits. The cast's result was private to the graph. Its operand
may be the user's, who may write to it before backward runs: then a copy is kept (`_Kept`). A cast
that nothing else reads is erased.

Dynamo's graph shows what the pass will find. `why_left` leaves a site to the pass where that is
better, and `narrow_dtypes` says for which dtypes to load kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.fx_utils import get_node_storage
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fx_fuser.graph.read.functions import ACTIVATIONS
from fx_fuser.graph.read.nodes import hint_of, inputs_of, meta_tensor
from fx_fuser.graph.read.sites import CONVOLUTIONS, GEMMS, Site
from fx_fuser.graph.read.source import called_name
from fx_fuser.kernels.base import GEMM_KINDS
from fx_fuser.kernels.exact import EXACT, EXACT_GEMMS
from fx_fuser.kernels.precision import SPLIT, asked_precision
from fx_fuser.kernels.split import MIXED_GEMMS, SPLIT_GEMM, reset_fallback
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.options import JOINT_PASS, LAST_PASS, Options
from fx_fuser.passes import attention_split, products
from fx_fuser.passes.attention_split import biased
from fx_fuser.passes.attention_split.biased import AttentionBias
from fx_fuser.passes.attention_split.dropout import AttentionDropout
from fx_fuser.passes.graph_pass import call
from fx_fuser.passes.products import SPLIT_PRODUCT, Products, fastest, put
from fx_fuser.planning import bench_ops
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.surroundings import VIEWS
from fx_fuser.planning.timing import Candidate

NARROW = tuple(EXACT_GEMMS)
# Operations without a gemm, forward or backward. Any other may contain one.
_NAMES = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d add all amax amin any arange argmax
argmin avg_pool1d avg_pool2d avg_pool3d batch_norm bool cat ceil clamp clone concat conv1d conv2d
conv3d cross_entropy cumsum detach dim div dropout dropout2d eq fill float floor full ge getattr
getitem glu group_norm gt half index instance_norm int interpolate l1_loss layer_norm le log_softmax
long lt masked_fill max max_pool1d max_pool2d max_pool3d mean min mse_loss mul narrow ne new_empty
new_full new_ones new_zeros normalize numel ones ones_like pad pow prod rms_norm select setattr
setitem shape size softmax stack std sub sum to truediv type type_as var where zeros zeros_like
_assert_tensor_metadata _to_copy
"""
_WITHOUT_GEMMS = VIEWS | ACTIVATIONS | set(_NAMES.split())
_CASTS = {"float", "to", "_to_copy", "type", "type_as"}
_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
# Views, and copies, of the operand.
_SAME_VALUES = frozenset({
    _aten.alias.default, _aten.expand.default, _aten.permute.default, _aten.select.int,
    _aten.slice.Tensor, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
    _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.view.default,
    _aten._unsafe_view.default, _aten.reshape.default, _aten.clone.default,
})  # fmt: skip


# ---- in Dynamo's graph -------------------------------------------------------------------------


def widened_from(node: Node | None) -> torch.dtype | None:
    """The 16-bit dtype from which this fp32 value was cast, views looked through; or None."""
    while node is not None and node.op in ("call_function", "call_method"):
        first = next(iter(inputs_of(node)), None)
        before = None if first is None else meta_tensor(first)
        value = meta_tensor(node)
        if before is None or value is None or value.dtype != torch.float32:
            return None
        name = called_name(node)
        if name in _CASTS and before.dtype in NARROW:
            return before.dtype
        if name not in VIEWS:
            return None
        node = first
    return None


def has_gemms(gm: GraphModule) -> bool:
    """May Inductor's graph contain a gemm?  If not, no kernel is compiled for the passes."""
    return any(
        called_name(node) not in _WITHOUT_GEMMS
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
    )


def has_convolutions(gm: GraphModule) -> bool:
    """Is there a convolution in Dynamo's graph?"""
    modules = (module for module in gm.modules() if isinstance(module, GraphModule))
    return any(called_name(node) in CONVOLUTIONS for m in modules for node in m.graph.nodes)


def narrow_dtypes(gm: GraphModule) -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes from which operands of gemms are cast up."""
    found = set()
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if called_name(node) in GEMMS:
                found |= {widened_from(operand) for operand in inputs_of(node)}
    return tuple(dtype for dtype in NARROW if dtype in found)


def why_left(site: Site, options: Options, has_tail: bool) -> str:
    """Why the gemm is left to the pass, which leaves its tail to Inductor; empty if it is not.

    It is left if both operands were cast up: the pass's kernel multiplies a third as much as a
    kernel with the tail. If one was, it is two thirds, and a kernel with a tail may be as fast.
    """
    runs = options.inner == "inductor" and options.plan == "measure"
    if site.kind not in GEMM_KINDS or not runs or asked_precision(options) != SPLIT:
        return ""
    x, weight = (widened_from(site.operands[name]) for name in ("x", "weight"))
    both, none = x is not None and x == weight, x is None and weight is None
    if none or (has_tail and not both):
        return ""
    return "an operand is cast up from 16 bits, and a pass over Inductor's graph reads those"


# ---- in Inductor's -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Provenance(Products):
    """The pass. narrow: dtypes whose kernels are loaded."""

    narrow: tuple[torch.dtype, ...] = ()

    def settings(self) -> tuple[Any, ...]:
        kernels = (made[d].name for made in (EXACT_GEMMS, MIXED_GEMMS) for d in self.narrow)
        return *super().settings(), *kernels

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        return functools.partial(self._replace_by_narrow, graph, _Kept(graph))

    def _replace_by_narrow(self, graph: Graph, kept: _Kept, node: Node) -> str | None:
        factors = self.factors(node)
        if factors is None:
            return None
        left, right = (_source_of(factor, self.narrow) for factor in factors)
        sources = left, None if right is None else right.as_matrix()
        recipes = [*_recipes(*sources)]
        if len(recipes) == 1:
            return None
        best: int | None = 0
        if not self.on_cpu:
            a, b = (bench_ops.form_of_value(f.meta["val"]) for f in factors)
            assert a is not None and b is not None
            narrow = [None if s is None else bench_ops.form_of_value(s.value) for s in sources]
            key = ("provenance", [r.spec.name for r in recipes], str(a), str(b), str(narrow))
            make_candidates = functools.partial(_ways, recipes, (a, b), narrow)
            best = fastest(node.target, a, b, key, make_candidates)
        recipe = None if best is None else recipes[best]
        if recipe is None or recipe.spec == SPLIT_GEMM:  # left to the last pass
            return None
        with graph.inserting_before(node):
            read = [
                source.build(graph, node, kept.readable(source, node)) if source else factor
                for factor, source in zip(factors, recipe.choose((None, None), sources))
            ]
        put(graph, node, recipe.op, read, recipe.spec, recipe.dense)
        for factor in dict.fromkeys(factors):
            _drop(graph, factor)
        dtypes = [str(f.meta["val"].dtype).removeprefix("torch.") for f in read]
        return f" of {' and '.join(dict.fromkeys(dtypes))}"


@dataclass(frozen=True)
class Passes:
    """The passes that Inductor is to run over the graphs it makes of Dynamo's graph.

    narrow: as in `Provenance`. kernels: GPU → the passes' kernels; None if no pass is to run.
    biased_alone: are those over 16-bit attention with a bias the only ones?
    """

    options: Options
    inputs: Sequence[Any]
    narrow: tuple[torch.dtype, ...]
    kernels: Mapping[torch.device, Sequence[KernelSpec]] | None
    biased_alone: bool = False

    @classmethod
    def over(cls, gm: GraphModule, options: Options, inputs: Sequence[Any]) -> Passes:
        """gm: the untouched graph. Compiles nothing."""
        narrow = narrow_dtypes(gm)
        kernels = products.kernels_for(options, inputs, narrow) if has_gemms(gm) else None
        kernels = kernels and {
            device: [
                *specs,
                *attention_split.foreseen(gm, device),
                *biased.foreseen(gm, device),
            ]
            for device, specs in kernels.items()
        }
        if kernels is None:
            kernels = biased.kernels_for(gm, options, inputs)
            return cls(options, inputs, narrow, kernels, kernels is not None)
        return cls(options, inputs, narrow, kernels)

    def load(self) -> dict[str, Any]:
        """Inductor's setting → pass. Compiles and loads their kernels."""
        if self.kernels is None:
            return {}
        if self.biased_alone:
            given = self.options.strict, not self.kernels
            first, final = map(self.options.users_pass, (JOINT_PASS, LAST_PASS))
            return {
                JOINT_PASS: AttentionDropout(*given, first, halves=False),
                LAST_PASS: AttentionBias(*given, final),
            }
        last = products.pass_for(self.options, self.inputs, self.narrow)
        if last is None:
            return {}
        first = pass_for(self.options, last, self.narrow)
        before = self.options.users_pass(JOINT_PASS) if first is None else first
        dropout = AttentionDropout(last.strict, last.on_cpu, before)
        return {JOINT_PASS: dropout, LAST_PASS: biased.behind(attention_split.behind(last))}


def pass_for(options: Options, last: Products, narrow: Sequence[torch.dtype]) -> Provenance | None:
    """The pass, if there is a cast to find. last: the other pass, which has loaded the kernels."""
    if not narrow:
        return None
    return Provenance(last.strict, last.on_cpu, options.users_pass(JOINT_PASS), tuple(narrow))


class _Kept:
    """Copies of casts' operands, in one graph, that gemms may read in place of the casts' results.

    Backward reads an operand long after the cast. If the user has its memory, as an input or a
    result, it may have been written to by then, so a 16-bit copy is kept. Forward's gemms read that
    copy, too: a partitioner does not recompute in backward what forward needs.
    """

    def __init__(self, graph: Graph) -> None:
        self.copies: dict[Node, Node] = {}
        self.backward: set[Node] = set()
        for node in graph.nodes:
            is_first = node.op == "placeholder" and "tangents" in str(node.target)
            if is_first or not self.backward.isdisjoint(node.all_input_nodes):
                self.backward.add(node)
        ends = (n for n in graph.nodes if n.op in ("placeholder", "get_attr", "output"))
        users = (o for n in ends for o in ([n] if n.op != "output" else n.all_input_nodes))
        self.users = {get_node_storage(node) for node in users}

    def readable(self, source: _Source, reader: Node) -> Node:
        """The operand, or its copy, whichever the reader may read."""
        node = source.node
        is_later = bool(self.backward) and source.cast not in self.backward
        if not is_later or get_node_storage(node) not in self.users:
            return node
        if node not in self.copies:
            graph = node.graph
            with graph.inserting_before(source.cast):
                self.copies[node] = call(graph, source.cast, torch.ops.fx_fuser.kept.default, node)
        return self.copies[node]


def _drop(graph: Graph, node: Node) -> None:
    """Erase the node, the views above it and the cast, up to the first that something reads."""
    while not node._erased and not node.users and node.target in (*_SAME_VALUES, _CAST):
        above = node.args[0]
        graph.erase_node(node)
        node = above  # type: ignore[assignment]


@dataclass(frozen=True)
class _Source:
    """The 16-bit tensor from which an fp32 value was cast up.

    cast: the node of the cast. node: its operand. views: the views of the cast, first to last:
    (operation, its other arguments, keyword arguments). value: the 16-bit tensor, viewed like that.
    """

    cast: Node
    node: Node
    views: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    value: Tensor

    def seen_as(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Source:
        fakes, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.value.fake_mode:  # type: ignore[attr-defined]
            value = target(self.value, *fakes, **named)
        return replace(self, views=(*self.views, (target, args, kwargs)), value=value)

    def as_matrix(self) -> _Source:
        """One matrix, if it is a batch of one or an expanded one, such as a shared weight."""
        value = self.value
        shared = value.ndim == 3 and (hint_of(value.stride(0)) == 0 or hint_of(value.size(0)) == 1)
        return self.seen_as(_aten.select.int, (0, 0), {}) if shared else self

    def build(self, graph: Graph, like: Node, operand: Node) -> Node:
        """The value, computed from `operand`: the cast's operand or a copy of it."""
        made = operand
        for target, args, kwargs in self.views:
            made = call(graph, like, target, made, *args, **kwargs)
        return made


def _source_of(node: Node, dtypes: Sequence[torch.dtype]) -> _Source | None:
    seen: list[Node] = []
    while node.op == "call_function" and node.target in _SAME_VALUES:
        seen.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target != _CAST:
        return None
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        return None
    found = _Source(node, source, (), value)  # type: ignore[arg-type]
    for view in reversed(seen):
        others = view.args[1:], dict(view.kwargs)
        try:
            found = found.seen_as(view.target, *others)
        except (RuntimeError, ValueError):  # the operand has gaps where the cast's result has none
            dense = found.seen_as(
                _aten.clone.default, (), {"memory_format": torch.contiguous_format}
            )
            found = dense.seen_as(view.target, *others)
    return found


@dataclass(frozen=True)
class _Recipe:
    """A fused kernel for left @ right. op: of `torch.ops.fx_fuser`. reads: which factors it reads
    in 16 bits. dense: it needs K adjacent in memory; a factor without that is copied."""

    op: Callable[[Tensor, Tensor, str], Tensor]
    spec: KernelSpec
    reads: tuple[bool, bool]
    dense: bool

    def choose(self, wide: Sequence[Any], narrow: Sequence[Any]) -> list[Any]:
        """For each factor the tensor that the kernel reads."""
        return [n if reads else w for w, n, reads in zip(wide, narrow, self.reads)]

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        rows = right.mT
        if self.dense:
            left, rows = left.contiguous(), rows.contiguous()
        return self.op(left, rows, self.spec.name)


def _recipes(left: _Source | None, right: _Source | None) -> Iterator[_Recipe]:
    """The likely fastest first; the last one reads the casts' fp32 results."""
    dtypes = [None if source is None else source.value.dtype for source in (left, right)]
    if right is not None and dtypes[0] == dtypes[1] and right.value.ndim == 2:
        spec, device = EXACT_GEMMS[right.value.dtype], right.value.device
        if device.type != "cuda" or load.runs_on(spec, device):
            exact = torch.ops.fx_fuser.exact_product.default
            yield _Recipe(exact, spec, (True, True), dense=True)
    for dtype, reads in zip(dtypes, ((True, False), (False, True))):
        if dtype is not None:
            yield _Recipe(SPLIT_PRODUCT, MIXED_GEMMS[dtype], reads, dense=False)
    yield _Recipe(SPLIT_PRODUCT, SPLIT_GEMM, (False, False), dense=False)


def _ways(
    recipes: Sequence[_Recipe],
    forms: Sequence[TensorForm],
    narrow: Sequence[TensorForm | None],
) -> list[Candidate]:
    """The library's gemm of the casts' results, then each recipe's of the 16-bit tensors."""
    generator = torch.Generator(forms[0].device).manual_seed(0)
    deviations = (1.0, hint_of(forms[1].size[-2]) ** -0.5)  # type: ignore[operator]
    wide, read = [], []
    for form, of_source, deviation in zip(forms, narrow, deviations):
        read.append((of_source or form).random(generator, deviation))
        wide.append(read[-1].float().expand(form.size))

    def library() -> Sequence[Tensor]:
        return (wide[0] @ wide[1],)

    def made_by(recipe: _Recipe) -> Sequence[Tensor]:
        return (recipe.multiply(*recipe.choose(wide, read)),)

    reset_fallback([recipe.spec for recipe in recipes], forms[0].device)
    fused = [functools.partial(made_by, recipe) for recipe in recipes]
    for recipe, made in zip(recipes, fused):
        name = EXACT if recipe.dense else SPLIT
        bench_ops.compare([library, made], name, torch.float32)
    return [Candidate(library), *map(Candidate, fused)]
