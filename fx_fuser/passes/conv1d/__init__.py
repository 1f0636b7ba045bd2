"""Inductor's graph of ATen operations → the same, with 16-bit convolutions along one dimension, in
groups and with long windows, by fx_fuser's kernels where faster.

The library has no fast kernel for them: the positional convolution of Wav2Vec2, HuBERT, WavLM and
data2vec, of 128 taps in 16 groups, takes 34 of 42.5 ms of a training step on an H100.
`aten.convolution` and `aten.convolution_backward` are replaced separately, so neither depends on
what replaced the other. Each is timed against the library once for each set of sizes and strides,
with all copies that change the layout of its operands and results. Inductor may fuse such a copy
into what makes x, so that is the worst that may happen.

Such a model has x as the transpose of [batch, frame, channel], which the kernels read as it is.
Results have the strides that torch's have: they are contiguous, whatever those of x.

The pass runs behind all others over Inductor's graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.read.nodes import inputs_of, meta_tensor
from fx_fuser.graph.read.source import called_name
from fx_fuser.kernels import conv1d
from fx_fuser.native import load
from fx_fuser.options import LAST_PASS, Options
from fx_fuser.passes.conv1d.site import CONVOLUTION, CONVOLUTION_BACKWARD, Site
from fx_fuser.passes.graph_pass import GraphPass, loaded
from fx_fuser.planning import plan

log = logging.getLogger("fx_fuser.passes.conv1d")

COUNTERS = "fx_fuser_conv1d"  # in `torch._dynamo.utils.counters`: operation → how many replaced
_NAMES = ("conv1d", "convolution")


@dataclass(frozen=True)
class Conv1d(GraphPass):
    """16-bit convolutions along one dimension."""

    COUNTERS = COUNTERS
    TARGETS: ClassVar[Sequence[Any]] = (CONVOLUTION, CONVOLUTION_BACKWARD)
    KIND = "a convolution along one dimension"

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        return self._replace

    def _replace(self, node: Node) -> str | None:
        site = Site.of(node, "cpu" if self.on_cpu else "cuda")
        if isinstance(site, str):
            log.info("%s is left: %s", node, site)
            return None
        if not (self.on_cpu or self._gains(site)):
            return None
        site.replace()
        return ""

    def _gains(self, site: Site) -> bool:
        specs = site.specs()
        if not all(load.runs_on(spec, site.device) for spec in specs):
            return False
        there = loaded(specs, site.device, self.KIND, self.strict)
        return there >= {*specs} and site.gains()


def settings(
    passes: Mapping[str, Any], gm: GraphModule, options: Options, inputs: Sequence[Any]
) -> dict[str, Any]:
    """These settings of Inductor, setting → pass, with the pass behind them if the graph may have
    a convolution for it. gm: the untouched graph. inputs: its own."""
    asks = options.inner == "inductor" and options.grows
    if options.users_pass("deterministic"):  # in which nothing may be timed
        asks = False
    if not asks or not any(map(_may_be_one, _nodes_of(gm))):
        return {**passes}
    used = {v.device for v in inputs if isinstance(v, Tensor) and v.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return {**passes}
    if not used and not options.cpu_ops:
        return {**passes}
    before = passes.get(LAST_PASS, options.users_pass(LAST_PASS))
    return {**passes, LAST_PASS: Conv1d(options.strict, not used, before)}


def _nodes_of(gm: GraphModule) -> Iterator[Node]:
    return (n for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)


def _may_be_one(node: Node) -> bool:
    """A convolution along one dimension, of 16 bits."""
    if node.op not in ("call_function", "call_method") or called_name(node) not in _NAMES:
        return False
    made = meta_tensor(node)
    operands = [value for n in inputs_of(node) if (value := meta_tensor(n)) is not None]
    if made is None or made.ndim != 3:
        return False
    return made.dtype in conv1d.DTYPES or any(t.dtype in conv1d.DTYPES for t in operands)
