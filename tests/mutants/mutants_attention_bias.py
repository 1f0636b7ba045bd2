"""Mutants of what puts 16-bit attention with a bias into Inductor's graphs."""

from __future__ import annotations

PASS = "passes/attention_split/biased.py"
TESTS = "tests/passes/test_biased_attention.py"
LEFT = f"{TESTS}::test_what_is_left_to_torch"
DROPPING, OPS = "passes/attention_split/dropout.py", "ops/attention_bias/__init__.py"
DROPS, NETS = (f"tests/passes/test_biased_attention_{name}.py" for name in ("drops", "nets"))
ALONE = "passes/provenance.py"
WHOLE = f"{TESTS}::test_a_gradient_that_is_whole"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "attention with a bias: no dropout",
        PASS,
        "return 0 < dropout < 1 if drops else dropout == 0",
        "return True",
        (f"{LEFT}[dropout]", f"{TESTS}::test_what_is_left_to_torch_in_backward"),
    ),
    (
        "attention with a bias: a scale that is a number",
        PASS,
        "and math.isfinite(scale)",
        "",
        (f"{LEFT}[a scale that is not known]",),
    ),
    (
        "attention with a bias: rows of whole vectors",
        PASS,
        "all(s > 0 and s % _LANES == 0 for s in steps)",
        "all(s > 0 for s in steps)",
        (f"{LEFT}[rows that are not aligned]",),
    ),
    (
        "attention with a bias: a row a query",
        PASS,
        "all(s > 0 and s % _LANES == 0 for s in steps)",
        "all(s % _LANES == 0 for s in steps)",
        (f"{LEFT}[one row for all queries]",),
    ),
    (
        "attention with a bias: one dtype, of 16 bits",
        PASS,
        "return found if is_one and dtypes <= {*attention_bias.DTYPES} else None",
        "return found",
        (f"{TESTS}::test_other_dtypes_are_left_to_torch",),
    ),
    (
        "attention with a bias: the sum is over what shares it",
        PASS,
        "if dims is None or sorted(d % 4 for d in dims) != [*shared] or keeps is not True:",
        "if keeps is not True:",
        tuple(f"{WHOLE}[{keys}-over what does not share it]" for keys in (24, 21)),
    ),
    (
        "attention with a bias: the sum keeps its dimensions",
        PASS,
        "!= [*shared] or keeps is not True:",
        "!= [*shared]:",
        tuple(f"{WHOLE}[{keys}-without that dimension]" for keys in (24, 21)),
    ),
    (
        "attention with a bias: what is summed has one reader",
        PASS,
        "if len(gradient.users) != 1 or not shared:",
        "if not shared:",
        tuple(f"{WHOLE}[{keys}-read otherwise too]" for keys in (24, 21)),
    ),
    (
        "attention with a bias: small ones are torch's",
        PASS,
        "or site.is_small():",
        ":",
        (f"{TESTS}::test_small_ones_are_left_to_torch",),
    ),
    (
        "attention with a bias: both have one bias where weights are dropped",
        DROPPING,
        '"value", "attn_bias", "dropout_p"',
        '"value", "dropout_p"',
        (f"{DROPS}::test_what_is_left_to_torch[another bias in backward]",),
    ),
    (
        "attention with a bias: fp32 that is the library's",
        ALONE,
        "AttentionDropout(*given, first, halves=False)",
        "AttentionDropout(*given, first)",
        (f"{NETS}::test_where_fp32_is_the_librarys[True]",),
    ),
    (
        "attention with a bias: backward drops what forward has dropped",
        OPS,
        "wide @ v.float().mT * kept - delta",
        "wide @ v.float().mT - delta",
        (f"{DROPS}::test_both_drop_the_same",),
    ),
    (
        "attention with a bias: cuDNN's logarithms are its own",
        PASS,
        "if items.keys() != {0}:",
        "if False:",
        (f"{NETS}::test_what_is_left_to_cudnn[its logarithms are read]",),
    ),
    (
        "attention with a bias: cuDNN's result as ours lies",
        PASS,
        "return bench_ops.form_of_value(made) == bench_ops.form_of_value(like)",
        "return True",
        (f"{NETS}::test_what_is_left_to_cudnn[another layout]",),
    ),
    (
        "attention with a bias: a rival of its own for cuDNN's",
        PASS,
        "            str(self.node.target),\n",
        "",
        (f"{NETS}::test_the_rival_is_cudnns",),
    ),
    (
        "attention with a bias: no pass where none has one",
        PASS,
        'return isinstance(argument_of(node, 3, "attn_mask"), Node)',
        "return True",
        (f"{NETS}::test_attention_without_a_bias_has_no_pass",),
    ),
)
