"""What fused, what nearly did and why not: for the user, the log and tlparse."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.arguments import shown
from fx_fuser.errors import OptionError
from fx_fuser.graph.attention.site import SCORE, AttentionSite, Refused
from fx_fuser.graph.attention.site import Operand as AttentionOperand
from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.graph.read.canonical import Arg, Expr, Operand, is_number
from fx_fuser.graph.read.naming import called, dtype_of, infix, place_of, shape_of
from fx_fuser.graph.read.nodes import inputs_of, meta_tensor
from fx_fuser.graph.read.sites import ATTENTION_NAMES, Site
from fx_fuser.graph.read.source import called_name, op_of, source_of
from fx_fuser.graph.read.view import View
from fx_fuser.passes.by_hand.rewrite import ByHand
from fx_fuser.passes.contractions import Contraction
from fx_fuser.passes.head_loss import HeadLoss
from fx_fuser.passes.masks import Mask
from fx_fuser.report.contents import (
    AttentionReport,
    Contents,
    ContractionReport,
    GraphReport,
    HeadReport,
    LeftReport,
    MaskReport,
    NodeReport,
    SiteReport,
)
from fx_fuser.report.header import Header
from fx_fuser.report.html import html_of
from fx_fuser.report.text import report_text, said_of
from fx_fuser.report.traffic import Saved

log = logging.getLogger("fx_fuser.report.report")

# Not a site: passes over Inductor's graphs replace it.
_LATER = "on a GPU a later pass may replace it (docs/attention.md)"
_PARTS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "glu", "unbind"})


class Report(Contents):
    """Prints as a table. Filled with matches and refusals; its fields are those of `Contents`."""

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
        name = called_name(node)
        reason = _LATER if name in ATTENTION_NAMES else "fx_fuser has no kernel for it"
        self._add_left(name, node, view, reason)

    def _add_left(self, kind: str, node: Node, view: View, reason: str) -> None:
        readers = view.readers[node]
        names = dict.fromkeys("return" if r.op == "output" else op_of(r) for r in readers)
        follows = " and ".join(names) or "nothing"
        if not names.keys().isdisjoint(_PARTS):
            follows += " (a packed projection: docs/patterns.md)"
        self.left.append(LeftReport(kind, follows, reason, *source_line(node)))

    def add_mask(self, mask: Mask) -> None:
        source = source_of(mask.node)
        code = "" if source is None else source.code
        self.masks.append(MaskReport(place_of(mask.node), code, mask.done, mask.reason))

    def add_contraction(self, contraction: Contraction) -> None:
        _, code = source_line(contraction.node)
        report = ContractionReport(place_of(contraction.node), code, contraction.equation)
        self.contractions.append(report)

    def add_head(self, head: HeadLoss) -> None:
        _, code = source_line(head.node)
        where = place_of(head.node)
        self.heads.append(HeadReport(where, code, head.bytes, head.reason, head.stay))

    def add_attention(self, attention: ByHand) -> None:
        found = attention.found
        _, code = source_line(found.node)
        formula = "" if isinstance(found, Refused) else _formula(found)
        reason = found.reason if isinstance(found, Refused) else attention.stays
        report = AttentionReport(place_of(found.node), code, formula, reason, attention.is_edit)
        self.attentions.append(report)

    def add_graph(self, view: View) -> None:
        ends = f"{view.end.place}: {view.end.why}" if view.end and view.end.breaks else ""
        self.graphs.append(GraphReport([_node(n) for n in view.nodes], ends))

    def __str__(self) -> str:
        return report_text(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json()` wrote. Raises OptionError for anything else."""
        try:
            return cls._from_data(json.loads(text))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise OptionError(
                f"the JSON of a report is {shown(text)}, which cannot be read as one "
                f"({type(error).__name__}: {error}); give what to_json() of the same version wrote"
            ) from error

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> Report:
        graphs = [
            GraphReport([NodeReport(**n) for n in g["nodes"]], g["ends"]) for g in data["graphs"]
        ]
        fused, refused = ([SiteReport(**s) for s in data[k]] for k in ("fused", "refused"))
        masks = [MaskReport(**m) for m in data["masks"]]
        contractions = [ContractionReport(**c) for c in data["contractions"]]
        left = [LeftReport(**site) for site in data["left"]]
        attentions = [AttentionReport(**one) for one in data["attentions"]]
        heads = [HeadReport(**one) for one in data["heads"]]
        header = Header(**data["header"]) if data["header"] else None
        of_all = data["others"], graphs, masks, contractions, left, header, attentions, heads
        return cls(fused, refused, *of_all)

    def to_html(self) -> str:
        """A self-contained page: the table, and the graphs with the sites coloured."""
        return html_of(self)

    def is_read(self) -> bool:
        """Is the log or the trace on, to which `publish` writes?"""
        # torch always has a handler, which writes nothing without a folder (TORCH_TRACE).
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
        found = self.summary, self.leftovers, self.attention, self.contracted, self.losses
        for said in found:
            if said:
                log.info("%s", said)
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "fx_fuser_report", "encoding": "json"},
            payload_fn=self.to_json,
        )


def _formula(site: AttentionSite) -> str:
    """As one would write it, without casts: `softmax(q·kᵀ * 0.125 + mask) · v`."""
    score: Operand = Arg("q·kᵀ")
    for step in site.tail:
        if step.op != "cast":
            given = (score if a is SCORE else _leaf(a) for a in step.args)
            score = Expr(step.op, tuple(given))
    weights = f"softmax({infix(score)})"
    return f"{f'dropout({weights})' if site.is_random else weights} · v"


def _leaf(given: Any) -> Operand:
    if isinstance(given, AttentionOperand):
        return given.node
    return Arg(f"{given:.4g}")


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
