"""What is found in one graph: matches of patterns, grown tails, refusals and what is left."""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.errors import OptionError
from fx_fuser.graph.match.grow import Grown, alone, auto_pattern, grow, reach
from fx_fuser.graph.match.match import find
from fx_fuser.graph.match.near_misses import near_miss
from fx_fuser.graph.match.pattern import Fault, Match, Pattern, Refusal
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site, outermost, products_without_anchor, site_at
from fx_fuser.graph.read.view import View
from fx_fuser.ops import checks
from fx_fuser.options import Options
from fx_fuser.passes import provenance
from fx_fuser.passes.by_hand.rewrite import ByHand, attentions
from fx_fuser.passes.contractions import Contraction
from fx_fuser.passes.convolution.later import later
from fx_fuser.passes.head_loss import HeadLoss
from fx_fuser.passes.masks import Mask
from fx_fuser.planning import plan

log = logging.getLogger("fx_fuser.reading")


@dataclass
class Reading:
    """What was found in one graph. No node belongs to two matches. others: anchors that no part of
    a pattern follows. gainless: z of an anchor → why no fused kernel may gain there. products: ops
    that multiply and are not anchors. masks: of attention. contractions: sums of products that are
    gemms now. attentions: those written by hand, and what looks like one and why it is not.
    heads: losses after a Linear."""

    view: View
    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    others: list[Site] = field(default_factory=list)
    gainless: dict[Node, str] = field(default_factory=dict)
    products: list[Node] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    attentions: list[ByHand] = field(default_factory=list)
    heads: list[HeadLoss] = field(default_factory=list)

    @property
    def is_edited(self) -> bool:
        """Has the graph changed even if nothing is fused?"""
        is_head = any(head.is_edit for head in self.heads)
        is_attention = any(one.is_edit for found in (self.masks, self.attentions) for one in found)
        return is_head or is_attention or bool(self.contractions)


def _fault_of(match: Match, taken: set[Node]) -> Fault | None:
    if not taken.isdisjoint(match.nodes):
        return Fault(match.root, "part of it is fused with another site")
    fault = checks.fault_of(match)
    if fault is None:
        reason = plan.unavailable(meta_tensor(match.site.node).device)  # type: ignore[union-attr]
        fault = Fault(match.root, reason) if reason else None
    return fault


def read_graph(view: View, active: Sequence[Pattern], options: Options) -> Reading:
    """All matches of a graph, and the places where a pattern fits but must not be fused."""
    read = Reading(view)
    taken: set[Node] = set()
    fault_of = functools.partial(_fault_of, taken=taken)
    sites = _readable_sites(view)
    inner = {n for site in sites for n in site.nodes if n is not site.node}
    # Otherwise a pattern that is only an anchor would take the gemm of `x @ w + b`, or the
    # convolution under a BatchNorm, and the larger site would be lost.
    for node in sorted(view.nodes, key=inner.__contains__):
        if node in taken:
            continue
        try:
            found = find(view, active, fault_of, node)
        except Exception as error:
            if options.strict:
                raise
            found = _failure_at(view, node, active, error)
        if isinstance(found, Match):
            read.matches.append(found)
            taken |= found.nodes
        elif isinstance(found, Refusal):
            read.refusals.append(found)
    if options.grows:
        _add_grown(read, [s for s in sites if s.node not in inner], taken, options)
    return read


def _add_grown(read: Reading, sites: Sequence[Site], taken: set[Node], options: Options) -> None:
    """A grown match at each of these anchors that no named pattern takes, if a fused kernel may
    gain.

    taken: the nodes of all matches; the grown ones are added.
    """
    told = {refusal.site.node for refusal in read.refusals}
    failed = {node for r in read.refusals if r.failed for node in r.site.nodes}
    for site in _visit_order(read.view, sites):
        if site.node in taken or not failed.isdisjoint(site.nodes):
            continue
        try:
            fault_of = functools.partial(_fault_of, taken=taken)
            found = _grown_at(read.view, site, fault_of, options)
            if isinstance(found, str):
                read.gainless[site.node] = found
                continue
        except Exception as error:
            if options.strict or isinstance(error, OptionError):
                raise
            log.info("a site is left to the model's own ops", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            found = Refusal(auto_pattern(site.kind), site, site.node, reason, failed=True)
        if isinstance(found, Match):
            read.matches.append(found)
            taken |= found.nodes
        elif found.failed or site.node not in told:
            read.refusals.append(found)


def _visit_order(view: View, sites: Sequence[Site]) -> list[Site]:
    """In the graph's order, but a convolution comes last if its tail may end after several others.

    A fused site is computed where its tail ends, and its operands live until then. In RegNet's
    `relu(proj(x) + f(x))` the last convolution of f can take the tail as well as that of proj; if
    proj does, x outlives all of f. If f does, `fx_fuser.passes.shortcuts` has proj computed first.
    """
    places = sorted(view.order[site.node] for site in sites)

    def waits(site: Site) -> bool:
        if not isinstance(ANCHORS[site.kind], Conv2d):
            return False
        with suppress(Exception):  # raised again where the site itself is read
            begin, end = (view.order[node] for node in (site.node, reach(view, site)))
            return bisect.bisect_left(places, end) - bisect.bisect_right(places, begin) > 1
        return False

    return sorted(sites, key=waits)


def _grown_at(
    view: View, site: Site, fault_of: Callable[[Match], Fault | None], options: Options
) -> Grown | Refusal | str:
    """The grown match, or why there is none: a text if no fused kernel may gain."""
    only = alone(view, site)
    if meta_tensor(site.node) is not None and not plan.runs_native(only, options):
        return plan.ON_CPU
    fault = fault_of(only)
    if fault is not None:
        return Refusal.of(only, fault)
    if isinstance(ANCHORS[site.kind], Conv2d):  # which kernel takes one may depend on its tail
        grown = grow(view, site, fault_of, functools.partial(plan.no_gain, options=options))
        gainless = plan.no_gain(grown, options) if isinstance(grown, Match) else ""
        if gainless and isinstance(grown, Match):
            gainless = plan.needs_inference(grown, options) or gainless
            gainless += later(site, options)
        return gainless or grown
    gainless = plan.no_gain(only, options)
    if gainless:
        return gainless
    grown = grow(view, site, fault_of)
    has_tail = isinstance(grown, Grown) and grown.alone is not None
    left = provenance.why_left(site, options, has_tail)
    return Refusal.of(only, Fault(site.node, left)) if left else grown


def _readable_sites(view: View) -> list[Site]:
    """Every anchor, without nodes that fx_fuser fails to read."""
    found: list[Site] = []
    for node in view.nodes:
        with suppress(Exception):  # it raises again in `find`, which handles it
            site = site_at(view, node)
            found += [] if site is None else [site]
    return found


def _failure_at(
    view: View, node: Node, active: Sequence[Pattern], error: Exception
) -> Refusal | None:
    """A refusal for the report, if the node is an anchor that can be read."""
    log.info("a site is left to the model's own ops", exc_info=error)
    try:
        site = site_at(view, node)
    except Exception:
        return None
    pattern = next((p for p in active if site and p.kind == site.kind), None)
    if site is None or pattern is None:
        return None
    return Refusal(pattern, site, node, f"{type(error).__name__}: {error}", failed=True)


def attentions_by_hand(graph: Graph, strict: bool) -> list[ByHand]:
    """The attentions of a graph that do not call torch's own, before the graph is prepared."""
    return [ByHand(one) for one in attentions(View(graph), strict) if one.is_by_hand]


def add_what_is_left(read: Reading, active: Sequence[Pattern], options: Options) -> None:
    """Add the nearest pattern at each other anchor, and products that are not anchors. Takes some
    ms per anchor, so only for a report that somebody reads."""
    view = read.view
    taken = {node for match in read.matches for node in match.nodes}
    fault_of = functools.partial(_fault_of, taken=taken)
    told = taken | {refusal.site.node for refusal in read.refusals}
    titles = {ANCHORS[pattern.kind].title for pattern in active}
    sites = outermost(view)
    for site in sites:
        if site.node in told or not (options.grows or ANCHORS[site.kind].title in titles):
            continue
        try:
            miss = near_miss(view, site, active, fault_of)
        except Exception:  # explaining must not cost a fusion
            if options.strict:
                raise
            log.info("skipped the search for near misses at %s", site.node, exc_info=True)
            miss = None
        if miss is None:
            read.others.append(site)
        else:
            read.refusals.append(miss)
    if options.grows:
        read.products = products_without_anchor(view, sites)
