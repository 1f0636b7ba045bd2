"""python -m fx_fuser: is this machine fit for fx_fuser, and is what runs there right?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fx_fuser import build, cache
from fx_fuser.doctor.diagnosis import diagnose

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"cache": cache.main, "build": build.main}
_EPILOG = """\
commands, each with a --help of its own:
  cache    shows the folder of compiled kernels; --clear empties it
  build    compiles kernels ahead of their first use
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a line says FAIL."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        return COMMANDS[given[0]](given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m fx_fuser",
        description="Checks this machine, lists what its GPU gets, and tests it. The text shows as "
        "few of your paths as possible, so that you can paste it into a bug report.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--no-test", action="store_true", help="run no kernel")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also time each main loop against the library, and write everything to FILE as JSON, "
        "to attach to an issue",
    )
    chosen = parser.parse_args(given)
    if chosen.report is not None and chosen.no_test:
        parser.error("--report needs the tests; leave out --no-test")
    if chosen.report is not None:  # before minutes of tests
        try:
            chosen.report.touch()
        except OSError as error:
            parser.error(f"--report: {error}; give a writable file")

    def say(line: str) -> None:
        if not chosen.json:
            print(line, flush=True)

    made = diagnose(not chosen.no_test, chosen.report is not None, say)
    if chosen.json:
        print(made.to_json())
    if chosen.report is not None:
        chosen.report.write_text(made.to_json() + "\n")
        say(f"written to {chosen.report}; attach it to an issue")
    return made.status


if __name__ == "__main__":
    sys.exit(main())
