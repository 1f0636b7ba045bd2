"""A report as text, at most `WIDTH` columns wide: the header, a table, and what is left."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

from tabulate import tabulate

from fx_fuser.report.contents import Contents, SiteReport, short_place

WIDTH = 100
_WHAT, _WHERE = 34, 48  # columns of the table; the verdict has what is left


def report_text(report: Contents) -> str:
    """What `str()` of a report is."""
    if report.fused or report.refused:
        found = [_table(report.fused + report.refused)]
        lines = [report.saving, report.keeping, report.summary]
    else:
        found, lines = [], [f"fx_fuser: {report.summary or 'no site of any pattern found'}"]
    for said in (report.leftovers, report.attention, report.contracted):
        lines += said.splitlines()
    head = [*map(_filled, report.header.lines), ""] if report.header else []
    return "\n".join([*head, *found, *(_filled(line) for line in lines if line)])


def said_of(site: SiteReport) -> str:
    """The source line, or why it is not fused and what would help."""
    if not site.reason:
        return f"{site.code} (ends {site.stop})" if site.stop else site.code
    return f"{site.reason}; to fuse it, {site.help}" if site.help else site.reason


def _table(sites: Iterable[SiteReport]) -> str:
    """Equal sites share a row."""
    headers = ["", "pattern, dtype, operands", "where, source or why not, kernel"]
    rows = Counter((site.verdict, _what(site), _where(site)) for site in sites)
    table = [
        (f"{verdict} ×{n}" if n > 1 else verdict, *cells) for (verdict, *cells), n in rows.items()
    ]
    return tabulate(table, headers, disable_numparse=True)


def _what(site: SiteReport) -> str:
    """The name stays whole, and so does each operand."""
    operands = [f"{name}{sizes}".replace(" ", "\0") for name, sizes in site.shapes.items()]
    return "\n".join([site.pattern, site.dtype, *_wrapped(" ".join(operands), _WHAT)])


def _where(site: SiteReport) -> str:
    texts = [said_of(site), site.kernel]
    return "\n".join([short_place(site.where), *(t for x in texts for t in _wrapped(x, _WHERE))])


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of this width; at "\\0" is a space that stays."""
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _filled(line: str) -> str:
    start = line[: len(line) - len(line.lstrip())]
    return "\n".join(_wrapped(line, WIDTH, start + "    "))
