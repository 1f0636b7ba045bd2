"""The calls that attention is made of: products of two tensors, softmax, torch's own attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fx_fuser.graph.read import einsum
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.nodes import argument_of, input_of, meta_tensor
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

aten = torch.ops.aten
ATTENTIONS = {F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}
# Their arguments in order, with defaults.
ATTENTION_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    ("query", None), ("key", None), ("value", None), ("attn_mask", None), ("dropout_p", 0.0),
    ("is_causal", False), ("scale", None), ("enable_gqa", False),
)  # fmt: skip
# torch's attention module is one call, projections included.
OPAQUE = {F.multi_head_attention_forward, torch._transformer_encoder_layer_fwd}
OPAQUE |= {torch._native_multi_head_attention}
_SOFTMAXES = {torch.softmax, torch.special.softmax, "softmax", aten.softmax.int}
_BADDBMMS = {torch.baddbmm, "baddbmm", aten.baddbmm.default}
_EINSUMS = {torch.einsum, aten.einsum.default}
DROPOUTS = {F.dropout, torch.dropout, aten.dropout.default}
_CALLS = ("call_function", "call_method")


@dataclass(frozen=True)
class Product:
    """alpha · left · right + beta · addend, with a label for each dimension.

    labels: of both factors; out: of the result. A label of both factors that the result lacks is
    summed over. addend: None where beta is 0, because it is then not read.
    """

    node: Node
    factors: tuple[Node, Node]
    labels: tuple[tuple[str, ...], tuple[str, ...]]
    out: tuple[str, ...]
    alpha: float = 1.0
    beta: float = 0.0
    addend: Node | None = None

    @property
    def summed(self) -> tuple[str, ...]:
        left, right = self.labels
        return tuple(x for x in left if x in right and x not in self.out)

    def own(self, place: int) -> tuple[str, ...]:
        """The labels that only this factor has; those of batches count for both."""
        mine, other = self.labels[place], self.labels[1 - place]
        return tuple(x for x in mine if x not in other and x.isalpha())


@dataclass(frozen=True)
class Softmax:
    node: Node
    input: Node
    dim: int  # of the input, from 0


def product_at(view: View, node: Node) -> Product | None:
    """The product of two tensors that a node is; None for a Linear, whose weight is a parameter."""
    if node.op not in _CALLS:
        return None
    if node.target in _EINSUMS:
        return _einsum(view, node)
    if node.target in _BADDBMMS:
        return _baddbmm(view, node)
    if called_name(node) not in ("matmul", "bmm", "mm", "__matmul__"):
        return None
    written = view.written(node)
    if written is None or written.op not in ("matmul", "bmm"):
        return None
    return _matmul(node, *written.args)


def _matmul(node: Node, left: Any, right: Any) -> Product | None:
    ranks = _ranks(left, right)
    if ranks is None or min(ranks) < 2:
        return None
    batches = [[f".{i}" for i in range(rank - 2, 0, -1)] for rank in ranks]
    labels = (*batches[0], "m", "k"), (*batches[1], "k", "n")
    return Product(node, (left, right), labels, (*max(batches, key=len), "m", "n"))


def _einsum(view: View, node: Node) -> Product | None:
    equation, *factors = node.args if node.args and not node.kwargs else (None,)
    if len(factors) == 1 and isinstance(factors[0], (list, tuple)):
        factors = [*factors[0]]
    if not isinstance(equation, str) or len(factors) != 2:
        return None
    left, right = view.resolve(node, tuple(factors))
    ranks = _ranks(left, right)
    found = None if ranks is None else einsum.labels(equation, *ranks)
    if found is None:
        return None
    a, b, out = map(tuple, found)
    product = Product(node, (left, right), (a, b), out)
    lost = {x for x in (*a, *b) if x not in out} - {*product.summed}
    return None if lost or len({*out}) < len(out) or not {*out} <= {*a, *b} else product


def _baddbmm(view: View, node: Node) -> Product | None:
    named = {key: value for key, value in node.kwargs.items() if key in ("beta", "alpha")}
    known = {"input", "self", "batch1", "batch2", "beta", "alpha"}
    factors = [argument_of(node, i, f"batch{i}") for i in (1, 2)]
    addend = input_of(node)
    if len(node.args) > 3 or not node.kwargs.keys() <= known:
        return None
    if not all(map(is_number, named.values())) or not isinstance(addend, Node):
        return None
    plain = _matmul(node, *view.resolve(node, tuple(factors)))
    if plain is None or any(len(labels) != 3 for labels in plain.labels):
        return None
    alpha, beta = (float(named.get(name, 1.0)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
    if alpha == 0:  # the libraries then read neither factor, whose NaN would spread
        return None
    unread = meta_tensor(addend)
    if beta == 0 and (unread is None or unread.requires_grad):
        return None  # its gradient is zeros, not None
    read = None if beta == 0 else view.value(node, addend)
    return Product(node, plain.factors, plain.labels, plain.out, alpha, beta, read)


def _ranks(left: Any, right: Any) -> tuple[int, int] | None:
    x, y = (meta_tensor(n) if isinstance(n, Node) else None for n in (left, right))
    return None if x is None or y is None else (x.ndim, y.ndim)


def softmax_at(view: View, node: Node) -> Softmax | None:
    if node.op not in _CALLS:
        return None
    if node.target is F.softmax:
        dim, dtype = argument_of(node, 1, "dim"), argument_of(node, 3, "dtype")
    elif node.target in _SOFTMAXES:
        dim, dtype = argument_of(node, 1, "dim"), argument_of(node, 2, "dtype")
    else:
        return None
    source, made = input_of(node), meta_tensor(node)
    if not isinstance(source, Node) or type(dim) is not int or made is None or not made.ndim:
        return None
    if node.kwargs.get("out") is not None or not isinstance(dtype, torch.dtype | None):
        return None
    return Softmax(node, view.value(node, source), dim % made.ndim)
