"""A frozen BatchNorm that is written as plain operations becomes a call of batch_norm, for
matching:

    scale = weight * (running_var + eps).rsqrt()        of vectors, or of [1, C, 1, 1]
    conv(x) * scale + (bias - running_mean * scale)

torchvision's FrozenBatchNorm2d is this, and DETR's, detectron2's and transformers'. As a batch_norm
in evaluation it is one node of the anchor Conv2d → BatchNorm, whose scale folds into the weight.
What is not fused becomes the operations again, as the user wrote them.

Under autocast the convolution's result is of 16 bits, and with vectors of fp32 the sum is of fp32,
where a batch_norm's would be of 16 bits, too. It is rounded to these where the next convolution
reads it. If nothing else does, and only a relu comes between, rounding may as well come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.graph.prepare.reindex import is_view
from fx_fuser.graph.read.canonical import Operand, is_number
from fx_fuser.graph.read.nodes import as_written, called_in_place, input_of, meta_tensor, storages
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

_ROOTS = frozenset({"rsqrt", "sqrt"})
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Norm:
    """One that was found. node: its sum; product: what the sum adds the shift to; vectors:
    running_mean, running_var, weight, bias; made: every operation between these and the sum.
    rounded: the sum and what follows it, if these are of fp32 and only read in 16 bits."""

    node: Node
    product: Node
    convolution: Node
    vectors: tuple[Node, Node, Node, Node]
    eps: float
    made: tuple[Node, ...]
    rounded: tuple[Node, ...] = ()


@dataclass(frozen=True)
class _Written:
    """How a norm was written: its sum and its product; and the values of `rounded`."""

    norm: _Norm
    sum: dict[str, Any]
    product: dict[str, Any]
    values: tuple[Any, ...]

    def write(self) -> None:
        """Write it so again."""
        norm, graph = self.norm, self.norm.node.graph
        # Its convolution may have been replaced since.
        written = _with(self.product, {norm.convolution: input_of(norm.node)})
        with graph.inserting_before(norm.node):
            product = graph.create_node(**written)
        product.meta = norm.product.meta
        _write(norm.node, _with(self.sum, {norm.product: product}))
        for node, value in zip(norm.rounded, self.values):
            node.meta["example_value"] = value


@dataclass(frozen=True)
class Frozen:
    """Those of a graph."""

    norms: tuple[_Written, ...] = ()

    def restore(self) -> None:
        """Write out what was not fused. Then erase what only the others read: two norms may share
        a scale."""
        for was in self.norms:
            if not was.norm.node._erased:
                was.write()
        for norm in (was.norm for was in self.norms if was.norm.node._erased):
            for node in reversed(norm.made):
                if not node._erased and not node.users:
                    node.graph.erase_node(node)


def as_batch_norms(graph: Graph) -> Frozen:
    """Make each a call of F.batch_norm."""
    names = {called_name(node) for node in graph.nodes}
    if "conv2d" not in names or _ROOTS.isdisjoint(names):
        return Frozen()
    view = View(graph)
    found = []
    for node in view.nodes:
        with suppress(Exception):  # a node that cannot be read raises again where its site is found
            norms = (_rounded(view, norm) for norm in _norms_at(view, node))
            found += [norm for norm in norms if _is_safe(view, norm)][:1]
    return Frozen(tuple(map(_into_call, found)))


def _into_call(norm: _Norm) -> _Written:
    values = tuple(node.meta["example_value"] for node in norm.rounded)
    was = _Written(norm, as_written(norm.node), as_written(norm.product), values)
    operands = (norm.convolution, *norm.vectors)
    named = {"training": False, "eps": norm.eps}
    _write(norm.node, {**was.sum, "target": F.batch_norm, "args": operands, "kwargs": named})
    norm.node.op = "call_function"
    norm.node.graph.erase_node(norm.product)
    dtype = norm.convolution.meta["example_value"].dtype
    for node, value in zip(norm.rounded, values):
        is_same = called_in_place(node) and node is not norm.node
        node.meta["example_value"] = (
            input_of(node).meta["example_value"]
            if is_same
            else torch.empty_like(value, dtype=dtype).requires_grad_(value.requires_grad)
        )
    return was


def _with(written: Mapping[str, Any], now: Mapping[Node, Node]) -> dict[str, Any]:
    """What a node calls, with these nodes in place of others."""
    given = map_arg((written["args"], written["kwargs"]), lambda n: now.get(n, n))
    return {**written, "args": given[0], "kwargs": given[1]}


def _write(node: Node, call: Mapping[str, Any]) -> None:
    for name, value in call.items():
        setattr(node, name, value)


# ---- what is written -----------------------------------------------------------------------------


def _norms_at(view: View, node: Node) -> Iterator[_Norm]:
    """Those whose sum the node may be."""
    for product, shift in _orders(view, node, "add"):
        for convolution, scale in _orders(view, product, "mul"):
            of_conv = view.written(convolution) if isinstance(convolution, Node) else None
            if of_conv is None or of_conv.op != "conv2d":
                continue
            if not isinstance(scale, Node) or not isinstance(shift, Node):
                continue
            of_scale = _base(view, scale)
            for weight, variance, eps in _scales(view, of_scale):
                for mean, bias in _shifts(view, shift, of_scale):
                    vectors = mean, variance, weight, bias
                    made = _made({scale, shift}, vectors)
                    yield _Norm(node, product, convolution, vectors, eps, made)


def _orders(view: View, operand: Operand, op: str) -> Iterator[tuple[Any, Any]]:
    """The two operands of such a sum or product, in either order."""
    written = view.written(operand) if isinstance(operand, Node) else None
    if written is not None and written.op == op and len(written.args) == 2:
        yield written.args[0], written.args[1]
        yield written.args[1], written.args[0]


def _base(view: View, operand: Operand) -> Any:
    """The operand behind views and casts."""
    while isinstance(operand, Node):
        written = view.written(operand)
        if is_view(operand):
            operand = input_of(operand)
        elif written is not None and written.op in ("identity", "cast"):
            (operand,) = written.args
        else:
            break
    return operand


def _scales(view: View, scale: Any) -> Iterator[tuple[Any, Any, float]]:
    """(weight, variance, eps) of weight * rsqrt(variance + eps), or weight / sqrt(…)."""
    for weight, root in _orders(view, scale, "mul"):
        for variance, eps in _roots(view, root, "rsqrt"):
            yield _base(view, weight), variance, eps
    written = view.written(scale) if isinstance(scale, Node) else None
    if written is not None and written.op == "div":
        weight, root = written.args
        for variance, eps in _roots(view, root, "sqrt"):
            yield _base(view, weight), variance, eps


def _roots(view: View, root: Operand, op: str) -> Iterator[tuple[Any, float]]:
    base = _base(view, root)
    written = view.written(base) if isinstance(base, Node) else None
    if written is None or written.op != op:
        return
    under = _base(view, written.args[0])
    yield under, 0.0
    for variance, eps in _orders(view, under, "add"):
        if is_number(eps) and eps >= 0:
            yield _base(view, variance), float(eps)


def _shifts(view: View, shift: Operand, scale: Any) -> Iterator[tuple[Any, Any]]:
    """(mean, bias) of bias - mean * scale."""
    base = _base(view, shift)
    written = view.written(base) if isinstance(base, Node) else None
    if written is None or written.op != "sub" or len(written.args) != 2:
        return
    bias, moved = written.args
    for mean, factor in _orders(view, _base(view, moved), "mul"):
        if _base(view, factor) is scale:
            yield _base(view, mean), _base(view, bias)


def _made(ends: Iterable[Node], vectors: Sequence[Any]) -> tuple[Node, ...]:
    """The ends and what they are computed from, without the vectors, in the graph's order."""
    found: dict[Node, None] = {}
    todo = [*ends]
    while todo:
        node = todo.pop()
        if node not in found and node not in vectors:
            found[node] = None
            todo += node.all_input_nodes
    return tuple(sorted(found))


# ---- is it known to be a BatchNorm? --------------------------------------------------------------


def _is_safe(view: View, norm: _Norm) -> bool:
    """Does batch_norm compute the same, of what these vectors hold at the sum?"""
    between = (*norm.made, norm.product, norm.node)
    if any(isinstance(n.target, OpOverload) or called_in_place(n) for n in between):
        return False  # exported programs have no op for a folded convolution
    if {n.op for n in norm.vectors} - {"placeholder", "get_attr"}:
        return False
    if {n.op for n in norm.made} - {"call_function", "call_method"}:
        return False
    readers = view.readers[norm.convolution], view.readers[norm.product]
    if readers != ([norm.product], [norm.node]):
        return False
    if len({view.region[n] for n in between}) > 1:
        return False
    return _are_vectors(norm) and not _is_written(view, norm)


def _are_vectors(norm: _Norm) -> bool:
    """Is there a number for each channel of a batch of images, in dtypes that batch_norm takes?"""
    z, c = meta_tensor(norm.node), meta_tensor(norm.convolution)
    vectors = [t for n in norm.vectors if (t := meta_tensor(n)) is not None]
    made = [t for n in norm.made if (t := meta_tensor(n)) is not None]
    if z is None or c is None or len(vectors) < len(norm.vectors) or len(made) < len(norm.made):
        return False
    if (c.ndim, z.ndim) != (4, 4):  # of others dimension 1 may be no channels
        return False
    channels, dtype, (mean, variance, *_) = z.shape[1], vectors[0].dtype, vectors
    if not isinstance(channels, int) or mean.requires_grad or variance.requires_grad:
        return False
    if any(v.shape != (channels,) or v.dtype != dtype or v.device != c.device for v in vectors):
        return False
    # What is rounded to fewer bits on the way is computed more exactly, but not what has more.
    if {t.dtype for t in made} - {c.dtype, dtype}:
        return False
    if z.dtype != c.dtype and not norm.rounded:
        return False
    if dtype != c.dtype and (dtype != torch.float32 or c.dtype not in _SIXTEEN_BITS):
        return False
    ends = [t for n, t in zip(norm.made, made) if {norm.product, norm.node} & n.users.keys()]
    along = all(t.ndim >= 3 and t.shape[-3] == channels for t in ends)
    return along and all(t.numel() == channels for t in made)


def _rounded(view: View, norm: _Norm) -> _Norm:
    """The norm; with what is of fp32, if its convolution is not, and then only read in 16 bits."""
    z, c = meta_tensor(norm.node), meta_tensor(norm.convolution)
    if z is None or c is None or z.dtype != torch.float32 or c.dtype not in _SIXTEEN_BITS:
        return norm
    chain = [norm.node]
    while not _is_only_rounded(view, chain[-1], c.dtype):
        if len(view.readers[chain[-1]]) != 1:
            return norm
        (node,) = view.readers[chain[-1]]
        written, value = view.written(node), meta_tensor(node)
        # Of equal maxima one has the gradient, and rounding makes equal ones.
        is_pool = called_name(node) == "max_pool2d" and not z.requires_grad
        if not (is_pool or (written is not None and written.op == "relu")):
            return norm
        if value is None or value.dtype != z.dtype or view.region[node] != view.region[norm.node]:
            return norm
        chain.append(node)
    return replace(norm, rounded=tuple(chain))


def _is_only_rounded(view: View, node: Node, dtype: torch.dtype) -> bool:
    """Is it read, and only as the input of convolutions that autocast runs in this dtype? With a
    gradient of one alone: those of several are added in fp32."""
    value = meta_tensor(node)
    if value is None or (value.requires_grad and len(view.readers[node]) > 1):
        return False
    for reader in view.readers[node]:
        written, y = view.written(reader), meta_tensor(reader)
        if written is None or written.op != "conv2d" or y is None or y.dtype != dtype:
            return False
        if written.args[0] is not node or node in written.args[1:]:
            return False
    return bool(view.readers[node])


def _is_written(view: View, norm: _Norm) -> bool:
    """May anything write to what the operations read, while they run?"""
    start, end = (view.order[n] for n in (norm.made[0], norm.node))
    memory = storages((*norm.vectors, *norm.made, norm.convolution, norm.product))
    for node, written in view.writers.items():
        if not start < view.order[node] < end:
            continue
        for value in written:
            here, tensor = storages((value,)), meta_tensor(value)
            if None in memory | here or here & memory:
                return True
            # It may share memory with a vector, and only the caller knows.
            is_counter = tensor is not None and not tensor.dtype.is_floating_point
            if here & view.graph_inputs and not is_counter:
                return True
    return False
