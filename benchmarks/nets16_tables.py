"""What rows of `benchmarks.nets16` show: which are slower, and the tables of docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.net16 import Row
from benchmarks.nets16_models import NETS

PATH = Path("nets16", "gpu.json")  # in the folder of results
LEAST = 0.99  # of Inductor's speed
MEMORY = 1.01  # of Inductor's peak, at most
CASES = {(net.name, step) for net in NETS.values() for step in net.phases}


def ratio(row: Row, what: str) -> float | None:
    """Inductor's over fx_fuser's, of one of "ms", "wall_ms", "compile_s", "peak_mib"."""
    theirs, ours = (row.get(f"{system}_{what}") for system in ("inductor", "fx_fuser"))
    return theirs / ours if isinstance(theirs, float) and isinstance(ours, float) else None


def slower(row: Row) -> list[str]:
    """In which time (GPU, wall) fx_fuser is slower: a ratio below 0.99, or below 1 less the spread.

    Compared with the slower of Inductor's compilations, if the row has two. If Inductor lowered the
    same graphs for fx_fuser, too, those are a third: they may be off by as much again.
    """
    found = []
    for clock, what in (("GPU", "ms"), ("wall", "wall_ms")):
        value, bound = ratio(row, what), max(LEAST, 1 - (row["spread"] or 0.0))
        first, second = row.get(f"inductor_{what}"), row.get(f"again_{what}")
        if isinstance(first, float) and isinstance(second, float):
            apart = max(first, second) / min(first, second)
            bound *= min(1.0, first / second) / (apart if row.get("same_graphs") else 1.0)
        if value is not None and value < bound:
            found.append(f"{clock} {value:.3f}×, not {bound:.3f}")
    return found


def faults(row: Row) -> list[str]:
    """Everything in which a row falls short of what we promise."""
    found = [row["error"]] if isinstance(row["error"], str) else []
    found += slower(row)
    peak = ratio(row, "peak_mib")
    if peak is not None and peak * MEMORY < 1:
        found.append(f"peak memory {tables.factor(1 / peak)}")
    return found


def key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["net"], row["step"]


def place(row: Mapping[str, Any]) -> tuple[int, str, str]:
    """A row's place in its file: in the order of the nets."""
    names = list(NETS)
    index = names.index(row["net"]) if row["net"] in names else len(names)
    return index, *key(row)


def line(row: Row) -> str:
    """One line for the terminal."""
    gains = f"GPU {tables.factor(ratio(row, 'ms'))} wall {tables.factor(ratio(row, 'wall_ms'))}"
    seconds = " and ".join(
        tables.number(row[name], ".1f") for name in ("inductor_compile_s", "fx_fuser_compile_s")
    )
    return f"{row['net']} {row['step']} {row['precision']}: {gains}, compiles {seconds} s"


def _caption(rows: Sequence[Row]) -> str:
    def all_of(field: str, length: int | None = None) -> str:
        return ", ".join(sorted({str(row[field])[:length] for row in rows}))  # type: ignore[literal-required]

    return (
        f"{all_of('gpu')}, torch {all_of('torch')}, {all_of('date', 10)}, "
        f"commit {all_of('commit', 7)}"
    )


def _scatter(row: Row) -> str:
    said = [] if row["spread"] is None else [f"± {100 * row['spread']:.1f} %"]
    said += ["same graphs"] * bool(row.get("same_graphs"))
    pairs = ((row.get(f"inductor_{what}"), row.get(f"again_{what}")) for what in ("ms", "wall_ms"))
    twice = [a / b for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
    said += [f"Inductor again {' and '.join(map(tables.factor, twice))}"] * bool(twice)
    return ", ".join(said)


def _pair(row: Row, what: str, form: str) -> list[str]:
    systems = ("inductor", "fx_fuser")
    return [tables.number(row[f"{s}_{what}"], form) for s in systems]  # type: ignore[literal-required]


def section(rows: Sequence[Row]) -> str:
    """The section of docs/results.md, with its heading; empty if there are no rows."""
    if not rows:
        return ""
    lines = []
    for row in rows:
        value, said = ratio(row, "ms"), row["error"]
        peak = ratio(row, "peak_mib")
        lines.append([
            row["net"], row["config"], row["step"], row["precision"],
            tables.short_name(row["gpu"]),
            *_pair(row, "ms", ".2f"),
            f"**{tables.factor(value)}**" if value else "",
            _scatter(row),
            tables.factor(ratio(row, "wall_ms")),
            "" if peak is None else f"{100 * (1 / peak - 1):+.1f} %",
            *_pair(row, "compile_s", ".1f"),
            "" if said is None or isinstance(said, str) else f"{said:.1e}",
            tables.number(row["eager_error"], ".1e"),
            "; ".join(faults(row)),
        ])  # fmt: skip
    heads = ["net", "input", "step", "precision", "on", "Inductor", "fx_fuser", "over Inductor"]
    heads += ["", "wall", "peak memory", "Inductor compiles, s", "fx_fuser, s", "error", "eager's"]
    heads += ["falls short"]
    said_first = (
        "Unmodified nets as people train and serve them. Each row has a process of its own, in "
        "which Inductor and fx_fuser take turns. A training step is forward, loss and backward; "
        "amp: fp32 weights and `torch.autocast` in bf16."
    )
    columns = (
        "*Inductor*, *fx_fuser*: GPU time in ms, medians of profiled steps.",
        "*±*: half the range of the ratio. *Same graphs*: nothing is fused, and Inductor compiled "
        "the same graphs for both, so any difference is Inductor's own (not checked in rows of "
        "ce1a8e1 and before). *Inductor again*: Inductor's time over that of a second compilation "
        "of its own, GPU and wall time.",
        "*Compiles*: the first call with empty caches; not measured if other processes compiled at "
        "the same time.",
        "*Error*: relative Frobenius error against float64; the larger of that of all outputs and "
        "that of all gradients.",
        f"*Falls short*: less than {LEAST} of Inductor's speed, or slower than the spread allows, "
        "in GPU or wall time (of Inductor's two compilations the slower one counts; with the same "
        "graphs their difference is allowed as well); more than 1 % more memory; a value beyond "
        "[the bound](accuracy.md#the-bound).",
    )
    parts = ["## Nets in 16 bits", tables.wrapped(said_first)]
    parts.append("\n".join(tables.wrapped(f"- {column}", indent="  ") for column in columns))
    measured = f"{len({key(row) for row in rows} & CASES)} of the {len(CASES)} cases"
    return "\n\n".join(
        [
            *parts,
            tables.table(lines, heads, 5),
            tables.wrapped(f"{_caption(rows)}. Measured: {measured}."),
        ]
    )
