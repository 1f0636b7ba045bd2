"""python -m fx_fuser.explain: not a command; says what to call instead."""

from __future__ import annotations

import sys

_USAGE = """\
fx_fuser.explain is a function, not a command, since it needs your model. In Python:

    import fx_fuser

    print(fx_fuser.explain(model, *inputs, train=False))
"""


def main() -> int:
    print(_USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
