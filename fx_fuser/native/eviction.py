"""Keep the cache folder below a size: remove the least recently used.

A kernel's last use is the time of its manifest, which `native.store` sets at each use. What was
used within the last hour stays, whatever the size: another process may be about to load it.
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
_seen = 0  # builds after which the folder was looked at


def keep_below(megabytes: int) -> None:
    """Evict, if this process has added to the cache folder since the last time."""
    global _seen
    if store.builds() != _seen:
        _seen = store.builds()
        with contextlib.suppress(OSError):
            trim(store.cache_dir(), megabytes * 10**6)


def trim(folder: Path, size: int, now: float | None = None) -> list[str]:
    """Remove entries until the folder's have `size` bytes at most; returns their keys.

    now: the time, by default the clock's, in seconds.
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
        log.info("removed %d entries of %s, now %.0f MB", len(removed), folder, total / 1e6)
    return removed


def _entries(folder: Path) -> Iterator[tuple[float, int, list[Path]]]:
    """(last use, bytes, files) of each kernel and of each timing remembered."""
    found: dict[Path, list[Path]] = {}
    for path in (*store.entries(folder), *store.timings(folder)):
        found.setdefault(path.with_suffix(""), []).append(path)
    for files in found.values():
        # The manifest first, since without it a binary is no entry. A killed build leaves binaries
        # that have none.
        files.sort(key=lambda path: path.suffix != ".json")
        with contextlib.suppress(OSError):  # another process removes as well
            stats = [path.lstat() for path in files]
            yield stats[0].st_mtime, sum(s.st_size for s in stats), files
