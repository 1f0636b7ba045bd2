"""Every kernel with example epilogues, for every architecture:  python -m fx_fuser.build"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable, Sequence

from fx_fuser import kernels
from fx_fuser.errors import BuildError
from fx_fuser.kernels import split
from fx_fuser.native.binaries import batch_stats_source, cubins, shim
from fx_fuser.native.kernel_spec import texts_of

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # what --all-archs compiles for
# And the split product also for these: its shared memory and registers differ there.
SPLIT_ARCHS = ("sm_86", "sm_89", "sm_90")


def _sources(arch: str, one_each: bool) -> list[str]:
    """The sources to compile for an architecture."""
    if arch in SPLIT_ARCHS:
        return texts_of(split.examples()[: 1 if one_each else 2])
    specs = kernels.examples(arch)
    if one_each:  # the first
        loops = {(spec.family.header, spec.family.macro): spec for spec in reversed(specs)}
        specs = list(loops.values())
    return [batch_stats_source(), *texts_of(specs)]


def _arch(name: str) -> str:
    if not re.fullmatch(r"sm_\d{2,3}[af]?", name):
        raise argparse.ArgumentTypeError(f"{name!r} is not an architecture; give one, say sm_90a")
    return name


def _attempt(label: str, action: Callable[[], object]) -> bool:
    started = time.perf_counter()
    try:
        action()
    except BuildError as error:
        print(f"FAIL  {label}\n{error}", flush=True)
        return False
    print(f"ok    {label} ({time.perf_counter() - started:.1f} s)", flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles everything and prints a line each; returns 0 if all of it compiled."""
    parser = argparse.ArgumentParser(prog="python -m fx_fuser.build", description=main.__doc__)
    parser.add_argument(
        "--all-archs",
        action="store_true",
        help=f"for {', '.join(ARCHS)}; the split product also for {', '.join(SPLIT_ARCHS)}",
    )
    help_arch = "for this architecture, say sm_90a"
    parser.add_argument("--arch", action="append", default=[], type=_arch, help=help_arch)
    parser.add_argument("--no-shim", action="store_true", help="only kernels, without g++")
    parser.add_argument("--one-each", action="store_true", help="one kernel for each main loop")
    chosen = parser.parse_args(arguments)

    passed = [] if chosen.no_shim else [_attempt("shim", shim)]
    for arch in (*chosen.arch, *(ARCHS + SPLIT_ARCHS if chosen.all_archs else ())):
        sources = _sources(arch, chosen.one_each)
        compile_all = functools.partial(cubins, sources, arch)
        passed.append(_attempt(f"{arch}: {len(sources)} sources", compile_all))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
