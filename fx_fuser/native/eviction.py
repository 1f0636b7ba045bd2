"""Keep the cache folder below a size: remove the least recently used.

A kernel's last use is the time of its manifest, which `native.store` sets at each use. What was
used within the last hour stays, whatever its size: another process may be about to load it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from fx_fuser.native import store

log = logging.getLogger("fx_fuser.native.eviction")

_SAFE_SECONDS = 3600
_seen = 0  # `store.builds()` when the folder was last checked


def keep_below(megabytes: int) -> None:
    """Evict, if this process has added to the cache folder since the last time."""
    global _seen
    if store.builds() != _seen:
        _seen = store.builds()
        with contextlib.suppress(OSError):
            trim(store.cache_dir(), megabytes * 10**6)


def trim(folder: Path, size: int, now: float | None = None) -> list[str]:
    """Remove entries until they have `size` bytes at most; returns the removed keys.

    now: the time in seconds, by default the current one.
    """
    now = time.time() if now is None else now
    entries = sorted(_entries(folder))
    total = sum(bytes_ for _, bytes_, _ in entries)
    removed: list[str] = []
    for used, bytes_, files in entries:
        if total <= size or used > now - _SAFE_SECONDS:
            break
        for path in files:
            with contextlib.suppress(OSError):
                path.unlink()
        total -= bytes_
        removed.append(files[0].stem)
    if removed:
        log.info("removed %d entries from %s, now %.0f MB", len(removed), folder, total / 1e6)
    return removed


def _entries(folder: Path) -> Iterator[tuple[float, int, list[Path]]]:
    """(last use, bytes, files) of each kernel and each remembered timing."""
    found: dict[Path, list[Path]] = {}
    for path in (*store.entries(folder), *store.timings(folder)):
        found.setdefault(path.with_suffix(""), []).append(path)
    for files in found.values():
        # The manifest first, since a binary without one is not an entry. A killed build leaves
        # such binaries.
        files.sort(key=lambda path: path.suffix != ".json")
        with contextlib.suppress(OSError):  # another process may remove it as well
            stats = [path.lstat() for path in files]
            yield stats[0].st_mtime, sum(s.st_size for s in stats), files
