"""Launch-bound convolutional graphs, in which folding BatchNorm saves no wall time.

On the host, cuDNN's fused call costs as much as the convolution and the pointwise kernel that it
replaces, and the fold itself is extra (kernels_cu/NOTES.md, "What a call costs the host"). If the
GPU waits for the host anyway, folding makes the step slower. Kernels that fold nothing stay: they
need one launch instead of two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.sites import ATTENTION_NAMES, CONVOLUTIONS, GEMMS
from fx_fuser.graph.read.source import called_name
from fx_fuser.kernels import KERNELS
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.options import Options
from fx_fuser.planning import convolutions
from fx_fuser.planning.convolutions import InLayout
from fx_fuser.planning.timing import Timing

log = logging.getLogger("fx_fuser.planning.launches")

# The host's time of a call in a graph, relative to that in a loop: code and plans have left the
# processor's caches, Python and guards are between the calls. ResNeXt-50 1.3, ResNet-18 1.6,
# Inception 1.8 (H100's hosts, 2026-11-27, kernels_cu/NOTES.md).
IN_GRAPH = 1.5
# The host's time to fold one more layer, relative to a call of the library's: 3 us in `fold` and
# 3.5 for views of its result, to 26 us (same place).
FOLDING = 0.25
# Gemms and attentions per convolution of a graph, at most: a classifier, not a transformer.
OTHERS = 0.25


def counts(matches: Sequence[Match], options: Options) -> bool:
    """Can the host's time decide?  Not where CUDA graphs are replayed, where Inductor does not make
    the pass after a convolution, or where much else in the graph may keep the GPU busy.

    matches: of one graph.
    """
    if options.plan != "measure" or options.inner != "inductor" or options.replays_cuda_graphs:
        return False
    called = [called_name(node) for node in matches[0].view.nodes]
    others = sum(name in GEMMS | ATTENTION_NAMES for name in called)
    return others <= OTHERS * sum(name in CONVOLUTIONS for name in called)


def times_of(
    match: Match,
    offered: Sequence[Mapping[str, Any]],
    chosen: str | None,
    options: Options,
) -> InLayout | None:
    """Times of a convolution that was timed in the graph's layout. chosen: what it runs on."""
    if not isinstance(ANCHORS[match.site.kind], Conv2d) or len(offered) == 1:
        return None
    if chosen not in (None, LIBRARY) and not KERNELS[chosen].any_layout:
        return None
    found = convolutions.times_in_layout(match, offered, options)
    return found if isinstance(found, InLayout) else None


def bound(times: Sequence[InLayout | None], folded: Collection[int]) -> Timing | None:
    """The times of a graph's convolutions, the GPU's without folds and the host's with them, if the
    host's is longer; else None.

    times: of each match, None where it has none. folded: the indices of those that would fold.
    """
    gpu = host = 0.0
    for i, found in enumerate(times):
        if found is not None and (took := _host_of(found)):
            gpu += found.apart.gpu
            host += IN_GRAPH * took * (1 + FOLDING * (i in folded))
    log.info("convolutions: %.4g ms of the GPU, about %.4g of the host", gpu, host)
    return Timing(gpu, host) if host > gpu else None


def note(waits: Timing) -> str:
    return (
        f"; the graph's convolutions take the GPU {waits.gpu:.2g} ms and the host about "
        f"{waits.host:.2g}, so folding BatchNorm saves no wall time"
    )


def _host_of(found: InLayout) -> float:
    """The host's time of the library's convolution and the pass over its result: that of its fused
    call, if that was timed; 0 if nothing was."""
    each = {name: took.host for name, took in found.each.items() if math.isfinite(took.gpu)}
    return each.get(FOLDED) or max(each.values(), default=0.0)
