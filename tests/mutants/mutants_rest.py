"""Mutants that an audit found or that no other batch has, for tests/mutants/mutate.py."""

from __future__ import annotations

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
)
