"""Site → the match of the pointwise tail after it, where no named pattern fits.

The tail is the largest region of epilogue operations after the anchor's value z that ends in one
value, which post-dominates z: every reader of z, and of what is computed from z, leads to it. A
reduction, an output or any other operation ends the growth; views were moved out of its way
(`graph.prepare.sink`). If a check of `ops.checks` refuses a region, the next smaller one is tried.
The smallest is z alone: a faster gemm or convolution, and no more.

A grown match is a `Match` of a pattern that nobody wrote, `auto_<anchor>`. After matching it is
treated like any other. `planning.gate` decides whether the tail, or z alone, is worth a kernel.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from fx_fuser.graph.epilogue import MAX_STEPS, Z
from fx_fuser.graph.match.bind import Bound
from fx_fuser.graph.match.match import CheckAll
from fx_fuser.graph.match.pattern import Fault, Match, Pattern, Refusal
from fx_fuser.graph.prepare.reindex import is_view
from fx_fuser.graph.read.canonical import Operand
from fx_fuser.graph.read.naming import statement
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.sites import Site
from fx_fuser.graph.read.view import View

AUTO = "auto_"  # and the anchor's kind: the names under which grown tails are counted


@functools.cache
def auto_pattern(kind: str) -> Pattern:
    """The pattern of a grown match, which nobody wrote."""
    return Pattern(f"{AUTO}{kind}", kind, Z, (), None)


@dataclass(frozen=True)
class Grown(Match):
    """A match that was grown.

    alone: the match of z alone, or None if this is it. stop: where the growth ended and why, in
    words; empty if nothing follows.
    """

    alone: Match | None = None
    stop: str = ""


def alone(view: View, site: Site) -> Match:
    """The match of z alone, unchecked."""
    return Match(auto_pattern(site.kind), site, site.node, frozenset(site.nodes), {}, view)


def grow(
    view: View, site: Site, check: CheckAll, why_not: Callable[[Match], str] = lambda match: ""
) -> Grown | Refusal:
    """The match of the largest tail that passes `check`; a Refusal if z alone does not pass.

    why_not: returns why no kernel computes a tail that passes, or "". Not called for z alone.
    """
    smallest = alone(view, site)
    fault = check(smallest)
    if fault is not None:
        return Refusal.of(smallest, fault)
    closed, stop = _regions(view, site)
    refused: tuple[Node, Fault] | None = None
    match, wildcards = smallest, dict[str, Operand]()
    for root, nodes in reversed(closed):
        larger = Match(smallest.pattern, site, root, nodes, {}, view)
        fault = check(larger)
        if fault is None and (reason := why_not(larger)):
            fault = Fault(root, reason)
        if fault is None:
            match, wildcards = larger, _named(larger.bound)
            break
        refused = root, fault
    if refused is not None:
        stop = f"before {statement(refused[0])}: {refused[1].reason}"
    smaller = None if match is smallest else smallest
    return Grown(smallest.pattern, site, match.root, match.nodes, wildcards, view, smaller, stop)


def reach(view: View, site: Site) -> Node:
    """Where the largest tail would end, unchecked."""
    closed, _ = _regions(view, site)
    return closed[-1][0] if closed else site.node


def _named(bound: Bound) -> dict[str, Operand]:
    tensors: dict[str, Operand] = {f"t{i}": node for i, node in enumerate(bound.tensors)}
    return {**tensors, **{f"s{i}": value for i, value in enumerate(bound.numbers)}}


def _regions(view: View, site: Site) -> tuple[list[tuple[Node, frozenset[Node]]], str]:
    """(last node, nodes) of each region that ends in one value, the smallest first, z alone left
    out; and what ended the growth.

    Nodes are taken in the graph's order. So once no reader is pending, the last node taken is the
    only value that later nodes can read.
    """
    order = view.order
    nodes = set(site.nodes)
    waiting = {order[n] for n in view.readers[site.node]}
    queue = sorted(waiting)
    closed: list[tuple[Node, frozenset[Node]]] = []
    while queue:
        place = heapq.heappop(queue)
        waiting.discard(place)
        node = view.nodes[place]
        written = view.written(node)
        if written is None or written.op not in OPS:
            whole = closed[-1][1] if closed else frozenset(site.nodes)
            is_end = not waiting and len(whole) == len(nodes) and _is_result(view, node)
            return closed, "" if is_end else f"before {statement(node)}"
        if len(nodes) - len(site.nodes) >= MAX_STEPS:
            return closed, f"after {MAX_STEPS} operations"
        nodes.add(node)
        if not waiting:
            closed.append((node, frozenset(nodes)))
        for reader in map(order.__getitem__, view.readers[node]):
            if reader not in waiting:
                waiting.add(reader)
                heapq.heappush(queue, reader)
    return closed, ""


def _is_result(view: View, node: Node) -> bool:
    """Is it the graph's output, or a view that only the output reads?"""
    views = is_view(node) and all(_is_result(view, reader) for reader in view.readers[node])
    return node.op == "output" or views
