"""Processes that compile side by side and measure one at a time, by a lock that they share.

    flock: https://man7.org/linux/man-pages/man2/flock.2.html

A lock belongs to an open file description, which a child gets from its parent: so a child holds the
lock from its start, before it has imported anything.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turnstile:
    """One process's place. handle: of the file, opened for this process and locked by `busy`."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def busy(cls, path: Path) -> Turnstile:
        """Of a process that works, and does not measure; waits until none measures."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        return cls(handle)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """All other processes wait meanwhile."""
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.handle, fcntl.LOCK_SH)

    def leave(self) -> None:
        """This process's copy is closed; a child that has one keeps the place."""
        os.close(self.handle)
