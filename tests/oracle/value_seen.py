"""What a run left behind, beside what another did."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from value_programs import Program
from value_sets import same


@dataclass
class Seen:
    """What one run left behind. y: the tail's result; after: what the program makes of it."""

    y: Tensor
    after: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def told(what: str, bad: Tensor, found: Tensor, oracle: Tensor, eager: Tensor | None) -> str:
    """The first element that differs."""
    at = tuple(int(i) for i in bad.nonzero()[0])
    said = [f"oracle {float(oracle[at])!r}", f"fused {float(found[at])!r}"]
    if eager is not None and eager.shape == found.shape:
        said.insert(1, f"eager {float(eager[at])!r}")
    return f"{what} differs at {int(bad.sum())} of {bad.numel()} elements, first {list(at)}: " + (
        ", ".join(said)
    )


def is_plain(p: Program, inputs: dict[str, Tensor]) -> bool:
    """Is all computed in float32, in eager mode too?"""
    floats = {v.dtype for v in inputs.values() if v.is_floating_point() and v.ndim > 0}
    casts = re.search(r"half|double|bfloat16|float\(|to\(|type\(", p.source)
    return floats == {torch.float32} and not casts


def state_faults(eager: Seen, fused: Seen) -> str:
    """Are the running statistics as in eager mode, but for roundings?"""
    for name, theirs in eager.state.items():
        mine = fused.state[name]
        room = 8 * torch.finfo(theirs.dtype).eps * (theirs.double().abs() + 1)
        bad = ~(same(mine, theirs) | ((mine.double() - theirs.double()).abs() <= room))
        if bad.any():
            return told(name, bad, mine, theirs, theirs)
    return ""


def lost_signs(found: Tensor, wanted: Tensor, eager: Tensor) -> Tensor:
    """Where a zero has another sign than the oracle's, which is eager's too."""
    agreed = (wanted == 0) & (eager == 0) & (wanted.signbit() == eager.signbit())
    return agreed & (found == 0) & (found.signbit() != wanted.signbit())


def stride_faults(eager: Seen, fused: Seen) -> str:
    sizes = zip(eager.y.shape, fused.y.stride(), eager.y.stride())
    if any(size > 1 and mine != theirs for size, mine, theirs in sizes):
        return f"the result has strides {fused.y.stride()}, eager {eager.y.stride()}"
    return ""


def unfused_faults(eager: Seen, fused: Seen, apart: Collection[str] | None = ()) -> str:
    """What is not as in eager mode, to the bit; of operands read `apart` too, gradients are sums in
    another order, and that of y says that y is not compared. None: nothing is fused, and all
    gradients are as they were."""
    for name in ("y", "after") if apart is None or "y" not in apart else ():
        theirs, mine = getattr(eager, name), getattr(fused, name)
        bad = ~same(theirs, mine) | lost_signs(mine, theirs, theirs)
        if bad.any():
            return told(f"{name}, in all as in eager mode,", bad, mine, theirs, theirs)
    for name, theirs in eager.grads.items():
        summed = not name.startswith("t") or theirs.shape != eager.y.shape
        if apart is not None and (summed or name in apart):
            continue  # in another order where another operand's layout wins
        if (bad := ~same(theirs, fused.grads[name])).any():
            what = f"the gradient of {name}, from eager,"
            return told(what, bad, fused.grads[name], theirs, theirs)
    return ""
