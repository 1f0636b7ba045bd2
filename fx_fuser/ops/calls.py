"""From a match to the call of an op: its arguments, and the kernels that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import DIRECT, FOLDED
from fx_fuser.graph.match import Match
from fx_fuser.graph.nodes import meta_tensor
from fx_fuser.graph.rewrite import Call
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import apply, folded
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
    return FusedCall(anchor, config, bound.epilogue, list(bound.numbers), out)


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
        return [folded.fold_spec(operands["weight"].dtype, c)] if is_normed else []  # type: ignore[union-attr]
    anchored = (call.anchor, call.config, call.epilogue, operands)
    specs = apply.forward_specs(*anchored, t, call.s, c, call.out)
    if choices.get("backward") == DIRECT:
        specs += filter(None, [apply.backward_spec(call.epilogue, t, call.s, call.out)])
    return specs + call.anchor.backward_specs(choices)


def may_have_fused_backward(match: Match) -> bool:
    """`FusedCall.has_fused_backward` of the call that this match becomes."""
    call, t = fused_call(match, {"backward": DIRECT}), fake_tensors(match)
    c = meta_tensor(match.site.nodes[0])
    nodes = {name: match.site.operands[name] for name in call.anchor.operands}
    operands = [
        node and (c if name in call.anchor.cast else meta_tensor(node))
        for name, node in nodes.items()
    ]
    return call.has_fused_backward(operands, t, [v.requires_grad for v in t])  # type: ignore[arg-type]
