"""The copy that a fused call's result needs in its place, which Inductor's own code would not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.anchors.conv2d_batchnorm import Conv2dBatchNorm
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.prepare.reindex import PERMUTATIONS, REGROUPINGS
from fx_fuser.graph.read.nodes import argument_of
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.native import limits
from fx_fuser.planning import bench_ops
from fx_fuser.planning.case import device_of

VIEWS = (
    PERMUTATIONS | REGROUPINGS | {"contiguous", "chunk", "split", "getitem", "expand", "getattr"}
)
VIEWS |= {"to_local", "from_local", "prim_to_local", "prim_from_local"}  # of a DTensor
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"})
_MOST_INLINE = 8  # inputs of a `cat` that is not materialised; Inductor's max_pointwise_cat_inputs


def ms_into_cat(match: Match) -> float:
    """The copy of the site's value into a `cat` that reads it, in ms.

    Inductor computes a pointwise operation into its part of the joined buffer. It must copy the
    result of an opaque call, and that of a bare library gemm, too, which therefore costs nothing
    extra here. A `cat` that only pointwise operations read is never materialised
    (`torch._inductor.lowering.cat`).
    """
    y = bench_ops.form_of(match.root)
    if y is None or not _is_pointwise(match):
        return 0.0
    readers = [*_readers(match.view, match.root)]
    joins = [node for node in readers if called_name(node) in _JOINS]
    # If others read the value as well, Inductor writes it once, into the buffer.
    if not joins or (len(readers) == 1 and _is_inline(match.view, joins[0])):
        return 0.0
    return 1e3 * 2 * y.bytes / limits.of(device_of(match)).bandwidth


def _is_pointwise(match: Match) -> bool:
    """Would Inductor make the value by a pointwise operation?  It splits a bias from a convolution
    (`torch._inductor.kernel.conv`), not from a gemm."""
    anchor, operands = ANCHORS[match.site.kind], match.site.operands
    is_biased = isinstance(anchor, Conv2d) and operands["bias"] is not None
    is_normed = isinstance(anchor, Conv2dBatchNorm)
    return bool(match.bound.epilogue.steps) or is_biased or is_normed


def _readers(view: View, node: Node, depth: int = 8) -> Iterator[Node]:
    """The value's readers, through views of it."""
    for reader in view.readers[node]:
        if called_name(reader) in VIEWS and depth:
            yield from _readers(view, reader, depth - 1)
        else:
            yield reader


def _is_inline(view: View, join: Node) -> bool:
    """Is the `cat` computed in the kernels of its readers?"""
    joined: Any = argument_of(join, 0, "tensors")
    few = isinstance(joined, (list, tuple)) and len(joined) <= _MOST_INLINE
    return few and all(_is_inlined_by(view, reader) for reader in _readers(view, join))


def _is_inlined_by(view: View, reader: Node) -> bool:
    name = called_name(reader)
    if name == "batch_norm":
        return argument_of(reader, 5, "training") is not True
    written = view.written(reader)
    return name in _JOINS | {"pad"} or (written is not None and written.op in OPS)
