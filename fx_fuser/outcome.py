"""What became of the sites of a graph: for the report, the counters and the user's warnings."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._dynamo.utils import counters

from fx_fuser.anchors.base import LIBRARY
from fx_fuser.errors import VerifyError
from fx_fuser.graph.match import rewrite
from fx_fuser.graph.match.grow import Grown
from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.graph.read.naming import at
from fx_fuser.kernels import KERNELS
from fx_fuser.options import Options
from fx_fuser.passes import (
    attention_split,
    contractions,
    conv1d,
    depthwise,
    grouped,
    head_loss,
    padding,
    pixels,
    products,
)
from fx_fuser.passes.by_hand import rewrite as by_hand
from fx_fuser.passes.by_hand.rewrite import ByHand
from fx_fuser.passes.contractions import Contraction
from fx_fuser.passes.head_loss import HeadLoss
from fx_fuser.passes.masks import Mask
from fx_fuser.planning import layout, plan
from fx_fuser.planning.contest import host_note
from fx_fuser.reading import Reading
from fx_fuser.report.report import Report
from fx_fuser.report.traffic import Saved

log = logging.getLogger("fx_fuser")


@dataclass(frozen=True)
class Planned:
    """Everything that is known about a site before the graph is rewritten.

    match: what is fused; for a grown match, perhaps z alone.
    """

    match: Match
    how: plan.Plan
    call: rewrite.Call
    saved: Saved
    kept: dict[str, int] | None


@dataclass
class Outcome:
    """What `backend.fuse` did. matches: rewritten. left: sites where fusing gains nothing. wrong:
    those that are wrong on these inputs. failed: those at which fx_fuser failed. masks: those
    removed. contractions: sums of products that are gemms now. heads: Linears fused with their
    loss. attentions: written by hand, and now torch's fused one.
    is_edited: does Inductor get a changed graph even if nothing is fused? sites: how many there
    are, with those that a pattern or fx_fuser cannot take, as far as the report lists these.
    is_known: False if Inductor's cache had the graph, so that nothing was searched. folds: is there
    a site for `passes.folding`? is_converted: would Inductor have converted one of its graphs to
    channels_last?"""

    report: Report = field(default_factory=Report)
    matches: list[Match] = field(default_factory=list)
    left: list[Refusal] = field(default_factory=list)
    wrong: list[Refusal] = field(default_factory=list)
    failed: list[Refusal] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    heads: list[HeadLoss] = field(default_factory=list)
    attentions: list[ByHand] = field(default_factory=list)
    is_edited: bool = False
    sites: int = 0
    is_known: bool = True
    folds: bool = False
    is_converted: bool = False

    def add(
        self, read: Reading, sites: Iterable[Planned | Refusal], index: int, options: Options
    ) -> None:
        """Add what was found in one graph, the report's `index`-th, and what became of it."""
        report, view = self.report, read.view
        for refusal in read.refusals:
            report.add_refusal(refusal, view, index)
        self.failed += [refusal for refusal in read.refusals if refusal.failed]
        for other in read.others:
            report.add_other(other, view, read.gainless.get(other.node, ""))
        for node in read.products:
            report.add_product(node, view)
        for mask in read.masks:
            report.add_mask(mask)
        self.masks += [mask for mask in read.masks if mask.is_edit]
        for contraction in read.contractions:
            report.add_contraction(contraction)
        self.contractions += read.contractions
        for head in read.heads:
            report.add_head(head)
        self.heads += [head for head in read.heads if head.is_edit]
        for attention in read.attentions:
            report.add_attention(attention)
        self.attentions += [attention for attention in read.attentions if attention.is_edit]
        self.is_edited |= read.is_edited
        self.sites += _count_of_sites(read)
        for site in sites:
            if isinstance(site, Refusal):
                report.add_refusal(site, view, index)
                kind = self.wrong if site.wrong else self.failed if site.failed else self.left
                kind.append(site)
            else:
                self._add_fused(site, index, options)

    def _add_fused(self, site: Planned, index: int, options: Options) -> None:
        match, how = site.match, site.how
        stop = match.stop if isinstance(match, Grown) else ""
        self.report.add_match(match, site.saved, site.kept, index, how.note, stop, how.native)
        self.matches.append(match)
        if KERNELS[how.choices.get("product", LIBRARY)].any_layout:
            self.folds = True
            self.is_converted |= layout.is_converted(match.view, options)

    def count(self) -> None:
        """Count what was fused, once it is compiled."""
        for match in self.matches:
            counters["fx_fuser"][match.pattern.name] += 1
        for mask in self.masks:
            counters["fx_fuser_masks"][mask.done] += 1
        for contraction in self.contractions:
            counters[contractions.COUNTER][contraction.equation] += 1
        if self.attentions:
            counters[by_hand.COUNTER]["attention"] += len(self.attentions)
        if self.heads:
            counters[head_loss.COUNTER]["cross_entropy"] += len(self.heads)

    def tell(self, strict: bool) -> None:
        """Log, count and warn; raises VerifyError instead of a warning if strict."""
        self.report.publish()
        for name, refusals in (("fx_fuser_left", self.left), ("fx_fuser_wrong", self.wrong)):
            for refusal in refusals:
                counters[name][refusal.pattern.name] += 1
        for refusals, what in ((self.failed, "failed"), (self.wrong, "was wrong")):
            if not refusals:
                continue
            sites = "\n".join(f"{r.pattern.name}{at(r.node)}: {r.reason}" for r in refusals)
            message = f"fx_fuser {what} at these sites; running them unfused:\n{sites}"
            if strict and refusals is self.wrong:
                raise VerifyError(message)
            warnings.warn(f"{message}\nPlease report it.", stacklevel=3)

    def hint(self, options: Options, inputs: Sequence[Any], replaced: Mapping[str, int]) -> None:
        """Log one line, once a graph is compiled. inputs: the graph's. replaced: kind → how many
        were replaced in Inductor's graph."""
        if log.isEnabledFor(logging.INFO):
            devices = {value.device.type for value in inputs if isinstance(value, Tensor)}
            log.info("%s", self.line(options, devices, replaced))

    def line(self, options: Options, devices: Set[str], replaced: Mapping[str, int]) -> str:
        """devices: the device types of the graph's inputs."""
        if devices and not ("cuda" in devices or options.cpu_ops or self.matches):
            where = "a CPU" if devices <= {"cpu"} else " and ".join(sorted(devices))
            return f"{self._said(0, replaced)}: on {where} none of fx_fuser's kernels run"
        fused = len(self.matches)
        said, remedy = self._said(fused, replaced), host_note(options)
        bound = sum(remedy in refusal.reason for refusal in self.left) if remedy else 0
        if bound:
            said += f"; {_counted(bound, 'site')} left unfused, though faster on the GPU{remedy}"
        return said + "; explain says why the rest is not" * (fused < self.sites)

    def _said(self, fused: int, replaced: Mapping[str, int]) -> str:
        if not self.is_known:
            return "Inductor's cache had this graph"
        said = f"fused {fused} of {_counted(self.sites, 'site')}" if self.sites else "no site"
        edits = {
            "contraction": len(self.contractions),
            "mask": len(self.masks),
            "head": len(self.heads),
            "hand-written attention": len(self.attentions),
        }
        counts = {**replaced, **edits}
        return ", ".join([said, *(_counted(n, what) for what, n in counts.items() if n)])


def replaced() -> Counter[str]:
    """Replaced in Inductor's graphs so far, by kind. It compiles a backward when it first runs."""
    names = {
        "gemm": (products.COUNTERS, padding.COUNTERS),
        "attention": (attention_split.COUNTERS,),
        "convolution": (*(conv1d.COUNTERS, depthwise.COUNTERS, grouped.COUNTERS, pixels.COUNTERS),),
    }
    return Counter({kind: sum(sum(counters[n].values()) for n in of) for kind, of in names.items()})


def _count_of_sites(read: Reading) -> int:
    """Each anchor once, though several patterns may be refused there; and other gemms."""
    found = [m.site for m in read.matches] + [r.site for r in read.refusals] + read.others
    return len({site.node for site in found}) + len(read.products)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
