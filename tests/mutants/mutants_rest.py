"""Mutants that an audit found or that no other batch has, for tests/mutants/mutate.py."""

from __future__ import annotations

CONTEST = "tests/planning/test_contest.py"
RATES = "tests/planning/test_architectures.py"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "rest: BatchNorm's mean and variance in one memory",
        "ops/checks.py",
        "if len(statistics) < 2:",
        "if False:",
        ("tests/graph/test_hazards.py::test_trap_is_refused[mean and variance are one tensor]",),
    ),
    (
        "rest: a training step that the host limits",
        "planning/plan.py",
        "_STEP_CALLS = 10",
        "_STEP_CALLS = 0",
        (
            "tests/planning/test_plan_conv.py::test_a_training_step_that_the_host_limits_is_left"
            "[0.15-None-False]",
        ),
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
        "kernels_cu/host/split_plan.h",
        "if (gpu.capability / 10 == 9) return rates;",
        "return rates;",
        (
            f"{RATES}::test_split_rates_follow_the_gpus_figures[A100]",
            f"{RATES}::test_split_rates_follow_the_gpus_figures[B200]",
        ),
    ),
    (
        "rest: the split gemm's rates on Hopper are as measured",
        "kernels_cu/host/split_plan.h",
        "if (gpu.capability / 10 == 9) return rates;",
        "",
        (f"{RATES}::test_split_choices_of_hopper_are_those_that_were_measured",),
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
)
