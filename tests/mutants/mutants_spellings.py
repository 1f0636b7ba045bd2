"""Mutants of the other spellings of heads, for tests/mutants/mutate.py."""

from __future__ import annotations

PIECES, OTHERS = "passes/head_loss/pieces.py", "passes/head_loss/spellings.py"
EDITS, PASS = "passes/head_loss/edits.py", "passes/head_loss/__init__.py"
TESTS = "tests/passes/test_head_spellings.py"


def _stays(
    name: str, old: str, new: str, body: str, of: str = PIECES
) -> tuple[str, str, str, str, tuple[str]]:
    return f"heads in pieces: {name}", of, old, new, (f"{TESTS}::test_what_stays[{body}]",)


# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    _stays("in order", "_Span(joined.dim, end, ", "piece.span[:1] + (", "in_another_order"),
)
