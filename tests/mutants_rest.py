"""Mutants that an audit found or that no other batch has, for tests/mutate.py."""

from __future__ import annotations

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "rest: BatchNorm's mean and variance in one memory",
        "ops/checks.py",
        "if len(statistics) < 2:",
        "if False:",
        ("tests/test_hazards.py::test_trap_is_refused[mean and variance are one tensor]",),
    ),
    (
        "rest: a training step that the host limits",
        "planning/plan.py",
        "_STEP_CALLS = 10",
        "_STEP_CALLS = 0",
        (
            "tests/test_plan_conv.py::test_a_training_step_that_the_host_limits_is_left"
            "[0.15-None-False]",
        ),
    ),
)
