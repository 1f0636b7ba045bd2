"""Inductor's graph of ATen operations → the same, with 16-bit depthwise convolutions in
channels_last, and their gradients, by fx_fuser's kernels if faster.

The library's take 4.6 of 17.3 ms of a training step of ConvNeXt-T on an H100, whose bytes need 0.6;
ours took 1.9 (kernels_cu/conv/NOTES_DEPTHWISE.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fx_fuser.options import Options
from fx_fuser.passes import convolution
from fx_fuser.passes.convolution import ConvolutionPass, operands_of_16_bits
from fx_fuser.passes.depthwise.site import DepthwiseSite

COUNTERS = "fx_fuser_depthwise"  # in `torch._dynamo.utils.counters`: operation → how many replaced


@dataclass(frozen=True)
class Depthwise(ConvolutionPass):
    """16-bit depthwise convolutions of images."""

    COUNTERS = COUNTERS
    KIND = "a depthwise convolution"

    def site_of(self, node: Node) -> DepthwiseSite | str:
        return DepthwiseSite.of(node, self.device)


def foreseen(gm: GraphModule, options: Options, inputs: Sequence[Any]) -> Depthwise | None:
    """As `convolution.foreseen`."""
    return convolution.foreseen(Depthwise, _may_be_one, gm, options, inputs)


def _may_be_one(node: Node) -> bool:
    """A convolution of images, of 16 bits, that reads a depthwise one's weight."""
    operands = operands_of_16_bits(node, ("conv2d", "convolution"), 4)
    return any(t.ndim == 4 and t.shape[1] == 1 and t.shape[0] != 1 for t in operands)
