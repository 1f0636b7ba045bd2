"""Reports of GPU owners, from `python -m fx_fuser --report FILE`, as the table of docs/gpus.md.

    python -m benchmarks.machines FILE... [--results FOLDER]

Files are kept in benchmarks/results/machines, one per GPU and torch; a later one replaces an
earlier. The table is printed; `python -m benchmarks.report` writes it into the page. A file whose
self-test failed is kept and mentioned, but its times are not shown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import results
from fx_fuser.doctor.diagnosis import SCHEMA

Machine = Mapping[str, Any]  # what `Diagnosis.to_json` writes
FOLDER = "machines"
HEADER = ("GPU", "main loop", "case", "Inductor, ms", "fx_fuser, ms", "speed-up", "self-test")


def checked(text: str, name: str) -> Machine:
    """Raises ValueError if this is not a report, or one of another version."""
    try:
        data = json.loads(text)
        schema, _ = data["schema"], data["facts"]["gpus"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} is not from python -m fx_fuser --report ({type(error).__name__}: {error})"
        ) from error
    if schema != SCHEMA:
        raise ValueError(f"{name} has schema {schema}, and this is for {SCHEMA}")
    if not data["times"]:
        raise ValueError(f"{name} has no times: on its machine torch saw no GPU that has kernels")
    return data


def names_of(machine: Machine) -> dict[str, str]:
    """Device → GPU, for those that were timed."""
    timed = {row["device"] for row in machine["times"]}
    names = {f"cuda:{gpu['index']}": gpu["name"] for gpu in machine["facts"]["gpus"]}
    return {device: name for device, name in names.items() if device in timed}


def file_name(machine: Machine) -> str:
    words = (*names_of(machine).values(), "torch", machine["facts"]["torch"])
    return f"{re.sub(r'[^a-z0-9.]+', '-', '-'.join(words).lower())}.json"


def read(folder: Path) -> list[Machine]:
    """Those kept in the folder of results."""
    files = sorted((folder / FOLDER).glob("*.json"))
    return [checked(path.read_text(), path.name) for path in files]


def rows_of(machine: Machine) -> Iterable[list[str]]:
    names = names_of(machine)
    tests = {(test["device"], test["title"]): test["level"] for test in machine["self_test"]}
    for row in machine["times"]:
        if row["device"] not in names:
            continue
        level = tests.get((row["device"], row["title"]), "not run")
        line = [names[row["device"]], row["ran"] or row["loop"], f"{row['title']}, {row['input']}"]
        if level == "FAIL":
            yield [*line, "", "", "", "**failed**"]
        elif row["left"]:
            yield [*line, "", "", row["left"], level]
        else:
            pair = row["inductor"], row["fx_fuser"]
            gain = f"{pair[0] / pair[1]:.2f}×"
            yield [*line, *(f"{ms:.3f}" for ms in pair), gain, level]


def caption(machine: Machine) -> str:
    facts = machine["facts"]
    gpus = " and ".join(sorted(set(names_of(machine).values())))
    return (
        f"{gpus}: driver {facts['driver'] or 'unknown'}, torch {facts['torch']}, "
        f"fx_fuser {facts['fx_fuser']}, {machine['date']}"
    )


def table(machines: Sequence[Machine]) -> str:
    """The table of these machines; empty if there are none."""
    rows = [row for machine in machines for row in rows_of(machine)]
    if not rows:
        return ""
    align = ("left",) * 3 + ("right",) * 3 + ("left",)
    body = tabulate(rows, HEADER, "github", colalign=align, disable_numparse=True)
    said = "\n".join(f"- {caption(machine)}" for machine in machines)
    return f"{body}\n\nGPU time, medians by turns, of one process each:\n\n{said}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machines")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    for file in chosen.files:
        try:
            machine = checked(file.read_text(), file.name)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        kept = chosen.results / FOLDER / file_name(machine)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(machine, indent=1) + "\n")
    print(table(read(chosen.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
