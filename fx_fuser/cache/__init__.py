"""The folder of compiled kernels:  python -m fx_fuser.cache [--clear]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fx_fuser.native import store


def _shown(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: nothing is there"
    reason = store.unused_because(folder)
    lines = [f"{folder}: not used, {reason}" if reason else f"{folder}:"]
    found = {"timings": store.timings(folder)}
    for what, suffix in zip(("kernels", "shims"), store.SUFFIXES):
        found[what] = [path for path in store.entries(folder) if path.suffix == suffix]
    for what in ("kernels", "shims", "timings"):
        size = sum(path.lstat().st_size for path in found[what])
        lines.append(f"{len(found[what]):6} {what:8} {size / 1e6:8.1f} MB")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fx_fuser.cache",
        description="Shows the folder of compiled kernels: $FX_FUSER_CACHE_DIR, or the default.",
    )
    parser.add_argument("--clear", action="store_true", help="remove fx_fuser's files in it")
    args = parser.parse_args(arguments)
    folder = store.cache_dir()
    print(_shown(folder))
    if args.clear and folder.exists():
        print(f"removed {store.clear(folder)} files")
    return 0
