"""Which results are older than the code that they depend on, by the commits of their rows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import results, stale


def git(root: Path, *command: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *command], cwd=root, check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(root: Path, path: str, text: str) -> str:
    """Write a file and commit it; the commit."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    git(root, "add", path)
    git(root, "commit", "-qm", path)
    return git(root, "rev-parse", "--short", "HEAD")


def keep(folder: Path, name: str, content: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    return tmp_path


def run(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    folder = ("--results", str(root / "results"), "--root", str(root))
    status = stale.main([*options, *folder])
    return status, *capsys.readouterr()


def test_changed_files_are_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = commit(root, "fx_fuser/a/b.py", "1")
    commit(root, "kernels_cu/linear/NOTES.md", "a log")
    commit(root, "docs/a.md", "a page")
    second = commit(root, "kernels_cu/linear/a.cuh", "2")
    commit(root, "fx_fuser/c.py", "3")
    last = commit(root, "patterns/d.py", "4")
    rows = [{"commit": first}, {"commit": second}, {"commit": f"{last}-dirty"}]
    keep(root / "results", "rows.json", rows)
    keep(root / "results", "record.json", {"commit": first})
    keep(root / "results", "sweep.json", {"commit": last, "cases": rows[:2]})
    keep(root / "results", "turns.json", {"old": first, "new": last, "rows": []})
    status, said, failed = run(root, capsys, "--check")
    assert said.splitlines() == [
        "record.json: 3 files changed since",
        "rows.json: 0 to 3 files changed since",
        "sweep.json: 2 to 3 files changed since",
        "turns.json: the code as it is",
    ]
    assert (status, failed) == (0, "")
    _, said, _ = run(root, capsys, "--names")
    assert said.splitlines()[:2] == ["record.json: 3 files changed since", "    fx_fuser/c.py"]


def test_a_comment_is_no_change(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(root, "fx_fuser/a.py", 'def f(x):\n    """Twice x."""\n    return x + x\n')
    first = commit(root, "kernels_cu/a.cuh", "int f(); // once\n/* long\n */ int g();\n")
    keep(root / "results", "record.json", {"commit": first})
    commit(root, "fx_fuser/a.py", 'def f(x):\n    """x twice."""\n    return x + x  # a sum\n')
    commit(root, "kernels_cu/a.cuh", "// two\nint f();\nint g();\n")
    assert run(root, capsys)[1] == "record.json: the code as it is\n"
    commit(root, "fx_fuser/a.py", 'def f(x):\n    """x twice."""\n    return 2 * x  # a sum\n')
    commit(root, "kernels_cu/b.cuh", "int h();\n")
    git(root, "rm", "-q", "kernels_cu/a.cuh")
    git(root, "commit", "-qm", "gone")
    assert run(root, capsys, "--names")[1].splitlines() == [
        "record.json: 3 files changed since",
        *(f"    {name}" for name in ("fx_fuser/a.py", "kernels_cu/a.cuh", "kernels_cu/b.cuh")),
    ]


def test_a_kernel_depends_on_its_own_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = commit(root, "kernels_cu/attention/a.cuh", "1")
    keep(root / "results", "net.json", {"commit": first})
    (root / "results" / "attention").mkdir()
    keep(root / "results" / "attention", "forward.json", {"commit": first})
    commit(root, "kernels_cu/conv/a.cuh", "2")
    assert run(root, capsys)[1].splitlines() == [
        "attention/forward.json: the code as it is",
        "net.json: 1 file changed since",
    ]


def test_every_dependency_is_there() -> None:
    folders = (stale.ROOT / name for name in ("fx_fuser", "kernels_cu", "patterns"))
    files = [p.relative_to(stale.ROOT).as_posix() for f in folders for p in f.rglob("*.*")]
    lost = {
        pattern
        for patterns in (stale.PRODUCT, *stale.DEPENDS.values())
        for pattern in patterns
        if not any(stale.matches(name, [pattern]) for name in files)
    }
    assert lost == set()
    kept = [str(p.relative_to(results.FOLDER)) for p in results.FOLDER.rglob("*.json")]
    assert [key for key in stale.DEPENDS if not any(stale.matches(n, [key]) for n in kept)] == []


def test_a_row_without_a_commit_and_an_unknown_one_fail(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = commit(root, "fx_fuser/a.py", "1")
    rows = [{"commit": known}, {"commit": None}, {"ms": 1.0}, {"commit": "abcdef0"}]
    keep(root / "results", "rows.json", rows)
    assert run(root, capsys)[0] == 0  # it informs
    status, said, failed = run(root, capsys, "--check")
    assert status == 1
    assert failed.splitlines() == [
        "FAILED rows.json: 2 of 4 rows name no commit",
        "FAILED rows.json: this history has no commit abcdef0",
    ]
    assert "2 of 4 rows name no commit; this history has no commit abcdef0; the code" in said


def test_without_a_history_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "results", "record.json", {"commit": "abcdef0"})
    status, said, failed = run(tmp_path, capsys, "--check")
    assert status == 0 and not failed
    assert said.splitlines() == [
        f"the git history at {tmp_path} is not complete: the age of results is unknown",
        "record.json: not compared",
    ]


def test_a_shallow_clone_is_no_history(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = commit(root, "fx_fuser/a.py", "1")
    commit(root, "fx_fuser/a.py", "2")
    clone = tmp_path_factory.mktemp("clone") / "shallow"
    git(root, "clone", "-q", "--depth", "1", root.as_uri(), str(clone))
    keep(clone / "results", "record.json", {"commit": first})
    status, said, _ = run(clone, capsys, "--check")
    assert status == 0 and "is not complete" in said


def test_another_history_knows_no_commit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(root, "fx_fuser/a.py", "1")
    keep(root / "results", "record.json", {"commit": "abcdef0"})
    status, said, _ = run(root, capsys, "--check")
    assert status == 0 and said.splitlines() == ["record.json: not compared"]


@pytest.mark.parametrize(
    ("record", "commits"),
    [
        ({"a": [{"commit": "x"}, {"v": 1}, {"v": 2}]}, {"x": 1, "": 2}),
        ({"a": [{"new": "x"}, {"new": "y"}]}, {"x": 1, "y": 1}),
        ({"commit": "c", "a": [{"commit": ""}, {"commit": "d"}]}, {"c": 1, "d": 1}),
        ({"commit": "c", "a": [{"v": 1}, {"v": 2}]}, {"c": 1}),
    ],
)
def test_rows_of_a_record(record: object, commits: dict[str, int]) -> None:
    assert stale.commits_of(json.dumps(record)) == commits


def test_every_row_of_the_results_names_a_commit() -> None:
    files = list(results.FOLDER.rglob("*.json"))
    assert len(files) > 10
    nameless = {path.name for path in files if stale.commits_of(path.read_text())[""]}
    assert nameless == set()
