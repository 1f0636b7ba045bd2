"""Mutants of what makes torch's fused attention of one that is written by hand."""

from __future__ import annotations

FOLDER = "passes/by_hand"
PLAIN, LAYOUT, CLOCK = (f"{FOLDER}/{name}.py" for name in ("plain", "layout", "clock"))
REWRITE, MULTI_HEAD = (f"{FOLDER}/{name}.py" for name in ("rewrite", "multi_head"))
WINDOWS, OF_WINDOWS = f"{FOLDER}/windows.py", "tests/passes/test_by_hand_windows.py"
WINDOW_STAYS = f"{OF_WINDOWS}::test_what_stays"
OF_CALLS, READ_THROUGH = (
    "tests/passes/test_by_hand_windows_calls.py",
    "graph/attention/read_through.py",
)
GATHERS, OF_GATHERS = f"{FOLDER}/gathers.py", "tests/passes/test_gathers.py"
TAKEN, CHOICE = "tests/passes/test_by_hand.py", "tests/passes/test_by_hand_choice.py"
STAYS = "tests/passes/test_by_hand_stays.py"
MASK = f"{STAYS}::test_a_mask_that_is_not_surely_causal_or_open"
TAIL, KIND = f"{STAYS}::test_a_tail", f"{STAYS}::test_kinds_and_layouts"
OF_HEADS = f"{STAYS}::test_multi_head_attention"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "by hand: no scale behind the mask", PLAIN,
        "            if is_masked:\n", "            if False:\n",
        (f"{TAIL}[a scale behind the mask]",),
    ),
    (
        "by hand: no dropout", PLAIN,
        'if any(step.op == "dropout" for step in site.post):', "if False:",
        (f"{TAIL}[dropout]",),
    ),
    (
        "by hand: a scale that the kernels take", PLAIN,
        "if not torch.finfo(torch.float32).tiny <= scale <= LARGEST_SCALE:", "if False:",
        (f"{TAIL}[a negative scale]", f"{TAIL}[an infinite scale]", f"{TAIL}[divided by 0]"),
    ),
    (
        "by hand: a division", PLAIN,
        "return 1 / number if number else math.inf", "return number",
        (f"{TAKEN}::test_a_form[divided]",),
    ),
    (
        "by hand: fp32 throughout", PLAIN,
        "if dtype is not torch.float32:", "if False:",
        (f"{KIND}[a softmax in float64]", f"{KIND}[bf16]"),
    ),
    (
        "by hand: hidden keys have the least score", PLAIN,
        "if isinstance(fill, float) and fill <= _LOWEST:", "if isinstance(fill, float):",
        (f"{MASK}[-1e9]",),
    ),
    (
        "by hand: a tensor that hidden keys have is the least", PLAIN,
        "    if not is_least:\n", "    if False:\n",
        (f"{TAIL}[filled by less than all]", f"{TAIL}[filled by what is given]"),
    ),
    (
        "by hand: a mask that hides", PLAIN,
        "return ~seen if self.hides else seen", "return seen",
        (f"{TAKEN}::test_a_form[keys filled]", f"{MASK}[shown where it should be hidden]"),
    ),
    (
        "by hand: a mask is added as it is", PLAIN,
        "if len(rest) != 1 or not isinstance(mask, Operand):", "if not isinstance(mask, Operand):",
        (f"{TAIL}[beta]",),
    ),
    (
        "by hand: numbers in fp32", PLAIN,
        "return seen.float()", "return seen",
        (f"{MASK}[fp16's least]",),
    ),
    (
        "by hand: a result that is written to", REWRITE,
        "if was.requires_grad and _is_written(view, site):", "if False:",
        (f"{STAYS}::test_a_result_that_is_written_to",),
    ),
    (
        "by hand: strides that show", REWRITE,
        "if same_sizes(now.stride(), was.stride()):", "if True:",
        (f"{TAKEN}::test_a_form[rows first]", f"{TAKEN}::test_strides_that_show_are_restored"),
    ),
    (
        "by hand: parts of another attention", REWRITE,
        "if any(node._erased for node in known):", "if False:",
        (f"{TAKEN}::test_one_behind_the_other",),
    ),
    (
        "by hand: what only it read", REWRITE,
        "masks.erase_unread([node for node in read if not node._erased])", "pass",
        (f"{TAKEN}::test_what_only_it_read_is_gone", f"{TAKEN}::test_a_mask_that_layers_share"),
    ),
    (
        "by hand: heads are not copied", LAYOUT,
        "if not copies and storages([node]) != storages([before]):", "if False:",
        (f"{KIND}[heads that come in turns]",),
    ),
    (
        "by hand: neighbouring heads", LAYOUT,
        "if parts[1] != self.heads[: len(parts[1])]:", "if False:",
        (f"{KIND}[heads shared across]",),
    ),
    (
        "by hand: as many heads as a grid has", LAYOUT,
        "if count > _MOST_HEADS:", "if False:",
        (f"{KIND}[more heads than a grid has]",),
    ),
    (
        "by hand: what the pass would leave", CLOCK,
        "    if left:\n", "    if False:\n",
        (f"{KIND}[heads of 136]", f"{CHOICE}::test_what_the_pass_would_leave_is_not_timed"),
    ),
    (
        "by hand: torch's kernel is on", CLOCK,
        "if not torch.backends.cuda.mem_efficient_sdp_enabled():", "if False:",
        (f"{CHOICE}::test_torchs_own_kernel_is_switched_off",),
    ),
    (
        "by hand: deterministic gradients", CLOCK,
        "if trains and torch.are_deterministic_algorithms_enabled():", "if False:",
        (f"{CHOICE}::test_a_training_step_is_taken",),
    ),
    (
        "by hand: the fastest of what is written", CLOCK,
        "if contest.gains(fused, min(by_hand)):", "if contest.gains(fused, max(by_hand)):",
        (f"{CHOICE}::test_the_clock_decides[ms1-0.3 ms as written, 0.9 fused]",),
    ),
    (
        "by hand: weights that nothing reads", MULTI_HEAD,
        'if not given.get("need_weights") or not all(map(_is_result, node.users)):',
        'if not given.get("need_weights"):',
        (f"{OF_HEADS}_that_is_not_looked_at[True]",),
    ),
    (
        "by hand: multi-head attention without dropout", MULTI_HEAD,
        'if given["dropout_p"] != 0 and given["training"] is not False:', "if False:",
        (f"{OF_HEADS}[dropout]",),
    ),
    (
        "by hand: multi-head attention without a mask of keys", MULTI_HEAD,
        'if given["key_padding_mask"] is not None:', "if False:",
        (f"{OF_HEADS}[a mask of keys]",),
    ),
    (
        "by hand: a mask of bool hides in multi-head attention", MULTI_HEAD,
        "return ~mask if mask.dtype is torch.bool else mask.float()", "return mask",
        (f"{TAKEN}::test_multi_head_attention_whose_weights_nobody_reads[causal, of bool]",),
    ),
    (
        "by hand: where the pass runs", REWRITE,
        "of_fp32 = products.kernels_for(options, inputs) is not None", "of_fp32 = True",
        (
            f"{CHOICE}::test_it_is_looked_for_where_the_pass_will_run[no passes]",
            f"{CHOICE}::test_it_is_looked_for_where_the_pass_will_run[the library's fp32]",
        ),
    ),
    (
        "windows: no scale behind the bias", WINDOWS,
        "            if is_biased:\n", "            if False:\n",
        (f"{WINDOW_STAYS}[scaled_behind-scaled after its bias]",),
    ),
    (
        "windows: no dropout", WINDOWS,
        'if any(step.op == "dropout" for step in site.post):', "if False:",
        (f"{OF_WINDOWS}::test_dropout_stays",),
    ),
    (
        "windows: no number is added", WINDOWS,
        "if len(rest) != 1 or not isinstance(rest[0], Operand):", "if False:",
        (f"{WINDOW_STAYS}[a_number-other than one tensor]",),
    ),
    (
        "windows: each head has keys of its own", WINDOWS,
        "    if key is not keys or value is not values:\n", "    if False:\n",
        (f"{WINDOW_STAYS}[few_keys-serves several query heads]",),
    ),
    (
        "windows: queries that change behind their factor", WINDOWS,
        "or is_written(view, first, first, view.nodes[-1]):", "or False:",
        (f"{OF_WINDOWS}::test_queries_that_are_changed_behind_their_factor",),
    ),
    (
        "windows: the factor of the queries", WINDOWS,
        "return replace(site.q, node=first), factor", "return replace(site.q, node=first), 1.0",
        (f"{OF_WINDOWS}::test_a_factor_is_in_the_op",),
    ),
    (
        "windows: the first axis of a bias's period", LAYOUT,
        "            lead = lead[1:]\n", "            lead = ()\n",
        (f"{OF_WINDOWS}::test_a_mask_of_images_and_windows",),
    ),
    (
        "windows: two batches share each bias", CLOCK,
        "2 * bias.size[0] > q.size[0]", "False",
        (f"{WINDOW_STAYS}[windows_first-too few of its batches share a bias]",),
    ),
    (
        "windows: rows of whole vectors", CLOCK,
        'if name != "bias" and not biased.is_aligned(form):', "if False:",
        (f"{OF_WINDOWS}::test_rows_off_16_bytes",),
    ),
    (
        "windows in torch's call: what is added stays as it is", READ_THROUGH,
        "if spread is None or is_written(view, given, given, view.nodes[-1]):",
        "if spread is None:",
        (f"{OF_CALLS}::test_a_sum_whose_part_changes_is_described_as_it_is",),
    ),
    (
        "windows in torch's call: the sum has gradients", READ_THROUGH,
        "    if view.region[node] != view.region[end]:\n        return operand\n", "",
        (f"{OF_CALLS}::test_a_sum_without_gradients",),
    ),
    (
        "windows in torch's call: the rounding of autocast", LAYOUT,
        'return calls.method("to", node, operand.dtype)', "return node",
        (f"{OF_CALLS}::test_a_mask_that_autocast_rounds",),
    ),
    (
        "windows in torch's call: rows that see nothing", "ops/attention_bias/window.py",
        "    if is_safe:\n", "    if False:\n",
        (f"{OF_CALLS}::test_rows_that_see_nothing_are_zero[False]",),
    ),
    (
        "gathers: batches share the index", GATHERS,
        "if any(step and n > 1 for n, step in zip(index.shape[:-2], index.stride())):", "if False:",
        (f"{OF_GATHERS}::test_what_stays[of_each_batch]",),
    ),
    (
        "gathers: along whole rows", GATHERS,
        "if x.ndim < 3 or dim not in (-1, x.ndim - 1) or index.shape[:-1] != x.shape[:-1]:",
        "if x.ndim < 3:",
        (f"{OF_GATHERS}::test_what_stays[of_rows]", f"{OF_GATHERS}::test_what_stays[of_some_rows]"),
    ),
    (
        "gathers: a result that is written to", GATHERS,
        "if any(is_written(view, one, one, view.nodes[-1]) for one in kept):", "if False:",
        (f"{OF_GATHERS}::test_what_stays[written_to]",),
    ),
    (
        "gathers: strides that a user sees", GATHERS,
        "        if traced is None or not is_torchs(reader):\n            return None\n",
        "        if traced is None or not is_torchs(reader):\n            break\n",
        (f"{OF_GATHERS}::test_the_order_of_dimensions_shows_in_what_is_returned",),
    ),
    (
        "gathers: none in inference", GATHERS,
        "    if not was.requires_grad:\n", "    if False:\n",
        (f"{OF_GATHERS}::test_inference_takes_none",),
    ),
    (
        "gathers: their gradient in fp32", "ops/attention_bias/gathered.py",
        "places, dtype=torch.float32)", "places)",
        (f"{OF_GATHERS}::test_a_sum_of_many_is_as_exact_as_fp32",),
    ),
)  # fmt: skip
