"""The cache folder stays below its size, and nothing goes that may be in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fx_fuser.native import eviction, store
from fx_fuser.native.jobs import SOURCE, TARGET, Job

HOUR = 3600
NEW, OLD, OLDER = ("0a" * 16, "1b" * 16, "2c" * 16)  # keys


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file, and what is in it; of a link where it leads."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def fill(folder: Path, ages: dict[str, float], now: float) -> None:
    """Entries of 1,000 bytes, used so many seconds ago."""
    for name, age in ages.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        manifest = place.with_suffix(".json")
        manifest.write_bytes(b"m" * 100)
        place.with_suffix(".cubin").write_bytes(b"c" * 900)
        os.utime(manifest, (now - age, now - age))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    fill(tmp_path, {NEW: 2 * HOUR, OLD: 9 * HOUR, OLDER: 20 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 1500, now=1e9) == [OLDER, OLD]
    assert names(tmp_path) == {f"{NEW}.json", f"{NEW}.cubin"}


def test_what_was_used_within_the_hour_stays(tmp_path: Path) -> None:
    fill(tmp_path, {NEW: 10, OLD: 2 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 0, now=1e9) == [OLD]
    assert names(tmp_path) == {f"{NEW}.json", f"{NEW}.cubin"}


def test_a_folder_below_its_size_is_left(tmp_path: Path) -> None:
    fill(tmp_path, {NEW: 2 * HOUR, OLD: 3 * HOUR}, now=1e9)
    (tmp_path / "lock-00").touch()
    assert eviction.trim(tmp_path, 2000, now=1e9) == []
    assert len(names(tmp_path)) == 5


def test_timings_count_too(tmp_path: Path) -> None:
    fill(tmp_path, {f"plans/{OLD}": 5 * HOUR, NEW: 4 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 1000, now=1e9) == [OLD]


FOREIGN = (
    *("model.json", "model.safetensors", "libother.so", "mine.cubin"),
    *(f"{OLD}.safetensors", f"{OLD}.json.bak", f"{OLD}", f"{OLD[1:]}.json", f"x{OLD}.json"),
    *(f"{OLD.upper()}.json", f"{OLD}.JSON", "plans/notes.json", f"plans/{OLD}.cubin"),
    *("lock-00", "tmp-2a-notes/page", "tmp-zz-abcdefgh/page", f"{OLD}.so/page"),
)


def test_other_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    """Even in fx_fuser's own folder: only what has exactly such a name."""
    for name in FOREIGN:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10_000)
        os.utime(tmp_path / name, (1.0, 1.0))
    (tmp_path / f"{OLDER}.cubin").symlink_to(tmp_path / "mine.cubin")
    before = contents(tmp_path)
    fill(tmp_path, {NEW: 2 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 1000, now=1e9) == []
    assert eviction.trim(tmp_path, 999, now=1e9) == [NEW]
    fill(tmp_path, {NEW: 0, f"plans/{NEW}": 0}, now=1e9)
    (tmp_path / f"plans/{NEW}.cubin").unlink()
    assert store.clear(tmp_path) == 3
    after = contents(tmp_path)
    assert before.items() <= after.items()
    assert all(name.startswith("lock-") for name in after.keys() - before.keys())


@pytest.mark.parametrize("link", ["", "plans", "tmp-00-abcdefgh"])
def test_no_link_leads_outside(tmp_path: Path, link: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / store.OWN
    fill(outside, {OLD: 5 * HOUR, f"plans/{OLD}": 5 * HOUR}, now=1e9)
    if link:
        folder.mkdir()
        (folder / link).symlink_to(outside / "plans" if link == "plans" else outside)
    else:
        folder.symlink_to(outside)
    before = contents(outside)
    assert eviction.trim(folder, 0, now=1e9) == []
    assert store.clear(folder) == 0
    after = {name: data for name, data in contents(outside).items() if "lock-" not in name}
    assert after == before


def test_binaries_of_a_killed_build_go_too(tmp_path: Path) -> None:
    """They have no manifest yet, and those of an eviction that was killed have none any more."""
    fill(tmp_path, {OLD: 5 * HOUR}, now=1e9)
    (tmp_path / f"{OLD}.json").unlink()
    assert eviction.trim(tmp_path, 0, now=1e9) == []
    os.utime(tmp_path / f"{OLD}.cubin", (1.0, 1.0))
    assert eviction.trim(tmp_path, 0, now=1e9) == [OLD]


def test_no_folder_is_no_fault(tmp_path: Path) -> None:
    assert eviction.trim(tmp_path / "none", 0) == []


def test_a_use_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    job = Job("ab" * 16, "text", ".txt", ".so", ("cp", SOURCE, TARGET))
    before = store.builds()
    (entry,) = store.ensure([job])
    assert entry.read_text() == "text" and store.builds() == before + 1
    manifest = store.cache_dir() / f"{job.key}.json"
    os.utime(manifest, (1.0, 1.0))
    store.ensure([job])
    assert manifest.stat().st_mtime > 1e9 and store.builds() == before + 1


def test_it_is_looked_at_after_builds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(eviction, "trim", lambda folder, size: asked.append(size))
    monkeypatch.setattr(eviction, "_seen", store.builds())
    eviction.keep_below(7)
    assert asked == []
    monkeypatch.setattr(store, "_builds", store.builds() + 1)
    eviction.keep_below(7)
    eviction.keep_below(7)
    assert asked == [7_000_000]
