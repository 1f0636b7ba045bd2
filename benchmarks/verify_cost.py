"""What `options={"verify": …}` costs:  python -m benchmarks.verify_cost [problem …]

Medians in ms: a step in eager mode, and one verification of the same graph, which "first_call" pays
once for each graph that is compiled and "always" at every call. On a CPU, small sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

import fx_fuser  # noqa: F401  (registers the backend in a bare checkout)
from benchmarks import measure
from benchmarks.measure import Case
from benchmarks.problems import PROBLEMS, Problem
from fx_fuser.verify.verification import Verification

_ROUNDS = 5


def verification_ms(case: Case, device: torch.device) -> float:
    """The median of a few first calls, without compile time."""
    samples: list[float] = []
    run = Verification.run

    def timed(self: Verification, *args: Any) -> Any:
        start = time.perf_counter()
        faults = run(self, *args)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) * 1e3)
        return faults

    options: dict[str, Any] = {"inner": "eager", "strict": True, "plan": "always"}
    options["verify"] = "first_call"
    with mock.patch.object(Verification, "run", timed):
        for _ in range(_ROUNDS):
            torch._dynamo.reset()
            case.values(torch.compile(case.model, backend="fx_fuser", options=options))
    return statistics.median(samples)


def row(problem: Problem, mode: str, device: torch.device) -> list[object]:
    size = problem.size(device)
    case = Case.make(problem, size, "fp32", mode, device)
    ms = verification_ms(case, device)
    measure.free_memory()
    eager = measure.median_ms(
        lambda: case.step(case.model), case.leaves(), device, warmup=20, rep=200
    )
    return [problem.name, list(size.x), mode, f"{eager:.2f}", f"{ms:.1f}", f"{ms / eager:.1f}×"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problem", nargs="*", default=list(PROBLEMS))
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(measure.machine(device))
    rows = [row(PROBLEMS[n], mode, device) for n in args.problem for mode in PROBLEMS[n].modes]
    header = ["problem", "input", "mode", "eager", "verification", "verification / eager"]
    print(tabulate(rows, header, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
