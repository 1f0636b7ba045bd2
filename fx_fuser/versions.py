"""fx_fuser's version, and those of Python and torch that it runs with."""

from __future__ import annotations

import logging
import platform
import re
from importlib.metadata import PackageNotFoundError, version

import torch

from fx_fuser.errors import VersionError

OLDEST_PYTHON = (3, 10)
NEWEST_TESTED_PYTHON = (3, 13)
OLDEST_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 15)

try:
    PACKAGE = version("fx_fuser")
except PackageNotFoundError:  # a bare checkout
    PACKAGE = "0.0.0+checkout"

log = logging.getLogger("fx_fuser.versions")


def check(torch_version: str = torch.__version__, python_version: str = "") -> None:
    """Raises VersionError if Python or torch is too old. If one is newer than all tested versions,
    it logs a line: it may well work.

    A pre-release build, say 2.11.0a0 in an NVIDIA container, counts as the release.

    Args:
        python_version: by default the running interpreter's.
    """
    python_version = python_version or platform.python_version()
    remedy = "use a newer Python"
    _check("Python", python_version, OLDEST_PYTHON, NEWEST_TESTED_PYTHON, remedy)
    remedy = f"pip install 'torch>={_dotted(OLDEST_TORCH)}'"
    _check("torch", torch_version, OLDEST_TORCH, NEWEST_TESTED_TORCH, remedy)


def _check(
    name: str, found: str, oldest: tuple[int, int], newest: tuple[int, int], remedy: str
) -> None:
    release = release_of(found)
    if release is None:
        log.info("%s's version %r cannot be parsed, so it is not checked", name, found)
        return
    if release < oldest:
        raise VersionError(
            f"fx_fuser needs {name} {_dotted(oldest)} or later (tested up to {_dotted(newest)}), "
            f"and this is {name} {found}; {remedy}, or uninstall fx_fuser"
        )
    if release > newest:
        text = "%s %s is newer than those fx_fuser is tested with, up to %s"
        log.info(text, name, found, _dotted(newest))


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def release_of(found: str) -> tuple[int, int] | None:
    """(2, 11) of "2.11.0+cu130"; None if it is not a version."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
