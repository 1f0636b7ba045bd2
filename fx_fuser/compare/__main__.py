"""python -m fx_fuser.compare: not a command; says what to call instead."""

from __future__ import annotations

import sys

_USAGE = """\
fx_fuser.compare is a function, not a command, since it needs your model. In Python:

    import fx_fuser

    print(fx_fuser.compare(model, *inputs, train=False))
"""


def main() -> int:
    print(_USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
