"""A convolution's candidates, measured beside what the inner compiler would run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.kernels.direct import DIRECT
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.kernels.precision import may_be_tf32
from fx_fuser.native import limits
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, layout
from fx_fuser.planning.case import (
    GAIN,
    device_of,
    gains,
    measured,
    note_of_host,
    timing_key,
)


def compare(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> tuple[dict[str, Any] | None, str]:
    """The fastest choices, with the figures; None if the inner compiler's convolution is faster.

    If gradients are asked for, times are of forward and backward together.
    """
    library, *direct = map(dict, candidates)
    # The inner compiler calls the library's convolution, too, converts whole graphs to the layout
    # that suits it, and needs as few passes over the result. Only its precision may be wrong.
    asked = options.fp32 in ("split", "ieee") and may_be_tf32(output_of(match))
    otherwise = library if asked else None
    if direct and all(choices["product"] != DIRECT for choices in direct):
        best, note = _compare_in_layout(match, library, direct, options)
        return best or otherwise, note
    others = [choices for choices in direct if choices["product"] != DIRECT]
    direct = [choices for choices in direct if choices["product"] == DIRECT]
    candidates = [library, *direct]
    if not direct:
        return otherwise, "the library's convolution is the inner compiler's"
    tensors = bench_ops.tensors_of(match)
    if tensors is None:
        return otherwise, "sizes unknown, so not timed"
    baselines = _baselines(match, {**library, "again": False}, options)
    key = (*timing_key(match, candidates, tensors), baselines)
    benches = functools.partial(bench_ops.convolutions, match, candidates, tensors, baselines)
    found = measured(match, key, benches, options)
    if isinstance(found, str):
        return otherwise, found
    names = [DIRECT, f"{DIRECT} in both directions"][: len(direct)]
    times = dict(zip([LIBRARY, *names, *(baseline.name for baseline in baselines)], found))
    note = ", ".join(f"{name} {took}" for name, took in times.items())
    fused = [times.pop(name) for name in names]
    fused_ms = [took.ms for took in fused]
    fastest, choices = min(zip(fused_ms, direct), key=itemgetter(0))
    *_, least_kept = direct
    if least_kept["backward"] == DIRECT and options.save == "memory":
        return least_kept, note
    least = min(took.gpu for took in times.values())
    gained = gains(fastest, least)
    if not gained and others:
        best, more = _compare_in_layout(match, library, others, options)
        return best or otherwise, f"{note}; {more}"
    if gained and options.save == "auto" and GAIN * fused_ms[-1] <= fastest:
        choices = least_kept
    if gained:
        return choices, note
    return otherwise, note + note_of_host(gains(min(took.gpu for took in fused), least), options)


def _compare_in_layout(
    match: Match, library: dict[str, Any], fused: Sequence[dict[str, Any]], options: Options
) -> tuple[dict[str, Any] | None, str]:
    """As `compare`, in inference, of candidates that run in the layout that the graph has."""
    if not match.bound.epilogue.steps:
        fused = [choices for choices in fused if choices["product"] != FOLDED]
    if not fused:
        return None, "no activation follows, and no site adds it"
    tensors = bench_ops.tensors_of(match)
    if tensors is None:
        return None, "sizes unknown, so not timed"
    baseline = {**library, "tf32": may_be_tf32(output_of(match))}
    is_last = layout.is_channels_last(match.view, match.site, options)
    key = ("in layout", is_last, *timing_key(match, [baseline, *fused], tensors))
    benches = functools.partial(bench_ops.in_layout, match, baseline, fused, tensors, is_last)
    found = measured(match, key, benches, options)
    if isinstance(found, str):
        return None, found
    apart, *each = found
    names = [choices["product"] for choices in fused]
    times = ", ".join(f"{name} {took}" for name, took in zip(names, each))
    folding = [_folding_ms(match) if name == FOLDED else 0 for name in names]
    needed = [took.ms + more for took, more in zip(each, folding)]
    best = min(range(len(fused)), key=needed.__getitem__)
    note = f"convolution and a pass {apart}, {times}"
    if gains(needed[best], apart.gpu):
        return fused[best], note
    on_gpu = min(took.gpu + more for took, more in zip(each, folding))
    return None, note + note_of_host(gains(on_gpu, apart.gpu), options)


def _folding_ms(match: Match) -> float:
    """What folding a BatchNorm into the weight takes at each call, together with other layers'."""
    weight = bench_ops.form_of(match.site.operands["weight"])  # type: ignore[arg-type]
    if weight is None or "running_mean" not in match.site.operands:
        return 0.0
    moved = 2 * math.prod(weight.size) * weight.dtype.itemsize
    return 1e3 * moved / limits.of(device_of(match)).bandwidth


def output_of(match: Match) -> torch.Tensor:
    return meta_tensor(match.site.nodes[0])  # type: ignore[return-value]


def _baselines(
    match: Match, library: Mapping[str, Any], options: Options
) -> tuple[bench_ops.Baseline, ...]:
    """The inner compiler's possible code of the match's convolution, if it is left."""
    if library["tf32"] or not may_be_tf32(output_of(match)):
        return (bench_ops.Baseline("in channels_last", library, channels_last=True),)
    if options.fp32 != "follow":
        return ()
    inexact = {**library, "tf32": True}
    return (
        bench_ops.Baseline("in TF32", inexact),
        bench_ops.Baseline("in TF32 and channels_last", inexact, channels_last=True),
    )
