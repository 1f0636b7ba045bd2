"""A folder of binaries and timings, keyed by everything that goes into them.

One folder serves every process and version. An entry is `<key><suffix>`; next to it,
`<key>.json` has the sha256 of its bytes. An entry that does not match is built again. Builders hold
file locks, work in a temporary folder and rename into place, so a build killed at any point leaves
nothing that looks like an entry. A timing is `plans/<key>.json`.

The folder is fx_fuser's own, below the user's, where other things may be kept. Only files with
exactly such a name, and never links, are counted, listed or removed.

Binaries from it run in this process, and a timing decides which. So a folder or a file is used
only if it belongs to this user or to root and nobody else may write to it; new folders are created
that way.
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
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

from fx_fuser.errors import BuildError
from fx_fuser.native import jobs
from fx_fuser.native.jobs import Job

log = logging.getLogger("fx_fuser.native.store")

T = TypeVar("T")

OWN = "fx_fuser-v1"  # changes if names or contents change their meaning
PLANS = "plans"
SUFFIXES = (".cubin", ".so")  # of binaries
_ENTRY = re.compile(r"[0-9a-f]{32}(\.cubin|\.so|\.json)")
_TIMING = re.compile(r"[0-9a-f]{32}\.json")
_WORK = re.compile(r"tmp-([0-3][0-9a-f])-[a-z0-9_]{8}")  # `tempfile.mkdtemp` makes up the end
_PARTIAL = "partial"  # a timing being written; one at a time, so that none is left behind

_SHARDS = 64
_builds = 0


class _UntrustedError(Exception):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


def cache_dir() -> Path:
    """fx_fuser's own folder in $FX_FUSER_CACHE_DIR, or in fx_fuser in $XDG_CACHE_HOME or ~/.cache.

    For a user without a home, as in some containers, a temporary one of this process.
    """
    if chosen := os.environ.get("FX_FUSER_CACHE_DIR"):
        return Path(chosen).absolute() / OWN
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        _warn_homeless(os.getuid())
        return _fallback_dir()
    return caches.absolute() / "fx_fuser" / OWN


def builds() -> int:
    """How often this process has added to the cache folder."""
    return _builds


def ensure(wanted: Sequence[Job]) -> list[Path]:
    """The jobs' binaries, building in one ninja run those the cache does not hold.

    Raises:
        BuildError: one of them cannot be built.
        OSError: neither the cache folder nor a temporary one can be written to.
    """
    return _in_some_folder(lambda folder: _ensure_in(folder, wanted))


def holds(job: Job) -> bool:
    """Would `ensure` find the job's binary?"""
    return any(_is_cached(folder, job) for folder in _readable())


def recall(name: str) -> str | None:
    """What `remember` stored under this name, which is a key."""
    for folder in _readable():
        path = folder / PLANS / f"{name}.json"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if any(map(_is_distrusted, (path.parent, path))):
                continue
            text = path.read_text()
            _note_use(path)
            return text
    return None


def remember(name: str, text: str) -> None:
    """Atomic. If it cannot be written anywhere, the next process does not know it."""
    with contextlib.suppress(OSError):
        _in_some_folder(lambda folder: _put(folder, f"{name}.json", text))


def unused_because(folder: Path) -> str:
    """Why this cache folder is not read; empty if it is."""
    try:
        _check_folder(folder)
    except _UntrustedError as error:
        return error.reason if error.path == folder else str(error)
    except OSError as error:
        return _meaning(error)
    return ""


def distrust(path: Path) -> str:
    """Why nothing may be loaded from there; empty if it may, or if nothing is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if found.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {found.st_uid}, and this is {os.getuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        return f"{who} may write to it"
    return ""


# ---- folders -------------------------------------------------------------------------------------


def _check(*paths: Path) -> None:
    """Raises _UntrustedError if one of them may not be used."""
    for path in paths:
        if reason := distrust(path):
            raise _UntrustedError(path, reason)


def _check_folder(folder: Path) -> None:
    # The user's own folder may be a link to another disk.
    _check(Path(os.path.realpath(folder.parent)), folder)


def _make(folder: Path) -> None:
    """Create the folder so that nobody else may write to it, whatever the umask."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)


def _in_some_folder(action: Callable[[Path], T]) -> T:
    """Run the action in the cache folder or, if that cannot be written to or trusted, in a
    temporary one of this process, with a warning."""
    folder = cache_dir()
    try:
        _check_folder(folder)
        if not folder.exists():
            _make(folder)
            _check_folder(folder)  # another process may have made it meanwhile
        return action(folder)
    except _UntrustedError as error:
        _warn_untrusted(error.path, error.reason)
    except OSError as error:  # read-only, full, without locks...
        _warn_fallback(folder, _meaning(error))
    _make(_fallback_dir())  # it may have been removed
    return action(_fallback_dir())


def _readable() -> Iterator[Path]:
    """The folders of `_in_some_folder`, as far as they exist."""
    folder = cache_dir()
    if not unused_because(folder):
        yield folder
    if _fallback_dir.cache_info().currsize and folder != _fallback_dir():
        yield _fallback_dir()


@functools.cache
def _fallback_dir() -> Path:
    made, owner = Path(tempfile.mkdtemp(prefix="fx_fuser-")).resolve(), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a child that was forked since
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    folder = made / OWN
    _make(folder)
    return folder


def _meaning(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


@functools.cache
def _warn_homeless(user: int) -> None:
    log.warning(
        "there is no folder to keep binaries in: HOME is not set and user %d has no entry in "
        "passwd; this process's binaries go to a temporary folder and are built again next time. "
        "Set FX_FUSER_CACHE_DIR to a writable folder.",
        user,
    )


@functools.cache
def _warn_fallback(folder: Path, reason: str) -> None:
    log.warning(
        "cannot use the cache folder %s (%s); this process's binaries go to a temporary folder "
        "and are built again next time. Set FX_FUSER_CACHE_DIR to a writable folder.",
        folder,
        reason,
    )


@functools.cache
def _warn_untrusted(path: Path, reason: str) -> None:
    log.warning(
        "nothing is loaded from %s: %s. This process builds its binaries again; to use the folder, "
        "make sure that you own it and run `chmod go-w` on it, or set FX_FUSER_CACHE_DIR.",
        path,
        reason,
    )


def _is_distrusted(path: Path) -> bool:
    """Is it distrusted?  Then warns."""
    if reason := distrust(path):
        _warn_untrusted(path, reason)
    return bool(reason)


def _note_use(path: Path) -> None:
    with contextlib.suppress(OSError):  # for `fx_fuser.native.eviction`; it may be read-only
        os.utime(path)


# ---- entries -------------------------------------------------------------------------------------


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(folder: Path, job: Job) -> Path:
    return folder / f"{job.key}.json"


def _is_cached(folder: Path, job: Job) -> bool:
    try:
        if any(map(_is_distrusted, (_manifest(folder, job), job.binary(folder)))):
            return False
        manifest = json.loads(_manifest(folder, job).read_bytes())
        return bool(manifest["sha256"] == _digest(job.binary(folder).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _ensure_in(folder: Path, wanted: Sequence[Job]) -> list[Path]:
    assert all(_ENTRY.fullmatch(job.binary(folder).name) for job in wanted)
    if not all(_is_cached(folder, job) for job in wanted):
        jobs.check_folder(folder)
        with _locked(folder, (_shard(job) for job in wanted)):
            # Whoever held the locks before may have built them.
            missing = {job.key: job for job in wanted if not _is_cached(folder, job)}
            if missing:
                _build(folder, list(missing.values()))
    for job in wanted:
        _note_use(_manifest(folder, job))
    return [job.binary(folder) for job in wanted]


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
            for path in (job.binary(work), _manifest(work, job)):  # independent of the umask
                path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
            # The manifest last: until it is there, the binary is not an entry.
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
    for leftover, shard in _work_folders(folder):
        if shard in held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with contextlib.suppress(BlockingIOError), _open_lock(folder, shard) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
            fcntl.flock(lock, fcntl.LOCK_UN)


def _put(folder: Path, name: str, text: str) -> None:
    """Write a timing."""
    assert _TIMING.fullmatch(name)
    plans = folder / PLANS
    plans.mkdir(mode=0o700, exist_ok=True)
    _check(plans)
    with _locked(folder, [PLANS]):
        partial = plans / _PARTIAL
        partial.unlink(missing_ok=True)  # whatever it is
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.replace(partial, plans / name)


# ---- what is fx_fuser's in a folder --------------------------------------------------------------


def entries(folder: Path) -> list[Path]:
    """Binaries and their manifests."""
    return _files(folder, _ENTRY)


def timings(folder: Path) -> list[Path]:
    return [] if folder.is_symlink() else _files(folder / PLANS, _TIMING)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Files with these names; links are not fx_fuser's, and are not followed."""
    return [Path(e) for e in _scan(folder, pattern) if e.is_file(follow_symlinks=False)]


def _work_folders(folder: Path) -> list[tuple[Path, str]]:
    """Folders of builds that run or were killed, and the lock that the builder holds."""
    found = [e for e in _scan(folder, _WORK) if e.is_dir(follow_symlinks=False)]
    return [(Path(e), e.name.split("-")[1]) for e in found]


def _scan(folder: Path, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        named = [entry for entry in found if pattern.fullmatch(entry.name)]
    return sorted(named, key=lambda entry: entry.name)


def clear(folder: Path) -> int:
    """Remove what fx_fuser put into the folder, while no build runs; returns how many files.

    Raises:
        OSError: something cannot be removed.
    """
    if folder.is_symlink():
        return 0
    removed = 0
    shards = (f"{shard:02x}" for shard in range(_SHARDS))
    with _locked(folder, [*shards, PLANS]):
        for path in (*entries(folder), *timings(folder)):
            path.unlink()
            removed += 1
        for leftover, _ in _work_folders(folder):
            shutil.rmtree(leftover)
    return removed


# ---- locks ---------------------------------------------------------------------------------------


def _shard(job: Job) -> str:
    """The lock of a key: one of several, so that builds of other keys need not wait."""
    return f"{int(job.key[:2], 16) % _SHARDS:02x}"


def _open_lock(folder: Path, name: str) -> IO[str]:
    return open(folder / f"lock-{name}", "a", opener=_open_no_link)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def _locked(folder: Path, shards: Iterable[str]) -> Iterator[None]:
    """Holds these locks of the folder, against other processes and other threads alike.

    All take them in the same order, so that there is no deadlock.
    """
    with contextlib.ExitStack() as held:
        for shard in sorted(set(shards)):
            lock = held.enter_context(_open_lock(folder, shard))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Closing does not release it if a process forked meanwhile has it open.
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield
