"""Mutants of products of what was cast up, of what Inductor is told and of what is compiled ahead,
for tests/mutants/mutate.py."""

from __future__ import annotations

FILE = "tests/passes/test_provenance.py"
AHEAD = "tests/planning/test_ahead.py"

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
        ("tests/package/test_inductor.py::test_strides_are_padded_only_where_the_user_asks",),
    ),
    (
        "ahead: tails wait for idle cores", "planning/ahead.py",
        "tails[: min(idle, most)]", "tails[:most]",
        (f"{AHEAD}::test_each_text_takes_a_core[1]",),
    ),
    (
        "ahead: each text takes a core", "planning/ahead.py",
        "sched_getaffinity(0)) - len(texts)", "sched_getaffinity(0)) - len(specs)",
        (f"{AHEAD}::test_each_text_takes_a_core[0]",),
    ),
    (
        "kernels: a name is of all texts", "native/kernel_spec.py",
        "parts = [*self.texts, *", "parts = [self.text, *",
        ("tests/native/test_build.py::test_the_name_is_of_all_that_is_loaded",),
    ),
    (
        "ahead: as many structures as the options allow", "planning/ahead.py",
        "tails[: min(idle, most)]", "tails[:idle]",
        (f"{AHEAD}::test_a_tail_waits_where_nothing_is_idle[no structure]",),
    ),
    (
        "ahead: what fails is asked for again", "planning/ahead.py",
        "    except Exception:", "    except ZeroDivisionError:",
        (f"{AHEAD}::test_what_fails_is_left_to_those_who_ask",),
    ),
    (
        "store: what builds beside a failure is kept", "native/store.py",
        "built = [job for job in missing if job not in failed]",
        "built = [] if failed else missing",
        ("tests/native/test_build.py::test_what_builds_beside_a_bad_source_is_kept",),
    ),
    (
        "passes: no kernel where no product comes of the graph", "passes/provenance.py",
        "if has_gemms(gm) else None", "if True else None",
        (f"{AHEAD}::test_no_kernel_is_compiled_for_a_graph_without_a_product[convolution]",),
    ),
)  # fmt: skip
