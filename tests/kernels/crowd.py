"""Repeated launches of the kernels while other processes keep the GPU busy, from the checkout:

    python tests/kernels/crowd.py [--seconds 30] [--only WORD] [--list]

A process for each check, all at once. Where processes share a GPU, a block's copies come late and
out of step with its warps, which shows races that launches of one process never do
(kernels_cu/attention/NOTES.md, "A release that overtook its loads").
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Module, function, arguments.
CHECKS: list[tuple[str, str, tuple[int, ...]]] = [
    ("attention_backward_checks", "repeats", (0,)),
    ("attention_backward_checks", "repeats", (1,)),
    ("attention_bias_backward_checks", "repeats", (0,)),
    ("attention_bias_backward_checks", "repeats", (1,)),
    ("attention_bias_checks", "repeats", (0,)),
    ("attention_bias_checks", "repeats", (1,)),
    ("attention_bias_dropout_checks", "repeats", ()),
    ("attention_checks", "repeats", (0,)),
    ("attention_checks", "repeats", (1,)),
    ("attention_dropout_checks", "repeats", ()),
    ("combs_checks", "repeats", ()),
    ("conv1d_checks", "repeats", ()),
    ("conv_backward_checks", "graphs_and_repeats", ()),
    ("conv_direct_checks", "graphs_and_repeats", ()),
    ("depthwise_checks", "repeats", ()),
    ("implicit_checks", "repeats", ()),
    ("linear_dense_checks", "graphs_and_repeats", ()),
    ("linear_split_checks", "graphs_and_repeats", ()),
    ("narrow_checks", "graphs_and_repeats", ()),
    ("stem_checks", "repeats", ()),
    ("unaligned_checks", "graphs_and_repeats", ()),
]


def name_of(place: int) -> str:
    module, function, arguments = CHECKS[place]
    return f"{module}.{function}({', '.join(map(str, arguments))})"


def run_one(place: int, seconds: float) -> int:
    """In this process, again and again. Returns the number of runs that failed."""
    module, function, arguments = CHECKS[place]
    check = getattr(importlib.import_module(module), function)
    runs = failed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        failures: list[str] = []
        check(failures, *arguments)
        runs += 1
        failed += bool(failures)
        for failure in failures:
            print(f"{name_of(place)}: {failure}", flush=True)
    print(f"{name_of(place)}: {failed} of {runs} runs failed", flush=True)
    return failed


def run_all(places: list[int], seconds: float) -> str:
    """At once. Returns what failed: empty if nothing did."""
    commands = [
        [sys.executable, __file__, "--place", str(place), "--seconds", str(seconds)]
        for place in places
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            one,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for one in commands
    ]
    said = [process.communicate()[0] for process in started]
    print("".join(text.splitlines(keepends=True)[-1] if text else "" for text in said), flush=True)
    return "".join(text for text, process in zip(said, started) if process.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/kernels/crowd.py")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", default="", metavar="WORD", help="of a check's name")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--place", type=int, help=argparse.SUPPRESS)  # in this process
    asked = parser.parse_args()
    if asked.place is not None:
        return min(run_one(asked.place, asked.seconds), 1)
    places = [place for place in range(len(CHECKS)) if asked.only in name_of(place)]
    if asked.list:
        print("\n".join(map(name_of, places)))
        return 0
    failed = run_all(places, asked.seconds)
    print(failed, end="")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
