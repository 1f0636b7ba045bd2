"""A comparison as one HTML page, without scripts or other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from fx_fuser.compare.contents import Contents
from fx_fuser.compare.text import cliff_lines, figure_rows, kind_rows, remarks, site_lines

_STYLE = """
:root { --ground: #fff; --ink: #1b1f24; --line: #c4c9d0; --plain: #f1f3f5; --good: #bfe8c8;
        --bad: #ffd0cc; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16191d; --ink: #e6e8ea; --line: #4a525b; --plain: #262b31; --good: #1f4d2b;
          --bad: #5c1f1a; } }
body { background: var(--ground); color: var(--ink); margin: 2rem; max-width: 70rem;
       font: 15px/1.45 system-ui, sans-serif; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid var(--line); padding: .35rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.verdict { background: var(--plain); padding: .8rem 1rem; }
.good { background: var(--good); }
.bad { background: var(--bad); }
"""


def page_of(found: Contents) -> str:
    """The page."""
    judged = found.judged
    mood = "good" if judged.use else "bad" if judged.word == "DO NOT USE" else "plain"
    first, *others = judged.sentences
    kinds = kind_rows(found) if found.kinds else []
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            f"<title>fx_fuser: {escape(judged.word)}, {escape(found.title)}</title>",
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(found.title)}</h1>",
            *_paragraphs(found.header.lines),
            f'<div class="verdict {mood}"><p><b>{escape(judged.word)}</b>: {escape(first)}</p>',
            *_paragraphs(others),
            "</div>",
            *_table(*figure_rows(found)),
            *_paragraphs(remarks(found)),
            *(_table(*kinds) if kinds else ()),
            *_paragraphs([*cliff_lines(found), *site_lines(found), *found.notes]),
            "</body>\n</html>\n",
        ]
    )


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    return (f"<p>{escape(line)}</p>" for line in lines)


def _table(head: Sequence[str], *lines: Sequence[str]) -> Iterator[str]:
    yield "<table>\n<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    for line in lines:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
    yield "</table>"
