"""What `mypy --strict` says of a user's file: fx_fuser's types are known, and faults are found."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fx_fuser

ROOT = Path(__file__).resolve().parents[2]
USERS = """\
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx_fuser
from fx_fuser import BuildError, FxFuserError, OptionError, PatternError, Report, SiteReport
from fx_fuser import VersionError
from fx_fuser.testing import assert_equivalent, assert_fused


def linear_tanh_mul(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight, bias)) * a


def first(sites: list[SiteReport]) -> str:
    return sites[0].where if sites else fx_fuser.__version__


model, x = nn.Linear(4, 4), torch.randn(2, 4)
pattern = fx_fuser.register_pattern(linear_tanh_mul, check=lambda match: None, name="mine")
names: list[str] = [p.name for p in fx_fuser.registered_patterns()]
report: Report = fx_fuser.explain(model, x, train=False, options={"auto": False}, kwargs={})
text: str = str(report) + report.to_json() + report.to_html() + first(report.fused)
again: Report = Report.from_json(report.to_json())
found: fx_fuser.Comparison = fx_fuser.compare(model, x, train=False, seconds=0.1)
said: str = str(found) + found.to_json() + found.to_html() + found.verdict if found.use else ""
devices: list[str] = report.header.devices if report.header else []
with fx_fuser.installed({"fp32": "ieee"}):
    fx_fuser.install()
fx_fuser.install({"fp32": "ieee"})
fx_fuser.uninstall()
program: torch.export.ExportedProgram = fx_fuser.fuse_exported(
    torch.export.export(model, (x,)), options={"strict": True}
)
assert_fused(model, (x,), {"mine": 0}, train=True, options={"strict": True})
assert_equivalent(model, (x,), train=True)
try:
    torch.compile(model, backend="fx_fuser")(x)
except (BuildError, OptionError, PatternError, VersionError) as error:
    failure: FxFuserError = error
"""
FAULTS = """\
import fx_fuser

fx_fuser.install(fp32="ieee")
number: int = fx_fuser.explain(len).summary
fx_fuser.register_pattern(3)
fx_fuser.explain(len, train="eval")
with fx_fuser.installed() as nothing:
    pass
fx_fuser.Report().fusd
"""


def test_py_typed_is_shipped() -> None:
    assert (ROOT / "fx_fuser/py.typed").exists()
    assert re.search(r'^"fx_fuser" = \[.*"py\.typed"', (ROOT / "pyproject.toml").read_text(), re.M)


def test_the_users_file_uses_every_public_name() -> None:
    used = {node.attr for node in ast.walk(ast.parse(USERS)) if isinstance(node, ast.Attribute)}
    imported = {n.name for n in ast.walk(ast.parse(USERS)) if isinstance(n, ast.alias)}
    assert set(fx_fuser.__all__) <= used | imported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if fx_fuser were installed: to mypy each folder of PYTHONPATH is like site-packages."""
    pytest.importorskip("mypy")
    made = tmp_path_factory.mktemp("typed")
    (made / "packages").mkdir()
    (made / "packages/fx_fuser").symlink_to(ROOT / "fx_fuser")
    return made


def mypy(folder: Path, code: str) -> list[str]:
    """The lines that it prints."""
    (folder / "users.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "users.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "packages")},
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow  # mypy reads all of torch
def test_mypy_strict_passes_a_users_file(folder: Path) -> None:
    assert mypy(folder, USERS) == []


@pytest.mark.slow
def test_mypy_strict_finds_faults_in_a_users_file(folder: Path) -> None:
    found = {int(line.split(":")[1]) for line in mypy(folder, FAULTS) if ": error: " in line}
    assert found == {3, 4, 5, 6, 9}
