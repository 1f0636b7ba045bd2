"""A broadcast product that is summed at once → the gemm that it is.

    (a[..., :, None] * b[..., None, :]).sum(d)        torch.einsum("…k,…k->…", a, b)

Inductor makes one kernel of it that does a gemm's work on CUDA cores and reads its operands once
for each product; backward writes the products. transformers' Mamba-2 (5.17) spends 8.2 of 8.6 ms in
three of them (an H100, bf16, evaluation, 2026-11-26). The einsum sums in another order, and in 16
bits it does not round each product. It is a site as if the model had written it
(`fx_fuser.graph.prepare.decompose`).

A sum stays where something else reads the product, where each element is used in few products
(`_LEAST`), and where autocast or a torch setting would make a gemm less exact than a sum.
"""

from __future__ import annotations

import logging
import math
import operator
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.graph.read.nodes import argument_of, input_of, meta_tensor, storages
from fx_fuser.graph.read.view import Region, View
from fx_fuser.kernels.precision import asked_precision, matmul_tf32_requested
from fx_fuser.options import Options
from fx_fuser.passes import strides

log = logging.getLogger("fx_fuser.passes.contractions")
_aten = torch.ops.aten
_SUMS = {"sum", torch.sum, _aten.sum.dim_IntList}
_PRODUCTS = {
    *("mul", "multiply", "__mul__"),
    *(operator.mul, torch.mul, torch.multiply, _aten.mul.Tensor),
}
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# Rows, columns and terms of a sum, at least: how often each element of an operand or result is
# used. With fewer, memory limits either form, and Inductor fuses a sum with what surrounds it.
_LEAST = 32
# Terms of an fp32 gemm, forward and backward, at most. torch adds a sum's terms in pairs, a gemm
# adds them in turn: cuBLAS's error is 1.9e-7 at 1024 terms and 4.9e-7 at 8192; docs/accuracy.md
# allows 4e-7.
_MOST = 1024
COUNTER = "fx_fuser_contractions"


@dataclass(frozen=True)
class Contraction:
    """A sum of products that was rewritten. node: what it is now. equation: of the einsum."""

    node: Node
    equation: str


@dataclass(frozen=True)
class _Sum:
    """product.sum(dim) of x · y. factors: first the one whose own dimensions come first in the
    result, as a gemm's rows do."""

    product: Node
    factors: tuple[Node, Node]
    dim: int

    def sizes(self) -> tuple[int, ...]:
        return tuple(_value(self.product).shape)

    def whole(self, factor: Node) -> set[int]:
        """The dimensions of the product, except those of size 1, in which the factor is not
        broadcast."""
        own, sizes = tuple(_value(factor).shape), self.sizes()
        return {len(sizes) - i for i, n in enumerate(reversed(own), 1) if n == sizes[-i] != 1}

    def is_gemm(self) -> bool:
        x, y = map(self.whole, self.factors)
        parts: Iterable[Iterable[int]] = ({self.dim}, x - y, y - x)
        sizes, value = self.sizes(), _value(self.product)
        counts = [math.prod(sizes[i] for i in part) for part in parts]
        terms = counts if value.requires_grad else counts[:1]
        is_exact = value.dtype is not torch.float32 or max(terms) <= _MOST
        return self.dim in x & y and min(counts) >= _LEAST and is_exact

    def equation(self) -> str:
        letters, x, y = string.ascii_letters, *map(self.whole, self.factors)
        of_x, of_y = ("".join(letters[i] for i in sorted(part)) for part in (x, y))
        of_result = "".join(letters[i] for i in sorted((x | y) - {self.dim}))
        return f"{of_x},{of_y}->{of_result}"

    def broadcast(self, factor: Node) -> tuple[int, ...]:
        """The dimensions of the factor that are not its own."""
        ndim = _value(factor).ndim
        skipped, whole = len(self.sizes()) - ndim, self.whole(factor)
        return tuple(i for i in range(ndim) if i + skipped not in whole)


def _value(node: Node) -> Any:
    """The fake tensor of a node that `_read` has seen to have one."""
    return meta_tensor(node)


def contract(graph: Graph, options: Options) -> list[Contraction]:
    """Rewrite the sums of products of a graph, those on CUDA, or with "cpu_ops" those on a CPU."""
    found: list[Contraction] = []
    view: View | None = None
    for node in list(graph.nodes):
        try:
            called = _read(node)
            if called is None:
                continue
            view = view or View(graph)
            equation = called.equation()
            if _may_move(called, node, view, options) and _rewrite(
                node, called, equation, view.region[node]
            ):
                found.append(Contraction(node, equation))
        except Exception as error:
            if options.strict:
                raise
            log.info("a sum of products is left as it is", exc_info=error)
    return found


def _read(node: Node) -> _Sum | None:
    """The sum of products that a node is, if a gemm can compute it."""
    if node.target not in _SUMS or node.op not in ("call_function", "call_method"):
        return None
    known = {"input", "self", "dim", "axis", "keepdim", "dtype"}  # not: out
    named = {name for name, value in node.kwargs.items() if value is not None}
    product, dim = input_of(node), argument_of(node, 1, "dim")
    dim = node.kwargs.get("axis") if dim is None else dim
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not named <= known or len(node.args) > 3 or type(dim) is not int:
        return None
    if not isinstance(product, Node) or product.target not in _PRODUCTS or len(product.users) > 1:
        return None
    if len(product.args) != 2 or product.kwargs:
        return None
    x, y = product.args
    if not isinstance(x, Node) or not isinstance(y, Node):
        return None
    tensors: list[Any] = [meta_tensor(n) for n in (x, y, product, node)]
    if not all(type(t) is FakeTensor and all(isinstance(n, int) for n in t.shape) for t in tensors):
        return None
    ndim, (kind, *others) = tensors[2].ndim, {(t.dtype, t.device) for t in tensors}
    if others or kind[0] not in _DTYPES or not 0 < ndim <= len(string.ascii_letters):
        return None
    found = _Sum(product, (x, y), dim % ndim)
    if not found.is_gemm():
        return None
    rows, columns = (min(found.whole(a) - found.whole(b)) for a, b in ((x, y), (y, x)))
    return found if rows < columns else _Sum(product, (y, x), dim % ndim)


def _may_move(called: _Sum, node: Node, view: View, options: Options) -> bool:
    """Would a gemm in place of the sum read the same values, and compute as exactly?"""
    value, region = _value(node), view.region[node]
    if value.device.type != ("cpu" if options.cpu_ops else "cuda"):
        return False
    if view.region[called.product] != region or region.functional_level() is not None:
        return False
    is_tf32 = matmul_tf32_requested() or asked_precision(options) == "tf32"
    if value.dtype is torch.float32 and is_tf32:
        return False
    # By default torch's gemms may add the parts of a long sum in fp16, which overflows.
    gemms = torch.backends.cuda.matmul
    adds_in_fp16 = gemms.allow_fp16_accumulation or gemms.allow_fp16_reduced_precision_reduction
    if value.dtype is torch.float16 and adds_in_fp16:
        return False
    # What is reshaped in place has another shape now than where it is read.
    if not view.reshaped.keys().isdisjoint(storages((*called.factors, called.product, node))):
        return False
    between = view.nodes[view.order[called.product] + 1 : view.order[node]]
    written = storages(n for one in between for n in view.writers.get(one, ()))
    return written.isdisjoint({None, *storages(called.factors)})


def _rewrite(node: Node, called: _Sum, equation: str, region: Region) -> bool:
    """Make the sum the einsum. False if its dtype or strides would differ; then it stays."""
    was, fakes = _value(node), list[Tensor]()
    with was.fake_mode, torch.set_grad_enabled(was.requires_grad):
        for factor in called.factors:
            fakes.append(_value(factor).squeeze(called.broadcast(factor)))
        # Backward runs under the autocast that is around the graph.
        around = torch.einsum(equation, *fakes).dtype
        with region.autocast():
            gemm = torch.einsum(equation, *fakes)
        now = gemm if gemm.shape == was.shape else gemm.reshape(was.shape)
    if {now.dtype, around} != {was.dtype}:
        return False
    if now.stride() != was.stride():
        try:
            strides.keep(node, now)
        except strides.StridesError:
            return False
    operands = [_squeezed(node, f, called, fake) for f, fake in zip(called.factors, fakes)]
    node.op, node.target, node.kwargs = "call_function", torch.einsum, {}
    node.args = (equation, *operands)
    node.meta["example_value"] = now
    if now is not gemm:
        with node.graph.inserting_before(node):
            inner = node.graph.call_function(torch.einsum, node.args)
        inner.meta = {**node.meta, "example_value": gemm}
        node.target, node.args = torch.reshape, (inner, tuple(was.shape))
    node.graph.erase_node(called.product)
    return True


def _squeezed(node: Node, factor: Node, called: _Sum, fake: Tensor) -> Node:
    """The factor without the dimensions that it has only for broadcasting."""
    dims = called.broadcast(factor)
    if not dims:
        return factor
    with node.graph.inserting_before(node):
        made = node.graph.call_method("squeeze", (factor, dims))
    made.meta = {**node.meta, "example_value": fake}
    return made
