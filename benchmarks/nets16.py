"""Unmodified nets as people train and serve them in 16 bits, beside Inductor:

    python -m benchmarks.nets16 [--only NET …] [--step train eval] [--seconds S] [--out FILE]
    python -m benchmarks.nets16 --merge FILE …   # puts the rows of parts into --out
    python -m benchmarks.nets16 --check          # rows that are slower, or fall short otherwise

Each net and step has its own process (`fx_fuser.compare.turns.kernels_of` says why), in which
Inductor and fx_fuser take turns. A row is written when it is finished, in the
place of that of the same net and step, so rows may be of different commits, and a call that is cut
off keeps what it has done.
`--seconds` are for the whole call: no process begins without time for it, and none outlives it.
docs/results.md shows the rows: `python -m benchmarks.report`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import harness, net16, nets16_tables, results, tables
from benchmarks.nets16_models import NETS, STEPS, Net16
from benchmarks.run import commit_here

LEAST_S, MOST_S = 40.0, 300.0  # of one net and step

Todo = Sequence[tuple[Net16, str]]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.nets16")
    found.add_argument("--only", nargs="+", choices=NETS, default=list(NETS), metavar="NET")
    found.add_argument("--step", nargs="+", choices=STEPS, default=list(STEPS))
    found.add_argument("--seconds", type=float, default=86400.0, help="for the whole call")
    found.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    found.add_argument(
        "--out", type=Path, default=results.FOLDER / nets16_tables.PATH, metavar="FILE"
    )
    found.add_argument("--commit", help="what is measured, where git cannot tell")
    found.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    found.add_argument("--check", action="store_true")
    found.add_argument("--list", action="store_true")
    found.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    return found


def chosen(args: argparse.Namespace) -> Todo:
    return [
        (NETS[name], step)
        for name in dict.fromkeys(args.only)
        for step in NETS[name].phases
        if step in args.step
    ]


def measure_here(todo: Todo, small: bool, out: Path, commit: str) -> list[str]:
    """One row after the other, in this process; what is wrong with them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net16.warm_up(device)
    failures = []
    for net, step in todo:
        row = net16.measured(net, step, device, small)
        row["date"], row["commit"] = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}", commit
        results.replace_rows(out, [row], nets16_tables.key, nets16_tables.place)
        print(nets16_tables.line(row), flush=True)
        if isinstance(row["error"], str):
            failures.append(f"{net.name}: {row['error']}")
    return failures


def spawn(arguments: Sequence[str], seconds: float) -> str:
    """The same command in a process of its own, whose lines are shown; what went wrong."""
    command = [sys.executable, "-m", "benchmarks.nets16", "--here", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compile workers, too
            process.wait()
            return f"not finished in {seconds:.0f} s"
        log.seek(0)
        said = log.read().strip().splitlines()
    failed = [line.removeprefix("FAILED ") for line in said if line.startswith("FAILED ")]
    if status and not failed:
        return f"exit status {status}: {(said or ['nothing said'])[-1][:300]}"
    return "; ".join(failed)


def measure_all(todo: Todo, args: argparse.Namespace, commit: str) -> list[str]:
    budget, failures = harness.Budget(args.seconds), []
    able = []
    for net, step in todo:
        if net.missing():
            print(f"{net.name} {step}: skipped, {net.missing()}", flush=True)
        else:
            able.append((net, step))
    for net, step in sorted(able, key=lambda one: list(STEPS).index(one[1])):
        if budget.left() < LEAST_S:
            failures.append(f"{net.name} {step}: no time was left")
            continue
        arguments = ["--only", net.name, "--step", step, "--out", str(args.out.resolve())]
        arguments += ["--commit", commit, *(["--small"] if args.small else [])]
        if wrong := spawn(arguments, min(budget.left(), MOST_S)):
            failures.append(f"{net.name} {step}: {wrong}")
    return failures


def main(arguments: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if args.list:
        for net, step in chosen(args):
            said = net.missing() or net.config(step, args.small)
            print(f"{net.name} {step} {net.precisions[step]}: {said}")
        return 0
    for path in args.merge or ():  # a row of the last file stays
        results.replace_rows(args.out, tables.read(path), nets16_tables.key, nets16_tables.place)
    if args.check:
        found = {nets16_tables.key(row): nets16_tables.faults(row) for row in tables.read(args.out)}
        lines = [f"{' '.join(key)}: {'; '.join(said)}" for key, said in found.items() if said]
        print(f"{len(found)} rows, {len(lines)} of them fall short")
        return results.verdict(lines)
    if args.merge:
        return 0
    commit = args.commit or commit_here()
    if commit is None:
        options.error("there is no git here: name the commit that is measured with --commit")
    if args.here:
        return results.verdict(measure_here(chosen(args), args.small, args.out, commit))
    return results.verdict(measure_all(chosen(args), args, commit))


if __name__ == "__main__":
    sys.exit(main())
