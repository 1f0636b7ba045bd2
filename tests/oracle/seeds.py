"""What the oracles of generated programs share: a loop over seeds, and its command line."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

# Of a seed on a device: what is wrong, empty if nothing is; it counts what was found.
Attempt = Callable[[int, str, Counter[str]], str]


def fuzz(
    attempt: Attempt, seeds: Sequence[int], device: str = "cpu"
) -> tuple[dict[int, str], Counter[str]]:
    """Seed → what is wrong, and the counts. Faults are printed at once; an exception is one."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    failed = {}
    for seed in seeds:
        try:
            wrong = attempt(seed, device, seen)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failed[seed] = wrong
            print(f"seed {seed}: {wrong[:600]}", flush=True)
    return failed, seen


def main(
    description: str | None, attempt: Attempt, show: Callable[[int, str], str], count: int = 1000
) -> int:
    """The exit code. show: a program as text."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="the programs, no check")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.count)
    if given.show:
        for seed in seeds:
            print(f"# {seed}\n{show(seed, given.device)}")
        return 0
    parts = [seeds[i :: given.jobs] for i in range(given.jobs)]
    run = functools.partial(fuzz, attempt, device=given.device)
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        results: Iterator[tuple[dict[int, str], Counter[str]]] = pool.imap(run, parts)
        found = list(results)
    failed = sum(len(faults) for faults, _ in found)
    seen = sum((counts for _, counts in found), Counter[str]())
    print(f"{given.count} programs, {failed} failed, {dict(seen)}")
    return int(failed > 0)
