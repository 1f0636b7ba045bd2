"""The ledger of the tests marked `gpu`: what is recorded, and what it lists as stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ledger
import pytest

CONV, LINEAR = (f"tests/kernels/test_{n}.py" for n in ("conv_sm90", "linear_sm90"))
WHOLE = "tests/ops/test_bmm_gpu.py"


def report(nodeid: str, when: str = "call", outcome: str = "passed", *marks: str) -> Any:
    passed, failed = outcome == "passed", outcome == "failed"
    return SimpleNamespace(
        nodeid=nodeid, when=when, keywords=dict.fromkeys(marks or ("gpu",), 1),
        passed=passed, failed=failed,
    )  # fmt: skip


def test_what_passed_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSER_COMMIT", "abc123")
    ledger._here.cache_clear()
    path = tmp_path / "ledger.json"
    for outcomes in ({"a": "passed", "b": "failed", "c": "skipped"}, {"b": "passed"}):
        recorder = ledger.Recorder(path)
        for name, outcome in outcomes.items():
            recorder.pytest_runtest_logreport(report(f"{CONV}::{name}", "call", outcome))
        recorder.pytest_runtest_logreport(report(f"{CONV}::no_gpu", "call", "passed", "slow"))
        recorder.pytest_sessionfinish()
    entries = ledger.read(path)
    assert entries.keys() == {f"{CONV}::a", f"{CONV}::b"}
    first = entries[f"{CONV}::a"]
    assert (first["commit"], first["hash"]) == ("abc123", ledger.product_hash(CONV))
    assert first.keys() == {"commit", "gpu", "torch", "date", "hash"}
    ledger._here.cache_clear()


def test_what_fails_at_its_end_did_not_pass(tmp_path: Path) -> None:
    recorder = ledger.Recorder(tmp_path / "ledger.json")
    recorder.pytest_runtest_logreport(report(f"{CONV}::a"))
    recorder.pytest_runtest_logreport(report(f"{CONV}::a", "teardown", "failed"))
    assert recorder.entries == {}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small one, of one file a folder."""
    for folder in (*ledger.SHARED, "kernels_cu/conv", "kernels_cu/linear", "fx_fuser/graph"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.h").write_text("as it was")
        (tmp_path / folder / "NOTES.md").write_text("as it was")
    for test in (CONV, LINEAR, WHOLE):
        (tmp_path / test).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ledger.ROOT / test, tmp_path / test)
    shutil.copy(ledger.ROOT / "tests/kernels/checks.py", tmp_path / "tests/kernels")
    return tmp_path


@pytest.mark.parametrize(
    "changed, listed",
    [
        ("kernels_cu/conv/file.h", {CONV, WHOLE}),
        ("kernels_cu/linear/file.h", {LINEAR, WHOLE}),
        ("kernels_cu/common/file.h", {CONV, LINEAR, WHOLE}),
        ("fx_fuser/graph/file.h", {WHOLE}),
        (LINEAR, {LINEAR}),
        ("tests/kernels/checks.py", {CONV, LINEAR}),
        ("kernels_cu/conv/NOTES.md", set()),
    ],
)
def test_a_changed_file_makes_its_tests_stale(
    checkout: Path, changed: str, listed: set[str]
) -> None:
    ledger.product_hash.cache_clear()
    tests = [f"{file}::test_it[{i}]" for file in (CONV, LINEAR, WHOLE) for i in range(2)]
    run = {"commit": "c", "gpu": "H200", "torch": "2.15", "date": "2026-11-26"}
    entries = {
        t: {**run, "hash": ledger.product_hash(t.partition("::")[0], checkout)} for t in tests
    }
    assert ledger.stale(tests, entries, checkout) == {}
    ledger.product_hash.cache_clear()
    (checkout / changed).write_text("changed")
    found = ledger.stale(tests, entries, checkout)
    assert set(found) == {f"{file}::test_it" for file in listed}
    why = "passed with c on H200, torch 2.15, 2026-11-26; what it depends on changed since"
    assert all(reasons == [why, why] for reasons in found.values())
    ledger.product_hash.cache_clear()


def test_what_never_passed_is_listed() -> None:
    assert ledger.stale([f"{CONV}::a[0]"], {}) == {f"{CONV}::a": ["never passed"]}


def test_its_rule_names_what_there_is() -> None:
    folders = {*ledger.SHARED, *ledger._REST, *(f for c in ledger.COVERS.values() for f in c)}
    assert all((ledger.ROOT / folder).is_dir() for folder in folders)
    assert all((ledger.ROOT / file).is_file() for file in ledger.COVERS)


def test_the_ledger_can_be_read() -> None:
    assert all(entry["hash"] for entry in ledger.read(ledger.LEDGER).values())
