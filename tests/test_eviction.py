"""The cache folder stays below its size, and nothing goes that may be in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fx_fuser.native import eviction, store
from fx_fuser.native.jobs import Job

HOUR = 3600


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
    fill(tmp_path, {"new": 2 * HOUR, "old": 9 * HOUR, "older": 20 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 1500, now=1e9) == ["older", "old"]
    assert names(tmp_path) == {"new.json", "new.cubin"}


def test_what_was_used_within_the_hour_stays(tmp_path: Path) -> None:
    fill(tmp_path, {"now": 10, "old": 2 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 0, now=1e9) == ["old"]
    assert names(tmp_path) == {"now.json", "now.cubin"}


def test_a_folder_below_its_size_is_left(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 2 * HOUR, "b": 3 * HOUR}, now=1e9)
    (tmp_path / "lock-00").touch()
    assert eviction.trim(tmp_path, 2000, now=1e9) == []
    assert len(names(tmp_path)) == 5


def test_timings_count_too(tmp_path: Path) -> None:
    fill(tmp_path, {"plans/a": 5 * HOUR, "b": 4 * HOUR}, now=1e9)
    assert eviction.trim(tmp_path, 1000, now=1e9) == ["a"]


def test_no_folder_is_no_fault(tmp_path: Path) -> None:
    assert eviction.trim(tmp_path / "none", 0) == []


def test_a_use_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    job = Job("ab" * 16, "text", ".txt", ".out", ("cp", "{source}", "{target}"))
    before = store.builds()
    (entry,) = store.ensure([job])
    assert entry.read_text() == "text" and store.builds() == before + 1
    manifest = tmp_path / f"{job.key}.json"
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
