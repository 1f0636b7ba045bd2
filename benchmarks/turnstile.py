"""Processes that compile side by side, of which one at a time reads a clock: it stops the others.

    kill(2): https://man7.org/linux/man-pages/man2/kill.2.html
    flock(2): https://man7.org/linux/man-pages/man2/flock.2.html

A compilation keeps one core busy, and a GPU hardly at all, except where candidates are timed. So
nets compile together, and whoever times something has the machine to itself meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fx_fuser.planning import timing

# What stopped processes have queued on the GPU ends within this many seconds: a step of a net.
SETTLE_S = 0.1
_inside = threading.RLock()
_depth = 0


class Turnstile:
    """folder: has a file for each process, whose name is its process group, and the lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self, start: Callable[[], subprocess.Popen[Any]]) -> subprocess.Popen[Any]:
        """Starts a process with a group of its own, when nobody is alone."""
        with self._locked():
            process = start()
            (self.folder / str(process.pid)).touch()
        return process

    def leave(self, process: subprocess.Popen[Any]) -> None:
        """Call it when the process has ended. Goes on with those that it may have stopped."""
        (self.folder / str(process.pid)).unlink()
        with self._locked():
            self._signal(signal.SIGCONT)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """All other processes are stopped during the block, compile workers included."""
        global _depth
        with _inside, self._stopped() if _depth == 0 else contextlib.nullcontext():
            _depth += 1
            try:
                yield
            finally:
                _depth -= 1

    @contextmanager
    def clocks(self) -> Iterator[None]:
        """Whatever fx_fuser and Inductor time during the block to choose among kernels, they time
        alone."""
        with ExitStack() as patches:
            for owner, name in (
                (timing, "times_of"),
                (CachingAutotuner, "benchmark_all_configs"),
            ):
                patches.enter_context(mock.patch.object(owner, name, self._timed(owner, name)))
            yield

    def _timed(self, owner: object, name: str) -> Callable[..., object]:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: object, **kwargs: object) -> object:
            with self.alone():
                return function(*args, **kwargs)

        return timed

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        with self._locked():
            self._signal(signal.SIGSTOP)
            try:
                time.sleep(SETTLE_S)
                yield
            finally:
                self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """To all processes but this one."""
        for path in self.folder.iterdir():
            if path.name.isdigit() and int(path.name) != os.getpgid(0):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.killpg(int(path.name), number)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # compile workers that were forked have it open
