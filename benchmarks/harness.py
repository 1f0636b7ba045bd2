"""What the harnesses of the sm_90a kernels have in common: arguments, progress and the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from benchmarks import results


def parser(module: str, cases: int) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.<module>`, which checks that many random cases if not told else."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    found.add_argument("--skip-checks", action="store_true")
    found.add_argument("--skip-timing", action="store_true")
    found.add_argument("--cases", type=int, default=cases)
    found.add_argument("--seed", type=int, default=0)
    return found


def progress() -> Callable[[str], None]:
    """To be called when something is done: says so, and when since now."""
    started = time.perf_counter()

    def done(what: str) -> None:
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    return done


def report(tables: Iterable[str], failures: Sequence[str]) -> int:
    """Prints what was found; the exit status."""
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for table in tables:
        print(table + "\n")
    shown = [failure[:400] for failure in failures[:30]]
    if len(failures) > len(shown):
        shown.append(f"and {len(failures) - len(shown)} more")
    if not shown:
        print("all checks passed")
    return results.verdict(shown)
