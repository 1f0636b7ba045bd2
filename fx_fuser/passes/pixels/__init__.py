"""Inductor's graph of ATen operations → the same, with 1 x 1 convolutions before a BatchNorm in
training by fx_fuser's kernel if faster: it computes the statistics of what it stores, and the
pass over the result that reads it for them is saved.

A node of `aten.var_mean` goes if it reads a convolution's result, cast up to fp32, over all
dimensions but channels. How running statistics follow from mean and variance stays in the graph.

The pass runs after all others over Inductor's graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.read.source import called_name
from fx_fuser.native import load
from fx_fuser.options import Options
from fx_fuser.passes import convolution
from fx_fuser.passes.graph_pass import GraphPass, loaded
from fx_fuser.passes.pixels.site import CONVOLUTION, Site

log = logging.getLogger("fx_fuser.passes.pixels")

COUNTERS = "fx_fuser_pixels"  # in `torch._dynamo.utils.counters`: operation → how many replaced
_NORMS = ("batch_norm", "native_batch_norm")


@dataclass(frozen=True)
class Pixels(GraphPass):
    """16-bit convolutions, 1 x 1, with the statistics of their results."""

    COUNTERS = COUNTERS
    TARGETS: ClassVar[Sequence[Any]] = (CONVOLUTION,)
    KIND = "a 1 x 1 convolution"

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        return self._replace

    def _replace(self, node: Node) -> str | None:
        site = Site.of(node, "cpu" if self.on_cpu else "cuda")
        if isinstance(site, str):
            log.info("%s is left: %s", node, site)
            return None
        shape = 0 if self.on_cpu else self._shape_that_gains(site)
        if shape is None:
            return None
        site.replace(shape)
        return ""

    def _shape_that_gains(self, site: Site) -> int | None:
        if not load.runs_on(site.spec, site.device):
            return None
        if not loaded([site.spec], site.device, self.KIND, self.strict):
            return None
        return site.shape_that_gains()


def foreseen(gm: GraphModule, options: Options, inputs: Sequence[Any]) -> Pixels | None:
    """As `convolution.foreseen`."""
    return convolution.foreseen(Pixels, _may_be_norm, gm, options, inputs)


def _may_be_norm(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and called_name(node) in _NORMS
