"""The copy that a fused call's result needs in its place, which Inductor's own code would not."""

from __future__ import annotations

from torch.fx import Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d_batchnorm import Conv2dBatchNorm
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.native import limits
from fx_fuser.planning import bench_ops
from fx_fuser.planning.case import device_of

_JOINS = frozenset({"cat", "concat", "concatenate"})


def ms_into_cat(match: Match) -> float:
    """The copy of the site's value into a `cat` that reads it, in ms.

    Inductor computes a pointwise operation into its part of the joined buffer. The result of an
    opaque call it must copy; so it must a bare library gemm's, which therefore costs nothing extra
    here. A `cat` that pointwise operations alone read is never materialised
    (`torch._inductor.lowering.cat`).
    """
    is_normed = isinstance(ANCHORS[match.site.kind], Conv2dBatchNorm)
    is_pointwise = is_normed or bool(match.bound.epilogue.steps)
    readers = match.view.readers[match.root]
    y = bench_ops.form_of(match.root)
    if y is None or not is_pointwise or not any(_is_buffer(match.view, node) for node in readers):
        return 0.0
    return 1e3 * 2 * y.bytes / limits.of(device_of(match)).bandwidth


def _is_buffer(view: View, node: Node) -> bool:
    """Is it a `cat` whose result is in memory?"""
    if called_name(node) not in _JOINS:
        return False
    written = (view.written(reader) for reader in view.readers[node])
    return not all(expr is not None and expr.op in OPS for expr in written)
