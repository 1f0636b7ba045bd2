"""The kernels of a pattern's source, as `apply.forward_specs` has them for a fused call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.epilogue import Epilogue
from fx_fuser.graph.match.bind import Bound, bind
from fx_fuser.graph.read.sites import Site, outermost
from fx_fuser.graph.read.view import View
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.apply import forward_specs

CHOICES = {"product": LIBRARY, "backward": LIBRARY, "again": False, "tf32": False}


def bound_of(source: Callable[..., Any]) -> tuple[Site, Bound]:
    """Its only anchor, and all that follows; a parameter is a tensor."""
    view = View(torch.fx.symbolic_trace(source).graph)
    (site,) = outermost(view)
    wanted: set[torch.fx.Node] = set()
    queue = next(n for n in view.nodes if n.op == "output").all_input_nodes
    while queue:
        node = queue.pop()
        if node not in wanted and node.op != "placeholder" and node not in site.nodes:
            wanted.add(node)
            queue += node.all_input_nodes
    return site, bind(view, site, wanted)


def epilogue_of(source: Callable[..., Any]) -> Epilogue:
    return bound_of(source)[1].epilogue


def specs_of(
    source: Callable[..., Any], dtypes: Mapping[str, torch.dtype], **config: Any
) -> list[KernelSpec]:
    """dtypes: of the source's parameters by name; an operand of the anchor that is not named is
    left out. The result has that of x."""
    site, bound = bound_of(source)

    def tensor(node: torch.fx.Node | None) -> torch.Tensor | None:
        known = node is not None and str(node.target) in dtypes
        return torch.empty(1, dtype=dtypes[str(node.target)], device="meta") if known else None

    operands = {name: tensor(node) for name, node in site.operands.items()}
    t = [torch.empty(1, dtype=dtypes[str(n.target)], device="meta") for n in bound.tensors]
    chosen = {**CHOICES, "training": False, "eps": 1e-5, **config}
    c = operands["x"].dtype
    anchored = (ANCHORS[site.kind], chosen, bound.epilogue, operands)
    return forward_specs(*anchored, t, bound.numbers, c, c)


def text_of(source: Callable[..., Any], dtypes: Mapping[str, torch.dtype], **config: Any) -> str:
    """Of the first kernel, in which the library has made the product."""
    return specs_of(source, dtypes, **config)[0].text


def steps_in(text: str) -> Iterator[str]:
    """The statements of a kernel's functor."""
    body = text.split("operator()", 1)[1].split("const {", 1)[1]
    return (line.strip() for line in body.splitlines() if " = " in line)
