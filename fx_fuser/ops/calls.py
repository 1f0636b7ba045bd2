"""From a match to the call of an op: its arguments, and the kernels that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.epilogue import read_anew_by_derivative, wanted_leaves
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.match.rewrite import Call
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.kernels import KERNELS
from fx_fuser.kernels.folded import FOLDED, fold_spec
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import apply
from fx_fuser.ops.library import FusedCall, argument_names


def graph_call(match: Match, native: bool, choices: Mapping[str, Any]) -> Call:
    """The composite op's call for this match; choices: the configuration that plan chose."""
    site, bound = match.site, match.bound
    config = {**ANCHORS[site.kind].config(site), **choices}
    values = {**site.operands, **config}
    anchored = (values[n] for n in argument_names(site.kind))
    compute = meta_tensor(match.site.nodes[0]).dtype  # type: ignore[union-attr]
    out = meta_tensor(match.root).dtype  # type: ignore[union-attr]
    epilogue = (bound.epilogue.text, list(bound.tensors), list(bound.numbers))
    tracked = config.get("training") and site.operands["running_mean"] is not None
    results = (site.operands["running_mean"], site.operands["running_var"]) if tracked else ()
    op = getattr(torch.ops.fx_fuser, site.kind).default
    return Call(op, (*anchored, *epilogue, compute, out, native), results, bound.items)


def config_of(match: Match, choices: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration arguments of the match's op, in the order of its schema."""
    kind = match.site.kind
    values = {**ANCHORS[kind].config(match.site), **choices}
    return {name: values[name] for name in argument_names(kind) if name in values}


def fused_call(match: Match, choices: Mapping[str, Any]) -> FusedCall:
    """The call that the match becomes."""
    bound, out = match.bound, meta_tensor(match.root).dtype  # type: ignore[union-attr]
    anchor, config = ANCHORS[match.site.kind], config_of(match, choices)
    return FusedCall(anchor, config, bound.epilogue, [*map(float, bound.numbers)], out)


def fake_tensors(match: Match) -> list[Tensor]:
    """The fake tensors of the epilogue's t0…."""
    return [meta_tensor(node) for node in match.bound.tensors]  # type: ignore[misc]


def kernel_specs(match: Match, choices: Mapping[str, Any]) -> list[KernelSpec]:
    """The CUDA kernels that this match needs with these choices of plan."""
    call, t = fused_call(match, choices), fake_tensors(match)
    operands = {n: o and meta_tensor(o) for n, o in match.site.operands.items()}
    c = meta_tensor(match.site.nodes[0]).dtype  # type: ignore[union-attr]
    if choices.get("product") == FOLDED:
        is_normed = "running_mean" in operands
        return [fold_spec(operands["weight"].dtype, c)] if is_normed else []  # type: ignore[union-attr]
    anchored = (call.anchor, call.config, call.epilogue, operands)
    specs = apply.forward_specs(*anchored, t, call.s, c, call.out)
    backward = KERNELS[choices.get("backward", LIBRARY)]
    if backward.backward_family is not None:
        family = backward.backward_family
        specs += filter(None, [apply.backward_spec(family, call.epilogue, t, call.s, call.out)])
    recomputing = KERNELS[choices["product"]].plain_specs() if choices.get("again") else []
    return [*specs, *(backward.plain_specs() or recomputing)]


def may_have_fused_backward(match: Match, kernel: str) -> bool:
    """`FusedCall.has_fused_backward` for the call that this match becomes."""
    call, t = fused_call(match, {"backward": kernel}), fake_tensors(match)
    c = meta_tensor(match.site.nodes[0])
    nodes = {name: match.site.operands[name] for name in call.anchor.operands}
    operands = [
        node and (c if name in call.anchor.cast else meta_tensor(node))
        for name, node in nodes.items()
    ]
    return call.has_fused_backward(operands, t, [v.requires_grad for v in t])  # type: ignore[arg-type]


def gradients_of(match: Match) -> dict[str, bool]:
    """Operand of the anchor → is its gradient needed?  Empty if nothing is to be saved."""
    z: Any = meta_tensor(match.site.node)
    if not z.requires_grad:
        return {}
    nodes = {name: match.site.operands[name] for name in ANCHORS[match.site.kind].operands}
    tensors = {name: node and meta_tensor(node) for name, node in nodes.items()}
    return {name: getattr(tensor, "requires_grad", False) for name, tensor in tensors.items()}


def gradients_of_tensors(match: Match) -> list[bool]:
    """For each of the epilogue's tensors: is its gradient needed?"""
    result: Any = meta_tensor(match.root)  # parameters require gradients under no_grad, too
    return [result.requires_grad and tensor.requires_grad for tensor in fake_tensors(match)]


def saves(match: Match) -> bool:
    """Is there anything to keep for a backward?"""
    return any(gradients_of(match).values()) or any(gradients_of_tensors(match))


def saved_only_by_fused(match: Match) -> list[Node]:
    """The operands that the op keeps for a backward, if it keeps c, and for which eager mode keeps
    another value or none.

    Among the anchor's these are a bias, and an x that eager's Linear copies because its rows are
    not contiguous.
    """
    if not saves(match):
        return []
    site, anchor = match.site, ANCHORS[match.site.kind]
    needs = {**dict.fromkeys(site.operands, False), **gradients_of(match)}
    needs_t = gradients_of_tensors(match)
    names = read_anew_by_derivative(match.bound.epilogue, wanted_leaves(needs, needs_t))
    x: Any = meta_tensor(site.operands["x"])  # type: ignore[arg-type]
    is_copied = site.kind in ("linear", "matmul") and x.ndim > 2 and not x.is_contiguous()
    own = {"bias", "x"} if is_copied else {"bias"}
    names |= own & fused_call(match, {"again": False}).reads(needs, needs_t)
    c = meta_tensor(site.nodes[0])
    return [
        node
        for name, node in {**site.operands, **apply.named(match.bound.tensors, ())}.items()
        if name in names
        and node is not None
        and (name not in anchor.cast or meta_tensor(node).dtype == c.dtype)  # type: ignore[union-attr]
    ]
