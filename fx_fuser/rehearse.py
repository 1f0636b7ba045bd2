"""A match's kernel op on tensors of our own, as the compiled model will call it: for timing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fx_fuser.anchors import ANCHORS
from fx_fuser.match import Match
from fx_fuser.ops import FusedCall, wildcards_of
from fx_fuser.spell import meta_tensor


@dataclass(frozen=True)
class TensorForm:
    """All of a tensor but its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def random(self, generator: torch.Generator) -> Tensor:
        """Normal values, or zeros and ones where the dtype is no float."""
        extent = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride))
        memory = torch.empty(max(extent, 0), dtype=self.dtype, device=self.device)
        if self.device != generator.device:
            memory.fill_(1)
        elif self.dtype.is_floating_point:
            memory.normal_(generator=generator)
        else:
            memory.random_(0, 2, generator=generator)
        return memory.as_strided(self.size, self.stride)


def tensors_of(match: Match) -> list[TensorForm | None] | None:
    """The kernel op's tensors, operands and wildcards, at the sizes of this trace.

    None if a size is not known when compiling.
    """
    site = match.site
    anchor = ANCHORS[site.kind]
    c = meta_tensor(site.nodes[0])
    t, _, _ = wildcards_of(match)
    forms: list[TensorForm | None] = []
    for name, node in (*((n, site.operands[n]) for n in anchor.operands), *(("", n) for n in t)):
        tensor = None if node is None else meta_tensor(node)
        if tensor is None:
            forms.append(None)
            continue
        size, stride = (tuple(map(_hint, v)) for v in (tensor.shape, tensor.stride()))
        if None in size or None in stride:
            return None
        dtype = c.dtype if name in anchor.cast else tensor.dtype  # type: ignore[union-attr]
        forms.append(TensorForm(size, stride, dtype, tensor.device))  # type: ignore[arg-type]
    return forms


def _hint(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else size.node.hint


def gradients_of(match: Match) -> dict[str, bool]:
    """Of which operands of the anchor a gradient is asked for; empty if nothing is to be saved."""
    z: Any = meta_tensor(match.site.node)
    if not z.requires_grad:
        return {}
    nodes = {name: match.site.operands[name] for name in ANCHORS[match.site.kind].operands}
    tensors = {name: node and meta_tensor(node) for name, node in nodes.items()}
    return {name: getattr(tensor, "requires_grad", False) for name, tensor in tensors.items()}


def rehearsals(
    match: Match, candidates: Sequence[Mapping[str, Any]], tensors: Sequence[TensorForm | None]
) -> list[Callable[[], object]]:
    """The kernel op on random tensors with each of plan's candidates, as the match will call it.

    In training followed by the anchor's backward with each of them.
    """
    pattern, site = match.pattern, match.site
    anchor = ANCHORS[pattern.kind]
    c: Any = meta_tensor(site.nodes[0])
    generator = torch.Generator(c.device).manual_seed(0)  # the user's random state stays as it is
    values = [None if form is None else form.random(generator) for form in tensors]
    count = len(anchor.operands)
    operands = dict(zip(anchor.operands, values))
    _, s, kinds = wildcards_of(match)
    out = meta_tensor(match.root).dtype  # type: ignore[union-attr]
    configs = [{**anchor.config(site), **choices} for choices in candidates]
    calls = [FusedCall(pattern, config, s, kinds, out) for config in configs]
    needs = gradients_of(match)
    forward = [
        functools.partial(call.run, values[:count], values[count:], save=bool(needs))
        for call in calls
    ]
    if not needs:
        return forward  # type: ignore[return-value]
    sizes: Any = tuple(map(_hint, c.shape))
    dz = torch.empty(sizes, dtype=c.dtype, device=c.device).normal_(generator=generator)
    backward = [
        functools.partial(anchor.backward, operands, (), config, dz, needs) for config in configs
    ]
    return [*forward, *backward]
