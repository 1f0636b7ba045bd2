"""What fused, what nearly did and why not: for the user, the log and tlparse."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.arguments import shown
from fx_fuser.errors import OptionError
from fx_fuser.graph.match.match import Match, Refusal
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.naming import called, dtype_of, infix, place_of, shape_of
from fx_fuser.graph.read.nodes import inputs_of, meta_tensor
from fx_fuser.graph.read.sites import Site
from fx_fuser.graph.read.source import called_name, op_of, source_of
from fx_fuser.graph.read.view import View
from fx_fuser.passes.masks import FORM, FORMULA, Mask
from fx_fuser.report.header import Header
from fx_fuser.report.html import html_of
from fx_fuser.report.text import report_text, said_of, short_place
from fx_fuser.report.traffic import Saved, text_of

log = logging.getLogger("fx_fuser.report.report")

_PARTS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "glu", "unbind"})


@dataclass(frozen=True)
class SiteReport:
    """One place in the user's model.

    pattern, op: names of the pattern and of the op that runs it. where: "file:line" of the user's
    source, code: that line; of the last operation if fused, of what stands in the way if not.
    shapes, dtypes, operands: operand → sizes, dtype and what the source calls it, as text. dtype:
    of the result (of z, if refused). reason: why it is not fused; empty if it is. help: an edit
    after which it would be, where one is known. kernel: what runs, with what was measured. stop:
    where a tail that was grown ends, and why; empty where nothing follows it.
    anchor: "file:line" of the Linear or convolution. graph: index in `Report.graphs`, nodes: names
    in it. missing: operations to add, change or drop until the pattern fits; 0 if it fits and
    something else is in the way. native: does an op of fx_fuser's run it? Not on a CPU, where a
    named pattern that is found becomes plain operations again. bytes_saved, launches_saved, kept
    (for backward: node → bytes): see `fx_fuser.report.traffic`; None if sizes are unknown, or
    nothing of fx_fuser's runs.
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
        """In a word."""
        if self.reason:
            return "refused"
        return "fused" if self.native else "match"

    @property
    def bytes_kept(self) -> int | None:
        """Bytes at most, from forward to backward, without parameters."""
        return None if self.kept is None else sum(self.kept.values())


@dataclass(frozen=True)
class MaskReport:
    """An attention, or its mask. done, reason: as of `fx_fuser.passes.masks.Mask`."""

    where: str
    code: str
    done: str
    reason: str = ""


@dataclass(frozen=True)
class LeftReport:
    """An anchor at which no pattern begins, or a product that is no anchor. kind: "Linear" or
    "conv1d", say. follows: what reads its value. reason: why no fused kernel may gain there; empty
    if tails are not grown. where, code: as in SiteReport."""

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
class Report:
    """The sites of one or several graphs; prints as a table.

    fused: in the order of the graphs; on a CPU the named patterns that are found there, at which
    nothing of fx_fuser's runs (`SiteReport.native`). refused: the near misses, the nearest first.
    others: kind → number of anchors that no part of a pattern follows. left: each of these. masks:
    of attention. graphs and header: filled by `explain` only.
    """

    fused: list[SiteReport] = field(default_factory=list)
    refused: list[SiteReport] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    graphs: list[GraphReport] = field(default_factory=list)
    masks: list[MaskReport] = field(default_factory=list)
    left: list[LeftReport] = field(default_factory=list)
    header: Header | None = None

    def add_match(
        self,
        match: Match,
        saved: Saved,
        kept: dict[str, int] | None,
        graph: int = 0,
        kernel: str = "",
        stop: str = "",
        native: bool = True,
    ) -> None:
        self.fused.append(
            _site(
                match.pattern.name,
                match.site,
                match.root,
                {**match.site.operands, **match.wildcards},
                kernel=kernel,
                stop=stop,
                graph=graph,
                nodes=_names(match.nodes, match.view),
                bytes_saved=saved.bytes if native else None,
                launches_saved=saved.launches if native else None,
                kept=kept if native else None,
                native=native,
            )
        )

    def add_refusal(self, refusal: Refusal, view: View, graph: int = 0) -> None:
        node = refusal.node if meta_tensor(refusal.node) is not None else refusal.site.node
        self.refused.append(
            _site(
                refusal.pattern.name,
                refusal.site,
                node,
                refusal.site.operands,
                reason=refusal.reason,
                help=refusal.help,
                graph=graph,
                nodes=_names(refusal.nodes, view),
                missing=refusal.missing,
            )
        )

    def sort(self) -> None:
        """The nearest misses first."""
        self.refused.sort(key=lambda site: site.missing)

    def add_other(self, site: Site, view: View, reason: str) -> None:
        kind = ANCHORS[site.kind].title
        self.others[kind] = self.others.get(kind, 0) + 1
        self._add_left(kind, site.node, view, reason)

    def add_product(self, node: Node, view: View) -> None:
        self._add_left(called_name(node), node, view, "fx_fuser has no kernel for it")

    def _add_left(self, kind: str, node: Node, view: View, reason: str) -> None:
        readers = view.readers[node]
        names = dict.fromkeys("the end" if r.op == "output" else op_of(r) for r in readers)
        follows = " and ".join(names) or "nothing"
        if not names.keys().isdisjoint(_PARTS):
            follows += " (a packed projection: docs/patterns.md)"
        self.left.append(LeftReport(kind, follows, reason, *source_line(node)))

    def add_mask(self, mask: Mask) -> None:
        source = source_of(mask.node)
        code = "" if source is None else source.code
        self.masks.append(MaskReport(place_of(mask.node), code, mask.done, mask.reason))

    def add_graph(self, view: View) -> None:
        ends = f"{view.end.place}: {view.end.why}" if view.end and view.end.breaks else ""
        self.graphs.append(GraphReport([_node(n) for n in view.nodes], ends))

    @property
    def summary(self) -> str:
        """One line on the anchors that are not near, or nothing."""
        count = sum(self.others.values())
        if not count:
            return ""
        other = "other " if self.fused or self.refused else ""
        kinds = " and ".join(sorted(self.others, reverse=True))
        sites = "site is" if count == 1 else "sites are"
        return f"{count} {other}{kinds} {sites} followed by nothing a pattern has"

    @property
    def leftovers(self) -> str:
        """A line for all anchors of one kind that the same follows, with the first of them."""
        groups: dict[tuple[str, str, str], list[LeftReport]] = {}
        for site in self.left:
            groups.setdefault((site.kind, site.follows, site.reason), []).append(site)
        return "\n".join(
            f"  {len(sites)} × {kind}, followed by {follows}{f': {reason}' if reason else ''}"
            + (f"; say {short_place(sites[0].where)} `{sites[0].code}`" if sites[0].code else "")
            for (kind, follows, reason), sites in groups.items()
        )

    @property
    def attention(self) -> str:
        """A line for each attention and each mask that was examined; equal ones share a line."""
        count = Counter(self.masks)
        said = {
            "causal": "mask of attention at {} is causal, and not read any more",
            "open": "mask of attention at {} hides nothing, and is not read any more",
            "": "mask of attention at {} stays: {}",
            FORM: "attention at {} is rewritten for a fused kernel: {}",
            FORMULA: "attention at {} is computed by its formula, for no fused kernel takes it: {}",
        }
        return "\n".join(
            said[mask.done].format(f"{mask.where}{f' ×{n}' if n > 1 else ''}", mask.reason)
            for mask, n in count.items()
        )

    def __str__(self) -> str:
        return report_text(self)

    @property
    def saving(self) -> str:
        """What all sites that fx_fuser runs save together, in one forward call."""
        sites = [s for s in self.fused if s.native]
        if not sites or any(s.bytes_saved is None for s in sites):
            return ""
        count = sum(s.bytes_saved or 0 for s in sites)
        launches = sum(s.launches_saved or 0 for s in sites)
        return f"saved in a forward pass, against op by op: {Saved(count, launches)}"

    @property
    def keeping(self) -> str:
        """What all fused sites keep together for backward; a tensor that several keep is one."""
        kept = {(s.graph, name): n for s in self.fused for name, n in (s.kept or {}).items()}
        return f"kept for the backward pass: {text_of(sum(kept.values()))}" if kept else ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report whose `to_json()` this is. Raises OptionError if it is none."""
        try:
            return cls._from_data(json.loads(text))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise OptionError(
                f"the JSON of a report is {shown(text)}, which does not read as one "
                f"({type(error).__name__}: {error}); give what to_json() of the same version wrote"
            ) from error

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> Report:
        graphs = [
            GraphReport([NodeReport(**n) for n in g["nodes"]], g["ends"]) for g in data["graphs"]
        ]
        fused, refused = ([SiteReport(**s) for s in data[k]] for k in ("fused", "refused"))
        masks = [MaskReport(**m) for m in data["masks"]]
        left = [LeftReport(**site) for site in data["left"]]
        header = Header(**data["header"]) if data["header"] else None
        return cls(fused, refused, data["others"], graphs, masks, left, header)

    def to_html(self) -> str:
        """One page that needs no other file: the table, and the graphs with the sites coloured."""
        return html_of(self)

    def is_read(self) -> bool:
        """Does anybody read what `publish` writes, the log or the trace?"""
        # torch always has a handler, which without a folder (TORCH_TRACE) writes nothing.
        handlers = torch._logging._internal.trace_log.handlers
        traced = any(getattr(handler, "root_dir", "") is not None for handler in handlers)
        return log.isEnabledFor(logging.INFO) or traced

    def publish(self) -> None:
        """Into the log (`TORCH_LOGS="+fx_fuser"`) and, as an artifact, into tlparse's trace."""
        for site in self.fused:
            kernel = f" ({site.kernel})" if site.kernel else ""
            stop = f", ends {site.stop}" if site.stop else ""
            log.info("%s %s at %s%s%s", site.verdict, site.pattern, site.where, kernel, stop)
        for site in self.refused:
            log.info("refused %s at %s: %s", site.pattern, site.where, said_of(site))
        for said in (self.summary, self.leftovers, self.attention):
            if said:
                log.info("%s", said)
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "fx_fuser_report", "encoding": "json"},
            payload_fn=self.to_json,
        )


def _names(nodes: frozenset[Node], view: View) -> list[str]:
    return [n.name for n in sorted(nodes, key=view.order.__getitem__)]


def _site(
    pattern: str, site: Site, node: Node, operands: Mapping[str, Any], **said: Any
) -> SiteReport:
    tensors = {n: meta_tensor(o) for n, o in operands.items() if isinstance(o, Node)}
    dtype = dtype_of(meta_tensor(node))
    where, code = source_line(node)
    return SiteReport(
        pattern,
        f"fx_fuser::{site.kind}",
        where,
        code,
        {n: shape_of(t) for n, t in tensors.items()},
        dtype,
        anchor=source_line(site.node)[0],
        operands={n: _word(o, site) for n, o in operands.items() if o is not None},
        dtypes={n: dtype_of(t) for n, t in tensors.items()},
        **said,
    )


def _word(operand: Any, site: Site) -> str:
    if isinstance(operand, Node):
        return called(operand).strip("`")
    return str(operand) if is_number(operand) else called(site.node).strip("`")


def _node(node: Node) -> NodeReport:
    where, code = source_line(node)
    value = meta_tensor(node)
    text = "" if value is None else f"{dtype_of(value)}{shape_of(value)}"
    label = "return" if node.op == "output" else infix(node)
    inputs = [n.name for n in inputs_of(node)]
    return NodeReport(node.name, node.op, op_of(node), label, where, code, text, inputs)


def source_line(node: Node) -> tuple[str, str]:
    """("file:line", code) of the innermost frame that Dynamo recorded for the node."""
    source = source_of(node)
    return ("unknown", "") if source is None else (source.where, source.code)
