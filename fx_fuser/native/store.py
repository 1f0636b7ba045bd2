"""A folder of binaries, keyed by everything that goes into them.

One folder serves every process and version side by side. An entry is `<key><suffix>`; beside it,
`<key>.json` has the sha256 of its bytes. An entry that does not match is built again. Builders hold
file locks, work in a temporary folder and rename into place, so a build killed at any point leaves
nothing that looks like an entry.

What is loaded runs in this process. So a folder or a file is used only if it belongs to this user
or to root and nobody else may write to it; new folders are created that way.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fx_fuser.errors import BuildError
from fx_fuser.native import jobs
from fx_fuser.native.jobs import Job

log = logging.getLogger("fx_fuser.native.store")

_SHARDS = 64
_builds = 0


def cache_dir() -> Path:
    """$FX_FUSER_CACHE_DIR, or fx_fuser in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("FX_FUSER_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fx_fuser"


def builds() -> int:
    """How often this process has added to the cache folder."""
    return _builds


def ensure(wanted: Sequence[Job]) -> list[Path]:
    """The jobs' binaries, building in one ninja run those the cache does not hold.

    Raises:
        BuildError: one of them cannot be built.
        OSError: neither the cache folder nor a temporary one can be written to.
    """
    folder = cache_dir()
    try:
        if reason := distrust(folder):
            _warn_untrusted(folder, reason)
            folder = _fallback_dir()
        return _ensure_in(folder, wanted)
    except OSError as error:  # read-only, full, without locks...
        _warn_fallback(folder, os.strerror(error.errno) if error.errno else str(error))
        return _ensure_in(_fallback_dir(), wanted)


def holds(job: Job) -> bool:
    """Would `ensure` find the job's binary?"""
    try:
        folder = cache_dir()
        if not distrust(folder) and _is_cached(folder, job):
            return True
    except OSError:  # then `ensure` takes a temporary folder
        pass
    return _fallback_dir.cache_info().currsize > 0 and _is_cached(_fallback_dir(), job)


def make(folder: Path) -> None:
    """Create the folder so that nobody else may write to it, whatever the umask."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def distrust(path: Path) -> str:
    """Why nothing may be loaded from there; empty if it may, or if there is nothing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {found.st_uid}, and this is {os.getuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        return f"{who} may write to it"
    return ""


def _ensure_in(folder: Path, wanted: Sequence[Job]) -> list[Path]:
    if not all(_is_cached(folder, job) for job in wanted):
        make(folder)
        with _locked(folder, (_shard(job) for job in wanted)):
            # Whoever held the locks before may have built them.
            missing = {job.key: job for job in wanted if not _is_cached(folder, job)}
            if missing:
                _build(folder, list(missing.values()))
    for job in wanted:
        with contextlib.suppress(OSError):  # a note of its use, for `fx_fuser.native.eviction`
            os.utime(_manifest(folder, job))
    return [job.binary(folder) for job in wanted]


@functools.cache
def _fallback_dir() -> Path:
    folder, owner = Path(tempfile.mkdtemp(prefix="fx_fuser-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and no child that was forked since
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _warn_fallback(folder: Path, reason: str) -> None:
    log.warning(
        "cannot write the cache folder %s (%s); binaries of this process go to a temporary folder "
        "and are built again next time. Set FX_FUSER_CACHE_DIR to a writable folder.",
        folder,
        reason,
    )


@functools.cache
def _warn_untrusted(path: Path, reason: str) -> None:
    log.warning(
        "nothing is loaded from %s: %s. Binaries of this process are built anew; to use it, see "
        "that it is yours and `chmod go-w` it, or set FX_FUSER_CACHE_DIR to another folder.",
        path,
        reason,
    )


# ---- entries -------------------------------------------------------------------------------------


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(folder: Path, job: Job) -> Path:
    return folder / f"{job.key}.json"


def _is_cached(folder: Path, job: Job) -> bool:
    try:
        for path in (_manifest(folder, job), job.binary(folder)):
            if reason := distrust(path):
                _warn_untrusted(path, reason)
                return False
        manifest = json.loads(_manifest(folder, job).read_bytes())
        return bool(manifest["sha256"] == _digest(job.binary(folder).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path, missing: Sequence[Job]) -> None:
    """Build the jobs. One that fails raises BuildError after the others have become entries."""
    global _builds
    shards = sorted({_shard(job) for job in missing})
    _remove_leftovers(folder, shards)
    work = Path(tempfile.mkdtemp(prefix=f"tmp-{shards[0]}-", dir=folder))
    started = time.perf_counter()
    try:
        failed = jobs.run(work, missing)
        built = [job for job in missing if job not in failed]
        for job in built:
            manifest = {"sha256": _digest(job.binary(work).read_bytes())}
            _manifest(work, job).write_text(json.dumps(manifest))
            for path in (job.binary(work), _manifest(work, job)):  # whatever the umask
                path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
            # The manifest last: until it is there, the binary is no entry.
            os.replace(job.binary(work), job.binary(folder))
            os.replace(_manifest(work, job), _manifest(folder, job))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _builds += bool(built)
    log.info("built %d binaries in %.1f s", len(built), time.perf_counter() - started)
    if failed:
        raise BuildError("\n\n".join(failed.values()))


def _remove_leftovers(folder: Path, held: Sequence[str]) -> None:
    """Remove folders of killed builds: only the holder of a lock makes `tmp-<shard>-…`."""
    for leftover in folder.glob("tmp-??-*"):
        shard = leftover.name.split("-")[1]
        if shard in held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with contextlib.suppress(BlockingIOError), open(folder / f"lock-{shard}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
            fcntl.flock(lock, fcntl.LOCK_UN)


# ---- locks ---------------------------------------------------------------------------------------


def _shard(job: Job) -> str:
    """The lock of a key: one of many, so that builds of other keys need not wait."""
    return f"{int(job.key[:2], 16) % _SHARDS:02x}"


@contextlib.contextmanager
def _locked(folder: Path, shards: Iterable[str]) -> Iterator[None]:
    """Holds these locks of the folder, against other processes and other threads alike.

    All take them in the same order, so that there is no deadlock.
    """
    with contextlib.ExitStack() as held:
        for shard in sorted(set(shards)):
            lock = held.enter_context(open(folder / f"lock-{shard}", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Closing does not free it if a process was forked meanwhile and has it open.
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield


def clear(folder: Path) -> int:
    """Remove what fx_fuser put into the folder, while nobody builds; returns how many files.

    Raises:
        OSError: something cannot be removed.
    """
    removed = 0
    shards = (f"{shard:02x}" for shard in range(_SHARDS))
    with _locked(folder, shards):
        for path in _files(folder):
            path.unlink()
            removed += 1
        for leftover in folder.glob("tmp-??-*"):
            shutil.rmtree(leftover)
    return removed


def _files(folder: Path) -> list[Path]:
    """Entries and their manifests, and the timings remembered."""
    files = [path for path in folder.glob("*.*") if path.suffix in (".cubin", ".so", ".json")]
    return sorted([*files, *folder.glob("plans/*.json")])
