"""A convolution's candidates, measured against what the inner compiler would run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.kernels import KERNELS
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.kernels.precision import may_be_tf32
from fx_fuser.native import limits
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, contest, layout, surroundings
from fx_fuser.planning.case import device_of, timing_key
from fx_fuser.planning.timing import Timing


def compare(
    match: Match,
    candidates: Sequence[Mapping[str, Any]],
    options: Options,
    folds: bool = True,
) -> tuple[dict[str, Any] | None, str]:
    """The fastest choices, with the figures; None if the inner compiler's convolution is faster.

    folds: may the library's fused call win? If gradients are asked for, times are of forward and
    backward together.
    """
    library, direct, others = _parts(candidates)
    # The inner compiler calls the library's convolution, too, converts whole graphs to the layout
    # that suits it, and needs as few passes over the result. Only its precision may be wrong.
    asked = options.fp32 in ("split", "ieee") and may_be_tf32(output_of(match))
    otherwise = library if asked else None
    if others and not direct:
        best, note = _compare_in_layout(match, library, others, options, folds)
        return best or otherwise, note
    candidates = [library, *direct]
    if not direct:
        return otherwise, "the inner compiler calls the library's convolution as well"
    tensors = bench_ops.tensors_of(match)
    if tensors is None:
        return otherwise, "sizes unknown, so not timed"
    baselines = _baselines(match, {**library, "again": False}, options)
    key = (*timing_key(match, candidates, tensors), baselines)
    benches = functools.partial(bench_ops.convolutions, match, candidates, tensors, baselines)
    found = contest.times(key, benches, device_of(match), options)
    if isinstance(found, str):
        return otherwise, found
    names = [c["product"] + " in both directions" * (c["backward"] == c["product"]) for c in direct]
    times = dict(zip([LIBRARY, *names, *(baseline.name for baseline in baselines)], found))
    note = ", ".join(f"{name} {took}" for name, took in times.items())
    of_direct = [times.pop(name) for name in names]
    *_, least_kept = direct
    if least_kept["backward"] != LIBRARY and options.save == "memory":
        return least_kept, note
    least = min(took.gpu for took in times.values())
    around = [surroundings.ms_into_cat(match)] * len(direct)
    won = contest.winner(of_direct, least, around, options)
    if won.place is None and others:
        best, more = _compare_in_layout(match, library, others, options, folds)
        return best or otherwise, f"{note}{won.note}; {more}"
    if won.place is None:
        return otherwise, note + won.note
    if options.save == "auto" and contest.GAIN * of_direct[-1].ms <= of_direct[won.place].ms:
        return least_kept, note
    return direct[won.place], note


def _parts(
    candidates: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The library's; those that need one layout, which are timed against the library's convolution
    in either; those that run in any."""
    library, *fused = map(dict, candidates)
    direct, others = (
        [c for c in fused if KERNELS[c["product"]].any_layout is any_layout]
        for any_layout in (False, True)
    )
    return library, direct, others


class InLayout(NamedTuple):
    """Times in the layout that the graph has. apart: of the library's convolution and a pass over
    its result. each: of the candidates, by name."""

    apart: Timing
    each: dict[str, Timing]


def times_in_layout(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> InLayout | str:
    """Times of candidates that run in any layout, in inference; or why there are none."""
    library, _, fused = _parts(candidates)
    if not match.bound.epilogue.steps:
        fused = [choices for choices in fused if choices["product"] != FOLDED]
    if not fused:
        return "no activation follows, and no site adds it"
    tensors = bench_ops.tensors_of(match)
    if tensors is None:
        return "sizes unknown, so not timed"
    baseline = {**library, "tf32": may_be_tf32(output_of(match))}
    is_last = layout.is_channels_last(match.view, match.site, options)
    key = ("in layout", is_last, *timing_key(match, [baseline, *fused], tensors))
    benches = functools.partial(bench_ops.in_layout, match, baseline, fused, tensors, is_last)
    found = contest.times(key, benches, device_of(match), options)
    if isinstance(found, str):
        return found
    apart, *each = found
    return InLayout(apart, dict(zip([choices["product"] for choices in fused], each)))


def _compare_in_layout(
    match: Match,
    library: dict[str, Any],
    fused: Sequence[dict[str, Any]],
    options: Options,
    folds: bool,
) -> tuple[dict[str, Any] | None, str]:
    """As `compare`, in inference, for candidates that run in the layout that the graph has."""
    found = times_in_layout(match, [library, *fused], options)
    if isinstance(found, str):
        return None, found
    named = {c["product"]: c for c in fused if folds or c["product"] != FOLDED}
    each = {name: took for name, took in found.each.items() if name in named}
    if not each:
        return None, f"convolution and a pass {found.apart}"
    times = ", ".join(f"{name} {took}" for name, took in each.items())
    copy = surroundings.ms_into_cat(match)
    around = [copy + (_folding_ms(match) if name == FOLDED else 0) for name in each]
    won = contest.winner([*each.values()], found.apart.gpu, around, options)
    note = f"convolution and a pass {found.apart}, {times}"
    return (None, note + won.note) if won.place is None else (named[[*each][won.place]], note)


def _folding_ms(match: Match) -> float:
    """The time to fold a BatchNorm into the weight at each call, together with other layers'."""
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
    """What the inner compiler may run for the match's convolution, if it is left."""
    if library["tf32"] or not may_be_tf32(output_of(match)):
        return (bench_ops.Baseline("in channels_last", library, channels_last=True),)
    if options.fp32 != "follow":
        return ()
    inexact = {**library, "tf32": True}
    return (
        bench_ops.Baseline("in TF32", inexact),
        bench_ops.Baseline("in TF32 and channels_last", inexact, channels_last=True),
    )
