"""(match, plan) → memory traffic in bytes and launches that fusing saves; bytes that it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.nn import Parameter

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.prepare import decompose
from fx_fuser.graph.read.nodes import hint_of, inputs_of, meta_tensor
from fx_fuser.kernels import KERNELS
from fx_fuser.ops import apply, calls
from fx_fuser.ops.calls import gradients_of, gradients_of_tensors, saves
from fx_fuser.planning.plan import Plan


@dataclass(frozen=True)
class Saved:
    """bytes: None if a size is unknown when compiling."""

    bytes: int | None
    launches: int

    def __str__(self) -> str:
        launches = f"{self.launches} launch{'' if self.launches == 1 else 'es'}"
        return launches if self.bytes is None else f"{text_of(self.bytes)}, {launches}"


def saved(match: Match, plan: Plan) -> Saved:
    """What one forward call saves compared with the user's operations run one by one.

    Each of these reads its tensors and writes its result, in one launch. The fused call writes its
    result and reads each operand once, in two launches. With the library: the gemm or convolution,
    and a pointwise kernel that reads its output. With a fused kernel: a pass over its operands
    (none for the dense one), and the kernel, whose z stays on the chip. Batch statistics are a
    third.

    What both do (x, the weight, the passes for batch statistics) is left out, and so is backward.
    Inductor fuses the pointwise operations with each other, so less is saved compared with it.
    """
    view, site = match.view, match.site
    free = set(match.bound.tensors)
    nodes = match.nodes - decompose.inner_of(match.nodes)
    read = [
        value
        for node in match.nodes
        for value in {view.value(node, n) for n in inputs_of(node)}
        if value in free or value in nodes
    ]
    kept = [match.root, *free]
    if plan.choices.get("product", LIBRARY) == LIBRARY and len(match.nodes) > 1:
        kept += [site.nodes[0], site.nodes[0]]
    apart, fused = _bytes([*nodes, *read]), _bytes(kept)
    launches = 3 if site.attrs.get("training") else 2
    known = apart is not None and fused is not None
    return Saved(
        apart - fused if known else None,  # type: ignore[operator]
        max(len(nodes) - launches, 0),
    )


def kept(match: Match, plan: Plan) -> dict[str, int] | None:
    """Node → bytes of it that the site keeps from forward to backward, at most; no parameters.

    Empty if the inner compiler differentiates the operations, and so decides. None if a size is
    unknown when compiling.
    """
    site, anchor = match.site, ANCHORS[match.site.kind]
    if not plan.native or not saves(match):
        return {}
    needs = {**dict.fromkeys(site.operands, False), **gradients_of(match)}
    call = calls.fused_call(match, plan.choices)
    c = site.nodes[0]
    compute = meta_tensor(c).dtype  # type: ignore[union-attr]
    named = {name: site.operands[name] for name in anchor.operands}
    operands = dict(zip(named, anchor.kernel_operands(named, call.config)))
    needs_t = gradients_of_tensors(match)
    read = call.reads({name: needs[name] for name in named}, needs_t)
    fused = KERNELS[plan.choices["backward"]].backward_family is not None
    held: dict[str, int | None] = {}
    for name, node in {**operands, **apply.named(match.bound.tensors, ())}.items():
        if name not in read or not isinstance(node, Node):
            continue
        tensor = meta_tensor(node)
        assert tensor is not None
        dtype = compute if name in anchor.cast else tensor.dtype
        if dtype != tensor.dtype or not isinstance(tensor, Parameter):  # or autocast's copy
            held[node.name] = _bytes([node], dtype)
    if call.saves(fused, {name: needs[name] for name in named}, needs_t):
        held[c.name] = _bytes([c])
    return None if None in held.values() else held  # type: ignore[return-value]


def text_of(count: int) -> str:
    """Bytes as text, with a unit."""
    size, units = float(count), ["bytes", "kB", "MB", "GB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def _bytes(nodes: list[Node], dtype: torch.dtype | None = None) -> int | None:
    """Bytes of all the tensors together, at the sizes of this trace; dtype: by default theirs."""
    total = 0
    for node in nodes:
        tensor = meta_tensor(node)
        if tensor is None:
            return None
        sizes = [hint_of(size) for size in tensor.shape]
        if None in sizes:
            return None
        total += math.prod(sizes) * (dtype or tensor.dtype).itemsize  # type: ignore[arg-type]
    return total
