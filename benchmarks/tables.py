"""Tables of KernelBench and of whole nets, for the terminal and docs/results.md:

python -m benchmarks.tables FILE …  # puts the rows of parts into the files that those pages show
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tabulate import tabulate

from benchmarks import results

PRODUCTS = {(1, number) for number in (*range(1, 4), *range(6, 12), *range(13, 19))}
MODES = ("eager", "inductor", "max-autotune", "fx_fuser")
KINDS = ("ours", "GEMM", "attention", "convolution", "Triton", "other")
SLOWER = 0.98  # of Inductor's speed: nothing may be below
_FOLDERS = {"level": "kernelbench", "net": "whole_nets"}

Row = Mapping[str, Any]  # kernelbench_problem.Row or whole_nets.Row


def read(path: Path) -> list[Any]:
    return json.loads(path.read_text()) if path.exists() else []


def read_all(folder: Path, name: str) -> list[list[Any]]:
    """The rows of every GPU that has any."""
    return [read(path) for path in sorted((folder / name).glob("*.json"))]


class Measured(Protocol):
    """A row with what it was measured on."""

    machine: dict[str, Any]
    date: str
    commit: str


def measured_on(rows: Sequence[Measured]) -> str:
    """Machines, the one with most rows first, dates and commits, as a paragraph."""
    said: list[str] = []
    for gpu in usual_gpus(rows):
        here = [row for row in rows if row.machine["gpu"] == gpu]
        facts = (
            {f"driver {row.machine['driver']}" for row in here},
            {f"torch {row.machine['torch']}" for row in here},
            {row.date for row in here},
        )
        commits = ", ".join(sorted({row.commit[:7] for row in here}))
        of_all = ", ".join(" and ".join(sorted(fact)) for fact in facts)
        begin = gpu if not said else f"Rows marked {short_name(gpu)}: {gpu}"
        said.append(f"{begin}, {of_all}, commit {commits}.")
    return wrapped(" ".join(said))


def usual_gpus(rows: Sequence[Measured]) -> list[str]:
    """The rows' GPUs, the one with most rows first."""
    return [gpu for gpu, _ in Counter(row.machine["gpu"] for row in rows).most_common()]


def short_name(gpu: str) -> str:
    """H100 for NVIDIA H100 80GB HBM3."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def mark(row: Measured, rows: Sequence[Measured]) -> str:
    """The row's GPU, if it is not the one with most rows."""
    gpu: str = row.machine["gpu"]
    return "" if gpu == usual_gpus(rows)[0] else short_name(gpu)


def ratio(row: Row, field: str, over: str = "inductor") -> float | None:
    """2.0: half of Inductor's time."""
    times = [row["modes"].get(mode, {}).get(field) for mode in (over, "fx_fuser")]
    return times[0] / times[1] if all(times) else None


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def cell(row: Row, mode: str, field: str, form: str) -> str:
    result = row["modes"].get(mode, {})
    return "failed" if "error" in result else number(result.get(field), form)


def shown(rows: Sequence[Row]) -> list[str]:
    return [mode for mode in MODES if any(mode in row["modes"] for row in rows)]


def title(mode: str) -> str:
    return "Inductor" if mode == "inductor" else mode


def caption(rows: Sequence[Row], command: str) -> str:
    def all_of(field: str) -> str:
        return ", ".join(sorted({str(row[field]) for row in rows}))

    days = sorted(row["date"][:10] for row in rows)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return wrapped(
        f"{all_of('gpu')}, driver {all_of('driver')}, torch {all_of('torch')}, measured {when} at "
        f"{all_of('commit')} by `python -m benchmarks.{command}`."
    )


def table(lines: Sequence[Sequence[str]], header: Sequence[str], left: int) -> str:
    align = ("left",) * left + ("right",) * (len(header) - left)
    return tabulate(lines, header, "github", colalign=align, disable_numparse=True)


def wrapped(text: str, indent: str = "") -> str:
    """In lines of a page's width; what stands in backticks is not broken.

    indent: of all lines but the first.
    """
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        whole, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def sites(row: Row) -> str:
    """Fused sites by counter, and those that were left to Inductor."""
    ours = row["modes"].get("fx_fuser", {})
    found = [f"{count} {name}" for name, count in sorted(ours.get("fused", {}).items())]
    if left := sum(ours.get("left", {}).values()):
        found.append(f"{left} left")
    return ", ".join(found)


# ---- KernelBench ------------------------------------------------------------------------------


def faults(row: Row) -> list[str]:
    """What fails a run: fx_fuser raised, or leaves eager's tolerance although Inductor does not."""
    name = f"{row['level']}/{row['problem']} {row['name']}"
    modes = row["modes"]
    ours, inductor = modes.get("fx_fuser", {}), modes.get("inductor", {})
    if "error" in row:
        return [f"{name}: {row['error']}"]
    if "error" in ours:
        return [f"{name}: fx_fuser: {ours['error']}"]
    found = [f"{name}: {said}" for said in ours.get("warnings", [])]
    if inductor.get("matches") and ours.get("matches") is False:
        found.append(f"{name}: fx_fuser is not within 1e-4 of eager, as Inductor is")
    return found


def kernelbench_line(row: Row) -> str:
    name = f"{row['level']}/{row['problem']} {row['name']}"[:48]
    if "error" in row:
        return f"{name:<48} {row['error']}"
    times = " ".join(
        f"{title(mode)} {cell(row, mode, 'gpu_ms', '.3f') or cell(row, mode, 'wall_ms', '.3f')}"
        for mode in row["modes"]
    )
    ratios = f"{factor(ratio(row, 'gpu_ms'))} wall {factor(ratio(row, 'wall_ms'))}"
    errors = " ".join(cell(row, mode, "err_fro", ".1e") or "–" for mode in row["modes"])
    verdict = " ".join("=≠"[not r.get("matches")] for r in row["modes"].values())
    seconds = " ".join(cell(row, mode, "compile_s", ".1f") for mode in row["modes"])
    rest = "; ".join(filter(None, [sites(row), *row["notes"]]))
    return f"{name:<48} {times} | {ratios} | {errors} {verdict} | {seconds} s | {rest}"


def kernelbench_groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        "level 2, problems with `nn.Linear`": [
            row for row in rows if row["level"] == 2 and row.get("linear")
        ],
        "level 1, matrix products (1–3, 6–11, 13–18)": [
            row for row in rows if (row["level"], row["problem"]) in PRODUCTS
        ],
        "all that was measured": list(rows),
    }


def kernelbench_groups_table(rows: Sequence[Row]) -> str:
    """A table by group; empty if nothing was timed."""
    lines = []
    for name, group in kernelbench_groups(rows).items():
        by_gpu, by_wall = (
            [r for row in group if (r := ratio(row, field)) is not None]
            for field in ("gpu_ms", "wall_ms")
        )
        if not by_wall:
            continue
        compared = [r["modes"]["fx_fuser"] for r in group if "fx_fuser" in r["modes"]]
        within = sum(bool(result.get("matches")) for result in compared)
        line = [name, f"{len(by_wall)} of {len(group)}"]
        line.append(f"**{mean(by_gpu):.2f}×**" if by_gpu else "")
        line.append(f"{min(by_gpu):.2f}×" if by_gpu else "")
        line += [factor(mean(by_wall)), f"{within} of {len(compared)}"]
        lines.append(line)
    header = ["KernelBench, over Inductor", "measured", "GPU time, geometric mean", "least"]
    header += ["wall time, geometric mean", "within 1e-4 of eager"]
    return table(lines, header, 1) if lines else ""


def kernelbench_summary(rows: Sequence[Row]) -> str:
    slow = [
        f"{row['level']}/{row['problem']} ({r:.2f}×)"
        for row in rows
        if (r := ratio(row, "gpu_ms")) is not None and r < SLOWER
    ]
    below = f"\n\nBelow {SLOWER}× by GPU time: {', '.join(slow) or 'none'}."
    shown = kernelbench_groups_table(rows)
    return shown + below if shown else "nothing was timed"


def kernelbench_table(rows: Sequence[Row]) -> str:
    modes = shown(rows)
    header = ["problem", *map(title, modes), "over Inductor", "wall", "error: eager"]
    header += ["Inductor", "fx_fuser", "within 1e-4: Inductor", "fx_fuser"]
    lines = []
    for row in rows:
        line = [f"{row['level']}/{row['problem']} {row['name']}"]
        line += [cell(row, mode, "gpu_ms", ".3f") for mode in modes]
        line += [factor(ratio(row, "gpu_ms")), factor(ratio(row, "wall_ms"))]
        line += [cell(row, mode, "err_fro", ".1e") for mode in ("eager", "inductor", "fx_fuser")]
        for mode in ("inductor", "fx_fuser"):
            matched = row["modes"].get(mode, {}).get("matches")
            line.append({None: "", True: "yes", False: "no"}[matched])
        lines.append(line)
    return table(lines, header, 1)


def kernelbench_section(rows: Sequence[Row]) -> str:
    said = (
        "GPU times in ms: medians with a cleared L2 cache. Error: relative Frobenius error against "
        "float64. Weights and inputs follow KernelBench's rules: no `.eval()`, fp32, torch's "
        "defaults."
    )
    if any(row["on_device"] for row in rows):
        said += " Some weights and inputs were drawn on the GPU, so they differ from KernelBench's."
    body = f"{kernelbench_table(rows)}\n\n{wrapped(said)}"
    parts = [caption(rows, "kernelbench"), kernelbench_summary(rows)]
    return "\n\n".join([*parts, folded("every problem", body)])


# ---- whole nets -------------------------------------------------------------------------------


def peak(row: Row) -> str:
    inverse = ratio(row, "peak_mib")
    return "" if inverse is None else f"{100 * (1 / inverse - 1):+.1f} %"


def whole_nets_table(rows: Sequence[Row]) -> str:
    modes = shown(rows)
    header = ["net", "batch", "step", "precision", *map(title, modes), "over Inductor", "wall"]
    header += ["peak memory", "error: eager", "Inductor", "fx_fuser", "accurate"]
    lines = []
    for row in rows:
        line = [row["net"], row["batch"], row["phase"], row["precision"]]
        line += [cell(row, mode, "gpu_ms", ".2f") for mode in modes]
        gain = factor(ratio(row, "gpu_ms"))
        line += [f"**{gain}**" if gain else "", factor(ratio(row, "wall_ms")), peak(row)]
        line += [cell(row, mode, "err", ".1e") for mode in ("eager", "inductor", "fx_fuser")]
        ours = row["modes"].get("fx_fuser", {})
        said = {None: "", True: "yes", False: "no"}[ours.get("accurate")]
        line.append("as Inductor" if ours.get("as_inductor") else said)
        lines.append(line)
    return table(lines, header, 4)


def kinds_table(rows: Sequence[Row]) -> str:
    kinds = ("fx_fuser" if kind == "ours" else kind for kind in KINDS)
    header = ["net", "step", "precision", "system", *kinds, "wall", "compile: cold, s"]
    header += ["warm, s", "peak, MiB", "worst gradient", "median gradient", "sites"]
    lines = []
    for row in rows:
        for mode in shown([row]):
            result = row["modes"][mode]
            by_kind = result.get("kinds", {})
            line = [row["net"], row["phase"], row["precision"], title(mode)]
            line += [number(by_kind.get(kind), ".2f") for kind in KINDS]
            line.append(cell(row, mode, "wall_ms", ".2f"))
            line += [cell(row, mode, field, ".1f") for field in ("cold_s", "warm_s")]
            line.append(cell(row, mode, "peak_mib", ".0f"))
            line += [cell(row, mode, f"{which}_grad", ".1e") for which in ("worst", "median")]
            line.append(sites(row) if mode == "fx_fuser" else "")
            lines.append(line)
    return table(lines, header, 4)


def whole_nets_section(rows: Sequence[Row]) -> str:
    said = (
        "Medians in ms; a training step is forward, loss and backward. Precision: the setting of "
        "`torch.set_float32_matmul_precision`. Error: relative Frobenius error of the logits "
        "against float64, without dropout. Accurate, yes: every output and gradient is within the "
        "[bound](accuracy.md#the-bound); as Inductor: all values beyond it come from operations "
        "that Inductor computes, and are within the same bound relative to Inductor's error."
    )
    body = kinds_table(rows)
    parts = [caption(rows, "whole_nets"), whole_nets_table(rows), wrapped(said)]
    return "\n\n".join([*parts, folded("GPU time by kind, compile times, memory", body)])


# ---- files ------------------------------------------------------------------------------------


def nets_place(row: Row) -> tuple[str, str, str]:
    return row["net"], row["phase"], row["precision"]


def kernelbench_place(row: Row) -> tuple[int, int]:
    return row["level"], row["problem"]


def sections(folder: Path) -> dict[str, str]:
    """Mark → text, for `benchmarks.report`; empty texts if there are no results."""
    nets = [rows for rows in read_all(folder, "whole_nets") if rows]
    kernelbench = [rows for rows in read_all(folder, "kernelbench") if rows]
    return {
        "whole-nets": "\n\n".join(map(whole_nets_section, nets)),
        "kernelbench": "\n\n".join(map(kernelbench_section, kernelbench)),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    args = parser.parse_args(arguments)
    for file in args.files:
        for row in read(file):
            field = next(field for field in _FOLDERS if field in row)
            place = nets_place if field == "net" else kernelbench_place
            path = results.path_for(row["gpu"], args.results / _FOLDERS[field])
            results.replace_rows(path, [row], place, place)
    found = sections(args.results)
    print("\n\n".join(filter(None, (found["whole-nets"], found["kernelbench"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
