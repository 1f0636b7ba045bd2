"""Mutants of what offers grouped convolutions and puts them into Inductor's graphs."""

from __future__ import annotations

KERNEL, SITE = "kernels/grouped/__init__.py", "passes/grouped/site.py"
OFFERS = "tests/kernels/test_grouped.py"
TESTS = "tests/passes/test_grouped_pass.py"
REFUSALS = f"{TESTS}::test_refusals"
OF_SITES = (
    "tests/passes/test_convolutions_of_sites.py::test_the_gradients_of_a_site_are_replaced_once"
)

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "grouped: depthwise convolutions have their own kernel",
        KERNEL,
        "        if weight.shape[1] == 1:  # depthwise\n            return False\n",
        "",
        (f"{OFFERS}::test_not_taken[f-given1]",),
    ),
    (
        "grouped: contiguous images are not taken",
        KERNEL,
        " or not case.is_channels_last:\n            return False\n        if weight",
        ":\n            return False\n        if weight",
        (f"{OFFERS}::test_not_taken[f-given5]",),
    ),
    (
        "grouped: products side by side waste little",
        KERNEL,
        "return min((3, 4), key=lambda n: (-(-tiles // n) * n, -n))",
        "return 4",
        (f"{OFFERS}::test_units[24-24-1-3]", f"{OFFERS}::test_units[48-48-1-3]"),
    ),
    (
        "grouped: the pass leaves units of too many channels",
        KERNEL,
        " and most <= _MOST_OF_UNIT",
        "",
        (REFUSALS,),
    ),
    (
        "grouped: padding within the window",
        SITE,
        "p < 0 or p > d * (k - 1)",
        "p < 0",
        (REFUSALS,),
    ),
    (
        "grouped: the passes are those that the untouched graph asks for",
        "backend.py",
        "of_convolutions, options)",
        "every.foreseen(gm, options, inputs), options)",
        (f"{OF_SITES}[by_backend-True-layers0]",),
    ),
    (
        "grouped: no gradient where a stride leaves pixels without taps",
        SITE,
        "makes_dx and any(s > 1 and",
        "makes_dx and any(s > 9 and",
        (f"{TESTS}::test_a_stride_beyond_the_window_has_no_gradient_here",),
    ),
    (
        "grouped: the gradient of a weight has torch's strides",
        SITE,
        'in_last = is_last(self.items[DW].meta["val"])',
        "in_last = False",
        (f"{TESTS}::test_a_gradient_of_a_weight_in_channels_last",),
    ),
    (
        "grouped: results in channels_last",
        SITE,
        "        elif not is_last(value):\n",
        "        elif False:\n",
        (REFUSALS,),
    ),
    (
        "what a pass adds gets the strides that it was timed with",
        "passes/graph_pass.py",
        "return target._schema.name not in _ANY_STRIDES",
        "return False",
        (
            f"{TESTS}::test_strides_at_run_time",
            "tests/passes/test_depthwise_pass.py::test_strides_at_run_time",
            "tests/passes/test_pixels_pass.py::test_strides_at_run_time",
            "tests/passes/test_attention_split.py::test_heads_arrive_with_adjacent_elements",
            "tests/passes/test_provenance.py::test_factors_arrive_with_adjacent_k[False]",
        ),
    ),
    (
        "a kernel of any strides asks for none",
        "passes/graph_pass.py",
        "return target._schema.name not in _ANY_STRIDES",
        "return True",
        (
            "tests/passes/test_products.py"
            "::test_the_split_product_takes_the_strides_that_inductor_holds",
        ),
    ),
)
