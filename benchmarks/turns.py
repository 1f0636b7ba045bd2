"""Two trees of this project in turns on one GPU, a process each: did a change make nets slower?

    git worktree add ../old REVISION
    python -m benchmarks.turns ../old [--case NET/STEP …] [--rounds N] [--seconds S] [--out FILE]

GPU time by events with a cleared L2 cache, all of a step queued before the GPU starts it; on a CPU
wall time of tiny nets. Cases are those of `benchmarks.nets16`. The ratio is the old tree's time
over this one's, the median over the rounds, in each of which both are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure, results
from benchmarks.nets16_models import NETS
from benchmarks.run import commit_here

ROOT = Path(__file__).parent.parent
CASES = ("gpt2/train", "bert/train", "hf_vit_b/eval", "llama/eval", "resnet50/eval", "dlrm/train")
STEPS = 5  # of a tree in a round


class Tree:
    """A checkout, and the process that runs its code, with its own caches."""

    def __init__(self, name: str, folder: Path, caches: Path) -> None:
        self.name = name
        environment = os.environ | {
            "FX_FUSER_CACHE_DIR": str(caches / f"{name}-fx_fuser"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / f"{name}-inductor"),
        }
        environment.pop("PYTHONPATH", None)
        command = [sys.executable, str(ROOT / "benchmarks" / "turns_worker.py")]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, *command: Any) -> Any:
        """Raises RuntimeError if the worker reports an error or has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {"error": "its process has died"}
        if "error" in said:
            raise RuntimeError(f"{self.name}: {said['error']}")
        return said["is"]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def row_of(case: str, trees: Sequence[Tree], rounds: int) -> dict[str, Any]:
    """trees: old, then new."""
    first = [tree.ask("make", case) for tree in trees]
    ms: dict[str, list[float]] = {tree.name: [] for tree in trees}
    for index in range(rounds):
        for tree in trees if index % 2 else reversed(trees):
            ms[tree.name].append(tree.ask("time", STEPS))
    ratios = [old / new for old, new in zip(*ms.values(), strict=True)]
    return {
        "case": case,
        **{f"{name}_ms": round(statistics.median(found), 4) for name, found in ms.items()},
        "ratio": round(statistics.median(ratios), 4),
        "spread": round((max(ratios) - min(ratios)) / 2, 4),
        "first_s": first,
    }


def measured(
    old: Path, cases: Sequence[str], rounds: int, seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what failed or was left out."""
    begin, rows, failed = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        trees = [Tree("old", old, Path(folder)), Tree("new", ROOT, Path(folder))]
        try:
            for case in cases:
                if time.monotonic() - begin > seconds:
                    failed.append(f"{case}: left out, there was no time")
                    continue
                try:
                    rows.append(row_of(case, trees, rounds))
                    print(json.dumps(rows[-1]), flush=True)
                    for tree in trees:
                        tree.ask("drop")
                except RuntimeError as error:
                    failed.append(f"{case}: {error}")
        finally:
            for tree in trees:
                tree.stop()
    return rows, failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns")
    parser.add_argument("old", type=Path, help="the other tree's folder")
    parser.add_argument("--case", nargs="+", default=CASES, metavar="NET/STEP")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins later")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if not (args.old / "fx_fuser" / "__init__.py").exists():
        parser.error(f"{args.old} is not a checkout of fx_fuser: it has no fx_fuser/__init__.py")
    for case in args.case:
        name, _, step = case.partition("/")
        if name not in NETS or step not in NETS[name].phases:
            parser.error(f"{case!r} is not a case; python -m benchmarks.nets16 --list names them")
    rows, failed = measured(args.old.resolve(), args.case, args.rounds, args.seconds)
    if args.out:
        import torch

        here = measure.machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(args.out, here, commit, old=str(args.old), rows=rows)
    return results.verdict(failed)


if __name__ == "__main__":
    sys.exit(main())
