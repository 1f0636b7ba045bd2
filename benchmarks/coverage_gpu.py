"""The models of benchmarks/coverage.py on a GPU, 32 times as wide and long: GPU and compile time.

    python -m benchmarks.coverage_gpu [NAME …] [--turns FOLDER N] [--budget SECONDS]
    python -m benchmarks.coverage_gpu [NAME …] --first-calls N

Inductor and fx_fuser in one process, fp32 at torch's defaults. Compile time is the first call's,
with empty caches except for fx_fuser's kernels, which an earlier compilation left. GPU time is of
one forward pass, or of a training step. Values are judged as on the CPU. With `--turns`, N such
processes compile side by side, wait for each other and then time one by one. `--first-calls` times
only first calls, N of each mode in turns, and prints them. The rows go to
benchmarks/results/coverage/gpu.json; `python -m benchmarks.report` puts them into docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import datetime
import fcntl
import importlib.metadata
import importlib.util
import itertools
import json
import pstats
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks import coverage, measure, tables
from benchmarks.results import FOLDER
from benchmarks.run import commit_here

PATH = Path("coverage", "gpu.json")
SCALE = 32
CUDA = torch.device("cuda")
MODES = ("inductor", "fx_fuser")
SLOWER_S, SLOWER = 3.0, 1.10  # of compile time; the larger counts
NOISE = 1.02  # of GPU time


@dataclass
class Row:
    """compile_s, gpu_ms: mode → what was measured. fused: sites. error, eager, inductor: against
    float64; inductor's only if fx_fuser's is not within the contract by eager's."""

    model: str
    package: str
    phase: str
    machine: dict[str, Any]
    date: str
    commit: str
    compile_s: dict[str, float] = field(default_factory=dict)
    gpu_ms: dict[str, float] = field(default_factory=dict)
    fused: int = 0
    error: float = 0.0
    eager: float = 0.0
    inductor: float = 0.0
    failed: str = ""


@dataclass
class Compiled:
    row: Row
    steps: Mapping[str, Callable[[], object]]
    leaves: list[torch.Tensor]


def step(model: nn.Module, run: Callable[..., Any], inputs: coverage.Inputs, train: bool) -> None:
    with torch.set_grad_enabled(train):
        found = coverage.tensors(run(**inputs))
    if train:
        torch.autograd.backward([t.float().sum() for t in found if t.requires_grad])


@contextmanager
def profiled(what: str) -> Iterator[None]:
    """Prints where the host's time went, if `what` is not empty; the time is then not a figure."""
    if not what:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    print(f"\n{what}", flush=True)
    for order in ("tottime", "cumtime"):
        pstats.Stats(profile).sort_stats(order).print_stats(40)


def on_gpu(model: coverage.Model, train: bool) -> tuple[nn.Module, coverage.Inputs]:
    made, inputs = coverage.made_of(model, SCALE)
    coverage.set_mode(made.to(CUDA), train)
    return made, {n: t.to(CUDA) for n, t in inputs.items()}


def first_call(
    model: nn.Module, backend: Any, inputs: coverage.Inputs, train: bool
) -> tuple[Callable[..., Any], float]:
    """The model compiled, with empty caches except for fx_fuser's kernels; seconds of its call."""
    run = torch.compile(model, backend=backend, dynamic=False)
    with fresh_cache():
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, run, inputs, train)
        torch.cuda.synchronize()
        return run, time.perf_counter() - start


def compiled(name: str, train: bool, commit: str, profile: bool = False) -> Compiled:
    """Times both modes' first calls, and judges their results."""
    model = coverage.MODELS[name]
    row = Row(
        name,
        f"{model.package} {importlib.metadata.version(model.package)}",
        "training" if train else "evaluation",
        dict(measure.machine(CUDA)),
        datetime.date.today().isoformat(),
        commit,
    )
    made, inputs = on_gpu(model, train)
    runs: dict[str, tuple[nn.Module, Callable[..., Any]]] = {}
    # The first leaves its kernels. To Dynamo it is another backend, so the last compiles again.
    first = partial(torch._dynamo.lookup_backend("fx_fuser"))
    backends: dict[str, Any] = {"kernels": first, **{mode: mode for mode in MODES}}
    for mode, backend in backends.items():
        twin = copy.deepcopy(made)
        counters["fx_fuser"].clear()
        with profiled(f"{name}, {row.phase}: {mode}" if profile else ""):
            run, row.compile_s[mode] = first_call(twin, backend, inputs, train)
        runs[mode] = twin, run
    row.fused = sum(counters["fx_fuser"].values())
    twin, run = runs["fx_fuser"]
    seen = coverage.observed(twin, run, inputs, train)
    eager = coverage.observed(made, made, inputs, train)
    exact = copy.deepcopy(made).double()
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    truth = coverage.observed(exact, exact, wide, train)
    row.error, row.eager = coverage.error(seen, truth), coverage.error(eager, truth)
    if not coverage.within(row.error, row.eager):
        theirs = coverage.observed(*runs["inductor"], inputs=inputs, train=train)
        row.inductor = coverage.error(theirs, truth)
    del runs["kernels"]
    steps = {mode: partial(step, twin, run, inputs, train) for mode, (twin, run) in runs.items()}
    leaves: list[torch.Tensor] = [p for twin, _ in runs.values() for p in twin.parameters()]
    return Compiled(row, steps, leaves)


def first_calls(name: str, train: bool, count: int) -> dict[str, list[float]]:
    """Seconds of `count` first calls of each mode, in turns, after one that leaves its kernels."""
    made, inputs = on_gpu(coverage.MODELS[name], train)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    turns = [MODES[:: 1 if i % 2 == 0 else -1] for i in range(count)]
    for i, mode in enumerate(["fx_fuser", *itertools.chain.from_iterable(turns)]):
        torch._dynamo.reset()
        _, seconds = first_call(copy.deepcopy(made), mode, inputs, train)
        if i > 0:
            found[mode].append(round(seconds, 2))
    return found


@contextmanager
def turn(folder: Path | None, count: int, deadline: float) -> Iterator[None]:
    """Once all processes are here, one after the other."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"here-{time.time_ns()}").touch()
    while len(list(folder.glob("here-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.2)
    with open(folder / "turn", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- the table ----------------------------------------------------------------------------------


def faults(row: Row) -> list[str]:
    """Where a row falls short of what we promise."""
    if row.failed:
        return [row.failed]
    found = []
    if not coverage.within(row.error, max(row.eager, row.inductor)):
        found.append(f"error {row.error:.1e}, Inductor's {row.inductor:.1e}")
    theirs, ours = (row.compile_s[mode] for mode in MODES)
    if ours > max(theirs * SLOWER, theirs + SLOWER_S):
        found.append(f"compiles in {ours:.1f} s, Inductor in {theirs:.1f}")
    if row.gpu_ms and row.gpu_ms["fx_fuser"] > NOISE * row.gpu_ms["inductor"]:
        found.append(f"{row.gpu_ms['fx_fuser'] / row.gpu_ms['inductor']:.3f} of Inductor's time")
    return found


def read(folder: Path = FOLDER) -> list[Row]:
    path = folder / PATH
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def table(rows: list[Row]) -> str:
    """The rows as Markdown; empty if there are none."""
    if not rows:
        return ""
    cells = []
    for row in rows:
        times = [row.gpu_ms.get(mode) for mode in MODES]
        cells.append([
            row.model,
            " on ".join(filter(None, (row.phase, tables.mark(row, rows)))),
            row.fused,
            *("" if t is None else f"{t:.3f}" for t in times),
            f"{times[0] / times[1]:.2f}×" if times[0] and times[1] else "",
            *(f"{row.compile_s[mode]:.1f}" if row.compile_s else "" for mode in MODES),
            f"{row.error:.1e} ({row.eager:.1e}"
            + (f", Inductor's {row.inductor:.1e})" if row.inductor else ")"),
            "; ".join(faults(row)),
        ])  # fmt: skip
    heads = ["model", "phase", "fused", "Inductor, GPU ms", "fx_fuser, GPU ms", "speedup"]
    heads += ["Inductor compiles, s", "fx_fuser compiles, s", "error (eager's)", "falls short"]
    said = tables.measured_on(rows)
    found = tabulate(cells, heads, tablefmt="github", disable_numparse=True)
    return f"{said}\n\n{found}"


def write(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage_gpu")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--turns", nargs=2, metavar=("FOLDER", "N"))
    parser.add_argument("--budget", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--phase", choices=("evaluation", "training"))
    parser.add_argument("--profile", action="store_true", help="where first calls spend their time")
    parser.add_argument("--first-calls", type=int, metavar="N")
    parser.add_argument("--commit", default=commit_here() or "", help="if there is no git")
    parser.add_argument("--out", type=Path, default=FOLDER / PATH, metavar="FILE")
    chosen = parser.parse_args(arguments)
    torch._dynamo.config.recompile_limit = 1000  # all are kept until they are timed
    start = time.monotonic()
    rows: list[Row] = []
    waiting: list[Compiled] = []
    for name in chosen.names or coverage.MODELS:
        if importlib.util.find_spec(coverage.MODELS[name].package) is None:
            print(f"{name}: skipped, {coverage.MODELS[name].package} is not installed")
            continue
        for phase in ("evaluation", "training"):
            late = time.monotonic() - start > 0.7 * chosen.budget
            if late or chosen.phase not in (None, phase):
                continue
            train = phase == "training"
            try:
                if chosen.first_calls:
                    print(name, phase, first_calls(name, train, chosen.first_calls), flush=True)
                    continue
                waiting.append(compiled(name, train, chosen.commit, chosen.profile))
                print(waiting[-1].row, flush=True)
            except Exception:
                print(f"{name}, {phase}: {traceback.format_exc(limit=-3)}", flush=True)
    folder, count = (Path(chosen.turns[0]), int(chosen.turns[1])) if chosen.turns else (None, 1)
    with turn(folder, count, start + 0.75 * chosen.budget):
        for case in waiting:
            if time.monotonic() - start < chosen.budget:
                case.row.gpu_ms = measure.gpu_ms(case.steps, case.leaves, CUDA)
            rows.append(case.row)
            if not chosen.profile:
                write(rows, chosen.out)
    print(table(rows))
    return 1 if any(map(faults, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
