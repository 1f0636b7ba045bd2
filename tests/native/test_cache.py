"""The cache of binaries. A stand-in for nvcc builds them: what is tested is ours, not nvcc."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from toolchains import ARCH

from fx_fuser.native import binaries, compilers, jobs, store


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob("tmp-*"))


# ---- what is cached ------------------------------------------------------------------------------


def test_cold_then_warm(fake):
    cold = binaries.cubin("// a", ARCH)
    assert cold.read_text() == "// a"
    assert cold.parent == store.cache_dir()
    assert binaries.cubin("// a", ARCH) == cold
    assert fake.calls == 1
    assert not leftovers(cold.parent)


@pytest.mark.slow
def test_what_takes_long_says_how_far_it_is(fake, monkeypatch, caplog):
    monkeypatch.setattr(jobs, "_PROGRESS_S", 0.1)
    target, slow = Path("done"), ["sleep", "0.5"]
    with caplog.at_level(logging.INFO, "fx_fuser.native.jobs"), subprocess.Popen(slow) as running:
        jobs._wait_for(running, [target, Path(__file__)])
    assert "compiled 1 of 2 kernels" in caplog.text
    assert running.returncode == 0


def test_several_sources_and_duplicates_in_one_run(fake):
    texts = ["// a", "// b", "// a"]
    paths = binaries.cubins(texts, ARCH)
    assert [path.read_text() for path in paths] == texts
    assert fake.calls == 2


def test_a_source_with_shell_characters(fake):
    text = "// $HOME `ls` 'x' \"y\" {source}"
    assert binaries.cubin(text, ARCH).read_text() == text


def truncate(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def corrupt(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[0] ^= 1
    entry.write_bytes(data)


def lose_binary(entry: Path) -> None:
    entry.unlink()


def lose_manifest(entry: Path) -> None:
    entry.with_suffix(".json").unlink()


def garble_manifest(entry: Path) -> None:
    entry.with_suffix(".json").write_text("[1")


def empty_manifest(entry: Path) -> None:
    entry.with_suffix(".json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [truncate, corrupt, lose_binary, lose_manifest, garble_manifest, empty_manifest],
    ids=lambda f: f.__name__,
)
def test_a_damaged_entry_is_built_again(fake, damage):
    entry = binaries.cubin("// a", ARCH)
    damage(entry)
    assert binaries.cubin("// a", ARCH).read_text() == "// a"
    assert fake.calls == 2
    binaries.cubin("// a", ARCH)
    assert fake.calls == 2


def test_the_key_holds_text_arch_and_headers(fake, tmp_path, monkeypatch):
    headers = tmp_path / "kernels_cu"
    shutil.copytree(binaries.KERNELS, headers)
    monkeypatch.setattr(binaries, "KERNELS", headers)
    paths = {
        binaries.cubin("// a", ARCH),
        binaries.cubin("// b", ARCH),
        binaries.cubin("// a", "sm_80"),
    }
    before = binaries.fingerprint()
    with (headers / "pointwise/pointwise.cuh").open("a") as header:
        header.write("// changed\n")
    paths.add(binaries.cubin("// a", ARCH))
    assert len(paths) == 4
    assert binaries.fingerprint() != before


def test_the_key_holds_the_compilers_version(fake, tmp_path, monkeypatch):
    before = binaries.cubin("// a", ARCH)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "nvcc").write_text(fake.nvcc.read_text().replace("fake 1.0", "fake 1.1"))
    (newer / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(newer), prepend=os.pathsep)
    assert binaries.cubin("// a", ARCH) != before


# ---- processes -----------------------------------------------------------------------------------


def _build_at_once(barrier, results) -> None:
    barrier.wait()
    paths = binaries.cubins([f"// {i}" for i in range(4)], ARCH)
    results.put([path.read_text() for path in paths])


@pytest.mark.slow
def test_eight_processes_build_once(fake):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=_build_at_once, args=(barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    texts = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert texts == [[f"// {i}" for i in range(4)]] * 8
    assert fake.calls == 4


def _build_in_a_session_of_its_own() -> None:
    os.setsid()
    try:
        binaries.cubins(["// quick", "// SLOW"], ARCH)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


INTERRUPTED = 42


def test_a_killed_build_harms_no_later_one(fake):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_build_in_a_session_of_its_own)
    process.start()
    deadline = time.monotonic() + 60
    while fake.calls < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert fake.calls == 2
    assert leftovers(store.cache_dir())

    assert binaries.cubin("// quick", ARCH).read_text() == "// quick"
    assert fake.calls == 3
    assert not leftovers(store.cache_dir())


@pytest.mark.parametrize("to_all", [False, True], ids=["to Python", "to all, as by ctrl-C"])
def test_an_interrupted_build_leaves_nothing_behind(fake, to_all):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_build_in_a_session_of_its_own)
    process.start()
    try:
        deadline = time.monotonic() + 60
        while fake.calls < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        process.join(timeout=60)
        assert process.exitcode == INTERRUPTED
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the compiler's
    assert not leftovers(store.cache_dir())
    assert binaries.cubin("// quick", ARCH).read_text() == "// quick"
    assert fake.calls == 3


def test_two_threads_build_once(fake):
    barrier, found = threading.Barrier(2), []

    def work():
        barrier.wait()
        found.append(binaries.cubins([f"// {i}" for i in range(4)], ARCH))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert fake.calls == 4


def test_a_build_does_not_wait_for_one_of_something_else(fake):
    """Nor does it take the other's folder for a leftover."""
    ours, *others = (
        store._shard(binaries._cubin_job(text, ARCH, compilers.nvcc()))
        for text in ("// ours", *map(str, range(100)))
    )
    other = next(shard for shard in others if shard != ours)
    folder = store.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    under_way = folder / f"tmp-{other}-underway"
    with store._locked(folder, [other]):
        under_way.mkdir()
        assert binaries.cubin("// ours", ARCH).read_text() == "// ours"
        assert under_way.exists()


def test_a_process_forked_during_a_build_does_not_hold_its_lock(tmp_path):
    """Both have it; the other may be a DataLoader's worker, and live as long as the training."""
    context = multiprocessing.get_context("fork")
    done = context.Event()
    child = context.Process(target=done.wait)
    with store._locked(tmp_path, ["2a"]):
        child.start()
    with open(tmp_path / "lock-2a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            done.set()
            child.join()


@pytest.mark.slow
def test_the_folder_of_an_unusable_cache_outlives_a_forked_child(fake, tmp_path, monkeypatch):
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "a_file/cache"))
    code = f"""
import os, sys
from fx_fuser.native import binaries
path = binaries.cubin('// a', {ARCH!r})
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert path.exists()
print(path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    assert not Path(done.stdout.strip()).parent.exists()


@pytest.mark.parametrize("folder", ["a_file/cache", "full/cache"])
def test_an_unusable_cache_folder_costs_one_warning(fake, tmp_path, monkeypatch, caplog, folder):
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / folder))
    with caplog.at_level(logging.WARNING, logger="fx_fuser.native.store"):
        assert binaries.are_built([f"// {folder}"], ARCH) == [False]
        first = binaries.cubin(f"// {folder}", ARCH)
        assert binaries.are_built([f"// {folder}", "// another"], ARCH) == [True, False]
        binaries.cubin(f"// {folder} again", ARCH)
    assert first.read_text() == f"// {folder}"
    assert tmp_path not in first.parents
    assert len(caplog.records) == 1
    assert str(tmp_path / folder) in caplog.text
    assert "FX_FUSER_CACHE_DIR" in caplog.text


UNWRITABLE = {
    "read-only": (os, "mkdir", errno.EROFS),
    "not ours": (store, "open", errno.EACCES),
    "without locks": (store, "open", errno.ENOLCK),
    "full for a source": (Path, "write_text", errno.ENOSPC),
    "full for a binary": (os, "replace", errno.ENOSPC),
}


@pytest.mark.parametrize("everywhere", [False, True], ids=["the cache", "every folder"])
@pytest.mark.parametrize("place, name, error", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_folder_that_cannot_be_written_to(
    fake, tmp_path, monkeypatch, place, name, error, everywhere
):
    """A temporary one does; if that cannot be written to either, the system's error says why."""
    folder, source = tmp_path / "cache", f"// {name} {error} {everywhere}"
    right = getattr(place, name, open)

    def failing(path, *args, **kwargs):
        if everywhere or folder in (Path(path), *Path(path).parents):
            raise OSError(error, os.strerror(error))
        return right(path, *args, **kwargs)

    monkeypatch.setattr(place, name, failing, raising=False)
    if everywhere:
        with pytest.raises(OSError, match=os.strerror(error)):
            binaries.cubin(source, ARCH)
    else:
        path = binaries.cubin(source, ARCH)
        assert path.read_text() == source and folder not in path.parents
    assert not folder.exists() or not leftovers(folder)
