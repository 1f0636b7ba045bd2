"""Write the results into the tables of README and the pages of docs, and draw their pictures:

python -m benchmarks.report [--check]

`--check` writes nothing, and fails if a page or a picture differs from the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from benchmarks import (
    conv_nets,
    coverage,
    coverage_gpu,
    expect,
    machines,
    nets16_tables,
    results,
    tables,
)
from benchmarks.problems import PROBLEMS
from benchmarks.results import Figures, Row

ROOT = Path(__file__).parent.parent
# Page → the marks around its generated text. README has the shortest.
PAGES = {
    "README.md": ("expect",),
    "docs/results.md": ("whole-nets", "nets16", "conv-nets"),
    "docs/kernelbench.md": ("kernelbench", "seed-problems", "linear-fp32"),
    "docs/models.md": ("models", "models-gpu"),
    "docs/gpus.md": ("machines",),
}
BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"
SYSTEMS = ("eager", "inductor", "max-autotune", "inductor-ieee", "fx_fuser")
SHOWN = ("fp32", "bf16")  # the other precisions are folded away
LEGEND = (
    "Medians in ms, the L2 cache cleared before each call. Inductor is `torch.compile(model)`. "
    "Error: relative Frobenius error against float64, the largest of the output and, in fwd+bwd, "
    "every gradient. In #73 Inductor's convolution uses TF32, as torch's defaults allow; "
    "Inductor ieee is Inductor without TF32."
)

Group = tuple[str, str, str]  # problem, precision, mode


def by_group(rows: list[Row]) -> dict[Group, dict[str, Row]]:
    groups: dict[Group, dict[str, Row]] = {}
    for row in sorted(rows, key=results.place):
        problem, precision, mode, system = results.key(row)
        groups.setdefault((problem, precision, mode), {})[system] = row
    return groups


def time_of(systems: dict[str, Row], name: str) -> float | None:
    return systems[name]["ms"] if name in systems else None


def speedup(systems: dict[str, Row], *over: str) -> float | None:
    """The fastest of `over` compared with fx_fuser; 2.0: fx_fuser takes half its time."""
    times = [time for name in over if (time := time_of(systems, name)) is not None]
    ours = time_of(systems, "fx_fuser")
    return min(times) / ours if times and ours is not None else None


def milliseconds(systems: dict[str, Row], name: str) -> str:
    if name not in systems:
        return ""
    ms = systems[name]["ms"]
    return "failed" if ms is None else f"{ms:.3f}"


def factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def error(systems: dict[str, Row], name: str) -> str:
    value = systems[name]["err_fp64"] if name in systems else None
    return "" if value is None else f"{value:.1e}"


def title(problem: str) -> str:
    return f"#{problem} {PROBLEMS[problem].title}" if problem.isdigit() else problem


def table(rows: list[Row], precision: str) -> str:
    groups = by_group([row for row in rows if row["precision"] == precision])
    ieee = any("inductor-ieee" in systems for systems in groups.values())
    shown = [name for name in SYSTEMS if ieee or name != "inductor-ieee"]
    header = ["problem", "input", "mode"]
    header += [
        f"{name.replace('inductor', 'Inductor').replace('-ieee', ' ieee')}" for name in shown
    ]
    header += ["over Inductor"] + (["over Inductor ieee"] if ieee else [])
    header += ["error: eager", "Inductor", "fx_fuser"]
    lines = []
    for (problem, _, mode), systems in groups.items():
        line = [title(problem), next(iter(systems.values()))["input"], mode]
        line += [milliseconds(systems, name) for name in shown]
        line.append(f"**{factor(speedup(systems, 'inductor'))}**")
        if ieee:
            line.append(factor(speedup(systems, "inductor-ieee")))
        line += [error(systems, name) for name in ("eager", "inductor", "fx_fuser")]
        lines.append(line)
    left = 3
    align = ("left",) * left + ("right",) * (len(header) - left)
    return tabulate(lines, header, "github", colalign=align, disable_numparse=True)


def values(rows: list[Row], field: str) -> str:
    return ", ".join(sorted({str(row[field]) for row in rows if row.get(field)}))  # type: ignore[literal-required]


def caption(rows: list[Row]) -> str:
    days = sorted(row["date"][:10] for row in rows)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    driver = f", driver {values(rows, 'driver')}" if values(rows, "driver") else ""
    return tables.wrapped(
        f"{values(rows, 'gpu')}{driver}, torch {values(rows, 'torch')}, measured {when} "
        f"at {values(rows, 'commit')}."
    )


def section(path: Path, rows: list[Row]) -> str:
    """The caption, the tables and the picture of one GPU."""
    present = list(dict.fromkeys(row["precision"] for row in sorted(rows, key=results.place)))
    parts = [caption(rows)]
    parts += [f"**{name}**\n\n{table(rows, name)}" for name in present if name in SHOWN]
    folded = [name for name in present if name not in SHOWN]
    if folded:
        body = "\n\n".join(f"**{name}**\n\n{table(rows, name)}" for name in folded)
        parts.append(tables.folded(" and ".join(folded), body))
    picture = path.with_suffix(".svg")
    parts.append(f"![speed-ups](../benchmarks/results/{picture.name})")
    return "\n\n".join(parts)


def accuracy_table(figures: Figures) -> str:
    """A row for each kind of data, a column for each K; SGEMM's error in brackets, same unit."""
    columns = list(dict.fromkeys(row["k"] for row in figures["accuracy"]))
    cells: dict[str, dict[int, str]] = {}
    for row in figures["accuracy"]:
        cell = f"{row['error'] * 1e7:.1f} ({row['sgemm'] * 1e7:.1f})"
        cells.setdefault(row["data"], {})[row["k"]] = cell
    lines = [[data, *(of_k.get(k) for k in columns)] for data, of_k in cells.items()]
    header = ["data", *(f"K = {k:,}" for k in columns)]
    return tabulate(
        lines,
        header,
        "github",
        disable_numparse=True,
        colalign=("left",) + ("right",) * len(columns),
    )


def linear_section(figures: Figures) -> str:
    """The fp32 linear kernel by itself."""
    worst = max(figures["accuracy"], key=lambda row: row["worst_row"])
    times = [
        [
            row["problem"],
            *(f"{row[f]:.3f}" for f in ("ms", "sustained", "eager")),
            f"{row['tflops']:.0f}",
        ]
        for row in figures["timing"]
    ]
    header = ["alone", "ms", "back to back", "eager", "TFLOP/s"]
    return "\n\n".join(
        (
            tables.wrapped(
                "Relative Frobenius error against float64 in units of 1e-7, for "
                "[256, K] × [384, K]ᵀ. cuBLAS SGEMM's error is in brackets."
            ),
            accuracy_table(figures),
            tables.wrapped(
                f"The worst single row of an output has an error of {worst['worst_row']:.1e} "
                f"({worst['data']}, K = {worst['k']:,}; SGEMM's {worst['sgemm_worst_row']:.1e})."
            ),
            tabulate(times, header, "github", disable_numparse=True),
            tables.wrapped(
                f"{figures['gpu']}, driver {figures['driver']}, torch {figures['torch']}, measured "
                f"{figures['date'][:10]} at {figures['commit']} by "
                "`python -m benchmarks.linear_sm90`; back to back is the mean over 0.4 s, "
                "during which the power cap limits the GPU."
            ),
        )
    )


def to_expect(folder: Path) -> list[expect.Kind]:
    whole = [row for rows in tables.read_all(folder, "whole_nets") for row in rows]
    of_16_bits = tables.read(folder / nets16_tables.PATH)
    return expect.kinds(whole, of_16_bits, conv_nets.read(folder))


def generated(files: dict[Path, list[Row]], linear: list[Figures], folder: Path) -> dict[str, str]:
    """Mark → its text. folder: of the results of whole nets and KernelBench."""
    sections = [section(path, rows) for path, rows in files.items()]
    nets, of_tables = conv_nets.read(folder), tables.sections(folder)
    of_16_bits = tables.read(folder / nets16_tables.PATH)
    return {
        **of_tables,
        "expect": expect.table(to_expect(folder)),
        "seed-problems": "\n\n".join([*sections, tables.wrapped(LEGEND)] if files else []),
        "linear-fp32": "\n\n".join(map(linear_section, linear)),
        "machines": machines.table(machines.read(folder)),
        "models": coverage.table(coverage.read(folder)),
        "models-gpu": coverage_gpu.table(coverage_gpu.read(folder)),
        "conv-nets": conv_nets.table(nets),
        "nets16": nets16_tables.section(of_16_bits),
    }


def between_marks(page: str, mark: str, body: str) -> str:
    """The page with the text between the marks replaced."""
    begin, end = BEGIN.format(mark), END.format(mark)
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"a page lacks {begin} … {end}")
    return (
        f"{before}{begin}\n\n{body}\n\n{end}{after}" if body else f"{before}{begin}\n{end}{after}"
    )


def render(page: str, marks: tuple[str, ...], texts: Mapping[str, str]) -> str:
    """A page's text with everything between its marks rewritten."""
    for mark in marks:
        page = between_marks(page, mark, texts[mark])
    return page


Bars = dict[str, dict[str, float]]  # precision → label of the group → speed-up


def bars(rows: list[Row]) -> Bars:
    found: Bars = {}
    for (problem, precision, mode), systems in by_group(rows).items():
        ratio = speedup(systems, "inductor", "max-autotune")
        if ratio is not None:
            found.setdefault(precision, {})[f"{problem}\n{mode}"] = round(ratio, 4)
    return found


def digest(drawn: Bars) -> str:
    """Kept in the picture, so that --check needs no matplotlib to see that it is stale."""
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def draw(path: Path, rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    drawn = bars(rows)
    labels = list(dict.fromkeys(label for group in drawn.values() for label in group))
    width = 0.8 / len(drawn)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.1 * len(labels)), 4.2), layout="constrained")
    for index, (precision, group) in enumerate(drawn.items()):
        left = [labels.index(label) + (index + 0.5) * width - 0.4 for label in group]
        axes.bar_label(
            axes.bar(left, list(group.values()), width, label=precision),
            fmt="%.2f",
            fontsize=6,
            rotation=90,
            padding=2,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylabel("speed-up over the better of Inductor and max-autotune")
    axes.set_title(f"fx_fuser on {values(rows, 'gpu')}, torch {values(rows, 'torch')}", fontsize=9)
    axes.margins(y=0.15)
    axes.legend(fontsize=7)
    matplotlib.rcParams["svg.hashsalt"] = "fx_fuser"  # the same picture from the same numbers
    figure.savefig(path, metadata={"Date": None, "Description": digest(drawn)})
    pyplot.close(figure)


def stale(root: Path, files: dict[Path, list[Row]], texts: Mapping[str, str]) -> list[str]:
    found = []
    for name, marks in PAGES.items():
        page = (root / name).read_text()
        if page != render(page, marks, texts):
            found.append(f"{name} does not show what the results say")
    for path, rows in files.items():
        picture = path.with_suffix(".svg")
        if not picture.exists() or digest(bars(rows)) not in picture.read_text():
            found.append(f"{picture.name} does not show what {path.name} says")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="of the pages")
    args = parser.parse_args(arguments)

    files = {path: results.read(path) for path in sorted(args.results.glob("*.json"))}
    texts = generated(files, results.read_linear(args.results), args.results)
    readmes, drawn = args.results / expect.PICTURE, expect.picture(to_expect(args.results))
    if not args.check:
        if drawn:
            readmes.write_text(drawn)
        for path, rows in files.items():
            draw(path.with_suffix(".svg"), rows)
        for name, marks in PAGES.items():
            page = args.root / name
            page.write_text(render(page.read_text(), marks, texts))
    problems = stale(args.root, files, texts)
    if drawn and not (readmes.exists() and readmes.read_text() == drawn):
        problems.append(f"{readmes.name} does not show what the results say")
    for problem in problems:
        print(f"{problem}: run python -m benchmarks.report", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
