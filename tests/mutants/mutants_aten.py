"""Mutants of what reads ATen's overloads, for tests/mutants/mutate.py."""

from __future__ import annotations

RULES = "tests/graph/test_aten_rules.py"
MEANS = f"{RULES}::test_what_an_overload_means"
OPAQUE = f"{RULES}::test_a_form_that_is_not_known_is_opaque"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "aten: arguments are bound by name", "graph/read/aten.py",
        "        if inspect.Parameter.VAR_POSITIONAL in kinds:", "        if True:",
        (f"{MEANS}[rsub, alpha by place]", f"{MEANS}[self by name]"),
    ),
    (
        "aten: of this library alone", "graph/read/aten.py",
        'overload.namespace != "aten" or ', "",
        (f"{RULES}::test_an_operation_of_another_library_is_opaque",),
    ),
    (
        "aten: a transpose in place", "graph/read/aten.py",
        " or torch.Tag.inplace_view in overload.tags", "",
        (f"{OPAQUE}[a transpose in place]",),
    ),
    (
        "aten: a transposed convolution", "graph/read/aten.py",
        " or transposed is not False", "",
        (f"{OPAQUE}[a transposed convolution]",),
    ),
    (
        "aten: in place by the schema", "graph/read/nodes.py",
        "        return _returns_what_it_writes(target)", "        return False",
        (f"{RULES}::test_an_operation_in_place_is_known_by_its_schema",
         f"{RULES}::test_a_name_from_before_an_operation_in_place[by place]",
         f"{RULES}::test_a_name_from_before_an_operation_in_place[by name]"),
    ),
    (
        "aten: statistics that no schema tells", "graph/read/nodes.py",
        'names = [] if reads else ["running_mean", "running_var"]', "names = []",
        (f"{RULES}::test_running_statistics_that_are_written[node0-2]",
         f"{RULES}::test_running_statistics_that_are_written[node2-2]"),
    ),
    (
        "aten: a check that may fail", "graph/read/aten.py",
        "            if named(*node.args, **node.kwargs):", "            if True:",
        (f"{RULES}::test_a_check_that_may_fail_stays[said3-True]",),
    ),
    (
        "aten: a norm without a convolution stays", "graph/prepare/decompose.py",
        "            _into_item(node)", "            pass",
        ("tests/package/test_aten_graphs.py::test_decomposed_norm_without_a_convolution_stays",),
    ),
)  # fmt: skip
