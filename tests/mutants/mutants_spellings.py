"""Mutants of the other spellings of heads, for tests/mutants/mutate.py."""

from __future__ import annotations

PIECES, OTHERS = "passes/head_loss/pieces.py", "passes/head_loss/spellings.py"
EDITS, PASS = "passes/head_loss/edits.py", "passes/head_loss/__init__.py"
TESTS = "tests/passes/test_head_spellings.py"


def _stays(
    name: str, old: str, new: str, body: str, of: str = PIECES
) -> tuple[str, str, str, str, tuple[str]]:
    return f"heads' spellings: {name}", of, old, new, (f"{TESTS}::test_what_stays[{body}]",)


# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    _stays(
        "pieces in order",
        "_Span(joined.dim, end, piece.span.stop, keeps)",
        "_Span(joined.dim, *piece.span[1:3], keeps)",
        "in_another_order",
    ),
    _stays(
        "all pieces are computed alike",
        "        all(first.form.is_as(piece.form) for piece in pieces),\n",
        "",
        "one_row_scaled",
    ),
    _stays(
        "labels of the same rows",
        "all(span == self._spans[0] for span in self._spans)",
        "True",
        "labels_in_another_order",
    ),
    _stays(
        "nothing else reads a piece",
        "        all(inner.issuperset({*n.users} - {node, *joined.writes}) for n in inner),\n",
        "",
        "a_row_is_read_too",
    ),
    _stays(
        "pieces are put where they come from",
        "        _check(span is None or span == piece.span)\n",
        "",
        "elsewhere",
    ),
    _stays(
        "the same grad mode",
        "_check(all(view.region[n] == region for n in read))",
        "pass",
        "one_row_without_a_gradient",
    ),
    _stays(
        "nothing is written in between",
        "(written - own).isdisjoint({None, *(storages(sources) - own)})",
        "True",
        "labels_written_between_rows",
    ),
    _stays(
        "all are written before one is read",
        "users[: len(writes)] == writes",
        "True",
        "read_too_early",
    ),
    _stays("nothing else is written", "writers == writes, ", "", "written_twice"),
    _stays(
        "logits are read once scaled",
        "(seen < at) if view.order[reader] > at",
        "False if view.order[reader] > at",
        "read_by_another_name",
        OTHERS,
    ),
    _stays(
        "and not before", "> at else not is_view", "> at else False", "scaled_after_it_is_read",
        OTHERS,
    ),
    _stays(
        "classes in the second dimension",
        "if not _is_same_view(value_of(moved), value.movedim(-1, 1)):",
        "if False:",
        "classes_first",
        OTHERS,
    ),
    _stays(
        "no gradient behind a view",
        "return is_view and all(_is_aside(view, one) for one in view.readers[reader])",
        "return is_view",
        "a_view_is_read_too",
        PASS,
    ),
    _stays(
        "labels as an index, of all rows",
        "if not statically_known_true(target.shape[0] == count) or not _counts(rows, count):",
        "if not statically_known_true(target.shape[0] == count):",
        "rows_backwards",
        OTHERS,
    ),
    (
        "heads' spellings: an index below 0 counts from the end",
        OTHERS,
        "torch.where, (below, from_end, labels)",
        "torch.where, (below, labels, labels)",
        (f"{TESTS}::test_under_autocast[policy_gradient]",),
    ),
    (
        "heads' spellings: what is not taken is put back",
        EDITS,
        "        if one not in kept:\n",
        "        if False:\n",
        (f"{TESTS}::test_a_head_that_stays_is_as_written",),
    ),
)  # fmt: skip
