"""(matches, options) → all kernels that they may come to need, compiled in one run of ninja.

`fx_fuser.planning.gate` asks for a tail's kernel once z alone has been measured, and Inductor's
passes for theirs apart from both. A product's kernel takes some 6 s of one core, so asked for one
after the other they take three times that (ViT-B on an H200's host, 2026-11-23: 8.8, 7.8 and
10.3 s). Here they are compiled side by side. What may not be needed is compiled only where it costs
no time: on cores that have nothing else to do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.match import Match
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import calls
from fx_fuser.options import Options
from fx_fuser.planning import plan

log = logging.getLogger("fx_fuser.planning.ahead")

Kernels = Mapping[torch.device, Sequence[KernelSpec]]


def build(
    first: Sequence[Match], whole: Sequence[Match], beside: Kernels, options: Options, most: int
) -> None:
    """Compile and load nothing; nor raise: what fails is asked for again, and then named.

    first: what is planned first of each match: z alone, or the match itself. whole: the matches.
    beside: what others will ask for. most: how many more tails may be compiled
    (`Options.max_structures`).
    """
    try:
        needed = {device: list(specs) for device, specs in beside.items()}
        for match in first:
            _add(needed, match, options)
        perhaps: dict[torch.device, list[KernelSpec]] = {}
        for match, begun in zip(whole, first):
            if match is not begun:
                _add(perhaps, match, options, own=True)
        norms = {plan.device_of(match) for match in first if match.site.attrs.get("training")}
        for device in needed:
            if device.type != "cuda":
                continue
            specs = load.not_loaded(needed[device], device)
            idle = max(len(os.sched_getaffinity(0)) - len(specs), 0)
            tails = load.not_loaded(perhaps.get(device, []), device)
            tails = [spec for spec in tails if spec not in specs]
            load.build([*specs, *tails[: min(idle, most)]], device, device in norms)
    except Exception:
        log.info("not all kernels could be compiled ahead", exc_info=True)


def _add(
    kernels: dict[torch.device, list[KernelSpec]], match: Match, options: Options, own: bool = False
) -> None:
    """The kernels of all that plan may choose; own: only where the product is ours."""
    for choices in ANCHORS[match.site.kind].candidates(plan.MatchCase(match, options)):
        if not own or choices["product"] != LIBRARY:
            specs = calls.kernel_specs(match, choices)
            kernels.setdefault(plan.device_of(match), []).extend(specs)
