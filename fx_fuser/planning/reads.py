"""Fused biases → after how many reads Inductor keeps a sum in memory.

Inductor recomputes a pointwise result in each kernel that needs it, unless it needs more reads than
`realize_reads_threshold`; until then everything that it reads stays alive. The residual stream of a
ViT, `x + (a @ w.t() + b) + (c @ v.t() + d)`, has five reads with its biases and is written. Where
a gemm adds its bias itself there is one read less, the sum of four is not written, and three
activations are alive instead of two (9 instead of 8 at the peak of torchvision's vit_b_16 in fp32,
an H100, 2026-11-25). So the threshold is one less there.

Not in training, where most memory is what is saved for backward, nor under `install()`, whose
settings are made before it is known what fuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._inductor import config

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.options import Options

THRESHOLD = "realize_reads_threshold"  # Inductor's setting


def settings(fused: Iterable[Match], options: Options) -> dict[str, Any]:
    """Inductor's settings for a graph with these sites; empty if the user has set the threshold,
    for this call or globally."""
    by_default = config._is_default(THRESHOLD)  # type: ignore[attr-defined]
    if THRESHOLD in options.inductor or not by_default or not any(map(_leaves_its_sum, fused)):
        return {}
    return {THRESHOLD: getattr(config, THRESHOLD) - 1}


def _leaves_its_sum(match: Match) -> bool:
    """Is it a gemm with its bias alone, in inference, so that Inductor adds the rest?"""
    z = meta_tensor(match.root)
    is_gemm = not isinstance(ANCHORS[match.site.kind], Conv2d)
    has_bias_alone = match.site.operands.get("bias") is not None and not match.bound.epilogue.steps
    return is_gemm and has_bias_alone and z is not None and not z.requires_grad
