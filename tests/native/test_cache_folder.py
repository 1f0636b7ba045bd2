"""The cache folder: whom it must belong to, what in it is fx_fuser's, and where there is none."""

from __future__ import annotations

import logging
import os
import pwd
import tempfile

import pytest
from toolchains import ARCH

from fx_fuser import cache
from fx_fuser.native import binaries, eviction, store
from fx_fuser.planning import timing

# ---- what can be trusted -------------------------------------------------------------------------


def warnings_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_new_folder_is_ones_own(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "new/cache"))
    old = os.umask(0o002)  # as of distributions whose users have groups of their own
    try:
        entry = binaries.cubin("// a", ARCH)
    finally:
        os.umask(old)
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    assert store.distrust(entry) == store.distrust(entry.parent) == ""


@pytest.mark.parametrize("mode, who", [(0o777, "everybody"), (0o770, "group")])
def test_nothing_is_loaded_from_a_folder_that_others_may_write(fake, caplog, mode, who):
    planted = binaries.cubin("// a", ARCH)
    planted.parent.chmod(mode)
    store._warn_untrusted.cache_clear()
    for _ in range(2):
        made = binaries.cubin("// a", ARCH)
        assert made.read_text() == "// a" and made.parent != planted.parent
    (said,) = warnings_in(caplog)
    assert f"nothing is loaded from {planted.parent}: {who}" in said and "chmod go-w" in said


def test_nothing_is_loaded_from_a_folder_of_somebody_else(fake, caplog, monkeypatch):
    planted = binaries.cubin("// a", ARCH)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    store._warn_untrusted.cache_clear()
    if mine == 0:  # whom everybody trusts
        os.chown(planted.parent, 12345, -1)
    made = binaries.cubin("// a", ARCH)
    assert made.parent != planted.parent
    assert "it belongs to user" in warnings_in(caplog)[0]


def test_a_file_that_others_may_write_is_made_again(fake, caplog):
    entry = binaries.cubin("// a", ARCH)
    entry.chmod(0o666)
    store._warn_untrusted.cache_clear()
    assert binaries.cubin("// a", ARCH) == entry
    assert fake.calls == 2 and store.distrust(entry) == ""
    assert f"nothing is loaded from {entry}: everybody may write to it" in warnings_in(caplog)[0]


def test_it_is_shown_and_cleared(fake, capsys):
    entry = binaries.cubin("// a", ARCH)
    (entry.parent / "plans").mkdir(exist_ok=True)
    (entry.parent / f"plans/{'a' * 32}.json").write_text("{}")
    (entry.parent / "notes.txt").write_text("not ours")
    assert cache.main([]) == 0
    shown = capsys.readouterr().out
    assert f"{entry.parent}:" in shown and "1 kernels" in shown and "1 timings" in shown
    assert cache.main(["--clear"]) == 0
    assert "removed 3 files" in capsys.readouterr().out
    assert not entry.exists() and (entry.parent / "notes.txt").exists()
    assert binaries.cubin("// a", ARCH).read_text() == "// a" and fake.calls == 2


def test_there_may_be_nothing_to_show(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "none"))
    assert cache.main(["--clear"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'none' / store.OWN}: nothing is there\n"


def test_timings_make_the_folder_ones_own_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "new/cache"))
    old, name = os.umask(0), "a" * 32
    try:
        timing._remember(name, [timing.Timing(1.0, 2.0)])
    finally:
        os.umask(old)
    assert timing._recall(name) == [timing.Timing(1.0, 2.0)]
    folder = store.cache_dir()
    assert store.unused_because(folder) == "" and folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"plans/{name}.json").stat().st_mode & 0o777 == 0o600


# ---- whose folder it is --------------------------------------------------------------------------


def test_the_users_folder_keeps_what_is_in_it(fake, tmp_path, monkeypatch):
    """Files there whose names look like fx_fuser's, and that an older version left, are not read
    either."""
    folder, key = tmp_path / "models", "0a" * 16
    names = ["model.json", "model.safetensors", f"{key}.json", f"{key}.cubin", "lib.so", "lock-00"]
    names += [f"plans/{key}.json", "tmp-00-abcdefgh/page"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        os.utime(folder / name, (1.0, 1.0))
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(folder))
    entry = binaries.cubin("// a", ARCH)
    assert entry.parent == folder / store.OWN and timing._recall(key) is None
    os.utime(entry.with_suffix(".json"), (1.0, 1.0))
    monkeypatch.setattr(eviction, "_seen", -1)
    eviction.keep_below(0)
    assert not entry.exists()
    binaries.cubin("// b", ARCH)
    assert cache.main(["--clear"]) == 0
    kept = [path for path in folder.rglob("*") if path.is_file() and store.OWN not in path.parts]
    assert {str(path.relative_to(folder)) for path in kept} == set(names)
    assert all((folder / name).read_text() == name for name in names)


def test_a_lock_that_is_a_link_is_not_opened(fake, tmp_path):
    (tmp_path / "notes").write_text("mine")
    folder = store.cache_dir()
    store._make(folder)
    for shard in range(store._SHARDS):
        (folder / f"lock-{shard:02x}").symlink_to(tmp_path / "notes")
    assert binaries.cubin("// a", ARCH).parent != folder
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_folder_that_somebody_made_meanwhile_is_looked_at_again(fake, monkeypatch, caplog):
    folder, right = store.cache_dir(), store._make
    store._warn_untrusted.cache_clear()

    def late(made):
        right(made)
        if made == folder:
            made.chmod(0o777)

    monkeypatch.setattr(store, "_make", late)
    assert binaries.cubin("// meanwhile", ARCH).parent != folder
    assert list(folder.iterdir()) == [] and "everybody may write to it" in caplog.text


def test_the_folder_above_counts_too(fake, caplog):
    """Whoever may write to it may put another one in place of fx_fuser's."""
    folder = binaries.cubin("// above", ARCH).parent
    folder.parent.chmod(0o777)
    store._warn_untrusted.cache_clear()
    assert binaries.cubin("// above", ARCH).parent != folder
    assert f"nothing is loaded from {folder.parent}: everybody" in warnings_in(caplog)[0]
    assert f"{folder.parent}: everybody may write to it" in store.unused_because(folder)


@pytest.mark.parametrize("link", ["link", "entry"])
def test_the_users_folder_may_be_a_link_and_ours_may_not(fake, tmp_path, monkeypatch, link):
    entry = binaries.cubin(f"// {link}", ARCH)
    if link == "entry":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "other").symlink_to(entry.parent.parent)
        monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "other"))
    assert binaries.cubin(f"// {link}", ARCH).read_text() == f"// {link}"
    assert fake.calls == 1 + (link == "entry") and not entry.is_symlink()


def test_a_user_without_a_home_gets_a_temporary_folder(fake, monkeypatch, caplog, capsys):
    for name in ("HOME", "XDG_CACHE_HOME", "FX_FUSER_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def missing(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", missing)
    store._warn_homeless.cache_clear()
    entry = binaries.cubin("// homeless", ARCH)
    assert binaries.cubin("// homeless", ARCH) == entry and fake.calls == 1
    assert entry.is_relative_to(tempfile.gettempdir())
    assert cache.main([]) == 0 and f"{entry.parent}:" in capsys.readouterr().out
    (said,) = warnings_in(caplog)
    assert "HOME is not set and user" in said and "Set FX_FUSER_CACHE_DIR" in said


@pytest.mark.parametrize("character", ['"', "`"])
def test_a_folder_that_compilers_cannot_name_costs_one_warning(
    fake, tmp_path, monkeypatch, caplog, character
):
    folder = tmp_path / f"a{character}b"
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(folder))
    assert binaries.cubin("// odd", ARCH).read_text() == "// odd"
    (said,) = warnings_in(caplog)
    assert f"compilers take no {character} in the path {folder}" in said
    assert "Set FX_FUSER_CACHE_DIR to a writable folder" in said
