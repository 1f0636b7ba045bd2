"""A comparison as text: a table of figures, where the time goes, and the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from tabulate import tabulate

from fx_fuser.compare.column import Column
from fx_fuser.compare.contents import Contents
from fx_fuser.compare.verdict import spread

WIDTH = 100
_FIGURES = [
    "", "wall time\nms", "GPU time\nms", "peak memory\nMiB", "first call\ns", "output\nerror",
    "gradient\nerror",
]  # fmt: skip


_SITES = {  # of `counting.Sites`
    "fused": "sites fused",
    "left": "left to Inductor, where fusing gains nothing",
    "products": "gemms replaced in Inductor's graphs",
    "attention": "fp32 attentions replaced there",
    "padded": "16-bit gemms of odd sizes padded or replaced there",
    "convolutions": "16-bit convolutions along one dimension replaced there",
    "depthwise": "16-bit depthwise convolutions replaced there",
    "grouped": "16-bit convolutions in groups replaced there",
    "statistics": "1 x 1 convolutions there that compute their BatchNorm's statistics",
    "masks": "attention masks removed",
    "by_hand": "attentions written by hand that became torch's fused one",
    "contractions": "sums of products computed as gemms",
    "heads": "losses computed with their Linear, without all logits",
}


def text_of(found: Contents) -> str:
    """What `str()` of a comparison is."""
    kinds = [_table(kind_rows(found))] if found.kinds else []
    parts = [
        _filled([found.title, *found.header.lines]),
        _table(figure_rows(found)),
        _filled(remarks(found)),
        *kinds,
        _filled(cliff_lines(found)),
        _filled(site_lines(found)),
        _filled(found.notes),
        _filled(found.verdict.splitlines()),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(rows: list[list[str]]) -> str:
    return tabulate(rows[1:], rows[0], disable_numparse=True)


def figure_rows(found: Contents) -> list[list[str]]:
    """The names of the figures, then a row for each column of the comparison. Figures that no
    column has are left out."""
    lines = [
        [
            column.title,
            _failure(column) or _figure(column.wall_ms),
            _figure(column.gpu_ms),
            "" if column.peak_mib is None else f"{column.peak_mib:.0f}",
            "" if column.first_s is None else f"{column.first_s:.1f}",
            _error(column.output_error),
            _error(column.grad_error),
        ]
        for column in found.columns.values()
    ]
    some = [i for i in range(len(_FIGURES)) if not i or any(line[i] for line in lines)]
    return [[line[i] for i in some] for line in (_FIGURES, *lines)]


def kind_rows(found: Contents) -> list[list[str]]:
    """Milliseconds of GPU time by kind of kernel, after a row of names."""
    head = [
        "GPU time, ms",
        *(kind if kind != "Triton" else "pointwise (Triton)" for kind in found.kinds),
    ]
    measured = [c for c in found.columns.values() if c.kinds]
    return [head, *([c.title, *(_figure(c.kinds.get(k)) for k in found.kinds)] for c in measured)]


def remarks(found: Contents) -> Iterator[str]:
    """How the figures were taken, and why a column has none."""
    rounds = max((len(column.wall) for column in found.columns.values()), default=0)
    if rounds:
        said = f"Wall time: median of {rounds} rounds, taken in turns"
        rival, mine = (found.columns.get(name) for name in ("inductor", "fx_fuser"))
        if rival and mine and rival.wall and mine.wall:
            varies = spread(rival, mine)
            said += f", {rival.title} / fx_fuser ± {varies:.1%} between quartiles"
        errors = any(column.error is not None for column in found.columns.values())
        yield said + (". Errors are relative, against float64." if errors else ".")
    for column in found.columns.values():
        if column.failed:
            yield f"{column.title} failed: {column.failed}"


def cliff_lines(found: Contents) -> list[str]:
    """The kernels of fx_fuser's column that are known to be slow."""
    mine = found.columns.get("fx_fuser")
    cliffs = mine.cliffs if mine else []
    lines = [f"  {cliff.ms:.3g} ms: {cliff.says} ({cliff.kernel})" for cliff in cliffs]
    return ["Still slow with fx_fuser:", *lines] if lines else []


def site_lines(found: Contents) -> Iterator[str]:
    """What was fused, and what fx_fuser warned of."""
    mine = found.columns.get("fx_fuser")
    if mine is None or not mine.sites:
        return
    if found.device == "cuda":
        counts = {words: sum(mine.sites.get(key, {}).values()) for key, words in _SITES.items()}
        parts = [f"{count} {words}" for words, count in counts.items() if count]
        yield f"{', '.join(parts) or 'no site fused'}; explain says why the rest is not fused"
    yield from (f"fx_fuser warned: {said}" for said in mine.sites.get("warnings", ()))


def _failure(column: Column) -> str:
    if column.out_of_memory:
        return "out of memory"
    return "failed" if column.failed else ""


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _filled(lines: Iterable[str]) -> str:
    return "\n".join(map(_fill, lines))


def _fill(line: str) -> str:
    start = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.strip(),
        WIDTH,
        initial_indent=start,
        subsequent_indent=start + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
