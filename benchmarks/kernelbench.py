"""KernelBench's own problems, by its own rules:  python -m benchmarks.kernelbench FOLDER

FOLDER: a checkout of https://github.com/ScalingIntelligence/KernelBench that you made; nothing of
it is in this repository. Its rules, as of 423217d (src/kernelbench/eval.py):

- weights: `set_seed(42)`, `Model(*get_init_inputs())`, drawn on the CPU, then moved, in fp32;
- inputs: `get_inputs()`, for each trial after a seed drawn from `manual_seed(42)`;
- no `.eval()`, so that BatchNorm and dropout train; under `no_grad`; torch's default precisions;
- a result passes if `torch.allclose(eager, result, atol=1e-4, rtol=1e-4)`, the tolerance of
  `get_tolerance_for_precision` for fp32; one trial by default, as `eval_kernel_against_ref`;
- times with a cleared L2 cache, here medians of all modes in turn on the last trial's inputs.

Two things differ: the seed is set before every call, so that dropout draws the same numbers in
eager mode at least; and all modes share one model, so the weights exist once.

A row per problem is written as soon as it is measured. A mode that fails leaves its error; if it
also loses the GPU, the process starts again after that problem.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import harness, measure, results, tables
from benchmarks.kernelbench_problem import Problem, Row, find, measure_problem
from benchmarks.run import SYSTEMS, commit_here

MODES = ("eager", "inductor", "fx_fuser", "max-autotune")  # in the order in which they are run
_ANCHOR = re.compile(r"\bnn\.(Linear|Conv2d)\(|\b(matmul|bmm|mm|einsum)\(|\S @ \w")

SETS: dict[str, Callable[[Problem], bool]] = {
    "all": lambda problem: True,
    "products": lambda problem: (problem.level, problem.number) in tables.PRODUCTS,
    "linear": lambda problem: problem.level == 2 and "nn.Linear(" in problem.path.read_text(),
    # Problems that a change of fx_fuser could make slower.
    "anchors": lambda problem: bool(_ANCHOR.search(problem.path.read_text())),
}


def numbers(text: str) -> set[int]:
    """ "6" or "1-3"."""
    first, _, last = text.partition("-")
    return set(range(int(first), int(last or first) + 1))


def lost(device: torch.device) -> bool:
    """Whether an error has left the GPU unusable to this process."""
    try:
        measure.free_memory()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def restart(arguments: Sequence[str], seconds: float) -> None:
    """Measures the rest in a new process: rows in the file are not measured again."""
    sys.stdout.flush()
    rest = [*arguments, "--resume", "--budget", str(int(seconds))]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.kernelbench", *rest])


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.kernelbench")
    found.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of KernelBench")
    found.add_argument("--level", nargs="+", type=int, default=[1, 2])
    found.add_argument("--problems", nargs="+", type=numbers, metavar="N|N-N", help="default: all")
    found.add_argument(
        "--set", nargs="+", choices=SETS, default=["all"],
        help="products: of level 1; linear: of level 2; anchors: all with such or a Conv2d",
    )  # fmt: skip
    found.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES[:3],
        help="max-autotune, which is slow to compile, only if it is named; eager always",
    )  # fmt: skip
    found.add_argument("--seconds", type=float, default=120, help="that one problem may take")
    found.add_argument("--budget", type=float, default=86400, help="seconds for all of them")
    found.add_argument("--trials", type=int, default=1, help="inputs that are compared")
    found.add_argument(
        "--on-device", action="store_true",
        help="draw weights and inputs there: faster, other numbers of the same distributions",
    )  # fmt: skip
    found.add_argument("--out", type=Path, metavar="FILE")
    found.add_argument("--resume", action="store_true", help="leave out what the file has")
    found.add_argument("--commit", help="the measured commit, if there is no git")
    return found


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser()
    args = options.parse_args(arguments)
    budget = harness.Budget(args.budget)
    commit = args.commit or commit_here()
    if commit is None:
        options.error("there is no git here: name the measured commit with --commit")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = measure.machine(device)
    path: Path = args.out or results.path_for(here["gpu"], results.FOLDER / "kernelbench")
    by_name = {system.name: system for system in SYSTEMS}
    systems = [by_name[name] for name in MODES if name in {"eager", *args.modes}]
    wanted = set().union(*args.problems) if args.problems else None
    problems = [
        problem
        for problem in find(args.folder, args.level)
        if (wanted is None or problem.number in wanted) and any(SETS[s](problem) for s in args.set)
    ]
    if args.resume:
        there = {tables.kernelbench_place(row) for row in tables.read(path)}
        problems = [p for p in problems if (p.level, p.number) not in there]

    measured: list[Row] = []
    place = tables.kernelbench_place
    for i, problem in enumerate(problems):
        share = budget.share(len(problems) - i)
        if share is None:
            left = ", ".join(f"{p.level}/{p.number}" for p in problems[i:])
            print(f"no time left for {left}")
            break
        seconds = min(share, args.seconds)
        found = measure_problem(problem, systems, device, seconds, args.trials, args.on_device)
        date = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}"
        row = Row(**found, **here, date=date, commit=commit)
        results.replace_rows(path, [row], place, place)
        measured.append(row)
        print(f"{args.budget - budget.left():6.1f} s  {tables.kernelbench_line(row)}", flush=True)
        if lost(device):
            restart(arguments, budget.left())
    rows: list[Row] = tables.read(path)
    print("\n" + tables.kernelbench_summary(rows))
    print(f"wrote {path}")
    return results.verdict([fault for row in measured for fault in tables.faults(row)])


if __name__ == "__main__":
    sys.exit(main())
