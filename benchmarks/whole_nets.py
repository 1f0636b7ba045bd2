"""Whole nets compared with Inductor, with GPU time by kind:  python -m benchmarks.whole_nets

Published nets (benchmarks/big_nets.py) with random weights, an evaluation or a training step
(forward, loss, backward; no optimizer). Every case, one net in one phase and precision, has its own
process, in which all modes share the model; logits and gradients are compared with float64 by the
contract that README promises. With `--compile-times`, each compiled mode also takes its first step
in two processes that do nothing else: with empty caches, then with what that left; the modes do so
side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, measure, results, tables
from benchmarks.big_nets import NETS, PHASES
from benchmarks.run import SYSTEMS, commit_here
from benchmarks.whole_net import PRECISIONS, Result, Row, first_step, measure_case

MODES = ("eager", "inductor", "fx_fuser", "max-autotune")
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "FX_FUSER_CACHE_DIR": "fx_fuser"}


@dataclass(frozen=True)
class Job:
    """What one process does: measure a case, or take the first step in one mode."""

    net: str
    phase: str
    precision: str
    modes: tuple[str, ...]
    values: bool
    small: bool
    compile: str = ""

    def name(self) -> str:
        return f"{self.net} {self.phase} {self.precision}"

    def run(self) -> Any:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        systems = {system.name: system for system in SYSTEMS}
        net = NETS[self.net]
        if self.compile:
            found = systems[self.compile]
            return first_step(net, self.phase, self.precision, found, device, self.small)
        chosen = [systems[name] for name in self.modes]
        return measure_case(
            net, self.phase, self.precision, chosen, device, self.small, self.values
        )


def spawn(job: Job, caches: Path, seconds: float) -> Any:
    """What the job returns, in a process of its own; raises RuntimeError if that fails."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    environment |= {name: str(caches / folder) for name, folder in _CACHES.items()}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks.whole_nets", "--job", json.dumps(asdict(job))]
        try:
            done = subprocess.run(
                [*command, "--out", str(out)],
                env=environment, cwd=Path(__file__).parent.parent, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not finished in {seconds:.0f} s") from None
        if done.returncode or not out.exists():
            last = done.stderr.strip().splitlines()[-1:] or ["nothing said"]
            raise RuntimeError(f"exit status {done.returncode}: {last[0][:300]}")
        return json.loads(out.read_text())


def compile_times(job: Job, caches: Path, budget: harness.Budget) -> dict[str, Result]:
    """cold_s and warm_s by mode, as far as there was time; says what was not measured.

    What the processes leave in their caches goes to `caches`.
    """

    caches.mkdir(parents=True, exist_ok=True)
    # Names differ from the last job's, whose compile workers may still write to theirs.
    modes = {
        mode: Path(tempfile.mkdtemp(prefix=f"of-{mode}-", dir=caches))
        for mode in job.modes
        if mode != "eager"
    }

    def of_mode(mode: str) -> Result:
        found: Result = {}
        one = replace(job, compile=mode)
        try:
            found["cold_s"] = spawn(one, modes[mode], budget.left())
            found["warm_s"] = spawn(one, modes[mode], budget.left())
        except RuntimeError as error:
            which = "warm" if "cold_s" in found else "cold"
            print(f"{job.name()}: {mode}: no {which} compile time: {error}", file=sys.stderr)
        return found

    with ThreadPoolExecutor(len(modes) or 1) as pool:
        times = dict(zip(modes, pool.map(of_mode, modes)))
    for own in modes.values():
        shutil.copytree(own, caches, dirs_exist_ok=True)
        shutil.rmtree(own, ignore_errors=True)
    return times


def measured(job: Job, caches: Path, budget: harness.Budget, parts: int, timed: bool) -> Row:
    """One row, whatever happens. timed: compile times, too."""
    seconds = budget.share(parts)
    row = Row(net=job.net, phase=job.phase, precision=job.precision, modes={})
    row["batch"] = NETS[job.net].describe(job.phase, job.small)
    if seconds is None:
        row["error"] = "no time was left"
        return row
    times = compile_times(job, caches, harness.Budget(seconds / 2)) if timed else {}
    try:
        row = spawn(job, caches, min(seconds, budget.left()))
    except (RuntimeError, OSError) as error:
        row["error"] = str(error)
    for mode, found in times.items():
        row["modes"].setdefault(mode, {}).update(found)
    return row


def faults(row: Row) -> list[str]:
    """What fails a run: a mode that raised, or fx_fuser beyond the contract or with a warning."""
    name = f"{row['net']} {row['phase']} {row['precision']}"
    if "error" in row:
        return [f"{name}: {row['error']}"]
    found = [f"{name}: {m}: {r['error']}" for m, r in row["modes"].items() if "error" in r]
    ours = row["modes"].get("fx_fuser", {})
    beyond = [] if ours.get("as_inductor") else ours.get("faults", [])
    return found + [f"{name}: {said}" for said in (*ours.get("warnings", []), *beyond)]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.whole_nets")
    found.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    found.add_argument("--train", action="store_true", help="only training steps")
    found.add_argument("--eval", action="store_true", help="only evaluation")
    found.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["highest"])
    found.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:3])
    found.add_argument("--no-values", action="store_true", help="no comparison with float64")
    found.add_argument(
        "--compile-times", nargs="*", choices=NETS, default=[], help="of these nets: cold and warm"
    )
    found.add_argument("--budget", type=float, default=86400, help="seconds for all")
    found.add_argument(
        "--caches", type=Path, metavar="FOLDER",
        help="keep compiled code there; a later run starts from it (compile times do not)",
    )  # fmt: skip
    found.add_argument("--size", choices=("full", "small"), default="full", help="small: on a CPU")
    found.add_argument("--out", type=Path, metavar="FILE")
    found.add_argument("--commit", help="the measured commit, if there is no git")
    found.add_argument("--job", help=argparse.SUPPRESS)
    return found


def jobs(args: argparse.Namespace) -> Sequence[Job]:
    chosen = [phase for phase in PHASES if getattr(args, phase)]
    modes = tuple(mode for mode in MODES if mode in {"eager", *args.modes})
    return [
        Job(net, phase, precision, modes, not args.no_values, args.size == "small")
        for precision in args.precision
        for net in args.nets
        for phase in chosen or NETS[net].phases
    ]


def main(arguments: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if args.job:
        results.write(args.out, Job(**json.loads(args.job)).run())
        return 0
    commit = args.commit or commit_here()
    if commit is None:
        options.error("there is no git here: name the measured commit with --commit")
    budget = harness.Budget(args.budget)
    here = measure.machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    path: Path = args.out or results.path_for(here["gpu"], results.FOLDER / "whole_nets")
    rows: list[Row] = []
    todo = jobs(args)
    with tempfile.TemporaryDirectory() as folder:
        caches: Path = (args.caches or Path(folder)).resolve()
        for i, job in enumerate(todo):
            timed = job.net in args.compile_times and job.precision == args.precision[0]
            found = measured(job, caches, budget, len(todo) - i, timed)
            date = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}"
            rows.append(Row(**found, **here, date=date, commit=commit))
            results.replace_rows(path, rows[-1:], tables.nets_place, tables.nets_place)
            said = "; ".join(faults(rows[-1])) or tables.factor(tables.ratio(rows[-1], "gpu_ms"))
            print(f"{args.budget - budget.left():6.1f} s  {job.name()}  {said}", flush=True)
    print(f"\n{tables.whole_nets_table(rows)}\n\n{tables.kinds_table(rows)}\nwrote {path}")
    return results.verdict([fault for row in rows for fault in faults(row)])


if __name__ == "__main__":
    sys.exit(main())
