"""Mutants of what is done for 16 bits beside kernels: strides, forms of attention, padding."""

from __future__ import annotations

STRIDES = "tests/passes/test_masks_strides.py"
FORMS = "tests/passes/test_attention_forms.py"
PADDING = "tests/passes/test_padding.py"
KEPT = f"{STRIDES}::test_results_keep_eagers_strides_and_values"
VALUES = f"{FORMS}::test_values_gradients_and_strides"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "strides: nobody writes to what has become a view, or returns it",
        "passes/strides.py",
        "return None if any(memory & storages(nodes) for nodes in seen if nodes) else values",
        "return values",
        (f"{KEPT}[returned_merged]", f"{KEPT}[written]"),
    ),
    (
        "strides: of every reader",
        "passes/strides.py",
        "if made is None or traced is None or _kind(made) != _kind(traced):",
        "if False:",
        (f"{KEPT}[viewed]",),
    ),
    (
        "forms: no kernel sees a row whose keys are all hidden",
        "ops/attention.py",
        "return (few | ~seen).contiguous()",
        "return few.contiguous()",
        (f"{FORMS}::test_rows_whose_keys_are_all_hidden[bool]",),
    ),
    (
        "forms: a row whose keys are all hidden is 0",
        "ops/attention.py",
        "if seen is not None:",
        "if False:",
        (
            f"{FORMS}::test_rows_whose_keys_are_all_hidden[bool]",
            f"{FORMS}::test_rows_whose_keys_are_all_hidden[expanded over keys]",
        ),
    ),
    (
        "forms: no mask that adds numbers",
        "passes/attention.py",
        "fakes.mask.dtype is not torch.bool:",
        "False:",
        (f"{FORMS}::test_a_mask_that_adds_numbers_stays_with_the_formula",),
    ),
    (
        "forms: the scale is that of the head without zeros",
        "ops/attention.py",
        "scale=head**-0.5 if call.scale is None else call.scale",
        "scale=call.scale",
        (f"{VALUES}[heads of 12 and a mask]",),
    ),
    (
        "forms: of 16 bits alone",
        "passes/attention.py",
        "or was.dtype not in SIXTEEN_BITS:",
        "or False:",
        (f"{FORMS}::test_what_stays_as_it_is[dtype0-shape0-options0]",),
    ),
    (
        "padding: what the graph returns has no gaps",
        "passes/padding.py",
        "if not any(zeros) or (leaves_gaps and _is_returned(node)):",
        "if not any(zeros):",
        (f"{PADDING}::test_a_result_that_is_returned_is_left",),
    ),
    (
        "padding: in the order of the operand's memory",
        "passes/padding.py",
        "if is_transposed:\n            rows, columns = columns, rows",
        "if False:\n            rows, columns = columns, rows",
        (f"{PADDING}::test_under_autocast",),
    ),
    (
        "padding: a twin of an operand that only gemms read is no copy",
        "passes/padding.py",
        "        elif reader not in gemms:\n            return False",
        "        elif False:\n            return False",
        (f"{PADDING}::test_what_a_copy_costs_counts_where_others_read_the_operand",),
    ),
)
