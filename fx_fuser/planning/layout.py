"""Graph → does it run in channels_last?

Inductor converts a whole convolutional graph to channels_last where its own count of operations
says that this is faster (`GraphLowering.decide_layout_opt`). It decides by the convolutions that it
sees. So it is asked here about the graph as the user wrote it, before some of them become fused
ops; and where it would have converted that graph, it is told to (`force_layout_optimization`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site, outermost
from fx_fuser.graph.read.view import View
from fx_fuser.options import Options

log = logging.getLogger("fx_fuser.planning.layout")

FORCED = "force_layout_optimization"  # Inductor's setting
_CONVOLUTION = torch.ops.aten.convolution.default
# With so many nodes per convolution or more, Inductor keeps the layout. It counts those of its own
# graph, which has some two for each of Dynamo's.
_FEW = 300 // 2
_SETTINGS = ("layout_optimization", FORCED)
# View → Inductor's settings → its answer
_converted: weakref.WeakKeyDictionary[View, dict[str, bool]] = weakref.WeakKeyDictionary()


def is_channels_last(view: View, site: Site, options: Options) -> bool:
    """Does the site's convolution run in channels_last?"""
    x = meta_tensor(site.operands["x"])  # type: ignore[arg-type]
    if x is not None and x.is_contiguous(memory_format=torch.channels_last):
        return not x.is_contiguous() or is_converted(view, options)
    return is_converted(view, options)


def is_converted(view: View, options: Options) -> bool:
    """Would Inductor convert the graph, as the user wrote it, to channels_last?"""
    if options.inner != "inductor":
        return False
    given = {name: options.inductor[name] for name in _SETTINGS if name in options.inductor}
    known = _converted.setdefault(view, {})
    if str(given) not in known:
        known[str(given)] = _inductor_converts(view, given)
    return known[str(given)]


def _inductor_converts(view: View, given: Mapping[str, Any]) -> bool:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    try:
        stand_in, trains = _convolutions_of(view)
        convolutions = len(stand_in.graph.find_nodes(op="call_function", target=_CONVOLUTION))
        if len(view.nodes) >= _FEW * convolutions:
            return False
        with config.patch(dict(given)):
            return GraphLowering.decide_layout_opt(stand_in, is_inference=not trains)
    except Exception:  # it is not a public torch function
        log.info("it is not known whether Inductor converts a graph", exc_info=True)
        return False


def _convolutions_of(view: View) -> tuple[GraphModule, bool]:
    """A graph of its convolutions alone, as Inductor sees them; and is any gradient asked for?"""
    graph = Graph()
    trains = False

    def placeholder(value: Any) -> Any:
        node = graph.placeholder(f"p{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    for site in outermost(view):
        anchor = ANCHORS[site.kind]
        x, weight, z = (
            meta_tensor(n)  # type: ignore[arg-type]
            for n in (site.operands["x"], site.operands["weight"], site.node)
        )
        if not isinstance(anchor, Conv2d) or x is None or weight is None or anchor.form_fault(site):
            continue
        found = anchor.config(site)
        left, _, top, _ = found["padding"]
        window = found["stride"], [top, left], found["dilation"]
        inputs = placeholder(x.detach()), placeholder(weight.detach()), None
        graph.call_function(_CONVOLUTION, (*inputs, *window, False, [0, 0], found["groups"]))
        trains |= z is not None and z.requires_grad
    graph.output(None)
    return GraphModule({}, graph), trains
