"""A report as one HTML page, without scripts or other files: a table, and each graph as SVG."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fx_fuser.report.contents import Contents, GraphReport, NodeReport, SiteReport
from fx_fuser.report.traffic import Saved

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _PAD = 240, 40, 24, 34, 10
_SMALL = 80  # nodes of a graph that is drawn whole
_NEAR = 2  # steps around a site that are drawn of a larger graph
_CHARACTERS = 30  # that fit in a box

_STYLE = """
:root { --ground: #fff; --ink: #1b1f24; --faint: #667; --line: #c4c9d0; --plain: #f1f3f5;
        --fused: #bfe8c8; --fused-line: #2b8a3e; --near: #ffe3a8; --near-line: #c77700; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16191d; --ink: #e6e8ea; --faint: #9aa3ad; --line: #4a525b; --plain: #262b31;
          --fused: #1f4d2b; --fused-line: #69db7c; --near: #5a3f0a; --near-line: #ffc14d; } }
body { background: var(--ground); color: var(--ink); margin: 2rem; font: 15px/1.45 system-ui,
       sans-serif; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
         vertical-align: top; }
code, svg text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; }
.verdict, .operands { white-space: nowrap; }
tr:target td { outline: 2px solid var(--ink); }
.fused .verdict, .fused rect { background: var(--fused); fill: var(--fused);
                               stroke: var(--fused-line); }
.near .verdict, .near rect { background: var(--near); fill: var(--near); stroke: var(--near-line); }
.plain rect { fill: var(--plain); stroke: var(--line); }
.faint, svg .faint { color: var(--faint); fill: var(--faint); }
.help { display: block; margin-top: .3rem; }
figure { margin: 1rem 0; overflow-x: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg .edge { fill: none; stroke: var(--line); stroke-width: 1.3; }
svg .region rect { fill-opacity: .35; stroke-dasharray: 5 4; }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0; }
"""


@dataclass(frozen=True)
class _Numbered:
    """A site with its number in the table. verdict: the name of its colours."""

    number: int
    verdict: str
    site: SiteReport

    @property
    def word(self) -> str:
        return "near miss" if self.verdict == "near" else self.site.verdict

    @property
    def what(self) -> str:
        said = f"{self.number} {self.word}: {self.site.pattern}"
        return "\n".join(t for t in (said, self.site.reason, self.site.help) if t)


def html_of(report: Contents) -> str:
    """The page."""
    sites = [
        _Numbered(number, verdict, site)
        for number, (verdict, site) in enumerate(
            [*(("fused", s) for s in report.fused), *(("near", s) for s in report.refused)], 1
        )
    ]
    counts = report.summary
    head = report.header.lines if report.header else []
    lines = [*head, report.summary, report.saving, report.keeping]
    for said in (report.attention, report.contracted, report.losses):
        lines += said.splitlines()
    drawn = [
        _graph(graph, index, len(report.graphs), [s for s in sites if s.site.graph == index])
        for index, graph in enumerate(report.graphs)
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>fx_fuser: {counts}</title>",
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>fx_fuser</h1>",
            *(f"<p>{escape(line)}</p>" for line in lines if line),
            *_table(sites),
            *drawn,
            "</body>\n</html>\n",
        ]
    )


# ---- the table ------------------------------------------------------------------------------


def _table(sites: Sequence[_Numbered]) -> Iterator[str]:
    if not sites:
        return
    titles = ("", "", "pattern", "where", "source", "operands", "why not, or what runs")
    yield "<table>\n<tr>" + "".join(f"<th>{t}</th>" for t in titles) + "</tr>"
    for numbered in sites:
        site = numbered.site
        operands = (
            f"{n} = <code>{escape(site.operands[n])}</code> "
            f'<span class="faint">{site.dtypes.get(n, "")}{escape(site.shapes.get(n, ""))}</span>'
            for n in site.operands
        )
        cells = (
            f"{numbered.number}",
            numbered.word,
            f"<code>{escape(site.pattern)}</code>",
            f'<span title="{escape(site.where)}">{escape(os.path.basename(site.where))}</span>',
            f"<code>{escape(site.code)}</code>",
            "<br>".join(operands),
            _outcome(site),
        )
        marks = ("", ' class="verdict"', "", "", "", ' class="operands"', "")
        row = "".join(f"<td{m}>{c}</td>" for m, c in zip(marks, cells))
        yield f'<tr id="site-{numbered.number}" class="{numbered.verdict}">{row}</tr>'
    yield "</table>"


def _outcome(site: SiteReport) -> str:
    if site.reason:
        help = f'<span class="help">To fuse it, {_prose(site.help)}.</span>' if site.help else ""
        return _prose(site.reason) + help
    if not site.native:
        return "matches; on a CPU it runs unfused, as Inductor compiles it"
    saved = f"saves {Saved(site.bytes_saved, site.launches_saved or 0)}, compared with eager mode"
    return "<br>".join(t for t in (escape(site.kernel), saved) if t)


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


# ---- a graph --------------------------------------------------------------------------------


def _graph(graph: GraphReport, index: int, count: int, sites: Sequence[_Numbered]) -> str:
    of = {name: s for s in reversed(sites) for name in s.site.nodes}
    whole = [
        n for n in graph.nodes if not (n.kind in ("placeholder", "get_attr") and "." in n.label)
    ]
    nodes = whole if len(whole) <= _SMALL else _around(whole, set(of))
    notes = [f"graph {index + 1} of {count}"]
    if len(nodes) < len(whole):
        notes.append(f"{len(nodes)} of {len(whole)} nodes drawn, those around the sites")
    if graph.ends:
        notes.append(f"breaks at {graph.ends}")
    parts = [p for p in _components(nodes) if len(p) > 1 or p[0].name in of]
    pictures = "\n".join(_picture(part, of) for part in parts)
    mark = " open" if sites or count == 1 else ""
    return f"<details{mark}><summary>{escape('; '.join(notes))}</summary>\n{pictures}\n</details>"


def _neighbours(nodes: Sequence[NodeReport]) -> dict[str, set[str]]:
    near: dict[str, set[str]] = {n.name: set() for n in nodes}
    for node in nodes:
        for name in node.inputs:
            if name in near:
                near[node.name].add(name)
                near[name].add(node.name)
    return near


def _around(nodes: Sequence[NodeReport], names: set[str]) -> list[NodeReport]:
    near, kept = _neighbours(nodes), set(names)
    for _ in range(_NEAR):
        kept |= {m for n in kept for m in near.get(n, ())}
    return [n for n in nodes if n.name in kept]


def _components(nodes: Sequence[NodeReport]) -> list[list[NodeReport]]:
    """Parts that no edge joins, each of them in order."""
    near, part_of = _neighbours(nodes), dict[str, int]()
    for index, node in enumerate(nodes):
        queue = [node.name]
        while queue:
            name = queue.pop()
            if name not in part_of:
                part_of[name] = index
                queue += near[name]
    parts: dict[int, list[NodeReport]] = {}
    for node in nodes:
        parts.setdefault(part_of[node.name], []).append(node)
    return list(parts.values())


@dataclass(frozen=True)
class _Box:
    """A place in the picture, in rows from the top and columns from the left."""

    row: int
    column: int

    @property
    def x(self) -> int:
        return _PAD + self.column * (_WIDTH + _GAP_X)

    @property
    def y(self) -> int:
        return _PAD + self.row * (_HEIGHT + _GAP_Y)

    @property
    def middle(self) -> float:
        return self.x + _WIDTH / 2


def _rows(nodes: Sequence[NodeReport]) -> dict[str, int]:
    """A node's row is the length of the longest path to it; inputs are right above a reader."""
    row_of: dict[str, int] = {}
    for node in nodes:
        row_of[node.name] = max((row_of[n] + 1 for n in node.inputs if n in row_of), default=0)
    for node in nodes:
        below = [row_of[n.name] for n in nodes if node.name in n.inputs]
        if below and row_of[node.name] == 0:
            row_of[node.name] = min(below) - 1
    return row_of


def _layout(nodes: Sequence[NodeReport], of: Mapping[str, _Numbered]) -> dict[str, _Box]:
    """Each site has its own columns; other nodes are near what they read."""
    row_of, boxes, used = _rows(nodes), dict[str, _Box](), set[_Box]()
    sites: dict[int, list[NodeReport]] = {}
    for node in nodes:
        if node.name in of:
            sites.setdefault(of[node.name].number, []).append(node)
    column = 0
    for members in sites.values():
        in_row: dict[int, int] = {}
        for node in members:
            row = row_of[node.name]
            boxes[node.name] = _Box(row, column + in_row.get(row, 0))
            in_row[row] = in_row.get(row, 0) + 1
        wide = max(in_row.values())
        used |= {
            _Box(row, column + i)
            for row in range(min(in_row), max(in_row) + 1)
            for i in range(wide)
        }
        column += wide
    for node in nodes:
        if node.name in boxes:
            continue
        near = [boxes[n].column for n in node.inputs if n in boxes]
        near += [boxes[n.name].column for n in nodes if node.name in n.inputs and n.name in boxes]
        wanted = sorted(near)[len(near) // 2] if near else 0
        places = (
            _Box(row_of[node.name], c)
            for c in sorted(range(wanted + column + len(nodes)), key=lambda c: abs(c - wanted))
        )
        boxes[node.name] = next(box for box in places if box not in used)
        used.add(boxes[node.name])
    return boxes


def _picture(nodes: Sequence[NodeReport], of: Mapping[str, _Numbered]) -> str:
    boxes = _layout(nodes, of)
    width = max(b.x for b in boxes.values()) + _WIDTH + _PAD
    height = max(b.y for b in boxes.values()) + _HEIGHT + _PAD
    parts = [
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">',
        *_regions(boxes, of),
        *(_edge(boxes[n], boxes[node.name]) for node in nodes for n in node.inputs if n in boxes),
        *(_node(node, boxes[node.name], of.get(node.name)) for node in nodes),
        "</svg></figure>",
    ]
    return "\n".join(parts)


def _regions(boxes: Mapping[str, _Box], of: Mapping[str, _Numbered]) -> Iterator[str]:
    """A frame around each site."""
    members: dict[int, list[str]] = {}
    for name in boxes:
        if name in of:
            members.setdefault(of[name].number, []).append(name)
    for names in members.values():
        x, y = min(boxes[n].x for n in names) - 7, min(boxes[n].y for n in names) - 7
        width = max(boxes[n].x for n in names) + _WIDTH + 7 - x
        height = max(boxes[n].y for n in names) + _HEIGHT + 7 - y
        yield (
            f'<g class="region {of[names[0]].verdict}"><rect x="{x}" y="{y}" width="{width}" '
            f'height="{height}" rx="9"/></g>'
        )


def _edge(start: _Box, end: _Box) -> str:
    top, bottom = start.y + _HEIGHT, end.y
    bend = max((bottom - top) / 2, 12)
    return (
        f'<path class="edge" d="M{start.middle:.0f},{top:.0f} C{start.middle:.0f},{top + bend:.0f} '
        f'{end.middle:.0f},{bottom - bend:.0f} {end.middle:.0f},{bottom:.0f}"/>'
    )


def _node(node: NodeReport, box: _Box, numbered: _Numbered | None) -> str:
    place = os.path.basename(node.where) if node.kind.startswith("call") else ""
    below = " ".join(t for t in (node.op if node.kind.startswith("call") else "input", place) if t)
    below = "" if node.kind == "output" else below
    label = node.label if numbered is None else f"{numbered.number} · {node.label}"
    says = [numbered.what if numbered else "", node.code, node.value, f"FX node {node.name}"]
    drawn = (
        f'<g class="{numbered.verdict if numbered else "plain"}"><title>'
        f"{escape(chr(10).join(t for t in says if t))}</title>"
        f'<rect x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{box.x + 8}" y="{box.y + 16}">{escape(_cut(label))}</text>'
        f'<text class="faint" x="{box.x + 8}" y="{box.y + 32}">{escape(_cut(below))}</text>'
        "</g>"
    )
    return f'<a href="#site-{numbered.number}">{drawn}</a>' if numbered else drawn


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
