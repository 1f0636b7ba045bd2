"""The built-in patterns: one file each, found here; there is no list to edit.

A file defines `source` (see `fx_fuser.graph.match.trace`), and may define `check(match)`.
"""

from __future__ import annotations

import importlib
import pkgutil

from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.match.trace import trace

if __name__ != "fx_fuser.patterns":
    raise ImportError(
        f"the patterns were imported as {__name__!r}, which would make a second registry; "
        "import fx_fuser.patterns instead"
    )


def names() -> frozenset[str]:
    """The names of the built-in patterns."""
    return frozenset(info.name for info in pkgutil.iter_modules(__path__))


def discover() -> list[Pattern]:
    """Every pattern of this folder, traced, largest first."""
    found = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found.append(trace(module.source, getattr(module, "check", None), info.name))
    return sorted(found, key=lambda p: (-p.size, p.name))
