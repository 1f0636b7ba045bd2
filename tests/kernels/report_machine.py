"""Reports whether the fp32 gemm is right on this GPU, and how fast, as one JSON to send in.

    PYTHONPATH=. python tests/kernels/report_machine.py [--seconds 280] [--out machine.json]

The split product with this GPU's main loop is checked against float64 and timed next to the library
and torch.compile (benchmarks/linear_mma.py has the problems). What did not fit into the time or the
memory is named in "left". Exits with 1 where a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import linear_split_checks
import torch

import fx_fuser
from benchmarks import harness, linear_mma
from benchmarks.harness import Budget, Overtime
from benchmarks.measure import float32_settings
from fx_fuser.native import binaries, limits, load

CASES = 40


def machine() -> dict[str, Any]:
    """What identifies the GPU and its software."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "arch": binaries.arch_of(device),
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "shared_bytes": getattr(found, "shared_memory_per_block_optin", None),
        "limits": asdict(limits.of(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fx_fuser": fx_fuser.__version__,
        "sources": binaries.fingerprint()[:16],
    }


def parts(failures: list[str], report: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Name → check or measurement, in the order in which they run."""

    def sweep() -> None:
        report["largest_error"] = linear_split_checks.sweep(failures, CASES, 0)

    def accuracy() -> None:
        report["accuracy"] = [asdict(row) for row in linear_split_checks.accuracy(failures)]

    def timing(problem: linear_mma.Problem) -> None:
        report["timing"].append(asdict(problem.measure(failures, compiles=True)))

    found: dict[str, Callable[[], None]] = {"random cases": sweep}
    for check in linear_split_checks.CHECKS:
        found[check.__name__] = lambda check=check: check(failures)  # type: ignore[misc]
    found["accuracy"] = accuracy
    for problem in linear_mma.problems():
        found[problem.name] = lambda problem=problem: timing(problem)  # type: ignore[misc]
    return found


def run(seconds: float) -> dict[str, Any]:
    """The report. Raises nothing: failures are listed in "failures"."""
    report: dict[str, Any] = {"machine": machine(), "timing": [], "left": [], "failures": []}
    failures: list[str] = report["failures"]
    reason = load.available("cuda")
    if reason is not None:
        failures.append(f"no kernel can be built: {reason}")
        return report
    done = harness.progress()
    budget = Budget(seconds)
    todo = parts(failures, report)
    for i, (name, part) in enumerate(todo.items()):
        share = budget.share(len(todo) - i)
        if share is None:
            report["left"].append(name)
            continue
        try:
            with harness.limit(share), float32_settings("fp32"):
                part()
        except (Overtime, torch.cuda.OutOfMemoryError) as error:
            report["left"].append(f"{name}: {harness.summary(error)}")
        except Exception as error:
            failures.append(f"{name}: {harness.summary(error)}")
        torch.cuda.empty_cache()
        done(name)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="report_machine.py")
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--out", type=Path, default=Path("machine.json"))
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return 1
    warnings.simplefilter("ignore")
    report = run(chosen.seconds)
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{json.dumps(report['timing'], indent=1)}\nleft: {report['left']}")
    print(f"failures: {report['failures']}\nwritten to {chosen.out}; attach it to an issue")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
