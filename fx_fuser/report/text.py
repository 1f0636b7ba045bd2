"""A report as text, at most `WIDTH` columns wide: the header, a summary, a table, and the rest."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable

from tabulate import tabulate

from fx_fuser import patterns
from fx_fuser.report.contents import Contents, SiteReport, short_place

WIDTH = 100
_WHAT, _WHERE = 34, 48  # columns of the table; the verdict gets the rest


def report_text(report: Contents) -> str:
    """What `str()` of a report is."""
    near = [site for site in report.refused if _is_near_builtin(site)]
    rows = report.fused + [site for site in report.refused if not _is_near_builtin(site)]
    head = [*report.header.lines] if report.header else []
    rest = [report.attention, report.contracted, report.losses]
    parts = [
        _filled(head),
        _filled([report.summary]),
        _table(rows) if rows else "",
        _filled([report.saving, report.keeping]),
        _filled(report.leftovers.splitlines()),
        _filled(_near_misses(near)),
        _filled(line for said in rest for line in said.splitlines()),
    ]
    return "\n\n".join(part for part in parts if part)


def said_of(site: SiteReport) -> str:
    """The source line, or why it is not fused and what would help."""
    if not site.reason:
        return f"{site.code} (ends {site.stop})" if site.stop else site.code
    return f"{site.reason}; to fuse it, {site.help}" if site.help else site.reason


def _is_near_builtin(site: SiteReport) -> bool:
    """Is it a few operations away from a pattern that the user did not register?"""
    return bool(site.missing) and site.pattern in patterns.names()


def _near_misses(sites: Iterable[SiteReport]) -> list[str]:
    """Those with the same obstacle, whatever its names and lines, share a line."""
    groups: dict[tuple[str, str], list[SiteReport]] = {}
    for site in sites:
        obstacle = re.sub(r"`[^`]*`|[\w.]+:\d+", "", site.reason)
        groups.setdefault((site.pattern, obstacle), []).append(site)
    lines = [
        f"  {len(group)} × {pattern}, {_places(group)}: {said_of(group[0])}"
        for (pattern, _), group in groups.items()
    ]
    head = (
        "Near misses of built-in patterns (nothing to do, unless you meant to write the pattern):"
    )
    return [head, *lines] if lines else []


def _places(sites: Iterable[SiteReport]) -> str:
    first, *others = dict.fromkeys(short_place(site.where) for site in sites)
    if not others:
        return first
    return f"{first} and {len(others)} more place{'s' * (len(others) > 1)}"


def _table(sites: Iterable[SiteReport]) -> str:
    """Equal sites share a row."""
    headers = ["", "pattern, dtype, operands", "where, source line or reason, kernel"]
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
    """Lines of this width; "\\0" is a space that stays."""
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _filled(lines: Iterable[str]) -> str:
    return "\n".join(_filled_line(line) for line in lines if line)


def _filled_line(line: str) -> str:
    start = line[: len(line) - len(line.lstrip())]
    return "\n".join(_wrapped(line, WIDTH, start + "    "))
