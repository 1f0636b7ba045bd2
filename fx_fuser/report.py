"""What fused, what was refused and why: for the user, the log and tlparse."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch.fx import Node

from fx_fuser.match import Match, Refusal
from fx_fuser.spell import meta_tensor

log = logging.getLogger("fx_fuser.report")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


@dataclass(frozen=True)
class SiteReport:
    """One place in the user's model.

    pattern, op: names of the pattern and its op. where: "file:line" of the user's source, code:
    that line. shapes: operand → sizes as text. dtype: of the result (of z, if refused).
    reason: why it was refused; empty if fused. kernel: what runs, with what was measured.
    """

    pattern: str
    op: str
    where: str
    code: str
    shapes: dict[str, str]
    dtype: str
    reason: str = ""
    kernel: str = ""


@dataclass
class Report:
    """The sites of one or several graphs; prints as a table."""

    fused: list[SiteReport] = field(default_factory=list)
    refused: list[SiteReport] = field(default_factory=list)

    def add_match(self, match: Match, kernel: str = "") -> None:
        tensors = {n: o for n, o in match.site.operands.items() if o is not None}
        tensors |= {n: o for n, o in match.wildcards.items() if isinstance(o, Node)}
        self.fused.append(_site(match.pattern.name, match.root, tensors, kernel=kernel))

    def add_refusal(self, refusal: Refusal) -> None:
        tensors = {n: o for n, o in refusal.site.operands.items() if o is not None}
        node = refusal.node if meta_tensor(refusal.node) is not None else refusal.site.node
        self.refused.append(_site(refusal.pattern.name, node, tensors, reason=refusal.reason))

    def extend(self, other: Report) -> None:
        self.fused += other.fused
        self.refused += other.refused

    def __str__(self) -> str:
        headers = ["", "pattern", "where", "operands", "dtype", "source, or why not", "product"]
        widths = [None, None, 40, 40, None, 60, 30]
        rows = [
            [verdict, s.pattern, s.where, _sizes(s.shapes), s.dtype, s.reason or s.code, s.kernel]
            for verdict, sites in (("fused", self.fused), ("refused", self.refused))
            for s in sites
        ]
        if not rows:
            return "fx_fuser: no site of any pattern found"
        shown = len(headers) if any(s.kernel for s in self.fused) else len(headers) - 1
        cut = [row[:shown] for row in rows]
        return tabulate(cut, headers[:shown], maxcolwidths=widths[:shown])

    def publish(self) -> None:
        """Into the log (`TORCH_LOGS="+fx_fuser"`) and, as an artifact, into tlparse's trace."""
        for site in self.fused:
            kernel = f" ({site.kernel})" if site.kernel else ""
            log.info("fused %s at %s%s", site.pattern, site.where, kernel)
        for site in self.refused:
            log.info("refused %s at %s: %s", site.pattern, site.where, site.reason)
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "fx_fuser_report", "encoding": "json"},
            payload_fn=lambda: json.dumps(asdict(self), indent=2),
        )


def _sizes(shapes: dict[str, str]) -> str:
    return " ".join(f"{n}{s}" for n, s in shapes.items())


def _site(pattern: str, node: Node, tensors: dict[str, Node], **said: str) -> SiteReport:
    where, code = source_line(node)
    shapes = {n: _shape(o) for n, o in tensors.items()}
    tensor: Any = meta_tensor(node)
    dtype = str(getattr(tensor, "dtype", "unknown")).removeprefix("torch.")
    return SiteReport(pattern, f"fx_fuser::{pattern}", where, code, shapes, dtype, **said)


def _shape(node: Node) -> str:
    tensor = meta_tensor(node)
    return "[?]" if tensor is None else "[" + ", ".join(map(str, tensor.shape)) + "]"


def source_line(node: Node) -> tuple[str, str]:
    """("file:line", code) of the innermost frame that Dynamo noted for the node."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return "unknown", ""
    return f"{frames[-1]['file']}:{frames[-1]['line']}", frames[-1]["code"].strip()
