"""(match, plan) → what fusing saves, in bytes through memory and launches; and what it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node
from torch.nn import Parameter

from fx_fuser import ops
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.anchors.conv2d import DIRECT
from fx_fuser.match import Match
from fx_fuser.plan import Plan
from fx_fuser.rehearse import gradients_of, saves
from fx_fuser.spell import hint_of, inputs_of, meta_tensor


@dataclass(frozen=True)
class Saved:
    """bytes: None where a size is not known when compiling."""

    bytes: int | None
    launches: int

    def __str__(self) -> str:
        launches = f"{self.launches} launch{'' if self.launches == 1 else 'es'}"
        return launches if self.bytes is None else f"{text_of(self.bytes)}, {launches}"


def saved(match: Match, plan: Plan) -> Saved:
    """What one forward call saves against the user's operations run one by one.

    Each of those reads its tensors and writes its result, in one launch. The fused call writes its
    result and reads each operand once, in two launches: the product, and a pointwise kernel that
    reads what the product wrote; or, with a product of our own, what makes its operands ready (the
    dense product needs no such launch), and the product, whose result stays on the chip. Batch
    statistics are a third.
    What both do alike is left out (x, the weight, the passes for batch statistics), as is the
    backward. Inductor fuses the pointwise operations among themselves, so against it less is saved.
    """
    view, site = match.view, match.site
    free = {o for o in match.wildcards.values() if isinstance(o, Node)}
    read = [
        value
        for node in match.nodes
        for value in {view.value(node, n) for n in inputs_of(node)}
        if value in free or value in match.nodes
    ]
    kept = [match.root, *free]
    if plan.choices.get("product", LIBRARY) == LIBRARY:
        kept += [site.nodes[0], site.nodes[0]]
    apart, fused = _bytes([*match.nodes, *read]), _bytes(kept)
    launches = 3 if site.attrs.get("training") else 2
    known = apart is not None and fused is not None
    return Saved(
        apart - fused if known else None,  # type: ignore[operator]
        max(len(match.nodes) - launches, 0),
    )


def kept(match: Match, plan: Plan) -> int | None:
    """Bytes that the site keeps from forward to backward, without parameters.

    0 too where the inner compiler differentiates the operations and decides. None if a size is not
    known when compiling.
    """
    needs = {**dict.fromkeys(match.site.operands, False), **gradients_of(match)}
    if not plan.native or not saves(match):
        return 0
    kinds = ops.wildcards_of(match)[2]
    read = ops.read_by_backward(match.pattern, kinds, plan.choices, needs)
    values = {**match.site.operands, **match.wildcards}
    nodes = {v for name, v in values.items() if name in read and isinstance(v, Node)}
    held = [n for n in nodes if not isinstance(meta_tensor(n), Parameter)]
    if not plan.choices["again"] and plan.choices["backward"] != DIRECT:
        held.append(match.site.nodes[0])
    return _bytes(held)


def text_of(count: int) -> str:
    """Bytes, for people."""
    size, units = float(count), ["bytes", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def _bytes(nodes: list[Node]) -> int | None:
    """Of all the tensors together, at the sizes of this trace."""
    total = 0
    for node in nodes:
        tensor = meta_tensor(node)
        if tensor is None:
            return None
        sizes = [hint_of(size) for size in tensor.shape]
        if None in sizes:
            return None
        total += math.prod(sizes) * tensor.element_size()  # type: ignore[arg-type]
    return total
