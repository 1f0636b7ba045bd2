"""Mutants of what puts fp32 attention by halves into Inductor's graphs."""

from __future__ import annotations

PASS, OPS = "passes/attention_split.py", "ops/attention_split.py"
SPLIT = "tests/passes/test_attention_split.py"
CHOICE = "tests/passes/test_attention_split_choice.py"
LEFT = f"{SPLIT}::test_what_is_left_to_torch"
BACKWARD = f"{SPLIT}::test_what_is_left_to_torch_in_backward"
LAYOUTS = f"{SPLIT}::test_results_have_torchs_layouts"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "attention by halves: no bias",
        PASS,
        'if given["attn_bias"] is not None or type',
        "if type",
        (f"{LEFT}[a bias]", f"{BACKWARD}[a bias]"),
    ),
    (
        "attention by halves: no dropout",
        PASS,
        'and given["dropout_p"] == 0',
        "",
        (f"{LEFT}[dropout]", f"{BACKWARD}[dropout]"),
    ),
    (
        "attention by halves: a positive scale",
        PASS,
        "and 0 < scale < math.inf",
        "",
        (f"{LEFT}[a scale of 0]", f"{LEFT}[an infinite scale]"),
    ),
    (
        "attention by halves: of fp32",
        PASS,
        "if value.dtype != torch.float32 or value.device.type != device:",
        "if value.device.type != device:",
        (f"{LEFT}[float64]", f"{BACKWARD}[a result of 16 bits]"),
    ),
    (
        "attention by halves: rows of whole vectors",
        PASS,
        "all(s > 0 and s % 4 == 0 for s in steps)",
        "all(s > 0 for s in steps)",
        (f"{LEFT}[rows of q apart by no vector]",),
    ),
    (
        "attention by halves: beginning at a vector",
        PASS,
        "return not form.offset and form.stride[3]",
        "return form.stride[3]",
        (f"{LEFT}[k begins between two vectors]",),
    ),
    (
        "attention by halves: the bias's gradient is torch's",
        PASS,
        'return not given["grad_input_mask"][3] and 3 not in items',
        "return 3 not in items",
        (f"{BACKWARD}[the bias's gradient is asked for]",),
    ),
    (
        "attention by halves: logarithms that are not saved are not read",
        PASS,
        'return given["compute_log_sumexp"] is True or _LSE not in items',
        "return True",
        (f"{LEFT}[logarithms that torch does not make]",),
    ),
    (
        "attention by halves: logarithms as torch has them",
        PASS,
        'return is_lse and forms["out"].size',
        'return forms["out"].size',
        (f"{BACKWARD}[logarithms without padding]", f"{BACKWARD}[logarithms with gaps]"),
    ),
    (
        "attention by halves: results in torch's layout",
        OPS,
        "return q.new_empty((batch, rows, heads, d)).transpose(1, 2)",
        "return q.new_empty((batch, heads, rows, d))",
        (f"{LAYOUTS}[rows first-8]",),
    ),
    (
        "attention by halves: infinity beyond the queries",
        OPS,
        "lse.fill_(torch.inf)",
        "lse",
        (f"{SPLIT}::test_forward[(2, 3, 40, 40, 64)-None-True]",),
    ),
    (
        "attention by halves: nothing small",
        PASS,
        "or site.is_small()",
        "",
        (f"{CHOICE}::test_small_ones_are_not_timed_and_no_kernel_is_built",),
    ),
    (
        "attention by halves: training is torch's",
        PASS,
        "if site.is_training() and not takes_training():",
        "if False:",
        (f"{CHOICE}::test_a_training_step_is_torchs",),
    ),
    (
        "attention by halves: what gains",
        PASS,
        "return contest.gains(fused, torchs)",
        "return True",
        (f"{CHOICE}::test_the_clock_decides[ms2-False]",),
    ),
    (
        "attention by halves: causal is another time",
        PASS,
        "key = (self.function, *forms, self.scale, self.causal, _LSE in self.items)",
        "key = (self.function, *forms, self.scale, _LSE in self.items)",
        (f"{CHOICE}::test_what_times_depend_on",),
    ),
)
