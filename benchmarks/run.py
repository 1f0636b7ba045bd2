"""Measure fx_fuser, eager, Inductor and max-autotune:  python -m benchmarks.run

A group is one problem in one precision and mode. Its systems share one process, model and input;
all are compiled and checked against float64 first, then timed in turns. A group replaces its rows
in benchmarks/results/<gpu>.json, so a run can be split by --problem, --precision and --mode; what
--system leaves out is then missing in the group.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch._dynamo.utils import counters

import fx_fuser  # noqa: F401  (registers the backend when it is not installed)
from benchmarks import measure, results
from benchmarks.measure import Call, Case
from benchmarks.problems import PROBLEMS, Problem, Size
from benchmarks.results import Row

T = TypeVar("T")


@dataclass(frozen=True)
class System:
    name: str
    compile: Callable[[nn.Module], Call]
    cudnn_tf32: bool = True
    is_ours: bool = False

    def runs(self, problem: Problem, precision: str) -> bool:
        """inductor-ieee only if it differs: fp32, and a convolution."""
        return self.cudnn_tf32 or (problem.pattern.startswith("conv2d") and precision == "fp32")


SYSTEMS = (
    System("eager", lambda model: model),
    System("inductor", torch.compile),
    System("max-autotune", partial(torch.compile, mode="max-autotune-no-cudagraphs")),
    # Dynamo hands it Inductor's compiled code: the convolution in it reads the flag at each call.
    System("inductor-ieee", torch.compile, cudnn_tf32=False),
    System("fx_fuser", partial(torch.compile, backend="fx_fuser"), is_ours=True),
)


@dataclass(frozen=True)
class Timing:
    warmup: int = 25  # ms, for each system and round; this and the next are do_bench's own
    rep: int = 100
    rounds: int = 3
    host: bool = True  # False: on a GPU only its part, as `measure.gpu_ms` times it


def measure_group(
    problem: Problem,
    precision: str,
    mode: str,
    device: torch.device,
    size: Size,
    systems: Iterable[System],
    timing: Timing,
) -> list[Row]:
    """One row per system. A system that raises gets a row that says so; the others continue."""
    # Once per group, not between its systems: a reset would drop what will be timed.
    measure.free_memory()
    case = Case.make(problem, size, precision, mode, device)
    exact = case.in_float64()
    reference = exact.values(exact.model)
    scale = measure.scales(reference)
    del exact

    rows: dict[str, Row] = {}
    steps: dict[str, Callable[[], object]] = {}
    errors: dict[str, dict[str, float]] = {}
    running = [system for system in systems if system.runs(problem, precision)]
    for system in running:
        row = rows[system.name] = Row(
            problem=problem.name,
            precision=precision,
            mode=mode,
            system=system.name,
            input=f"x{list(size.x)}",
            ms=None,
            err_fp64=None,
        )
        try:
            with measure.float32_settings(precision, system.cudnn_tf32):
                fused = counters["fx_fuser"][problem.pattern]
                left = counters["fx_fuser_left"][problem.pattern]
                start = time.perf_counter()
                call = system.compile(case.model)
                values = case.values(call)
                row["compile_s"] = round(time.perf_counter() - start, 2)
                if system.is_ours:
                    row["fused"] = counters["fx_fuser"][problem.pattern] - fused
                    row["left"] = counters["fx_fuser_left"][problem.pattern] - left
                found = errors[system.name] = measure.errors(values, reference, scale)
                del values
                allowed = measure.bounds(precision, device, errors)
                row["err_fp64"] = max(found.values())
                row["accurate"] = all(found[name] <= allowed[name] for name in allowed)
            steps[system.name] = partial(case.step, call)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    del reference

    def settled(of: Callable[..., T], system: System, *arguments: int) -> T:
        with measure.float32_settings(precision, system.cudnn_tf32):
            return of(steps[system.name], case.leaves(), device, *arguments)

    ready = [system for system in running if system.name in steps]
    if timing.host or device.type != "cuda":
        timers = {
            system.name: partial(settled, measure.median_ms, system, timing.warmup, timing.rep)
            for system in ready
        }
        times = measure.interleaved(timers, timing.rounds)
    else:
        alone = {system.name: partial(settled, lambda step, *_: step(), system) for system in ready}
        times = measure.gpu_ms(alone, case.leaves(), device)
    for name, ms in times.items():
        rows[name]["ms"] = round(ms, 5)
    if device.type == "cuda":
        for system in ready:
            rows[system.name]["peak_mib"] = settled(measure.peak_mib, system)
    return list(rows.values())


def complaint(row: Row) -> str | None:
    """Why a row fails the run. Other systems' accuracy is recorded, not judged."""
    if "error" in row:
        return row["error"]
    if "fused" in row:
        if not row["fused"] and not row["left"]:
            return "nothing was fused"
        if not row["accurate"]:
            return f"error {row['err_fp64']:.2e} against float64 is beyond the bound"
    return None


def describe(row: Row) -> str:
    name = " ".join(results.key(row))
    if row["ms"] is None or row["err_fp64"] is None:
        return f"  {name:<45} failed"
    return f"  {name:<45} {row['ms']:9.4f} ms   err_fp64 {row['err_fp64']:.2e}"


def commit_here() -> str | None:
    """The checkout's commit, "-dirty" if files other than results differ; None without git."""

    def git(*command: str) -> str:
        here = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            ["git", *command], cwd=here, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
        )
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--precision", nargs="+", choices=measure.DTYPES)
    parser.add_argument("--mode", nargs="+", choices=measure.MODES)
    names = [system.name for system in SYSTEMS]
    parser.add_argument(
        "--system", nargs="+", choices=names, default=names,
        help="eager, by which errors are judged, is always one of them",
    )  # fmt: skip
    parser.add_argument("--size", choices=("full", "small"), help="default: full on a GPU only")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    parser.add_argument("--commit", help="the measured commit, if there is no git")
    parser.add_argument("--warmup", type=int, default=Timing.warmup, metavar="MS")
    parser.add_argument("--rep", type=int, default=Timing.rep, metavar="MS")
    parser.add_argument("--rounds", type=int, default=Timing.rounds)
    args = parser.parse_args(arguments)

    commit = args.commit or commit_here()
    if commit is None:
        parser.error("there is no git here: name the measured commit with --commit")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = measure.machine(device)
    path = results.path_for(here["gpu"], args.results)
    timing = Timing(args.warmup, args.rep, args.rounds)
    systems = [s for s in SYSTEMS if s.name in {"eager", *args.system}]

    failures = []
    start = time.perf_counter()
    for problem in (PROBLEMS[name] for name in args.problem):
        size = getattr(problem, args.size) if args.size else problem.size(device)
        for precision in problem.precisions:
            if args.precision and precision not in args.precision:
                continue
            if precision == "tf32" and device.type != "cuda":
                continue
            for mode in problem.modes:
                if args.mode and mode not in args.mode:
                    continue
                now = time.perf_counter() - start
                print(f"[{now:6.1f} s] {problem.name} {precision} {mode} x{list(size.x)}")
                group = measure_group(problem, precision, mode, device, size, systems, timing)
                date = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}"
                rows = [Row(**row, **here, date=date, commit=commit) for row in group]
                results.replace_group(path, rows)
                for row in rows:
                    print(describe(row), flush=True)
                    if reason := complaint(row):
                        failures.append(f"{' '.join(results.key(row))}: {reason}")
    print(f"wrote {path}")
    return results.verdict(failures)


if __name__ == "__main__":
    sys.exit(main())
