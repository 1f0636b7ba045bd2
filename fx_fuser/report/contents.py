"""What a report says, as values, and the sentences about all its sites together."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from fx_fuser.passes.masks import FORM, FORMULA, GATHER
from fx_fuser.report.header import Header
from fx_fuser.report.traffic import Saved, text_of

PLACE = 40  # characters of a place, if the file's name allows


@dataclass(frozen=True)
class SiteReport:
    """One place in the user's model.

    pattern, op: names of the pattern and of the op that runs it. where: "file:line" of the user's
    source, code: that line; of the last operation if fused, of the obstacle if not. shapes, dtypes,
    operands: operand → sizes, dtype and what the source calls it, as text. dtype: of the result (of
    z, if refused). reason: why it is not fused; empty if it is. help: an edit after which it would
    be, if one is known. kernel: what runs, with what was measured. stop: where a tail that was
    grown ends, and why; empty if nothing follows it.
    anchor: "file:line" of the Linear or convolution. graph: index in `Report.graphs`, nodes: names
    in it. missing: operations to add, change or drop until the pattern fits; 0 if it fits and
    something else is in the way. native: does one of fx_fuser's ops run it? Not on a CPU, where a
    named pattern that is found becomes plain operations again. bytes_saved, launches_saved, kept
    (for backward: node → bytes): see `fx_fuser.report.traffic`; None if sizes are unknown, or
    none of fx_fuser's kernels run.
    """

    pattern: str
    op: str
    where: str
    code: str
    shapes: dict[str, str]
    dtype: str
    reason: str = ""
    kernel: str = ""
    help: str = ""
    anchor: str = ""
    operands: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    graph: int = 0
    nodes: list[str] = field(default_factory=list)
    missing: int = 0
    bytes_saved: int | None = None
    launches_saved: int | None = None
    kept: dict[str, int] | None = None
    stop: str = ""
    native: bool = True

    @property
    def verdict(self) -> str:
        """The verdict in one word."""
        if self.reason:
            return "refused"
        return "fused" if self.native else "match"

    @property
    def bytes_kept(self) -> int | None:
        """Bytes at most, from forward to backward, without parameters."""
        return None if self.kept is None else sum(self.kept.values())


@dataclass(frozen=True)
class MaskReport:
    """An attention, or its mask. done, reason: as in `fx_fuser.passes.masks.Mask`."""

    where: str
    code: str
    done: str
    reason: str = ""


@dataclass(frozen=True)
class AttentionReport:
    """A hand-written attention. formula: what it computes, over q·kᵀ and v; empty if no description
    was found. reason: why not, or why it is not fused. fused: is it one call of torch's fused
    attention now?"""

    where: str
    code: str
    formula: str
    reason: str = ""
    fused: bool = False


@dataclass(frozen=True)
class ContractionReport:
    """A sum of products that is computed as a gemm. equation: of the einsum that it is now."""

    where: str
    code: str
    equation: str


@dataclass(frozen=True)
class HeadReport:
    """A loss after a Linear. bytes, reason, stay: as in `fx_fuser.passes.head_loss.HeadLoss`."""

    where: str
    code: str
    bytes: int | None
    reason: str = ""
    stay: bool = False


@dataclass(frozen=True)
class LeftReport:
    """An anchor at which no pattern begins, or a product that is not an anchor. kind: "Linear" or
    "conv1d", say. follows: the operations that read its value. reason: why no fused kernel may gain
    there; empty if tails are not grown. where, code: as in SiteReport."""

    kind: str
    follows: str
    reason: str
    where: str
    code: str


@dataclass(frozen=True)
class NodeReport:
    """One node of a graph. kind: what FX calls its op; label: in the user's words; value: dtype and
    sizes; inputs: names of nodes."""

    name: str
    kind: str
    op: str
    label: str
    where: str
    code: str
    value: str
    inputs: list[str]


@dataclass(frozen=True)
class GraphReport:
    """One graph that Dynamo recorded. ends: why the function goes on in another one, if it does."""

    nodes: list[NodeReport]
    ends: str = ""


@dataclass
class Contents:
    """The sites of one or several graphs.

    fused: in the order of the graphs; on a CPU the named patterns that are found, at which none of
    fx_fuser's kernels run (`SiteReport.native`). refused: the near misses, the nearest first.
    others: kind → number of anchors that no part of a pattern follows. left: each of these. masks:
    of attention. contractions: sums of products. attentions: hand-written. heads: losses after
    a Linear. graphs and header: filled in by `explain` only.
    """

    fused: list[SiteReport] = field(default_factory=list)
    refused: list[SiteReport] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    graphs: list[GraphReport] = field(default_factory=list)
    masks: list[MaskReport] = field(default_factory=list)
    contractions: list[ContractionReport] = field(default_factory=list)
    left: list[LeftReport] = field(default_factory=list)
    header: Header | None = None
    attentions: list[AttentionReport] = field(default_factory=list)
    heads: list[HeadReport] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line: how many sites are fused, and how many are not, by reason."""
        native = sum(site.native for site in self.fused)
        matches = len(self.fused) - native
        near = sum(bool(site.missing) for site in self.refused)
        refused, kinds = len(self.refused) - near, Counter(site.kind for site in self.left)
        if not (self.fused or self.refused or self.left):
            return "Nothing found that fx_fuser could fuse."
        done = f"{_counted(native, 'site')} fused" if native or not matches else ""
        if matches:
            does = "matches" if matches == 1 else "match"
            done = f"{_counted(matches, 'site')} {does} a named pattern"
        parts = [
            f"{refused} refused" if refused else "",
            _counted(near, "near miss", "near misses") if near else "",
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        ]
        left = ", ".join(filter(None, parts))
        return f"{done}; {'not matched' if matches else 'not fused'}: {left}" if left else done

    @property
    def leftovers(self) -> str:
        """By reason, a line for all anchors of one kind that are followed by the same operation,
        with the first of them."""
        groups: dict[str, dict[tuple[str, str], list[LeftReport]]] = {}
        for site in self.left:
            alike = groups.setdefault(site.reason, {})
            alike.setdefault((site.kind, site.follows), []).append(site)
        lines = []
        for reason, alike in groups.items():
            lines.append(f"Not fused: {reason or 'no pattern is near'}")
            for (kind, follows), sites in alike.items():
                line, first = f"  {len(sites)} × {kind}, then {follows}", sites[0]
                example = "; for example" if len(sites) > 1 else ":"
                place = f"{example} {short_place(first.where)} `{first.code}`" if first.code else ""
                lines.append(line + place)
        return "\n".join(lines)

    @property
    def attention(self) -> str:
        """A line for each attention and each mask that was examined; equal ones share a line."""
        return "\n".join(filter(None, (self._masks, self._by_hand)))

    @property
    def _by_hand(self) -> str:
        lines = []
        for one, n in Counter(self.attentions).items():
            where = f"{one.where}{f' ×{n}' if n > 1 else ''}"
            if one.formula:
                how = "two gemms with a softmax between them"
                how = "torch's fused attention, or fx_fuser's" if one.fused else how
                said = f"The attention at {where} is written by hand, {one.formula}; it runs as "
                said += how + (f": {one.reason}" if one.reason else "")
            else:
                said = f"The softmax at {where} is not an attention that fx_fuser knows: "
                said += one.reason
            lines.append(said)
        return "\n".join(lines)

    @property
    def _masks(self) -> str:
        count = Counter(self.masks)
        said = {
            "causal": "The attention mask at {} is causal, so it is no longer read.",
            "open": "The attention mask at {} is all true, so it is no longer read.",
            "": "The attention mask at {} stays: {}",
            FORM: "The attention at {} is rewritten for a fused kernel: {}",
            FORMULA: "The attention at {} runs as matmul and softmax, because no fused kernel "
            "accepts it: {}",
            GATHER: "The gather at {} runs as fx_fuser's: {}",
        }
        return "\n".join(
            said[mask.done].format(f"{mask.where}{f' ×{n}' if n > 1 else ''}", mask.reason)
            for mask, n in count.items()
        )

    @property
    def contracted(self) -> str:
        """A line for each sum of products that is a gemm now; equal ones share a line."""
        return "\n".join(
            f"The sum of products at {one.where}{f' ×{n}' if n > 1 else ''} runs as a gemm: "
            f"einsum {one.equation}"
            for one, n in Counter(self.contractions).items()
        )

    @property
    def losses(self) -> str:
        """A line for each loss after a Linear; equal ones share a line."""
        return "\n".join(map(_said_of_head, Counter(self.heads).items()))

    @property
    def saving(self) -> str:
        """What all sites that fx_fuser runs save together, in one forward call."""
        sites = [s for s in self.fused if s.native]
        if not sites or any(s.bytes_saved is None for s in sites):
            return ""
        count = sum(s.bytes_saved or 0 for s in sites)
        launches = sum(s.launches_saved or 0 for s in sites)
        return f"Saved in a forward pass, compared with eager mode: {Saved(count, launches)}"

    @property
    def keeping(self) -> str:
        """What all fused sites keep for backward; a tensor that several keep counts once."""
        kept = {(s.graph, name): n for s in self.fused for name, n in (s.kept or {}).items()}
        return f"Kept for the backward pass: {text_of(sum(kept.values()))}" if kept else ""


def _said_of_head(counted: tuple[HeadReport, int]) -> str:
    head, n = counted
    said = f"The loss at {head.where}{f' ×{n}' if n > 1 else ''}"
    if head.reason:
        return f"{said} is not fused with its Linear: {head.reason}"
    held = "" if head.bytes is None else f": {text_of(head.bytes)} less memory at once"
    without = "a gradient of all logits" if head.stay else "the logits of all"
    return f"{said} runs with its Linear, in chunks of rows, without {without}{held}"


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def short_place(where: str) -> str:
    """The last folders of a path, in PLACE characters if the file's name allows: a name that a
    column breaks in two cannot be searched for."""
    where = where.removeprefix(os.getcwd() + os.sep)
    while len(where) > PLACE and os.sep in where.removeprefix("…" + os.sep):
        where = f"…{os.sep}{where.removeprefix('…' + os.sep).split(os.sep, 1)[1]}"
    return where
