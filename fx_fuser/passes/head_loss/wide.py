"""Heads that multiply in fp32 what was cast up from 16 bits.

    F.linear(hidden.float(), weight.float()).log_softmax(-1).gather(-1, labels)

`fx_fuser.ops.head_wide` computes them from the 16-bit tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.read.heads import Head, value_of
from fx_fuser.graph.read.nodes import is_torchs, storages
from fx_fuser.graph.read.sites import Site
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.precision import asked_precision, matmul_tf32_requested
from fx_fuser.kernels.split import MIXED_GEMMS
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.options import Options
from fx_fuser.passes.head_loss.parts import Stays
from fx_fuser.planning.surroundings import VIEWS

_CASTS = {"float", "to", "type", "type_as"}
_ALIGNED = 8  # 16-bit values, of which a row that TMA copies has a multiple


@dataclass(frozen=True)
class Wide:
    """narrow: from which dtype both operands were cast up. x, weight: of it, or as the Linear reads
    them, in fp32. casts: of both. by_library: does torch multiply in TF32?"""

    narrow: torch.dtype
    x: Node
    weight: Node
    casts: tuple[Node, Node]
    by_library: bool


class _Cast(NamedTuple):
    """node: of the cast. before: what it casts up."""

    node: Node
    before: Node


def wide_of(view: View, head: Head, options: Options) -> Wide | None:
    """Raises Stays. None of any other head."""
    site = head.head
    x, weight = site.operands["x"], site.operands["weight"]
    if head.kind is not torch.float32 or x is None or weight is None:
        return None
    of_x, of_weight = _cast_of(view, x), _cast_of(view, weight)
    if of_x is None or of_weight is None:
        return None
    narrow = value_of(of_x.before).dtype
    if narrow is not value_of(of_weight.before).dtype:
        return None
    # Backward reads them once more.
    read = [*of_x, *of_weight, *(n for n in site.operands.values() if n is not None)]
    first = min(view.order[of_x.node], view.order[of_weight.node])
    written = storages(n for one in view.nodes[first:] for n in view.writers.get(one, ()))
    if not written.isdisjoint({None, *storages(read)}):
        raise Stays("something is written to its operands, or to what they were cast up from")
    used = _used(view, site, of_x, x), _used(view, site, of_weight, weight)
    return Wide(narrow, *used, (of_x.node, of_weight.node), _asks_library(options))


def kernels_of(wide: Wide) -> list[KernelSpec]:
    """Of its products. Raises Stays if they would not take the operands."""
    x, exact = value_of(wide.x), EXACT_GEMMS[wide.narrow]
    if wide.by_library:
        return []
    k = x.shape[-1]
    is_known = x.device.type == "cuda" and load.available(x.device) is None
    if is_known and not load.runs_on(exact, x.device):
        raise Stays("only Hopper has a kernel for fp32 products of 16-bit operands")
    if not (isinstance(k, int) and k % _ALIGNED == 0):
        raise Stays(f"its rows of {k} 16-bit values are not a multiple of 16 bytes")
    return [exact, MIXED_GEMMS[wide.narrow]]


def _asks_library(options: Options) -> bool:
    precision = asked_precision(options)
    if precision == "ieee":
        raise Stays("option 'fp32' asks for products that are not exact 16-bit ones")
    return precision == "tf32" and matmul_tf32_requested()


def _cast_of(view: View, node: Node) -> _Cast | None:
    """The cast from 16 bits whose elements these are, all or some, in any order."""
    while node.op in ("call_function", "call_method") and is_torchs(node):
        first = node.args[0] if node.args else None
        before = view.value(node, first) if isinstance(first, Node) else None
        if before is None or any(type(value_of(n)) is not FakeTensor for n in (node, before)):
            return None
        value, was, name = value_of(node), value_of(before), called_name(node)
        if value.dtype is not torch.float32 or value.device != was.device:
            return None
        if name in _CASTS and was.dtype in SIXTEEN_BITS:
            return _Cast(node, before)
        if was.dtype is not torch.float32 or name not in VIEWS | _CASTS:
            return None
        node = before
    return None


def _used(view: View, site: Site, cast: _Cast, operand: Node) -> Node:
    """What the op reads: what was cast up, unless the fp32 result has other readers whose gradients
    autograd adds before it rounds their sum."""
    readers = _readers(view, cast.node, site)
    is_alone = operand is cast.node and not any(map(_takes_gradient, readers))
    is_same = value_of(cast.node).requires_grad == value_of(cast.before).requires_grad
    return cast.before if is_alone and is_same else operand


def _readers(view: View, node: Node, site: Site) -> Iterator[Node]:
    """Of the value, and of its transpose or other views, but for the Linear."""
    for reader in view.readers[node]:
        if reader in site.nodes:
            continue
        if called_name(reader) in VIEWS:
            yield from _readers(view, reader, site)
        else:
            yield reader


def _takes_gradient(reader: Node) -> bool:
    value = value_of(reader)
    return type(value) is not FakeTensor or value.requires_grad
