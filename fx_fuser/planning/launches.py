"""A graph for whose convolutions the host needs longer than the GPU: no fold is worth its launch.

The library's fused call takes the host as long as the convolution and the pass that it replaces,
and folding BatchNorm into the weights comes on top (kernels_cu/NOTES.md, "What a call costs the
host"). So in a launch-bound graph folded sites save GPU time that nobody waits for, and the clock
loses. A kernel that folds nothing needs one launch where there were two, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.graph.match.pattern import Match
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.options import Options
from fx_fuser.planning import contest, convolutions
from fx_fuser.planning.convolutions import InLayout
from fx_fuser.planning.timing import Timing

log = logging.getLogger("fx_fuser.planning.launches")

# The host's time of a call in a graph, by its time in a loop: code and plans have left the
# processor's caches, Python and guards are between the calls. ResNeXt-50 1.3, ResNet-18 1.6,
# Inception 1.8 (H100's hosts, 2026-11-27, kernels_cu/NOTES.md).
IN_GRAPH = 1.5
# What folding one more layer takes the host, by a call of the library's: 3 us in `fold` and 3.5 for
# the views of what it makes, beside 26 (same place).
FOLDING = 0.25


def bound(
    matches: Sequence[Match],
    candidates: Sequence[Sequence[Mapping[str, Any]] | None],
    folded: Collection[int],
    options: Options,
) -> Timing | None:
    """What the graph's convolutions take, the GPU without folds and the host with them, if that is
    longer; else None.

    matches: of one graph, timed already, with their candidates; None: failed. folded: the indices
    of those that would fold.
    """
    if options.plan != "measure" or options.inner != "inductor" or options.replays_cuda_graphs:
        return None
    gpu = host = 0.0
    for i, (match, offered) in enumerate(zip(matches, candidates)):
        if offered is None or len(offered) == 1:
            continue
        if not isinstance(ANCHORS[match.site.kind], Conv2d):
            continue
        found = convolutions.times_in_layout(match, offered, options)
        if isinstance(found, InLayout):
            gpu += found.apart.gpu
            host += IN_GRAPH * _host_of(found) * (1 + FOLDING * (i in folded))
    log.info("convolutions: %.4g ms of the GPU, about %.4g of the host", gpu, host)
    return Timing(gpu, host) if host > gpu else None


def note(waits: Timing, options: Options) -> str:
    return (
        f"; the graph's convolutions take the GPU {waits.gpu:.2g} ms and the host about "
        f"{waits.host:.2g}, so folding BatchNorm saves no wall time{contest.host_note(options)}"
    )


def _host_of(found: InLayout) -> float:
    """Of the library's convolution and the pass over its result: as its fused call, where that was
    timed."""
    took = found.each.get(FOLDED)
    return took.host if took is not None else max(each.host for each in found.each.values())
