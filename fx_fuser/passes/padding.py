"""Inductor's graph → the same, with 16-bit gemms of odd sizes run at multiples of 8, if faster.

cuBLAS has fast kernels for rows of a multiple of 16 bytes only, and the sizes count, not the pitch
alone. `[8192, 768] @ [768, 50257]` in bf16 takes 6.51 ms on an H100 (2026-11-26, torch 2.11), at
50264 columns 0.90; written at a pitch of 50264, 6.51 still. Its two gradients take 4.5 and 4.3 ms,
padded 0.83 and 0.81.

So an operand gets zeros after its rows or columns, the gemm runs at the padded sizes, and its
readers get a slice of the result. The zeros are `constant_pad_nd`, a pointwise operation: Inductor
computes it in the kernel that makes the operand, so a matrix that only gemms read is never copied.
One padded twin serves all gemms that read a matrix, transposed or not. A gemm whose result the
graph returns is not padded where a slice of it would have gaps. A kernel for unaligned operands
(`fx_fuser.passes.unaligned`) needs neither zeros nor slices: it runs where it is faster.

Inductor's own pass (`torch/_inductor/fx_passes/pad_mm.py`) pads for the same reason. It runs after
this one and pads what is left. It pads a transposed operand by a transposing copy, so that padding
the gradient of a head's weight does not pay, and it skips memory-bound gemms.

The pass runs before the graph is partitioned into forward and backward (`joint_custom_pre_pass`).
Each gemm's sizes and strides are timed once, with a copy of each operand that is not made by a
pointwise operation for gemms only.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.read.nodes import inputs_of, meta_tensor
from fx_fuser.graph.read.source import called_name
from fx_fuser.kernels.base import SIXTEEN_BITS, short_of_16_bytes
from fx_fuser.kernels.split import is_small
from fx_fuser.native import limits
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.options import EARLY_PASS, Options
from fx_fuser.passes import unaligned
from fx_fuser.passes.graph_pass import GEMMS, GraphPass, call, leave, loaded
from fx_fuser.planning import bench_ops, contest, plan
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.padding")

COUNTERS = "fx_fuser_padded"  # in `torch._dynamo.utils.counters`: operation → how many padded
# How a gemm may be computed, besides by the library's call.
PADDED, UNALIGNED = "padded", "unaligned"
# Of the library's time, at most. Only the gemm is timed, but a padded operand takes more memory,
# and Inductor fuses less across it. When any gain was enough, DLRM's step was no faster (H100,
# 2026-11-26) and took 3 % more memory.
_MOST = 0.75
_aten = torch.ops.aten
_TRANSPOSES = {_aten.permute.default, _aten.t.default, _aten.transpose.int}
_VIEWS = {
    *_TRANSPOSES,
    _aten.alias.default,
    _aten.expand.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}
# Pointwise operations that lack torch's tag for them.
_POINTWISE = {_aten.clone.default, torch.ops.prims.convert_element_type.default}


@dataclass(frozen=True)
class Padding(GraphPass):
    """16-bit gemms of odd sizes, padded."""

    COUNTERS = COUNTERS

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        found = [gemm for node in graph.nodes if (gemm := _Gemm.of(node, self.on_cpu))]
        if not self.on_cpu:
            found = _with_kernels(found, self.strict)
        gemms = {gemm.node: gemm for gemm in found}
        # Once, before the first one is replaced.
        choose = functools.cache(functools.partial(_chosen, gemms, self.on_cpu, self.strict))
        return functools.partial(self._replace, _Twins(graph), gemms, choose)

    def _replace(
        self,
        twins: _Twins,
        gemms: dict[Node, _Gemm],
        choose: Callable[[], dict[Node, str | None]],
        node: Node,
    ) -> str | None:
        gemm = gemms.get(node)
        chosen = gemm and choose()[node]
        if gemm is None or chosen is None:
            return None
        if chosen == PADDED:
            gemm.replace(twins)
            return ""
        assert gemm.spec is not None
        unaligned.put(node.graph, node, gemm.spec)
        return f"_{unaligned.name_of(gemm.spec)}"


def settings(gm: GraphModule, options: Options) -> dict[str, Any]:
    """Inductor's setting → the pass, if it may gain in what Inductor makes of Dynamo's graph."""
    asks = options.inner == "inductor" and options.grows and options.users_pass("shape_padding")
    if not asks or options.users_pass("deterministic"):  # in which nothing may be timed
        return {}
    values = [_values(n) for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]
    device = "cpu" if options.cpu_ops else "cuda"
    if not any(_may_be_odd(of_node, device) for of_node in values):
        return {}
    return {EARLY_PASS: Padding(options.strict, options.cpu_ops, options.users_pass(EARLY_PASS))}


def _values(node: Node) -> list[Tensor]:
    """For a call that may be a gemm, its result, if that is a tensor, and then its operands."""
    result = meta_tensor(node)
    if node.op not in ("call_function", "call_method") or result is None:
        return []
    operands = [value for n in inputs_of(node) if (value := meta_tensor(n)) is not None]
    several = called_name(node) in ("linear", "multi_head_attention_forward") or len(operands) > 1
    return [result, *operands] if several else []


def _may_be_odd(values: Sequence[Tensor], device: str) -> bool:
    if not values or values[0].dtype not in SIXTEEN_BITS or values[0].device.type != device:
        return False
    dtype = values[0].dtype  # its operands' too, under autocast
    sizes = (n for v in values for n in v.shape[-2:] if isinstance(n, int))
    return any(n > 1 and short_of_16_bytes(n, dtype) for n in sizes)


# ---- one gemm ----------------------------------------------------------------------------------


def _is_transposed(form: TensorForm) -> bool:
    """Are its columns adjacent in memory, and its rows not?"""
    return form.stride[-1] != 1 and form.stride[-2] == 1


@dataclass(frozen=True)
class _Gemm:
    """left [*, M, K] @ right [*, K, N]. zeros: how many padding adds to M, K and N. pads: may it be
    padded here?  spec: of the kernel for its unaligned operands, if there is one that may gain.
    """

    node: Node
    forms: tuple[TensorForm, TensorForm]
    zeros: tuple[int, int, int]
    pads: bool
    spec: KernelSpec | None

    @classmethod
    def of(cls, node: Node, on_cpu: bool) -> _Gemm | None:
        """The gemm that the node is, if it is 16-bit, has an odd size, and something other than the
        library's call may be faster; else None."""
        if node.op != "call_function" or node.target not in GEMMS:
            return None
        factors = tuple(node.args[i] for i in GEMMS[node.target])
        values = [f.meta.get("val") for f in factors if isinstance(f, Node)]
        if len(values) != 2 or not all(isinstance(v, Tensor) for v in values):
            return None
        sizes = [n for v in values for n in (*v.shape, *v.stride())]  # type: ignore[union-attr]
        if not all(isinstance(n, int) for n in sizes) or 0 in sizes[: values[0].ndim]:  # type: ignore[union-attr]
            return None
        if values[0].dtype not in SIXTEEN_BITS or values[1].dtype != values[0].dtype:  # type: ignore[union-attr]
            return None
        if values[0].device.type != ("cpu" if on_cpu else "cuda"):  # type: ignore[union-attr]
            return None
        left, right = (bench_ops.form_of_value(v) for v in values)
        assert left is not None and right is not None
        zeros = _zeros_of(left, right)
        leaves_gaps = zeros[2] or (zeros[0] and len(left.size) > 2)
        if not any(zeros):
            return None
        pads = not (leaves_gaps and _is_returned(node))
        spec = unaligned.spec_for(node, left, right)
        return cls(node, (left, right), zeros, pads, spec) if pads or spec else None

    @property
    def factors(self) -> tuple[Node, Node]:
        """The factors as they are now: a gemm that was replaced may have made one."""
        left, right = (self.node.args[i] for i in GEMMS[self.node.target])
        return left, right  # type: ignore[return-value]

    def replace(self, twins: _Twins) -> None:
        """Compute it from padded operands; its readers get a slice."""
        m, k, n = self.zeros
        graph, node, (left, right) = self.node.graph, self.node, self.factors
        args = list(node.args)
        places = GEMMS[node.target]
        args[places[0]], args[places[1]] = twins.of(left, m, k), twins.of(right, k, n)
        with graph.inserting_before(node):
            if places[0]:
                args[0] = self._padded_addend(twins)
            made = call(graph, node, node.target, *args, **node.kwargs)
            rank = len(self.forms[0].size)
            for dim, zeros, size in (
                (rank - 2, m, self.forms[0].size[-2]),
                (rank - 1, n, self.forms[1].size[-1]),
            ):
                if zeros:
                    made = call(graph, node, _aten.slice.Tensor, made, dim, 0, size)
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    def _padded_addend(self, twins: _Twins) -> Any:
        """What `addmm` adds, padded in the dimensions that it does not broadcast over."""
        addend = self.node.args[0]
        assert isinstance(addend, Node)
        shape = addend.meta["val"].shape
        rows = self.zeros[0] if len(shape) > 1 and shape[-2] != 1 else 0
        columns = self.zeros[2] if len(shape) > 0 and shape[-1] != 1 else 0
        return twins.of(addend, rows, columns)


def _is_returned(node: Node) -> bool:
    """Does the graph return the result, or a view of it?  A slice does not have the strides of
    eager mode; Inductor pads such a gemm itself."""
    todo = [node]
    while todo:
        readers = list(todo.pop().users)
        if any(reader.op == "output" for reader in readers):
            return True
        todo += [reader for reader in readers if _is_view(reader)]
    return False


def _is_view(node: Node) -> bool:
    """May its result share its operand's memory, and so have strides of the operand?"""
    if node.op != "call_function" or node.target is operator.getitem or node.target in _VIEWS:
        return node.op == "call_function"
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(found.alias_info is not None for found in schema.returns)


def _zeros_of(left: TensorForm, right: TensorForm) -> tuple[int, int, int]:
    """The zeros after each dimension that is adjacent in memory, of an operand or of the result."""
    (m, k), n = left.size[-2:], right.size[-1]
    if 1 in (m, k, n) or 0 in (m, k, n):
        return 0, 0, 0
    reads_k = not _is_transposed(left) or _is_transposed(right)
    rows = short_of_16_bytes(m, left.dtype) if _is_transposed(left) else 0
    return (
        rows,
        short_of_16_bytes(k, left.dtype) if reads_k else 0,
        short_of_16_bytes(n, left.dtype),
    )


class _Twins:
    """The padded twin of each matrix of a graph, one for all its readers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[Node, int, int], Node] = {}

    def of(self, value: Node, rows: int, columns: int) -> Node:
        """The value with so many rows and columns of zeros after its own."""
        if not rows and not columns:
            return value
        origin, is_transposed = _origin(value)
        if is_transposed:
            rows, columns = columns, rows
        key = origin, rows, columns
        if key not in self.made:
            self.made[key] = self._padded(*key)
        made = self.made[key]
        if not is_transposed:
            return made
        with self.graph.inserting_after(made):
            return _transposed(self.graph, made)

    def _padded(self, origin: Node, rows: int, columns: int) -> Node:
        """The padded origin, in the order of its memory."""
        inputs = self.graph.find_nodes(op="placeholder")
        after = inputs[-1] if origin.op == "placeholder" else origin
        with self.graph.inserting_before(after.next):
            form = bench_ops.form_of_value(origin.meta["val"])
            if len(form.size) < 2 or not _is_transposed(form):  # type: ignore[union-attr, arg-type]
                behind = [0, columns, 0, rows] if rows else [0, columns]
                return call(self.graph, origin, _aten.constant_pad_nd.default, origin, behind, 0.0)
            behind = [0, rows, 0, columns] if columns else [0, rows]
            seen = _transposed(self.graph, origin)
            made = call(self.graph, origin, _aten.constant_pad_nd.default, seen, behind, 0.0)
            return _transposed(self.graph, made)


def _origin(value: Node) -> tuple[Node, bool]:
    """The matrix that the value is, or is the transpose of."""
    is_transposed = False
    while value.op == "call_function" and value.target in _TRANSPOSES:
        before = value.args[0]
        if before.meta["val"].mT.shape != value.meta["val"].shape:  # type: ignore[union-attr]
            break
        if before.meta["val"].mT.stride() != value.meta["val"].stride():  # type: ignore[union-attr]
            break
        value, is_transposed = before, not is_transposed  # type: ignore[assignment]
    return value, is_transposed


def _transposed(graph: Graph, value: Node) -> Node:
    rank = value.meta["val"].ndim
    order = [*range(rank - 2), rank - 1, rank - 2]
    return call(graph, value, _aten.permute.default, value, order)


# ---- is it faster? -----------------------------------------------------------------------------


def _is_free(value: Node, gemms: Collection[Node]) -> bool:
    """Does a pointwise operation make it for gemms only, so that Inductor writes it padded?"""
    while value.op == "call_function" and value.target in _VIEWS:
        value = value.args[0]  # type: ignore[assignment]
    tags = getattr(value.target, "tags", ())
    if value.op != "call_function" or not (
        torch.Tag.pointwise in tags or value.target in _POINTWISE
    ):
        return False
    readers = list(value.users)
    while readers:
        reader = readers.pop()
        if reader.op == "call_function" and reader.target in _VIEWS:
            readers += reader.users
        elif reader not in gemms:
            return False
    return True


def _is_small(gemm: _Gemm) -> bool:
    left, right = gemm.forms
    return is_small(left.size, (*left.size[:-1], right.size[-1]), left.device)


def _with_kernels(gemms: Sequence[_Gemm], strict: bool) -> list[_Gemm]:
    """The gemms, each with a spec only where that kernel is loaded; all are built at once."""
    specs: dict[torch.device, dict[KernelSpec, None]] = {}
    for gemm in gemms:
        if gemm.spec is not None and not _is_small(gemm):
            specs.setdefault(gemm.forms[0].device, {})[gemm.spec] = None
    there: set[tuple[KernelSpec, torch.device]] = set()
    for device, of_device in specs.items():
        if plan.unavailable(device) is None:
            there |= {(s, device) for s in loaded([*of_device], device, unaligned.KIND, strict)}
    found = []
    for gemm in gemms:
        has_kernel = (gemm.spec, gemm.forms[0].device) in there
        found.append(gemm if has_kernel else dataclasses.replace(gemm, spec=None))
    return [gemm for gemm in found if gemm.pads or gemm.spec]


def _chosen(gemms: dict[Node, _Gemm], on_cpu: bool, strict: bool) -> dict[Node, str | None]:
    """How to compute each. If one that reads an operand is not padded, the operand is written
    twice, and its zeros are not free for the others: so these are decided again."""
    padded = {node for node, gemm in gemms.items() if gemm.pads}
    if on_cpu:
        return {node: PADDED if node in padded else UNALIGNED for node in gemms}

    def fastest(gemm: _Gemm) -> str | None:
        try:
            return _fastest(gemm, [_is_free(f, padded) for f in gemm.factors])
        except Exception as error:  # only this gemm is left alone
            leave(error, strict)
            return None

    while True:
        chosen = {node: fastest(gemm) for node, gemm in gemms.items()}
        left = {node for node in padded if chosen[node] == PADDED}
        if left == padded:
            return chosen
        padded = left


def _fastest(gemm: _Gemm, free: Sequence[bool]) -> str | None:
    """The way to compute it; None for the library's. A padded gemm copies each operand that is not
    free."""
    if _is_small(gemm):
        return None
    left, right = gemm.forms
    adds = unaligned.adds(gemm.node)
    key = ("16 bits", str(left), str(right), gemm.zeros, gemm.spec and gemm.spec.name, adds, *free)
    times = contest.times(key, functools.partial(_candidates, gemm, free), left.device)
    if isinstance(times, str):
        return None
    library, padded, *fused = (took.gpu for took in times)
    log.info("%s @ %s: library %.4g ms, padded %.4g, %s %s",
             left.size, right.size, library, padded, gemm.spec and unaligned.name_of(gemm.spec),
             fused)  # fmt: skip
    # Where a reduction comes before the operand, the kernel that pads reads its input once more.
    read = sum(math.prod(form.size) for form, is_free in zip(gemm.forms, free) if is_free)
    in_place = padded + 1e3 * read * left.dtype.itemsize / limits.of(left.device).bandwidth
    pads = gemm.pads and in_place <= _MOST * library
    # Where this pass may not pad, Inductor may.
    rival = in_place if pads else library if gemm.pads else min(library, padded)
    if fused and contest.gains(fused[0], rival):
        return UNALIGNED
    return PADDED if pads else None


def _candidates(gemm: _Gemm, free: Sequence[bool]) -> list[Candidate]:
    """The library's, padded and, if the gemm has a spec, by that kernel."""
    forms, zeros = gemm.forms, gemm.zeros
    generator = torch.Generator(forms[0].device).manual_seed(0)
    deviations = (1.0, forms[1].size[-2] ** -0.5)
    values = [form.random(generator, d) for form, d in zip(forms, deviations)]
    behind = ((zeros[0], zeros[1]), (zeros[1], zeros[2]))
    (m, n) = forms[0].size[-2], forms[1].size[-1]
    operands: list[Callable[[], Tensor]] = []
    for value, rows_and_columns, is_free in zip(values, behind, free):
        make = functools.partial(_with_zeros, value, *rows_and_columns)
        operands.append(functools.partial(_given, make()) if is_free else make)

    def library() -> Sequence[Tensor]:
        return (values[0] @ values[1],)

    def padded() -> Sequence[Tensor]:
        return ((operands[0]() @ operands[1]())[..., :m, :n],)

    ways: dict[str, Callable[[], Sequence[Tensor]]] = {PADDED: padded}
    if gemm.spec is not None:
        adds = unaligned.adds(gemm.node)
        ways[unaligned.name_of(gemm.spec)] = unaligned.candidate(gemm.spec, adds, *values)
    checked = (_checked(library, way, name, forms[0].dtype) for name, way in ways.items())
    return [Candidate(library), *checked]


def _checked(
    library: Callable[[], Sequence[Tensor]],
    way: Callable[[], Sequence[Tensor]],
    name: str,
    dtype: torch.dtype,
) -> Candidate:
    """A way that is wrong is not timed; the others are."""
    try:
        bench_ops.compare([library, way], name, dtype)
    except bench_ops.DisagreementError as error:
        error.warn()
        return Candidate(way, is_exact=False)
    return Candidate(way)


def _given(value: Tensor) -> Tensor:
    return value


def _with_zeros(value: Tensor, rows: int, columns: int) -> Tensor:
    """The padded value, in the order of its memory."""
    if not rows and not columns:
        return value
    if value.stride(-1) != 1 and value.stride(-2) == 1:
        return F.pad(value.mT, (0, rows, 0, columns)).mT
    return F.pad(value, (0, columns, 0, rows))
