"""The gemm of unaligned operands by TMA on a GPU."""

from __future__ import annotations

import combs_checks
import pytest
from checks import passes
from sm90 import gpu


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_pitches(seed: int) -> None:
    passes(combs_checks.sweep, 120, seed, most=3000, most_k=3000)


@gpu
@pytest.mark.parametrize(
    "check", [combs_checks.special_values, combs_checks.repeats, combs_checks.refusals]
)
def test_checks(check) -> None:
    passes(check)


@gpu
def test_more_than_2_to_the_31_elements() -> None:
    passes(combs_checks.last_lines, 43008, 50257)


@gpu
def test_10_000_launches() -> None:
    passes(combs_checks.repeats, 10_000)
