"""The mutants of how attention is found and described, for tests/mutants/mutate.py."""

from __future__ import annotations

FIND = "graph/attention/find.py"
FOUND = "tests/graph/test_attention_found.py::test_it_is_found_and_computes_what_eager_does"
PROGRAMS = "tests/graph/test_attention_programs.py::test_"
REFUSED = "tests/graph/test_attention_refused.py::test_it_is_refused"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "attention: a baddbmm adds before it rounds", FIND,
        "wide = _WIDER.get(made.dtype, made.dtype)", "wide = made.dtype",
        (f"{PROGRAMS}a_scaled_sum_is_rounded_once",),
    ),
    (
        "attention: a step has the dtype of its result", FIND,
        "[Step(written.op, tuple(args), _tensor(node).dtype)]",
        "[Step(written.op, tuple(args), _tensor(before).dtype)]",
        (f"{PROGRAMS}a_wide_bias_added_in_place_to_narrow_scores",),
    ),
    (
        "attention: its softmax is over the keys", FIND,
        "if over and {*over} <= {*own}:", "if over:",
        (f"{FOUND}[layout: keys before queries]", f"{REFUSED}[softmax over heads]"),
    ),
    (
        "attention: the dtype of its softmax", FIND,
        "weights=weights.dtype", "weights=entry.dtype", (f"{PROGRAMS}llama[True]",),
    ),
    (
        "attention: the product with v sums over the keys", FIND,
        "if sorted(axes.flat(of[x] for x in second.summed)) != sorted(axes.leaves(keys)):",
        "if len(second.summed) != 1:",
        (f"{REFUSED}[softmax over queries]", f"{REFUSED}[heads taken for keys]"),
    ),
    (
        "attention: v does not differ by query", FIND,
        "rows = tuple(axis for axis in self.axes.leaves(own) if axis not in shared)",
        "rows = self.axes.leaves(own)",
        (f"{REFUSED}[heads mixed by matmul]",),
    ),
    (
        "attention: the product with v adds nothing", FIND,
        "if second.factors.count(p) != 1 or (second.alpha, second.addend) != (1, None):",
        "if second.factors.count(p) != 1:",
        (f"{REFUSED}[a sum with v]",),
    ),
    (
        "attention: scores are an argument once", FIND,
        "if given is before and SCORE not in args:", "if given is before:",
        (f"{REFUSED}[scores twice]",),
    ),
    (
        "attention: a factor of an addend", FIND,
        "factor = () if product.beta == 1 else (product.beta,)", "factor = ()",
        (f"{FOUND}[layout: baddbmm]",),
    ),
    (
        "attention: what is added no times is not read", "graph/attention/calls.py",
        "read = None if beta == 0 else", "read =",
        (f"{PROGRAMS}baddbmm_does_not_read_what_it_takes_no_times",),
    ),
    (
        "attention: but has a gradient", "graph/attention/calls.py",
        "if beta == 0 and (unread is None or unread.requires_grad):",
        "if beta == 0 and unread is None:",
        ("tests/graph/test_attention_refused.py::test_an_addend_of_beta_0_has_a_gradient_of_zeros",),
    ),
    (
        "attention: a view without a gradient", "graph/attention/read_through.py",
        "if view.region[operand.node] != view.region[end]:", "if False:",
        (f"{PROGRAMS}what_a_view_is_of_is_not_always_read[viewed_without_gradient]",),
    ),
    (
        "attention: a copy of what is written later", "graph/attention/read_through.py",
        "if is_written(view, source, source, view.nodes[-1]):", "if False:",
        (f"{PROGRAMS}what_a_view_is_of_is_not_always_read[copied_and_written]",),
    ),
    (
        "attention: each head repeated, or all of them", "graph/attention/read_through.py",
        "found.append(parts[0 if inner else 1])", "found.append(parts[1 if inner else 0])",
        (f"{FOUND}[layout: keys of groups, interleaved]",),
    ),
    (
        "attention: torch's own gives 0 for a hidden row", "graph/attention/torchs.py",
        "is_safe=True", "is_safe=False",
        (f"{PROGRAMS}rows_that_hide_all_keys_have_three_answers",),
    ),
    (
        "attention: autocast rounds its mask", "graph/attention/torchs.py",
        "replace(mask, dtype=dtype) if is_cast else mask", "mask",
        (f"{PROGRAMS}torchs_attention_is_one_more_spelling[float-True]",),
    ),
    (
        "attention: grouped heads", "graph/attention/torchs.py",
        "axes.arrange(dim, [size, whole // size])", "axes.arrange(dim, [whole // size, size])",
        (f"{PROGRAMS}torchs_attention_is_one_more_spelling[grouped-True]",),
    ),
    (
        "attention: one region", "graph/attention/hazards.py",
        "if view.region[node] != region:", "if False:", (f"{REFUSED}[no_grad]",),
    ),
    (
        "attention: writes stay inside", "graph/attention/hazards.py",
        "_writes_stay_inside(view, site)\n    _operands", "_operands",
        (f"{REFUSED}[scores added into a bias]",),
    ),
    (
        "attention: an operand written before backward", "graph/attention/hazards.py",
        "        if trained and is_written", "        if False and is_written",
        (f"{REFUSED}[a bias written after]",),
    ),
    (
        "attention: an input written in between", "graph/attention/hazards.py",
        "            if not counter and storages", "            if False and storages",
        (f"{REFUSED}[an input written between]",),
    ),
)  # fmt: skip
