"""The mutants of the views that move below a tail, for tests/mutants/mutate.py."""

from __future__ import annotations

VIEWS = "tests/graph/test_views.py"
MOVES, STAY = f"{VIEWS}::test_views_move_below_the_tail", f"{VIEWS}::test_views_that_stay"
OF_PRODUCTS = "tests/graph/test_views_of_products.py"
PUT_BACK = f"{VIEWS}::test_what_is_not_fused_is_put_back"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "views: memory that something writes", "graph/prepare/sink.py",
        "not memory & {None, *view.written_at}", "True",
        (f"{STAY}[written later-eval]",),
    ),
    (
        "views: another region", "graph/prepare/sink.py",
        "and all(view.region[o] == view.region[node] for o in operands)", "",
        (f"{STAY}[detached view-train]",),
    ),
    (
        "views: a result larger than the view", "graph/prepare/sink.py",
        "not same_sizes(shown.shape, value.shape)", "False",
        (f"{STAY}[grown shape-train]",),
    ),
    (
        "views: a large copy", "graph/prepare/reindex.py",
        "if not constant or not all(is_same(size, 1) for size in others):", "if not constant:",
        (f"{STAY}[rotary-train]",),
    ),
    (
        "views: another dtype", "graph/prepare/reindex.py",
        "if x.dtype != y.dtype:", "if False:",
        (f"{VIEWS}::test_a_view_of_another_dtype_stays",),
    ),
    (
        "views: an order undone", "graph/prepare/reindex.py",
        "undone.permute(tuple(map(step.order.index, range(len(step.order)))))",
        "undone.permute(step.order)",
        (f"{MOVES}[permute-train]",),
    ),
    (
        "views: an operand that is repeated", "graph/prepare/reindex.py",
        "elif not same_sizes(mine, after):", "elif False:",
        (f"{MOVES}[a scale of each head-train]",),
    ),
    (
        "views: other views of one value", "graph/prepare/sink.py",
        "if other is not None and same_steps(other.steps, viewed.steps):", "if other is not None:",
        (f"{STAY}[two views-train]",),
    ),
    (
        "views: what is not fused is put back", "graph/prepare/prepare.py",
        "moved.restore(results)", "pass",
        (f"{PUT_BACK}[none]",),
    ),
    (
        "views: what is put back has its value", "graph/prepare/sink.py",
        'node.meta["example_value"] = move.value\n', "pass\n",
        (f"{PUT_BACK}[none]",),
    ),
    (
        "views: z's views behind what is fused", "graph/prepare/sink.py",
        "move.show(results[node])", "return results[node]",
        (f"{VIEWS}::test_an_operation_behind_what_is_fused_reads_its_views",),
    ),
    (
        "views: a moved operation that a product reads", "graph/prepare/sink.py",
        "            if readers:\n", "            if False:\n",
        (f"{OF_PRODUCTS}::test_the_factor_is_seen_the_right_way_round[square-clip]",),
    ),
    (
        "views: a view that went with the product", "graph/prepare/sink.py",
        "not move.after or move.after[-1]._erased:", "not move.after:",
        (f"{OF_PRODUCTS}::test_the_factor_is_seen_the_right_way_round[square-tail of the first]",),
    ),
    (
        "views, saved: an operand of a c that is computed again", "planning/case.py",
        " and self.match.written_after() is None", "",
        ("tests/ops/test_saved_operands.py::test_where_c_is_computed_again_its_operands_stay",),
    ),
)  # fmt: skip
