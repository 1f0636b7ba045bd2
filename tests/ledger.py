"""Which tests marked `gpu` have passed, on which GPU, and whether with the code as it is now.

    FX_FUSER_COMMIT=… python -m pytest -m gpu --ledger tests/gpu_ledger.json   # on a GPU: record
    python tests/ledger.py                                                     # anywhere: list

CI has no GPU, so it cannot run them. The ledger says of each when it last passed, with a hash of
what it depends on: its own file, the `*checks.py` beside it, `SHARED`, and the folders that
`COVERS` names for its file, but for `.md`, comments and docstrings. That is a rule, not a proof: a
change elsewhere, say of how a graph is matched, may break one that is not listed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "tests" / "gpu_ledger.json"

SHARED = ("fx_fuser/anchors", "fx_fuser/native", "fx_fuser/ops", "kernels_cu/common",
          "kernels_cu/host", "kernels_cu/nvrtc")  # fmt: skip
_LINEAR, _CONV = ("kernels_cu/linear",), ("kernels_cu/conv",)
# What the tests of a file depend on beside SHARED; of another file on all of `_REST`.
COVERS: dict[str, tuple[str, ...]] = {
    "tests/kernels/test_linear_dense_sm90.py": _LINEAR,
    "tests/kernels/test_linear_sm90.py": _LINEAR,
    "tests/kernels/test_split_planes.py": _LINEAR,
    "tests/kernels/test_conv_backward_sm90.py": _CONV,
    "tests/kernels/test_conv_sm90.py": _CONV,
    "tests/kernels/test_narrow_sm90.py": _CONV,
    "tests/kernels/test_depthwise.py": _CONV,
    "tests/kernels/test_implicit.py": _CONV,
    "tests/kernels/test_stem.py": _CONV,
    "tests/kernels/test_epilogue_math.py": (),
}
_REST = ("fx_fuser/graph", "fx_fuser/passes", "fx_fuser/planning", "fx_fuser/verify", "kernels_cu",
         "patterns")  # fmt: skip


@functools.cache
def product_hash(test_file: str, root: Path = ROOT) -> str:
    """Of the files that the tests of this file depend on, by the rule above."""
    from benchmarks.stale import code  # each run of pytest imports this file

    found = hashlib.sha256()
    files = {root / test_file, *(root / test_file).parent.glob("*checks.py")}
    for folder in {*SHARED, *COVERS.get(test_file, _REST)}:
        files.update(f for f in (root / folder).rglob("*") if f.is_file())
    for file in sorted(files):
        if file.suffix not in (".md", ".pyc"):
            text = code(file.name, file.read_text())
            found.update(f"{file.relative_to(root)}\0{text}\0".encode())
    return found.hexdigest()[:16]


def here() -> dict[str, str]:
    """What a run has in common. FX_FUSER_COMMIT: of a copy that has no .git."""
    from benchmarks.run import commit_here

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    commit = os.environ.get("FX_FUSER_COMMIT") or commit_here() or "unknown"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"commit": commit, "gpu": gpu, "torch": torch.__version__, "date": today}


Entries = dict[str, dict[str, str]]  # test → what `here` says of its last run that passed, and hash


def read(path: Path) -> Entries:
    """In the file, what runs have in common stands once."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    runs, tests = stored["runs"], stored["tests"]
    return {test: {**runs[run], "hash": seen} for test, (run, seen) in tests.items()}


def write(path: Path, entries: Mapping[str, Mapping[str, str]]) -> None:
    runs: list[dict[str, str]] = []
    tests: dict[str, tuple[int, str]] = {}
    for test, entry in sorted(entries.items()):
        run = {name: value for name, value in entry.items() if name != "hash"}
        if run not in runs:
            runs.append(run)
        tests[test] = runs.index(run), entry["hash"]
    lines = [f"  {json.dumps(test)}: {json.dumps(seen)}" for test, seen in tests.items()]
    made = ",\n".join(lines)
    path.write_text(f'{{"runs": {json.dumps(runs, indent=1)},\n"tests": {{\n{made}\n}}}}\n')


class Recorder:
    """A pytest plugin: writes the tests marked `gpu` that passed to the ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Entries = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if "gpu" not in report.keywords:
            return
        if report.when == "call" and report.passed:
            file = report.nodeid.partition("::")[0]
            self.entries[report.nodeid] = {**_here(), "hash": product_hash(file)}
        elif report.failed:  # a teardown's, too
            self.entries.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        write(self.path, {**read(self.path), **self.entries})


_here = functools.cache(here)


class _Collected:
    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


def stale(tests: Iterable[str], entries: Entries, root: Path = ROOT) -> dict[str, list[str]]:
    """Function → why each of its tests that have not passed with this code is listed."""
    found: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        function, entry = test.partition("[")[0], entries.get(test)
        if entry is None:
            found[function].append("never passed")
        elif entry["hash"] != product_hash(test.partition("::")[0], root):
            passed = "passed with {commit} on {gpu}, torch {torch}, {date}".format(**entry)
            found[function].append(f"{passed}; what it depends on changed since")
    return found


def main() -> int:
    """Says what is stale; that is no failure, since who has no GPU cannot mend it."""
    collected = _Collected()
    arguments = ["--collect-only", "-qq", "-m", "gpu", str(ROOT / "tests")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(arguments, plugins=[collected])
    if code != pytest.ExitCode.OK:
        print(f"{said.getvalue()}\npytest could not collect the tests marked gpu: {code!r}")
        return 1
    entries = read(LEDGER)
    listed = stale(collected.tests, entries)
    for function, reasons in listed.items():
        for reason in dict.fromkeys(reasons):
            print(f"{reasons.count(reason):5} of {function}: {reason}")
    left = len(collected.tests) - sum(map(len, listed.values()))
    print(f"{left} of {len(collected.tests)} tests marked gpu passed with this code")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
