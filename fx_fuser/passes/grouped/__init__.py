"""Inductor's graph of ATen operations → the same, with 16-bit convolutions in groups, in
channels_last, and their gradients, by fx_fuser's kernels if faster.

The library's gradients of the weight take 2.4 of 17.7 ms of a training step of ResNeXt-50 on an
H100, and layout conversions around its convolutions half of RegNet-Y's time in 16 bits
(kernels_cu/conv/NOTES_GROUPED.md). In inference a convolution with a tail is a site of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fx_fuser.options import Options
from fx_fuser.passes import convolution
from fx_fuser.passes.convolution import ConvolutionPass, operands_of_16_bits
from fx_fuser.passes.grouped.site import GroupedSite

COUNTERS = "fx_fuser_grouped"  # in `torch._dynamo.utils.counters`: operation → how many replaced


@dataclass(frozen=True)
class Grouped(ConvolutionPass):
    """16-bit convolutions of images in groups."""

    COUNTERS = COUNTERS
    KIND = "a grouped convolution"

    def site_of(self, node: Node) -> GroupedSite | str:
        return GroupedSite.of(node, self.device)


def foreseen(gm: GraphModule, options: Options, inputs: Sequence[Any]) -> Grouped | None:
    """As `convolution.foreseen`."""
    return convolution.foreseen(Grouped, _may_be_one, gm, options, inputs)


def _may_be_one(node: Node) -> bool:
    """A convolution of images, of 16 bits, whose weight has fewer channels than x."""
    images = [t for t in operands_of_16_bits(node, ("conv2d", "convolution"), 4) if t.ndim == 4]
    return len({t.shape[1] for t in images}) > 1 and all(t.shape[1] != 1 for t in images)
