"""The mutants of the views that move below a tail, for tests/mutate.py."""

from __future__ import annotations

VIEWS = "tests/test_views.py"
MOVES, STAY = f"{VIEWS}::test_views_move_below_the_tail", f"{VIEWS}::test_views_that_stay"
PUT_BACK = f"{VIEWS}::test_what_is_not_fused_is_put_back"
GENERATED = f"{VIEWS}::test_generated_programs"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "views: an operation in place", "graph/sink.py",
        "or called_in_place(node):", "or False:",
        (f"{STAY}[in place-train]",),
    ),
    (
        "views: memory that something writes", "graph/sink.py",
        "not memory & {None, *view.written_at}", "True",
        (f"{STAY}[written later-eval]",),
    ),
    (
        "views: another region", "graph/sink.py",
        "and all(view.region[o] == view.region[node] for o in operands)", "",
        (f"{STAY}[detached view-train]",),
    ),
    (
        "views: a result larger than the view", "graph/sink.py",
        "not same_sizes(shown.shape, value.shape)", "False",
        (f"{STAY}[grown shape-train]",),
    ),
    (
        "views: a large copy", "graph/reindex.py",
        "if not constant or not all(is_same(size, 1) for size in others):", "if not constant:",
        (f"{STAY}[rotary-train]",),
    ),
    (
        "views: a reshape that copies", "graph/reindex.py",
        "if x.dtype != y.dtype or not storages((source,)) & storages((node,)) - {None}:",
        "if x.dtype != y.dtype:",
        (f"{STAY}[copied-train]",),
    ),
    (
        "views: an order undone", "graph/reindex.py",
        "undone.permute(tuple(map(step.order.index, range(len(step.order)))))",
        "undone.permute(step.order)",
        (f"{MOVES}[permute-train]",),
    ),
    (
        "views: an operand that is repeated", "graph/reindex.py",
        "elif not same_sizes(mine, after):", "elif False:",
        (f"{MOVES}[a scale of each head-train]",),
    ),
    (
        "views: other views of one value", "graph/sink.py",
        "if other is not None and same_steps(other.steps, viewed.steps):", "if other is not None:",
        (GENERATED,),
    ),
    (
        "views: what is not fused is put back", "backend.py",
        "change.restore(results)", "pass",
        (f"{PUT_BACK}[none]",),
    ),
    (
        "views: what is put back has its value", "graph/sink.py",
        'node.meta["example_value"] = move.value\n', "pass\n",
        (f"{PUT_BACK}[none]",),
    ),
    (
        "views: z's views behind what is fused", "graph/sink.py",
        "move.show(results[node])", "return results[node]",
        (GENERATED,),
    ),
)  # fmt: skip
