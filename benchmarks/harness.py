"""What harnesses share: arguments, progress, a time limit, the exit status."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from benchmarks import results


def parser(module: str) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.<module>`."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")


def progress() -> Callable[[str], None]:
    """Returns a function to call when something is done: it says so, and how long that took."""
    started = time.perf_counter()

    def done(what: str) -> None:
        torch.cuda.synchronize()
        print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    return done


class Overtime(BaseException):
    """Not an Exception: a compiler may take that for its own failure and continue."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises Overtime in what takes longer, at the interpreter's next step; main thread only.

    What does not return to the interpreter, such as a kernel that hangs, is not stopped.
    """

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise Overtime(f"not finished in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Budget:
    """Seconds from its creation on, shared among parts of unknown length."""

    seconds: float
    least: float = 5.0  # with less no part begins

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def share(self, parts: int) -> float | None:
        """What the first of so many parts may take: three times an even share, since the others get
        what a part leaves. None if there is no time for any.
        """
        left = self.left()
        return None if left < self.least else min(left, max(self.least, 3 * left / parts))


def summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def report(tables: Iterable[str], failures: Sequence[str] | None) -> int:
    """Prints the failures; returns the exit status. None: no result was compared."""
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for table in tables:
        print(table + "\n")
    shown = [failure[:400] for failure in (failures or ())[:30]]
    if failures and len(failures) > len(shown):
        shown.append(f"and {len(failures) - len(shown)} more")
    if failures is not None and not shown:
        print("what was compared is within its bound")
    return results.verdict(shown)
