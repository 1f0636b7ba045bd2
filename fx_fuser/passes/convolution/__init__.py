"""What the passes over 16-bit convolutions of Inductor's graphs have in common: which sites are
replaced, and when a graph gets the pass.

`aten.convolution` and `aten.convolution_backward` are replaced separately, so neither depends on
what replaced the other. Each is timed against the library once for each set of sizes and strides,
with all copies that change the layout of its operands and results. Inductor may fuse such a copy
into what makes x, so that is the worst that may happen.

The passes run after all others over Inductor's graphs.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.read.nodes import inputs_of, meta_tensor
from fx_fuser.graph.read.source import called_name
from fx_fuser.native import load
from fx_fuser.options import Options
from fx_fuser.passes.convolution.site import CONVOLUTION, CONVOLUTION_BACKWARD, Site
from fx_fuser.passes.graph_pass import GraphPass, leave, loaded
from fx_fuser.planning import plan

log = logging.getLogger("fx_fuser.passes.convolution")

DTYPES = torch.bfloat16, torch.float16
Found = TypeVar("Found", bound=GraphPass)


@dataclass(frozen=True)
class ConvolutionPass(GraphPass):
    """Replaces sites of one kind."""

    TARGETS: ClassVar[Sequence[Any]] = (CONVOLUTION, CONVOLUTION_BACKWARD)

    @abstractmethod
    def site_of(self, node: Node) -> Site | str:
        """Of this node; or why it stays as it is."""

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        if not self.on_cpu:
            try:
                self._build(graph)
            except Exception as error:
                leave(error, self.strict, self.KIND)
        return self._replace

    def _build(self, graph: Graph) -> None:
        """Builds the kernels of all sites at once, in parallel: one after the other took a net's
        compile time several times over."""
        nodes = (n for n in graph.nodes if n.op == "call_function" and n.target in self.TARGETS)
        sites = [site for node in nodes if isinstance(site := self.site_of(node), Site)]
        if sites:
            specs = dict.fromkeys(spec for site in sites for spec in site.specs())
            loaded([*specs], sites[0].device, self.KIND, self.strict)

    def _replace(self, node: Node) -> str | None:
        site = self.site_of(node)
        if isinstance(site, str):
            log.info("%s: %s is left: %s", self.COUNTERS, node, site)
            return None
        if not (self.on_cpu or self._gains(site)):
            return None
        site.replace()
        return ""

    @property
    def device(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def _gains(self, site: Site) -> bool:
        specs = site.specs()
        if not all(load.runs_on(spec, site.device) for spec in specs):
            return False
        there = loaded(specs, site.device, self.KIND, self.strict)
        return there >= {*specs} and site.gains()


def may_run(options: Options) -> bool:
    """May these passes run at all?"""
    if options.users_pass("deterministic"):  # in which nothing may be timed
        return False
    return options.inner == "inductor" and options.grows


def foreseen(
    kind: Callable[[bool, bool], Found],
    may_be_one: Callable[[Node], bool],
    gm: GraphModule,
    options: Options,
    inputs: Sequence[Any],
) -> Found | None:
    """A pass of this kind, if the graphs that Inductor makes of this one may have a convolution for
    it. gm: the untouched graph. inputs: its own."""
    if not may_run(options) or not any(map(may_be_one, _nodes_of(gm))):
        return None
    used = {v.device for v in inputs if isinstance(v, Tensor) and v.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return None
    if not used and not options.cpu_ops:
        return None
    return kind(options.strict, not used)


def _nodes_of(gm: GraphModule) -> Iterator[Node]:
    return (n for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)


def operands_of_16_bits(node: Node, names: Sequence[str], ndim: int) -> list[Tensor]:
    """The tensors that a call of these names reads, if its result has so many dimensions and one of
    them all has 16 bits; else none. Under autocast that is the result."""
    if node.op not in ("call_function", "call_method") or called_name(node) not in names:
        return []
    made = meta_tensor(node)
    operands = [value for n in inputs_of(node) if (value := meta_tensor(n)) is not None]
    if made is None or made.ndim != ndim:
        return []
    return operands if any(t.dtype in DTYPES for t in (made, *operands)) else []
