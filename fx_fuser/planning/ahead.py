"""(matches, options) → all kernels that they may need, compiled in one run of ninja.

`fx_fuser.planning.gate` asks for a tail's kernel only after z alone was measured, and the passes
over Inductor's graphs ask for theirs after that. A gemm kernel took some 6 s of one core, so one
after the other they took three times that (ViT-B on an H200's host, 2026-11-23: 8.8, 7.8 and
10.3 s). Here they compile side by side. Kernels that may not be needed compile on cores that are
idle meanwhile; where nothing else has to be compiled, they wait until the gate asks for those it
needs, in one run. (ESMFold's triangle block in training, an H100, 2026-11-25: a second compilation
took 6 s longer for tails that none of its sites used.)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch

from fx_fuser import kernels
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.match.pattern import Match
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import calls
from fx_fuser.options import Options
from fx_fuser.planning.case import MatchCase, device_of

log = logging.getLogger("fx_fuser.planning.ahead")

Kernels = Mapping[torch.device, Sequence[KernelSpec]]


def build(
    first: Sequence[Match], whole: Sequence[Match], beside: Kernels, options: Options, most: int
) -> None:
    """Compile, without loading. Raises nothing: what fails fails again, by name, where it is used.

    first: what is planned first of each match: z alone, or the match itself. whole: the matches.
    beside: kernels that the passes need. most: how many more tails may be compiled
    (`Options.max_structures`).
    """
    try:
        needed = {device: list(specs) for device, specs in beside.items()}
        for match in first:
            _add(needed, match, options)
        perhaps: dict[torch.device, list[KernelSpec]] = {}
        for match, begun in zip(whole, first):
            if match is not begun:
                _add(perhaps, match, options, fused_only=True)
        norms = {device_of(match) for match in first if match.site.attrs.get("training")}
        for device in needed:
            if device.type != "cuda":
                continue
            specs = load.not_built(needed[device], device)
            texts = {text for missing in specs.values() for text in missing}
            idle = max(len(os.sched_getaffinity(0)) - len(texts), 0) if texts else 0
            # A tail adds one text; z alone needs the other parts of its kernel, too.
            found = load.not_built(perhaps.get(device, []), device) if idle else {}
            tails = [spec for spec in found if spec not in specs]
            load.build([*specs, *tails[: min(idle, most)]], device, device in norms)
    except Exception:
        log.info("not all kernels could be compiled ahead", exc_info=True)


def _add(
    needed: dict[torch.device, list[KernelSpec]],
    match: Match,
    options: Options,
    fused_only: bool = False,
) -> None:
    """Add the kernels of all candidates. fused_only: without the library's."""
    for choices in kernels.candidates(MatchCase(match, options)):
        if not fused_only or choices["product"] != LIBRARY:
            specs = calls.kernel_specs(match, choices)
            needed.setdefault(device_of(match), []).extend(specs)
