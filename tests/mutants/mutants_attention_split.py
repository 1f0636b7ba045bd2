"""Mutants of what puts fp32 attention by halves into Inductor's graphs."""

from __future__ import annotations

PASS, OPS = "passes/attention_split/__init__.py", "ops/attention_split.py"
DROPPING = "passes/attention_split/dropout.py"
SPLIT = "tests/passes/test_attention_split.py"
CHOICE = "tests/passes/test_attention_split_choice.py"
DROPS = "tests/passes/test_attention_drops.py"
LEFT = f"{SPLIT}::test_what_is_left_to_torch"
KERNELS, DROPOUT = "kernels/attention/__init__.py", "ops/attention_dropout.py"
OF_DROPOUT = "tests/ops/test_dropout_mask.py"
FORMULAS = f"{OF_DROPOUT}::test_formulas_are_autograds[1-True]"
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
        "(0 < dropout < 1 if drops else dropout == 0)",
        "(0 < dropout < 1 if drops else dropout < 1)",
        (f"{LEFT}[dropout]", f"{BACKWARD}[dropout]"),
    ),
    (
        "attention by halves: what is saved has one reader",
        DROPPING,
        "if len(backs) != 1 or readers != {*backs}:",
        "if len(backs) != 1:",
        (f"{DROPS}::test_what_is_left_to_torch[logarithms that are returned]",),
    ),
    (
        "attention by halves: both drop the same share",
        DROPPING,
        '"attn_bias", "dropout_p", "is_causal"',
        '"attn_bias", "is_causal"',
        (f"{DROPS}::test_what_is_left_to_torch[another share in backward]",),
    ),
    (
        "attention by halves: eager's own random numbers",
        DROPPING,
        "stays = config.fallback_random or _recomputes_all(graph)",
        "stays = _recomputes_all(graph)",
        (f"{DROPS}::test_eagers_own_random_numbers_are_left",),
    ),
    (
        "attention by halves: no budget for seeds",
        DROPPING,
        "return 0 in budgets",
        "return False",
        (f"{DROPS}::test_where_backward_recomputes_all_seeds_are_torchs[None]",),
    ),
    (
        "attention by halves: a seed each",
        DROPPING,
        "drawn, 0, place)",
        "drawn, 0, 0)",
        (f"{DROPS}::test_attentions_of_a_graph_have_seeds_of_their_own",),
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
        " or site.is_small()",
        "",
        (f"{CHOICE}::test_small_ones_are_not_timed_and_no_kernel_is_built",),
    ),
    (
        "attention by halves: what gains",
        PASS,
        "return found is not None and contest.gains(found[1], found[0])",
        "return True",
        (f"{CHOICE}::test_the_clock_decides[ms2-False]",),
    ),
    (
        "attention by halves: causal is another time",
        PASS,
        "key = (self.function, *forms, self.scale, self.causal, self.dropout, saves)",
        "key = (self.function, *forms, self.scale, self.dropout, saves)",
        (f"{CHOICE}::test_what_times_depend_on",),
    ),
    (
        "dropout of attention: as many rounds as the kernels have",
        DROPOUT,
        "_ROUNDS = 7",
        "_ROUNDS = 6",
        (f"{OF_DROPOUT}::test_a_weights_number_is_of_seed_head_query_and_key[0]",),
    ),
    (
        "dropout of attention: both words of the seed",
        DROPOUT,
        "philox((seed & _WORD, seed >> 32 & _WORD), counter)",
        "philox((seed & _WORD, seed & _WORD), counter)",
        (f"{OF_DROPOUT}::test_a_weights_number_is_of_seed_head_query_and_key[1]",),
    ),
    (
        "dropout of attention: D as the forward's weights",
        OPS,
        "d_out @ v.mT * kept - delta",
        "d_out @ v.mT - delta",
        (FORMULAS,),
    ),
    (
        "dropout of attention: dv of what is kept",
        OPS,
        "(weights * kept).mT @ d_out",
        "weights.mT @ d_out",
        (FORMULAS,),
    ),
    (
        "dropout of attention: shares that kernels drop",
        KERNELS,
        "of = _DROPPING_OF if 0 < steps_of(dropout) <= MOST_DROPPED else {}",
        "of = _DROPPING_OF",
        (f"{OF_DROPOUT}::test_kernels_that_drop[64-0.97-False]",),
    ),
)
