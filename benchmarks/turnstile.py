"""Processes that compile side by side and measure one at a time, with a shared lock.

    flock: https://man7.org/linux/man-pages/man2/flock.2.html

A lock belongs to an open file description, which a child gets from its parent: so a child holds the
lock from its start, before it has imported anything. A process that waits to measure holds a second
lock, the gate, so that no newcomer overtakes it: flock grants shared locks while others wait.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turnstile:
    """One process's place. handle: of the lock file, opened for this one and locked by `busy`."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def busy(cls, path: Path) -> Turnstile:
        """The place of a process that works and does not measure; waits until none measures."""
        place = cls(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        with place._gate():
            fcntl.flock(place.handle, fcntl.LOCK_SH)
        return place

    @contextmanager
    def alone(self) -> Iterator[None]:
        """All other processes wait during the block."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)  # others may be waiting at the gate for it
        with self._gate():
            fcntl.flock(self.handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.handle, fcntl.LOCK_SH)

    @contextmanager
    def _gate(self) -> Iterator[None]:
        path = os.readlink(f"/proc/self/fd/{self.handle}")
        gate = os.open(f"{path}.gate", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield
        finally:
            os.close(gate)

    def leave(self) -> None:
        """Closes this process's copy; a child that has one keeps the place."""
        os.close(self.handle)
