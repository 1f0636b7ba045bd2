"""Mutants that an audit found or that no other batch has, for tests/mutants/mutate.py."""

from __future__ import annotations

CONTEST = "tests/planning/test_contest.py"
LAUNCHES = "tests/planning/test_launches.py"
MEMORY = "tests/passes/test_memory.py"
RATES = "tests/planning/test_architectures.py"
FROZEN = "tests/ops/test_folded_training.py"
IN_16_BITS = "tests/ops/test_frozen_folded.py::test_a_net_in_16_bits[train]"
PLAIN = "tests/graph/test_frozen_norms.py"
RANKS = f"{PLAIN}::test_only_batches_of_images_have_a_batch_norm"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "rest: a frozen BatchNorm's gamma has no gradient",
        "kernels/folded.py",
        "not is_trained and ",
        "",
        (f"{FROZEN}::test_what_is_left[thawed]",),
    ),
    (
        "rest: a frozen BatchNorm's x is in channels_last",
        "kernels/folded.py",
        ' and memory_format_of(case.operand("x")) == torch.channels_last',
        "",
        (f"{FROZEN}::test_what_is_left[in_rows]",),
    ),
    (
        "rest: the weight's gradient is that of the folded one times the scale",
        "ops/folded.py",
        "dw.to(scale.dtype) * scale.view(-1, 1, 1, 1)",
        "dw.to(scale.dtype)",
        (
            f"{FROZEN}::test_a_layer[relu]",
            f"{FROZEN}::test_one_of_the_gradients[False]",
            IN_16_BITS,
        ),
    ),
    (
        "rest: dz is zero where relu's result is",
        "ops/folded.py",
        "torch.ops.aten.threshold_backward(dy, *y, 0) if y else dy",
        "dy",
        (f"{FROZEN}::test_a_layer[relu]", f"{FROZEN}::test_one_of_the_gradients[True]", IN_16_BITS),
    ),
    (
        "rest: dz is zero nowhere else",
        "ops/folded.py",
        "threshold_backward(dy, *y, 0)",
        "threshold_backward(dy, *y, 0.02)",
        (IN_16_BITS,),
    ),
    (
        "rest: beta's gradient is not scaled",
        "ops/folded.py",
        "db if of_beta else None",
        "db * scale if of_beta else None",
        (f"{FROZEN}::test_only_a_shift_is_trained", f"{FROZEN}::test_shifts[names0-relu]"),
    ),
    (
        "rest: the gradient of a convolution's bias is scaled",
        "ops/folded.py",
        "db * scale if of_bias else None",
        "db if of_bias else None",
        (f"{FROZEN}::test_shifts[names1-alone]",),
    ),
    (
        "rest: a frozen norm's product has one reader",
        "graph/prepare/frozen.py",
        "if readers != ([norm.product], [norm.node]):",
        "if False:",
        (f"{PLAIN}::test_traps[its product is read-train]",),
    ),
    (
        "rest: a frozen norm's vectors are inputs",
        "graph/prepare/frozen.py",
        'if {n.op for n in norm.vectors} - {"placeholder", "get_attr"}:',
        "if False:",
        (f"{PLAIN}::test_traps[vectors that are computed-eval]",),
    ),
    (
        "rest: a frozen norm is in one region",
        "graph/prepare/frozen.py",
        "if len({view.region[n] for n in between}) > 1:",
        "if False:",
        (f"{PLAIN}::test_traps[no gradient through the scale-train]",),
    ),
    (
        "rest: a frozen norm's shift has its own scale",
        "graph/prepare/frozen.py",
        "if _base(view, factor) is scale:",
        "if True:",
        (f"{PLAIN}::test_traps[another scale in the shift-eval]",),
    ),
    (
        "rest: a frozen norm's vectors lie along the channels",
        "graph/prepare/frozen.py",
        "return along and all(t.numel() == channels for t in made)",
        "return all(t.numel() == channels for t in made)",
        (f"{PLAIN}::test_traps[a number for each row-eval]",),
    ),
    (
        "rest: a frozen norm's convolution is of a batch",
        "graph/prepare/frozen.py",
        "if (c.ndim, z.ndim) != (4, 4):",
        "if z.ndim != 4:",
        (f"{RANKS}[no batch before the sum]",),
    ),
    (
        "rest: a frozen norm's sum is of a batch of images",
        "graph/prepare/frozen.py",
        "if (c.ndim, z.ndim) != (4, 4):",
        "if False:",
        (f"{RANKS}[no batch]", f"{RANKS}[five dimensions]"),
    ),
    (
        "rest: a frozen norm's statistics have no gradient",
        "graph/prepare/frozen.py",
        " or mean.requires_grad or variance.requires_grad:",
        ":",
        (f"{PLAIN}::test_traps[a trained variance-train]",),
    ),
    (
        "rest: nothing writes to a frozen norm's scale",
        "graph/prepare/frozen.py",
        "if None in memory | here or here & memory:",
        "if False:",
        (f"{PLAIN}::test_traps[a scale that is written to-eval]",),
    ),
    (
        "rest: nor to an input that may be one",
        "graph/prepare/frozen.py",
        "if here & view.graph_inputs and not is_counter:",
        "if False:",
        (f"{PLAIN}::test_an_alias_that_only_the_caller_knows",),
    ),
    (
        "rest: a frozen norm's vectors have no more bits",
        "graph/prepare/frozen.py",
        "if {t.dtype for t in made} - {c.dtype, dtype}:",
        "if False:",
        (f"{PLAIN}::test_traps[a scale of float64-eval]",),
    ),
    (
        "rest: a sum of fp32 is read in 16 bits",
        "graph/prepare/frozen.py",
        "if z.dtype != c.dtype and not norm.rounded:",
        "if False:",
        (f"{PLAIN}::test_autocast[returned-form0-eval]",),
    ),
    (
        "rest: gradients of several readers are added in fp32",
        "graph/prepare/frozen.py",
        "if value is None or (value.requires_grad and len(view.readers[node]) > 1):",
        "if value is None:",
        (f"{PLAIN}::test_autocast[two convolutions read it-form0-train]",),
    ),
    (
        "rest: maxima are of fp32 where they have a gradient",
        "graph/prepare/frozen.py",
        " and not z.requires_grad\n",
        "\n",
        (f"{PLAIN}::test_autocast[pooled-form0-train]",),
    ),
    (
        "rest: only a relu may come before rounding",
        "graph/prepare/frozen.py",
        'written.op == "relu"',
        "True",
        (f"{PLAIN}::test_autocast[a sigmoid between-form0-eval]",),
    ),
    (
        "rest: what is folded at a time leaves the peak",
        "passes/memory.py",
        "yield i, self._alive[i] - apart + whole",
        "yield i, self._alive[i] - apart",
        (
            f"{MEMORY}::test_what_is_folded_at_a_time_leaves_the_peak[96-folds0]",
            f"{MEMORY}::test_bytes_alive_from_the_maker_to_the_last_reader",
        ),
    ),
    (
        "rest: room that is taken is gone",
        "passes/memory.py",
        "            self._alive[i] = alive\n",
        "            pass\n",
        (f"{MEMORY}::test_room_that_a_group_has_taken_is_gone",),
    ),
    (
        "rest: what Inductor fuses takes no memory",
        "passes/memory.py",
        "if any(map(_is_no_loop, (node, *node.users))):",
        "if True:",
        (f"{MEMORY}::test_what_inductor_fuses_takes_no_memory",),
    ),
    (
        "rest: joined folds keep their places",
        "passes/folding.py",
        "*part.args[1:3], at + begin)",
        "*part.args[1:3], at)",
        ("tests/ops/test_folded.py::test_a_net[form1]",),
    ),
    (
        "rest: a fold moves along with its convolution",
        "passes/shortcuts.py",
        "node.target == self._prepares or ",
        "",
        (
            "tests/passes/test_shortcuts.py::"
            "test_a_shortcut_smaller_than_its_image_comes_first[False]",
        ),
    ),
    (
        "rest: BatchNorm's mean and variance in one memory",
        "ops/checks.py",
        "if len(statistics) < 2:",
        "if False:",
        ("tests/graph/test_hazards.py::test_trap_is_refused[mean and variance are one tensor]",),
    ),
    (
        "rest: a training step that the host limits",
        "planning/timing.py",
        "STEP_CALLS = 10",
        "STEP_CALLS = 0",
        (
            "tests/planning/test_plan_conv.py::test_a_training_step_that_the_host_limits_is_left"
            "[0.15-None-False]",
        ),
    ),
    (
        "contractions: not under autocast",
        "passes/contractions.py",
        "if {now.dtype, around} != {was.dtype}:",
        "if False:",
        ("tests/passes/test_contractions.py::test_no_gemm[under_autocast]",),
    ),
    (
        "contractions: not where backward would be cast",
        "passes/contractions.py",
        "{now.dtype, around}",
        "{now.dtype}",
        ("tests/passes/test_contractions.py::test_autocast_around_the_graph",),
    ),
    (
        "contractions: not what is reshaped in place",
        "passes/contractions.py",
        "if not view.reshaped.keys().isdisjoint(",
        "if not set().isdisjoint(",
        ("tests/passes/test_contractions.py::test_no_gemm[reshaped_afterwards]",),
    ),
    (
        "contractions: not in a body under autocast",
        "backend.py",
        "hidden = is_cast and module is not gm",
        "hidden = False",
        ("tests/passes/test_contractions.py::test_in_a_checkpoint",),
    ),
    (
        "contractions: fp16 is not added in fp16",
        "passes/contractions.py",
        "value.dtype is torch.float16 and adds_in_fp16",
        "False",
        (
            "tests/passes/test_contractions.py::"
            "test_a_sum_stays_exact_where_gemms_may_sum_in_fp16[True-False]",
        ),
    ),
    (
        "contractions: not across a write",
        "passes/contractions.py",
        "return written.isdisjoint({None, *storages(called.factors)})",
        "return True",
        ("tests/passes/test_contractions.py::test_no_gemm[written_in_between]",),
    ),
    (
        "contractions: one reader",
        "passes/contractions.py",
        "or len(product.users) > 1:",
        "or False:",
        ("tests/passes/test_contractions.py::test_no_gemm[another_reader]",),
    ),
    (
        "contractions: fp32 stays fp32",
        "passes/contractions.py",
        "value.dtype is torch.float32 and is_tf32",
        "False",
        ("tests/passes/test_contractions.py::test_a_sum_stays_exact_where_gemms_may_be_of_tf32",),
    ),
    (
        "contractions: the sum's strides",
        "passes/contractions.py",
        "if now.stride() != was.stride():",
        "if False:",
        ("tests/passes/test_contractions.py::test_strides_that_a_gemm_has_not",),
    ),
    (
        "contractions: a sum into a tensor of the user's",
        "passes/contractions.py",
        "named <= known",
        "named",
        ("tests/passes/test_contractions.py::test_no_gemm[into_a_tensor]",),
    ),
    (
        "rest: the host is timed where its time decides",
        "planning/timing.py",
        "if STEP_CALLS * queued < gpu:",
        "if queued < gpu:",
        ("tests/planning/test_timing.py::test_what_takes_long_is_run_a_few_times[short]",),
    ),
    (
        "rest: the implicit gemm's bound follows the GPU",
        "kernels/implicit.py",
        "MOST_PER_BYTE * limits.of(case.device).balance",
        "MOST_PER_BYTE",
        (
            "tests/kernels/test_implicit.py::"
            "test_what_products_bound_follows_the_gpus_balance[1.75-wanted1]",
        ),
    ),
    (
        "rest: the split gemm's rates follow the GPU",
        "native/limits.py",
        "if capability[0] != 9:",
        "if False:",
        (
            f"{RATES}::test_split_rates_follow_the_gpus_figures[A100]",
            f"{RATES}::test_split_rates_follow_the_gpus_figures[B200]",
        ),
    ),
    (
        "rest: the split gemm's rates on Hopper are as measured",
        "native/limits.py",
        "if capability[0] != 9:",
        "if True:",
        (f"{RATES}::test_split_choices_of_hopper_are_those_that_were_measured",),
    ),
    (
        "rest: a GPU's rates go with its kernels",
        "native/load.py",
        "*arguments, index, rates)",
        "*arguments, index, [])",
        ("tests/native/test_build.py::test_a_kernel_that_does_not_load_is_no_kernel",),
    ),
    (
        "rest: the least shared memory of a block is the shim's, too",
        "native/limits.py",
        "99 << 10",
        "100 << 10",
        ("tests/ops/test_contract.py::test_the_real_shim_says_what_python_says",),
    ),
    (
        "contest: what a candidate costs where it stands",
        "planning/contest.py",
        "[took.ms + more for took,",
        "[took.ms for took,",
        (f"{CONTEST}::test_a_gain_that_the_copy_takes_is_none[0.2-False]",),
    ),
    (
        "contest: the host's cost where no graph is replayed",
        "planning/contest.py",
        "replays = options is not None and options.replays_cuda_graphs",
        "replays = options is not None",
        (f"{CONTEST}::test_where_cuda_graphs_are_replayed_the_host_costs_nothing",),
    ),
    (
        "contest: a cat that pointwise operations read is no buffer",
        "planning/surroundings.py",
        "if not joins or (len(readers) == 1 and _is_inline(match.view, joins[0])):",
        "if not joins:",
        (f"{CONTEST}::test_a_copy_into_a_cat_is_charged[cat_that_a_product_reads-0]",),
    ),
    (
        "kernels: those that are for inference are not offered in training",
        "kernels/__init__.py",
        "if kernel.for_inference and case.has_backward()",
        "if False and case.has_backward()",
        (
            "tests/planning/test_offers.py::test_where_times_decide_a_kernel_for_inference_"
            "is_not_offered_in_training[measure-True]",
        ),
    ),
    (
        "rest: a graph that waits for the host folds nothing",
        "planning/launches.py",
        "if host > gpu else None",
        "if False else None",
        (f"{LAUNCHES}::test_a_fold_needs_a_graph_that_waits_for_the_gpu[True]",),
    ),
    (
        "rest: folds count with the host",
        "planning/launches.py",
        " * (1 + FOLDING * (i in folded))",
        "",
        (
            f"{LAUNCHES}::test_a_fold_needs_a_graph_that_waits_for_the_gpu[True]",
            f"{LAUNCHES}::test_who_folds_pays_for_it",
        ),
    ),
    (
        "rest: what stands beside a fold is left with it no more",
        "planning/convolutions.py",
        'if folds or c["product"] != FOLDED}',
        "if folds}",
        (f"{LAUNCHES}::test_another_kernel_takes_its_place",),
    ),
    (
        "rest: the result's rows are odd, too",
        "planning/plan.py",
        "for node in (site.nodes[0], *operands) if",
        "for node in operands if",
        (
            "tests/planning/test_plan.py::test_why_no_kernel_may_gain"
            "[dtype4-sizes4-has no fast kernel for rows of 50257 elements]",
        ),
    ),
)
