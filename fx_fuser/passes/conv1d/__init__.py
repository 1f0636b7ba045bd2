"""Inductor's graph of ATen operations → the same, with 16-bit convolutions along one dimension, in
groups and with long windows, by fx_fuser's kernels if faster.

The library has no fast kernel for them: the positional convolution of Wav2Vec2, HuBERT, WavLM and
data2vec, of 128 taps in 16 groups, takes 34 of 42.5 ms of a training step on an H100.

Such a model has x as the transpose of [batch, frame, channel], which the kernels read as it is.
Results have the strides that torch's have: they are contiguous, whatever those of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fx_fuser.options import Options
from fx_fuser.passes import convolution
from fx_fuser.passes.conv1d.site import Conv1dSite
from fx_fuser.passes.convolution import ConvolutionPass, operands_of_16_bits

COUNTERS = "fx_fuser_conv1d"  # in `torch._dynamo.utils.counters`: operation → how many replaced


@dataclass(frozen=True)
class Conv1d(ConvolutionPass):
    """16-bit convolutions along one dimension."""

    COUNTERS = COUNTERS
    KIND = "a convolution along one dimension"

    def site_of(self, node: Node) -> Conv1dSite | str:
        return Conv1dSite.of(node, self.device)


def foreseen(gm: GraphModule, options: Options, inputs: Sequence[Any]) -> Conv1d | None:
    """As `convolution.foreseen`."""
    return convolution.foreseen(Conv1d, _may_be_one, gm, options, inputs)


def _may_be_one(node: Node) -> bool:
    """A convolution along one dimension, of 16 bits."""
    return bool(operands_of_16_bits(node, ("conv1d", "convolution"), 3))
