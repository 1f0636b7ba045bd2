"""Host time of a step, in turns with Inductor in one process:

    python -m benchmarks.host [--only CASE …] [--step eval train]

`host_ms`: from an idle GPU until a step's last launch is queued. `steady_ms`: wall time of steps
run back to back. `gpu_ms`: how long the GPU is busy. If `steady_ms` is well above `gpu_ms`, the net
is launch-bound, and wall time does not show what the GPU saves.

Each case and step has its own process, since the profiler slows the launches of the one it ran in
(`fx_fuser.compare.turns.kernels_of`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_kinds, measure, net16
from benchmarks.nets16_models import NETS, Net16
from fx_fuser.compare import turns

ROUNDS = 15
# Net, number of items, and an item's shape if it differs from the net's.
CASES: dict[str, tuple[str, int, tuple[int, ...] | None]] = {
    "resnet18 × 1": ("resnet18", 1, None),
    "resnet18 × 32": ("resnet18", 32, None),
    "bert 8 × 128": ("bert", 8, (128,)),
    "resnet50 × 8": ("resnet50", 8, None),
}


def net_of(case: str, precision: str | None) -> Net16:
    name, items, shape = CASES[case]
    net = NETS[name]
    precisions = net.precisions if precision is None else dict.fromkeys(net.precisions, precision)
    counts = dict.fromkeys(net.counts, items)
    return dataclasses.replace(
        net, counts=counts, shape=net.shape if shape is None else shape, precisions=precisions
    )


def host_ms(step: Callable[[], object], leaves: list[Tensor], device: torch.device) -> float:
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    took = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize(device)
    return took


def measured(case: str, step: str, device: torch.device, precision: str | None) -> dict[str, Any]:
    net = net_of(case, precision)
    measure.free_memory()
    made = net16.case_of(net, step, device, small=False)
    leaves, sites = made.leaves(), measure.Sites()
    steps: dict[str, Callable[[], object]] = {}
    for system in net16.RIVALS:
        with measure.counted(sites if system.is_ours else measure.Sites()):
            call = system.compile(made.model)
            for _ in range(3):
                made.step(call)
        steps[system.name] = partial(made.step, call)
    row: dict[str, Any] = {"case": case, "step": step, "precision": net.precisions[step]}
    row["sites"] = {name: found for name, found in sites.items() if found}
    for what, timer in (("host_ms", host_ms), ("steady_ms", _steady), ("gpu_ms", _gpu)):
        timers = {name: partial(timer, run, leaves, device) for name, run in steps.items()}
        rounds = measure.interleaved_rounds(timers, ROUNDS)
        row[what] = {n: round(statistics.median(ms), 4) for n, ms in rounds.items()}
    return row


def _gpu(step: Callable[[], object], leaves: list[Tensor], device: torch.device) -> float:
    return sum(gpu_kinds.profiled(step, leaves, device).values())


def _steady(step: Callable[[], object], leaves: list[Tensor], device: torch.device) -> float:
    def fresh() -> None:
        for leaf in leaves:
            leaf.grad = None
        step()

    return turns.steady_ms(fresh, device, 20)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--step", nargs="+", choices=("eval", "train"), default=["eval", "train"])
    parser.add_argument("--precision", choices=("fp32", "bf16", "amp"), help="of all")
    args = parser.parse_args(arguments)
    todo = [(case, step) for case in args.only for step in args.step]
    if len(todo) == 1:
        device = torch.device("cuda")
        net16.warm_up(device)
        print(json.dumps(measured(*todo[0], device, args.precision)), flush=True)
        return 0
    precision = ["--precision", args.precision] if args.precision else []
    failed = 0
    for case, step in todo:
        command = [sys.executable, "-m", "benchmarks.host", "--only", case, "--step", step]
        failed |= subprocess.run([*command, *precision], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
