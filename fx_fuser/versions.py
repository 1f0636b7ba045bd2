"""fx_fuser's version, and those of torch that it runs with."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version

import torch

from fx_fuser.errors import VersionError

OLDEST_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 15)

try:
    PACKAGE = version("fx_fuser")
except PackageNotFoundError:  # a bare checkout
    PACKAGE = "0.0.0+checkout"

log = logging.getLogger("fx_fuser.versions")


def check(found: str = torch.__version__) -> None:
    """Raises VersionError for a torch that is too old. Of one that is newer than all tested ones a
    line is logged: it may well work.

    A build that precedes a release, say 2.11.0a0 in a container of NVIDIA's, counts as the release.
    """
    release = release_of(found)
    if release is None:
        log.info("torch's version %r is not understood, so not checked", found)
        return
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TORCH, NEWEST_TESTED_TORCH))
    if release < OLDEST_TORCH:
        raise VersionError(
            f"fx_fuser needs torch {oldest} or later (tested up to {newest}), and this is torch "
            f"{found}; pip install 'torch>={oldest}', or uninstall fx_fuser"
        )
    if release > NEWEST_TESTED_TORCH:
        log.info("torch %s is newer than those fx_fuser is tested with, up to %s", found, newest)


def release_of(found: str) -> tuple[int, int] | None:
    """(2, 11) of "2.11.0+cu130"; None of what is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
