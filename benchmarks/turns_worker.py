"""One tree's side of `benchmarks.turns`, which runs this file in that tree's folder.

A line of JSON in, a line out: ["make", CASE], ["time", COUNT], ["drop"]. If a tree's own
`benchmarks` lacks something, that case fails, not the run.
"""

import json
import os
import statistics
import sys
import time
import traceback
from functools import partial
from typing import Any

sys.path.insert(0, os.getcwd())
_OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a library prints must not look like an answer

import torch

import fx_fuser
from benchmarks import measure, net16
from benchmarks.nets16_models import NETS

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_SLEEP_RATE = 1.7e9  # cycles a second, at least
_CLEARED = 2 * 50 * 2**20  # bytes, of which no L2 cache holds half


class Timed:
    """A compiled step."""

    def __init__(self, case: str) -> None:
        name, step = case.split("/")
        made = net16.case_of(NETS[name], step, _DEVICE, small=_DEVICE.type == "cpu")
        self.leaves = made.leaves()
        self.step = partial(made.step, torch.compile(made.model, backend="fx_fuser"))
        self.flush = torch.empty(_CLEARED, dtype=torch.int8, device=_DEVICE)
        for _ in range(3):
            self.once()
        # As long as the host needs to queue all of a step, so that the GPU never waits for it.
        self.cycles = int(min(0.1, 2e-3 * self.once() + 0.002) * _SLEEP_RATE)

    def _prepare(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def once(self) -> float:
        """ms of wall time."""
        self._prepare()
        _wait()
        begin = time.perf_counter()
        self.step()
        _wait()
        return 1e3 * (time.perf_counter() - begin)

    def gpu(self) -> float:
        """ms of the GPU, with a cleared L2 cache."""
        self._prepare()
        self.flush.zero_()
        torch.cuda._sleep(self.cycles)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.step()
        end.record()
        _wait()
        return begin.elapsed_time(end)


def _wait() -> None:
    if _DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    assert fx_fuser.__file__.startswith(os.getcwd()), f"{fx_fuser.__file__} is no part of this tree"
    timed: Timed | None = None

    def answer(command: str, *arguments: Any) -> Any:
        nonlocal timed
        if command == "make":
            begin = time.perf_counter()
            timed = Timed(*arguments)
            return round(time.perf_counter() - begin, 1)
        if command == "time":
            assert timed is not None
            once = timed.gpu if _DEVICE.type == "cuda" else timed.once
            return statistics.median(once() for _ in range(*arguments))
        timed = None
        torch._dynamo.reset()
        measure.free_memory()
        return None

    for line in sys.stdin:
        try:
            said = {"is": answer(*json.loads(line))}
        except Exception as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        _OUT.write(json.dumps(said) + "\n")
        _OUT.flush()


if __name__ == "__main__":
    main()
