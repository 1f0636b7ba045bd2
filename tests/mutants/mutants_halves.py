"""Mutants of what is done for 16 bits beside kernels: strides, forms of attention, padding."""

from __future__ import annotations

STRIDES = "tests/passes/test_masks_strides.py"
FORMS = "tests/passes/test_attention_forms.py"
BIAS = "tests/passes/test_attention_bias.py"
ROWS = f"{BIAS}::test_rows_that_a_kernel_is_not_asked_for"
BOUNDS = "tests/passes/test_bounds.py"
PADDING = "tests/passes/test_padding.py"
UNALIGNED = "tests/passes/test_unaligned_pass.py"
KEPT = f"{STRIDES}::test_results_keep_eagers_strides_and_values"
VALUES = f"{FORMS}::test_values_gradients_and_strides"
APART = f"{FORMS}::test_gradients_reach_the_kernel_with_the_strides_of_its_result"

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
        "few = (few | ~rows).contiguous()",
        "few = few.contiguous()",
        (f"{FORMS}::test_rows_whose_keys_are_all_hidden[bool]",),
    ),
    (
        "forms: shared until the mask is written to",
        "passes/attention.py",
        "if is_written or key not in forms:",
        "if key not in forms:",
        (
            f"{BIAS}::test_what_layers_have_in_common_is_formed_once[written_between-2-True]",
            f"{BIAS}::test_what_layers_have_in_common_is_formed_once[written_between-2-False]",
        ),
    ),
    (
        "forms: shared within a region",
        "passes/attention.py",
        "key = (mask_key, region, str(form_key))",
        "key = (mask_key, str(form_key))",
        (
            f"{BIAS}::test_what_layers_have_in_common_is_formed_once"
            "[without_gradients_and_with-2-True]",
        ),
    ),
    (
        "forms: shared by views of one grad mode",
        "passes/attention.py",
        "mask_key = mask.name if region.settings else _view_key(mask)",
        "mask_key = _view_key(mask)",
        (
            f"{BIAS}::test_what_layers_have_in_common_is_formed_once"
            "[sliced_without_gradients_and_with-2-True]",
        ),
    ),
    (
        "forms: shared",
        "passes/attention.py",
        "if is_written or key not in forms:",
        "if True:",
        (f"{BIAS}::test_what_layers_have_in_common_is_formed_once[shared-1-False]",),
    ),
    (
        "forms: a row whose keys are all hidden is 0",
        "ops/attention.py",
        "if rows is not None:",
        "if False:",
        (
            f"{FORMS}::test_rows_whose_keys_are_all_hidden[bool]",
            f"{FORMS}::test_rows_whose_keys_are_all_hidden[expanded over keys]",
        ),
    ),
    (
        "bias: no kernel adds log(S) to a large number",
        "ops/attention.py",
        "few = few - far",
        "few = few - 0 * far",
        (f"{BIAS}::test_what_kernels_add_is_near_0_and_exact[-1000000000.0]",),
    ),
    (
        "bias: no score beside what absorbs it",
        "ops/attention.py",
        "absorbed = (largest.abs() >= _ABSORBING)",
        "absorbed = (largest.abs() >= torch.inf)",
        (f"{ROWS}[-3.3895313892515355e+38-nothing]", f"{ROWS}[-1e+20-all]"),
    ),
    (
        "bias: keys have gradients where the query is 0",
        "ops/attention.py",
        "torch.where(rows, q, 0.0)",
        "torch.where(rows, zero, 0.0)",
        (f"{ROWS}[-3.3895313892515355e+38-but the mask]",),
    ),
    (
        "bias: a trained one needs aligned tensors",
        "ops/attention.py",
        "return trained and tensor.itemsize == 2",
        "return False and tensor.itemsize == 2",
        (f"{BIAS}::test_a_learned_bias[a slice that is not aligned]",),
    ),
    (
        "bias: none that a kernel would round",
        "passes/attention.py",
        "if not _is_taken_as_it_is(",
        "if False and not _is_taken_as_it_is(",
        (f"{BIAS}::test_an_fp32_mask_that_a_kernel_would_round_stays_with_the_formula[<lambda>0]",),
    ),
    (
        "bounds: what is written to is not known",
        "passes/bounds.py",
        "if None in memory or memory & known.written:",
        "if None in memory:",
        (f"{BOUNDS}::test_not_known_to_be_moderate[filled and written to]",),
    ),
    (
        "bounds: a row's only moderate number may be hidden",
        "passes/bounds.py",
        "return self.is_near and -math.inf not in self.numbers",
        "return self.is_near",
        (f"{BOUNDS}::test_not_known_to_be_moderate[the least beside what is hidden]",),
    ),
    (
        "bounds: what was a column is no row",
        "passes/bounds.py",
        "keeps = name in _BY_ROWS and was",
        "keeps = was",
        (f"{BOUNDS}::test_not_known_to_be_moderate[rows that were columns]",),
    ),
    (
        "forms: the scale is that of the head without zeros",
        "ops/attention.py",
        "if q.shape[-1] != head and scale is None:",
        "if False:",
        (f"{VALUES}[heads of 12 and a mask]",),
    ),
    (
        "forms: a gradient has the strides of the result",
        "ops/attention.py",
        "if made.requires_grad:",
        "if False:",
        (f"{APART}[form-with other strides-aot_eager]",),
    ),
    (
        "forms: where a mask was removed, too",
        "passes/attention.py",
        "if mask_removed and was.requires_grad:",
        "if False:",
        (
            f"{APART}[causal-with other strides-inductor]",
            f"{APART}[causal-with other strides-aot_eager]",
        ),
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
        "pads = not (leaves_gaps and _is_returned(node))",
        "pads = True",
        (f"{PADDING}::test_a_result_that_is_returned_is_not_padded[2-24-False]",),
    ),
    (
        "padding: a compute-bound gemm that cannot be padded stays",
        "passes/unaligned.py",
        "if is_bandwidth_bound(m, n, k):",
        "if True:",
        (f"{PADDING}::test_a_result_that_is_returned_is_not_padded[64-512-True]",),
    ),
    (
        "unaligned: what is added is a vector of columns",
        "passes/unaligned.py",
        "return tuple(value.shape) == (right.size[-1],) and value.stride() == (1,)",
        "return True",
        (f"{UNALIGNED}::test_what_it_does_not_take",),
    ),
    (
        "unaligned: a batch adds nothing",
        "passes/unaligned.py",
        "    if len(right.size) > 2:\n        return False\n",
        "",
        (f"{UNALIGNED}::test_what_it_does_not_take",),
    ),
    (
        "unaligned: where an operand begins",
        "planning/bench_ops.py",
        "offset = (hint_of(tensor.storage_offset()) or 0) % max(16 // dtype.itemsize, 1)",
        "offset = 0",
        (f"{UNALIGNED}::test_an_operand_that_begins_anywhere_has_another_form",),
    ),
    (
        "unaligned: no kernel where none can be built",
        "passes/padding.py",
        "if plan.unavailable(device) is None:",
        "if True:",
        (f"{UNALIGNED}::test_gemms_keep_only_kernels_that_are_there[True]",),
    ),
    (
        "unaligned: rows or k are adjacent",
        "kernels/unaligned.py",
        "    elif rows == 1 or stride[-2] == 1:\n",
        "    elif True:\n",
        (f"{UNALIGNED}::test_forms",),
    ),
    (
        "unaligned: aligned lines begin at multiples of 16 bytes, wherever the first one does",
        "kernels/unaligned.py",
        "for step in (*steps, offset)",
        "for step in steps",
        (f"{UNALIGNED}::test_forms",),
    ),
    (
        "unaligned: the library where a padded gemm is faster, though only Inductor may pad it",
        "passes/padding.py",
        "min(library, padded)",
        "library",
        (f"{UNALIGNED}::test_the_fastest_is_taken",),
    ),
    (
        "padding: zeros are free only where all readers of the operand are padded",
        "passes/padding.py",
        "if left == padded:",
        "if True:",
        (f"{UNALIGNED}::test_padding_is_free_only_if_all_readers_are_padded[None]",),
    ),
    (
        "padding: a gemm that cannot be timed costs itself alone",
        "passes/padding.py",
        "except Exception as error:  # only this gemm is left alone",
        "except ZeroDivisionError as error:",
        (f"{UNALIGNED}::test_a_gemm_that_cannot_be_timed_does_not_cost_the_others[False]",),
    ),
    (
        "padding: so does a kernel that is wrong",
        "passes/padding.py",
        "except bench_ops.DisagreementError as error:",
        "except ZeroDivisionError as error:",
        (f"{UNALIGNED}::test_a_kernel_that_is_wrong_does_not_cost_padding",),
    ),
    (
        "combs: all of them are compared with the library",
        "planning/bench_ops.py",
        "(1 + library.numel() // _COMPARED) | 1",
        "1 + library.numel() // _COMPARED",
        ("tests/planning/test_contest.py::test_of_each_eighth_row_some_are_compared[1]",),
    ),
    (
        "combs: the matrix along which the offsets move is aligned",
        "kernels/unaligned.py",
        "form_b & ALIGNED and is_third_aligned",
        "form_b & ALIGNED",
        (f"{UNALIGNED}::test_gemms_by_combs[sizes5-forms5-None]",),
    ),
    (
        "combs: none where most of the tensor cores are idle",
        "kernels/unaligned.py",
        "_LEAST_SHARE * _RATE * multiprocessors",
        "0 * multiprocessors",
        (f"{UNALIGNED}::test_gemms_by_combs[sizes11-forms11-None]",),
    ),
    (
        "combs: a bias is added to what they make",
        "passes/unaligned.py",
        "is_apart = bias is not None and is_by_combs(spec.family)",
        "is_apart = False",
        (f"{UNALIGNED}::test_a_heads_gemms_on_the_emulator",),
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
    (
        "padding: a slice of the result has its strides",
        "passes/padding.py",
        "any(found.alias_info is not None for found in schema.returns)",
        "False",
        (
            "tests/passes/test_padding.py::test_nor_is_one_of_which_a_view_is_returned[<lambda>0]",
            "tests/passes/test_padding.py::test_nor_is_one_of_which_a_view_is_returned[<lambda>1]",
        ),
    ),
)
