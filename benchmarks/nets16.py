"""Unmodified nets as people train and serve them in 16 bits, compared with Inductor:

    python -m benchmarks.nets16 [--only NET …] [--step train eval] [--seconds S] [--out FILE]
    python -m benchmarks.nets16 --merge FILE …   # puts the rows of parts into --out
    python -m benchmarks.nets16 --check          # rows that are slower, or fall short otherwise

Each net and step has its own process (`fx_fuser.compare.turns.kernels_of` says why), in which
Inductor and fx_fuser take turns. A row is written when it is finished, and replaces that of the
same net and step, so rows may be of different commits, and an interrupted call keeps what it has
done.
`--seconds` are for the whole call: no process begins without time for it, and none outlives it.
`--twice`: Inductor is compiled once more, so the row shows its own scatter. `--no-dropout`: no net
has any, so none with dropout is compiled again for its values (EfficientNet, Inception, Swin).
`--jobs N`: N processes compile at a time; whoever times something, a choice among kernels included,
stops the others meanwhile (`benchmarks.turnstile`). `--gpus N` spreads them over N GPUs. Compile
times are then not reported.
docs/results.md shows the rows: `python -m benchmarks.report`.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import harness, net16, nets16_tables, results, tables
from benchmarks.nets16_models import NETS, STEPS, Net16
from benchmarks.run import commit_here
from benchmarks.turnstile import Turnstile

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
    found.add_argument("--commit", help="the measured commit, if there is no git")
    found.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    found.add_argument("--check", action="store_true")
    found.add_argument("--list", action="store_true")
    found.add_argument("--gpus", type=int, default=1, metavar="N")
    found.add_argument("--jobs", type=int, default=1, metavar="N", help="at least one for each GPU")
    found.add_argument("--twice", action="store_true", help="Inductor is compiled once more")
    found.add_argument("--no-dropout", action="store_true", help="a compilation less")
    found.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    found.add_argument("--turnstile", type=Path, help=argparse.SUPPRESS)
    return found


def chosen(args: argparse.Namespace) -> Todo:
    return [
        (NETS[name], step)
        for name in dict.fromkeys(args.only)
        for step in NETS[name].phases
        if step in args.step
    ]


def measure_here(
    todo: Todo, args: argparse.Namespace, commit: str, place: Turnstile | None
) -> list[str]:
    """Measures one row after the other, in this process; returns what is wrong with them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net16.warm_up(device)
    failures = []
    for net, step in todo:
        row = net16.measured(
            net,
            step,
            device,
            args.small,
            place=place,
            twice=args.twice,
            dropout=not args.no_dropout,
        )
        row["date"], row["commit"] = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}", commit
        results.replace_rows(args.out, [row], nets16_tables.key, nets16_tables.place)
        print(nets16_tables.line(row), flush=True)
        if isinstance(row["error"], str):
            failures.append(f"{net.name}: {row['error']}")
    return failures


def spawn(
    arguments: Sequence[str], seconds: float, gpu: int | None = None, place: Turnstile | None = None
) -> str:
    """Run the same command in its own process, and show its lines; returns what went wrong.

    gpu: the only one that it sees; None: all. place: of concurrent processes.
    """
    command = [sys.executable, "-m", "benchmarks.nets16", "--here", *arguments]
    command += [] if place is None else [f"--turnstile={place.folder}"]
    seen = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    with tempfile.TemporaryFile("w+") as log:
        start = functools.partial(
            subprocess.Popen, command, cwd=Path(__file__).parent.parent, stderr=log,
            start_new_session=True, env=seen,
        )  # fmt: skip
        process = start() if place is None else place.enter(start)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compile workers, too
            process.wait()
            return f"not finished in {seconds:.0f} s"
        finally:
            if place is not None:
                place.leave(process)
        log.seek(0)
        said = log.read().strip().splitlines()
    failed = [line.removeprefix("FAILED ") for line in said if line.startswith("FAILED ")]
    if status and not failed:
        return f"exit status {status}: {(said or ['nothing said'])[-1][:300]}"
    return "; ".join(failed)


def measure_all(todo: Todo, args: argparse.Namespace, commit: str) -> list[str]:
    budget, failures = harness.Budget(args.seconds), list[str]()
    able = []
    for net, step in todo:
        if net.missing():
            print(f"{net.name} {step}: skipped, {net.missing()}", flush=True)
        else:
            able.append((net, step))
    jobs = max(args.gpus, args.jobs)
    gpus: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for job in range(jobs):
        gpus.put(job % args.gpus if args.gpus > 1 else None)

    def measure(one: tuple[Net16, str]) -> str:
        net, step = one
        gpu = gpus.get()
        try:
            if budget.left() < LEAST_S:
                return f"{net.name} {step}: no time was left"
            place = Turnstile(Path(folder)) if jobs > 1 else None
            out = Path(folder, f"{net.name}-{step}.json") if place else args.out
            arguments = ["--only", net.name, "--step", step, "--out", str(out.resolve())]
            arguments += ["--commit", commit, *(["--small"] if args.small else [])]
            arguments += ["--twice"] * args.twice + ["--no-dropout"] * args.no_dropout
            wrong = spawn(arguments, min(budget.left(), MOST_S * jobs), gpu, place)
            if out != args.out and out.exists():
                with merging:
                    merge([out], args.out)
            return f"{net.name} {step}: {wrong}" if wrong else ""
        finally:
            gpus.put(gpu)

    todo, merging = sorted(able, key=lambda one: list(STEPS).index(one[1])), threading.Lock()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        failures += filter(None, pool.map(measure, todo))
    return failures


def merge(files: Sequence[Path], out: Path) -> None:
    """Puts their rows into `out`; if two files have a row of one net and step, the last one's."""
    for path in files:
        results.replace_rows(out, tables.read(path), nets16_tables.key, nets16_tables.place)


def main(arguments: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if args.list:
        for net, step in chosen(args):
            said = net.missing() or net.config(step, args.small)
            print(f"{net.name} {step} {net.precisions[step]}: {said}")
        return 0
    merge(args.merge or (), args.out)
    if args.check:
        found = {nets16_tables.key(row): nets16_tables.faults(row) for row in tables.read(args.out)}
        lines = [f"{' '.join(key)}: {'; '.join(said)}" for key, said in found.items() if said]
        print(f"{len(found)} rows, {len(lines)} of them fall short")
        return results.verdict(lines)
    if args.merge:
        return 0
    commit = args.commit or commit_here()
    if commit is None:
        options.error("there is no git here: name the measured commit with --commit")
    if args.here:
        place = None if args.turnstile is None else Turnstile(args.turnstile)
        return results.verdict(measure_here(chosen(args), args, commit, place))
    return results.verdict(measure_all(chosen(args), args, commit))


if __name__ == "__main__":
    sys.exit(main())
