"""The versions of Python and torch: checked at import, and the same wherever they are named."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest
import torch
from forked import run_script

from fx_fuser import versions
from fx_fuser.errors import VersionError

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0+cu128", "1.13.1", "2.9.1"])
def test_an_older_torch_is_refused(version: str) -> None:
    said = (
        rf"needs torch 2\.11 or later .*this is torch {re.escape(version)}; pip install 'torch>=2"
    )
    with pytest.raises(VersionError, match=said) as failure:
        versions.check(version)
    assert isinstance(failure.value, ImportError)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git123", "2.15.0+cpu", torch.__version__])
def test_a_tested_torch_is_taken_silently(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fx_fuser"):
        versions.check(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0.dev20270101", "main"])
def test_a_newer_torch_is_logged(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fx_fuser"):
        versions.check(version)
    assert version in caplog.text


@pytest.mark.slow
def test_the_import_checks_the_version(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text(
        "import sys, torch\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'fx_fuser']:\n"
        "    del sys.modules[name]\n"
        "torch.__version__ = '2.10.0'\n"
        "try:\n"
        "    import fx_fuser\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
        "assert 'fx_fuser.backend' not in sys.modules\n"
    )
    status, said = run_script(script)
    assert status == 0, said
    assert said.startswith("VersionError fx_fuser needs torch 2.11 or later")


def test_versions_are_those_of_the_package() -> None:
    oldest, newest = (
        ".".join(map(str, v)) for v in (versions.OLDEST_TORCH, versions.NEWEST_TESTED_TORCH)
    )
    assert f'"torch>={oldest}",\n' in PYPROJECT
    assert f"torch {oldest} to {newest}," in " ".join((ROOT / "README.md").read_text().split())


# ---- Python -------------------------------------------------------------------------------------


def test_an_older_python_is_refused() -> None:
    said = r"needs Python 3\.10 or later .*this is Python 3\.9\.18; use a newer Python"
    with pytest.raises(VersionError, match=said):
        versions.check(python_version="3.9.18")


@pytest.mark.parametrize("version", ["3.10.13", "3.13.0", "3.13.0rc1"])
def test_a_tested_python_is_taken_silently(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fx_fuser"):
        versions.check(python_version=version)
    assert not caplog.records


def test_a_newer_python_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fx_fuser"):
        versions.check(python_version="3.14.1")
    assert "Python 3.14.1 is newer than those fx_fuser is tested with, up to 3.13" in caplog.text


@pytest.mark.parametrize("name", ["__init__", "versions", "errors"])
def test_an_older_python_reads_as_far_as_the_check(name: str) -> None:
    text = (ROOT / f"fx_fuser/{name}.py").read_text()
    ast.parse(text, feature_version=(3, 8))


def test_pythons_are_those_of_the_package() -> None:
    oldest = ".".join(map(str, versions.OLDEST_PYTHON))
    assert f'requires-python = ">={oldest}"\n' in PYPROJECT
    assert f"Python {oldest} or later" in " ".join((ROOT / "README.md").read_text().split())
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert named == pythons()


def pythons() -> list[str]:
    """Those that are tested: "3.10" and so on."""
    (major, first), (_, last) = versions.OLDEST_PYTHON, versions.NEWEST_TESTED_PYTHON
    return [f"{major}.{minor}" for minor in range(first, last + 1)]
