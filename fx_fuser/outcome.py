"""What became of the sites of a graph: for the report, the counters and the user's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch._dynamo.utils import counters

from fx_fuser.anchors.base import LIBRARY
from fx_fuser.errors import VerifyError
from fx_fuser.graph.match import rewrite
from fx_fuser.graph.match.grow import Grown
from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.graph.read.naming import at
from fx_fuser.kernels import KERNELS
from fx_fuser.options import Options
from fx_fuser.passes.masks import Mask
from fx_fuser.planning import layout, plan
from fx_fuser.reading import Reading
from fx_fuser.report.report import Report
from fx_fuser.report.traffic import Saved


@dataclass(frozen=True)
class Planned:
    """Everything that is known of a site before the graph is rewritten.

    match: what is fused; of a grown match perhaps z alone.
    """

    match: Match
    how: plan.Plan
    call: rewrite.Call
    saved: Saved
    kept: dict[str, int] | None


@dataclass
class Outcome:
    """What `backend.fuse` did. matches: those rewritten. left: those that gain nothing. wrong:
    those that are wrong on these inputs. failed: those at which fx_fuser failed. masks: those
    removed. folds: is there a site that `passes.folding` is for? is_converted: of its graphs, would
    Inductor have converted one to channels_last?"""

    report: Report = field(default_factory=Report)
    matches: list[Match] = field(default_factory=list)
    left: list[Refusal] = field(default_factory=list)
    wrong: list[Refusal] = field(default_factory=list)
    failed: list[Refusal] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    folds: bool = False
    is_converted: bool = False

    def add(
        self, read: Reading, sites: Iterable[Planned | Refusal], index: int, options: Options
    ) -> None:
        """What was found in one graph, the report's `index`-th, and what became of its matches."""
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

    def tell(self, strict: bool) -> None:
        """Log, count and warn; raises VerifyError instead of a warning if strict."""
        self.report.publish()
        for name, refusals in (("fx_fuser_left", self.left), ("fx_fuser_wrong", self.wrong)):
            for refusal in refusals:
                counters[name][refusal.pattern.name] += 1
        for refusals, what in ((self.failed, "fails at"), (self.wrong, "would compute wrongly")):
            if not refusals:
                continue
            sites = "\n".join(f"{r.pattern.name}{at(r.node)}: {r.reason}" for r in refusals)
            message = f"fx_fuser leaves what it {what} to the model's own ops:\n{sites}"
            if strict and refusals is self.wrong:
                raise VerifyError(message)
            warnings.warn(f"{message}\nPlease report it.", stacklevel=3)
