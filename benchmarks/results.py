"""Result rows and the files that hold them: one per GPU, rewritten after every group."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measure import MODES, Machine
from benchmarks.problems import PROBLEMS

FOLDER = Path(__file__).parent / "results"

R = TypeVar("R", bound=Mapping[str, Any])


class Row(Machine, total=False):
    problem: str
    precision: str
    mode: str
    system: str
    ms: float | None  # median; None if the system failed
    err_fp64: float | None  # the largest relative Frobenius error of the output and all gradients
    accurate: bool  # every tensor within measure.bounds
    fused: int  # fused sites; in fx_fuser's rows only
    left: int  # sites left to Inductor because they gain nothing, likewise
    peak_mib: float  # peak device memory of one step, weights included; GPUs only
    compile_s: float  # the first call
    input: str
    error: str  # what was raised; absent if nothing was
    date: str  # UTC
    commit: str


class Figures(Machine):
    """The fp32 linear kernel by itself (benchmarks/linear_sm90.py has the fields of the rows)."""

    date: str
    commit: str
    accuracy: list[dict[str, Any]]
    timing: list[dict[str, Any]]


def key(row: Row) -> tuple[str, str, str, str]:
    return row["problem"], row["precision"], row["mode"], row["system"]


def place(row: Row) -> tuple[int, int, int, str]:
    """A row's place in its file: in the order of the tables, whatever was measured first."""
    problem = PROBLEMS[row["problem"]]
    return (
        list(PROBLEMS).index(problem.name),
        problem.precisions.index(row["precision"]),
        MODES.index(row["mode"]),
        row["system"],
    )


def path_for(gpu: str, folder: Path = FOLDER) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def linear_path_for(gpu: str, folder: Path = FOLDER) -> Path:
    return path_for(gpu, folder / "linear_fp32")


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text()) if path.exists() else []


def read_linear(folder: Path = FOLDER) -> list[Figures]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("linear_fp32/*.json"))]


def save(path: Path, here: Machine, commit: str | None, **content: Any) -> dict[str, Any]:
    """Write content, and where and when it was measured; returns the record that is in the file."""
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    record = {**here, "date": date, "commit": commit, **content}
    write(path, record)
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def verdict(failures: Sequence[str]) -> int:
    """Print what failed; returns the exit status."""
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def replace_group(path: Path, group: list[Row]) -> None:
    """Put the rows of one group in place of those that the file has of it.

    All of the old ones go: the times of a group come from one process.
    """
    replace_rows(path, group, lambda row: key(row)[:3], place)


def replace_rows(
    path: Path,
    rows: Sequence[R],
    same: Callable[[R], object],
    place: Callable[[R], Any],
) -> None:
    """Put rows in place of those that are the `same`; the file is in the order of `place`.

    A reader never sees half a file.
    """
    replaced = {same(row) for row in rows}
    found: list[R] = json.loads(path.read_text()) if path.exists() else []
    kept = [other for other in found if same(other) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    lines = (json.dumps(row, allow_nan=False) for row in sorted([*kept, *rows], key=place))
    partial.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    os.replace(partial, path)
