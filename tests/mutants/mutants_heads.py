"""Mutants of heads with their loss, for tests/mutants/mutate.py."""

from __future__ import annotations

PASS, OP, READ = "passes/head_loss/__init__.py", "ops/head_loss.py", "graph/read/heads.py"
TESTS = "tests/passes/test_head_loss.py"
KEPT, STAYING = "ops/head_kept.py", "tests/passes/test_head_kept.py"
LEFT = "tests/passes/test_head_loss_left.py"
PARTS, REWRITE = "passes/head_loss/parts.py", "passes/head_loss/rewrite.py"
PIECES = "tests/passes/test_head_pieces.py"
LENGTHS = "tests/passes/test_head_lengths.py"
WIDE, CASTS = "ops/head_wide/__init__.py", "passes/head_loss/wide.py"
IN_FP32 = "tests/passes/test_head_wide"
EMULATED = "tests/kernels/test_emulated_head_loss.py"


def _wide(
    name: str, of: str, old: str, new: str, test: str
) -> tuple[str, str, str, str, tuple[str]]:
    file = f"{IN_FP32}_left.py" if "stay" in test else f"{IN_FP32}.py"
    return f"heads in fp32: {name}", of, old, new, (f"{file}::{test}",)


def _left(
    name: str, old: str, body: str, new: str = "if False:", of: str = PASS
) -> tuple[str, str, str, str, tuple[str]]:
    return f"heads: {name}", of, old, new, (f"{LEFT}::test_a_loss_that_stays[{body}]",)


# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    _left("class weights", 'if given["weight"] is not None:', "class_weights", of=PARTS),
    _left(
        "label smoothing below 1", "<= smoothing < 1.0:", "smoothed_away", "<= smoothing:", PARTS
    ),
    (
        "heads: all rows for each length",
        PARTS,
        "return statically_known_true(made == used)",
        "return hint_of(made) == hint_of(used)",
        (f"{LENGTHS}::test_of_some_tokens[False]",),
    ),
    _left("several losses", "if len(losses) > 1:", "two_losses_and_a_penalty", of=PARTS),
    _left(
        "one multiple",
        "if len({one.tails[-1] for one in heads.values()}) > 1:",
        "penalty_of_another_multiple",
        of=PARTS,
    ),
    _left("the same rows", "if not are_whole and any(", "penalty_of_other_rows", "if all(", PARTS),
    _left(
        "labels come first",
        "if all(view.order[n] < view.order[first] for n in made):",
        "labels_of_a_log_sum_exp",
        "if True:",
        PARTS,
    ),
    _left(
        "labels stay beside a log-sum-exp",
        "if _are_written(view, labels, at, loss):",
        "labels_written_in_between",
        of=PARTS,
    ),
    _left(
        "nothing is written behind a log-sum-exp",
        "if any(_is_written(view, head, view.nodes[-1]) for head in heads.values()):",
        "penalty_and_a_write",
    ),
    _left(
        "a log-sum-exp is no loss",
        "if not any(is_loss(n) or is_pick(n) for n in heads):",
        "log_sum_exp_alone",
    ),
    _left(
        "a log-sum-exp of one dimension",
        "return len(dims) == 1 and ",
        "log_sum_exp_of_columns",
        "return ",
        READ,
    ),
    _left(
        "a log-sum-exp of rows",
        "dims[0] in (-1, ndim - 1)",
        "log_sum_exp_over_rows",
        "True",
        READ,
    ),
    _left("one cap", "if factor is None and tail.after:", "capped_twice", of=READ),
    _left("a scale is not 0", "all(1e-30 < abs(v) ", "of_nothing", "all(0 <= abs(v) ", READ),
    _left(
        "scales of logits",
        "_scaled(view, at) if is_normalised else",
        "scaled_likelihoods",
        "_scaled(view, at) if True else",
        READ,
    ),
    _left(
        "scales that are numbers",
        "if len(values) != 1 or len(values) + len(numbers) != len(expr.args):",
        "of_a_learnt_scale",
        "if not values:",
        READ,
    ),
    _left(
        "readers with a gradient",
        "reader is output or _is_aside(view, reader)",
        "also_a_penalty",
        "True",
    ),
    _left("one of a row", "of_row == 1 and ", "two_of_a_row", "", PARTS),
    _left(
        "of every row", " and rows == [*value_of(likely).shape[:-1]]", "of_a_few_rows", "", PARTS
    ),
    _left("along a row", "dim in (-1, len(rows)) and ", "over_rows", "", PARTS),
    _left("what is read are logits", "if value not in head.logits or ", "likely_returned", "if "),
    _left(
        "nothing is written behind",
        "if _is_written(view, head, output):",
        "written_behind",
    ),
    _left(
        "all rows of what is returned",
        "if not reads_all(head) and (is_returned or not stay):",
        "some_rows_of_what_is_returned",
    ),
    _left(
        "something wants a gradient",
        "if not value_of(loss).requires_grad:",
        "returned_without_training",
    ),
    _left("a cast that rounds", "if not kinds <= {head.kind, torch.float32}:", "rounded_again"),
    _left("one region", " or len(regions) > 1", "without_its_gradient", ""),
    _left(
        "a write in between",
        "if _is_written(view, head, loss):",
        "written_in_between",
    ),
    _left(
        "reshaped in place",
        "if not view.reshaped.keys().isdisjoint(",
        "reshaped_in_place",
        "if not set().isdisjoint(",
    ),
    _left("none out of a checkpoint", "if is_body and is_returned:", "out_of_a_checkpoint"),
    _left(
        "columns of a view",
        "or now.shape[-1] != width:",
        "columns_turned_to_rows",
        "or False:",
        READ,
    ),
    _left(
        "which softmax",
        "dim % value_of(node).ndim == value_of(node).ndim - 1",
        "of_softmax_over_rows",
        "True",
        READ,
    ),
    _left(
        "a loss of what is normalised",
        "if not is_normalised or site.kind not in",
        "not_normalised",
        "if site.kind not in",
        READ,
    ),
    _left(
        "torch's own functions",
        "if not (is_torchs(node) and ",
        "by_the_users_flatten",
        "if not (",
        READ,
    ),
    (
        "heads: in a checkpoint gradients are made in backward",
        PASS,
        'waits = parts.given.reduction == "none" or is_body',
        'waits = parts.given.reduction == "none"',
        (f"{STAYING}::test_in_a_checkpoint",),
    ),
    (
        "heads: rows' own losses wait for their gradients",
        PASS,
        'waits = parts.given.reduction == "none" or is_body',
        "waits = is_body",
        (f"{STAYING}::test_under_autocast[of_each_row]",),
    ),
    (
        "heads: rows' own losses without gradients do not wait",
        PASS,
        "(waits and value_of(node).requires_grad)",
        "waits",
        (f"{STAYING}::test_losses_of_rows_without_gradients",),
    ),
    (
        "heads: a write to logits is noticed",
        KEPT,
        "watched._version != before:",
        "False:",
        (f"{STAYING}::test_a_write_to_the_logits_is_noticed[True-inductor]",),
    ),
    (
        "heads: what notices a write holds no memory",
        KEPT,
        "    watched.data = logits.new_empty(0)",
        "    pass",
        (f"{STAYING}::test_what_notices_a_write_holds_no_logits",),
    ),
    (
        "heads: a gradient of logits comes from outside",
        REWRITE,
        'results[at] = output.graph.call_method("detach", (value,))',
        "pass",
        (f"{STAYING}::test_only_who_sends_a_gradient_through_the_logits_pays_for_one",),
    ),
    (
        "heads: a gradient of returned logits is restored",
        KEPT,
        "results[one.logits] = _Logits",
        "_ = _Logits",
        (f"{STAYING}::test_a_gradient_of_the_logits_alone",),
    ),
    (
        "heads: pieces of logits that stay begin where they do",
        KEPT,
        "of_piece = logits[piece], ",
        "of_piece = logits[: part.shape[0]], ",
        (f"{STAYING}::test_pieces_of_rows[True-dtype0-129]",),
    ),
    (
        "heads: graphs that return logits are not in Inductor's caches alone",
        "installation.py",
        "and not (options.takes_heads and has_losses(gm.graph))",
        "and True",
        (f"{STAYING}::test_inductor_calls_fx_fuser",),
    ),
    (
        "heads: columns of an index",
        READ,
        "return _keeps_columns(node.args[1], was.ndim)",
        "return True",
        (f"{LEFT}::test_one_column_of_as_many_rows",),
    ),
    (
        "heads: logits of 16 bits",
        PASS,
        "if narrow not in SIXTEEN_BITS:",
        "if False:",
        (f"{LEFT}::test_wide_weights_without_autocast_stay[dtype0]",),
    ),
    (
        "heads: not where gemms may add in fp16",
        PASS,
        "narrow is torch.float16 and torch",
        "False and torch",
        (f"{LEFT}::test_where_gemms_may_add_in_fp16_it_stays[dtype0]",),
    ),
    (
        "heads: gradients of fp16 are scaled",
        OP,
        "_FP16_EXPONENT = 14",
        "_FP16_EXPONENT = 0",
        (f"{TESTS}::test_gradients_that_fp16_rounds_to_zero[1.0]",),
    ),
    (
        "heads: what no label counts in is not NaN",
        OP,
        "share = count.clamp(min=1)",
        "share = count",
        (f"{TESTS}::test_where_no_label_counts[mean-dtype1]",),
    ),
    (
        "heads: pieces add",
        OP,
        "beta = 1 if piece.start else 0",
        "beta = 0",
        (f"{PIECES}::test_pieces_of_rows[dtype0-129]",),
    ),
    (
        "heads: logits are returned behind their tail",
        REWRITE,
        "head.kind, head.tails[head.logits.index(value)]",
        "head.kind",
        (f"{STAYING}::test_under_autocast[capped_and_returned]",),
    ),
    (
        "heads: a log-sum-exp has its gradient",
        KEPT,
        "scale, hot = scale + d_lse",
        "scale, hot = scale",
        (f"{STAYING}::test_under_autocast[with_a_penalty]",),
    ),
    (
        "heads: a log-sum-exp of an infinite logit",
        KEPT,
        "torch.where(largest.isinf(), largest, ",
        "torch.where(False, largest, ",
        (f"{STAYING}::test_log_sum_exp_of_rows_that_are_not_finite[inf]",),
    ),
    (
        "heads: what is read before is made before",
        REWRITE,
        "            parts.at.prepend(node)",
        "            pass",
        (f"{STAYING}::test_under_autocast[with_a_penalty]",),
    ),
    (
        "heads: labels' views are seen through",
        PARTS,
        "labels = _made_of(given.labels)",
        "labels = given.labels",
        (f"{STAYING}::test_under_autocast[penalty_first]",),
    ),
    (
        "heads: smoothed gradients",
        OP,
        "    if tail.smoothing:\n",
        "    if False:\n",
        (f"{TESTS}::test_under_autocast[smoothed]",),
    ),
    (
        "heads: a cap has a slope",
        OP,
        "    if tail.after:\n        shares",
        "    if False:\n        shares",
        (f"{TESTS}::test_under_autocast[capped]",),
    ),
    (
        "heads: a log-sum-exp without a gradient is aside",
        PARTS,
        "read_head(view, other) if value_of(other).requires_grad else None",
        "read_head(view, other)",
        (f"{STAYING}::test_under_autocast[also_a_log_sum_exp]",),
    ),
    (
        "heads: gradients of fp16 behind a scale",
        OP,
        "slope = abs(tail.before * (tail.after or 1.0))",
        "slope = 1.0",
        (f"{TESTS}::test_gradients_of_fp16_behind_a_scale[0.005]",),
    ),
    (
        "heads: grad mode shows in values",
        "graph/read/view.py",
        'grad = "_set_grad_enabled" if has_grad else None',
        "grad = None",
        (f"{STAYING}::test_under_autocast[also_a_log_sum_exp]",),
    ),
    (
        "heads: few pieces add in bf16",
        OP,
        "_ADDED = 2",
        "_ADDED = 3",
        (f"{PIECES}::test_pieces_that_add_in_bf16[True-0.3333333333333333-1.0-0.02]",),
    ),
    (
        "heads: a setting of torch's keeps sums wide",
        OP,
        "return not torch.backends",
        "return False and torch.backends",
        (f"{PIECES}::test_where_torchs_setting_keeps_sums_wide",),
    ),
    (
        "heads: the logits' memory is free before a sum is rounded",
        OP,
        "max(2 * height + 4 * k, 6 * k)",
        "2 * height + 6 * k",
        (f"{PIECES}::test_sizes_of_pieces[10240-2048-dtype10-2048-False]",),
    ),
    (
        "heads: NaN of a row that does not count",
        OP,
        "    shares *= scale[:, None]  #",
        "    shares = (shares * scale[:, None]).where(scale[:, None] != 0, 0.0)  #",
        (f"{TESTS}::test_rows_that_are_not_finite[nan]",),
    ),
    _wide(
        "smoothing is shared by blocks",
        WIDE,
        "    if not tail.smoothing:\n",
        "    if True:\n",
        "test_gradients_in_fp32[0.3]",
    ),
    (
        "heads in fp32: labels of another block",
        WIDE,
        "(labels >= first) & (labels < block.stop)",
        "(labels >= 0)",
        (f"{EMULATED}::test_the_op_of_fp32_logits_with_the_kernels_is_the_op_without[dtype0]",),
    ),
    _wide(
        "blocks add to x's gradient",
        WIDE,
        "d_x.add_(_product(gradient, weight.t(), by_library))",
        "_product(gradient, weight.t(), by_library)",
        "test_forms[crossed-dtype0]",
    ),
    _wide(
        "blocks add to x's gradient by the library",
        WIDE,
        "d_x.addmm_(gradient, weight.float())",
        "d_x",
        "test_where_torch_is_asked_for_tf32_the_library_multiplies[likely_tokens-follow]",
    ),
    _wide(
        "who asks for split products gets them",
        CASTS,
        'return precision == "tf32" and ',
        "return ",
        "test_where_torch_is_asked_for_tf32_the_library_multiplies[likely_tokens-split]",
    ),
    _wide(
        "one 16-bit dtype",
        CASTS,
        "if narrow is not value_of(of_weight.before).dtype:",
        "if False:",
        "test_a_loss_that_stays[of_two_dtypes]",
    ),
    _wide(
        "nothing is written",
        CASTS,
        "if not written.isdisjoint(",
        "if False and not written.isdisjoint(",
        "test_a_loss_that_stays[written_behind_the_cast]",
    ),
    _wide(
        "torch's own views",
        CASTS,
        "and is_torchs(node):",
        "and True:",
        "test_a_loss_that_stays[by_the_users_contiguous]",
    ),
    _wide(
        "a cast that has a gradient",
        CASTS,
        "if is_alone and is_same else",
        "if is_alone else",
        "test_a_cast_without_a_gradient_keeps_it_out",
    ),
    _wide(
        "nobody else reads the logits",
        PASS,
        "        _check_unread(others)\n",
        "",
        "test_a_loss_that_stays[and_an_accuracy]",
    ),
    _wide(
        "rows that TMA copies",
        CASTS,
        "k % _ALIGNED == 0",
        "True",
        "test_rows_that_tma_does_not_copy_stay[12-not a multiple of 16 bytes]",
    ),
)
