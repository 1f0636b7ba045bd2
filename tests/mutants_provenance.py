"""Mutants of products of what was cast up, and of what Inductor is told, for tests/mutate.py."""

from __future__ import annotations

FILE = "tests/test_provenance.py"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "provenance: what the user may write to is copied", "passes/provenance.py",
        "if not is_later or get_node_storage(node) not in self.users:", "if True:",
        (f"{FILE}::test_the_operands_may_be_written_to_before_backward",
         f"{FILE}::test_a_weight_that_the_graph_writes_to",
         f"{FILE}::test_a_result_that_is_written_to_before_backward"),
    ),
    (
        "provenance: only of 16 bits", "passes/provenance.py",
        "if not isinstance(value, Tensor) or value.dtype not in dtypes:",
        "if not isinstance(value, Tensor):",
        (f"{FILE}::test_only_the_operand_that_was_cast_from_16_bits[torch.float64]",
         f"{FILE}::test_only_the_operand_that_was_cast_from_16_bits[torch.int8]"),
    ),
    (
        "provenance: both of one dtype", "passes/provenance.py",
        "if right is not None and dtypes[0] == dtypes[1] and right.value.ndim == 2:",
        "if right is not None and dtypes[0] and right.value.ndim == 2:",
        (f"{FILE}::test_two_products_where_the_dtypes_differ",),
    ),
    (
        "provenance: a cast that others read stays", "passes/provenance.py",
        "while not node._erased and not node.users and", "while not node._erased and",
        (f"{FILE}::test_a_cast_that_others_read_stays_for_them",),
    ),
    (
        "options: no padded strides beside our ops", "options.py",
        '_WITH_OWN_OPS = {"comprehensive_padding": False}', "_WITH_OWN_OPS = {}",
        ("tests/test_inductor.py::test_strides_are_padded_only_where_the_user_asks",),
    ),
)  # fmt: skip
