"""The gemm of unaligned operands: it compiles without spills and, on a GPU, is right."""

from __future__ import annotations

import pytest
import unaligned_checks
from checks import passes
from sm90 import gpu_from_sm80 as gpu


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_strides_and_operands(seed: int) -> None:
    passes(unaligned_checks.sweep, 200, seed, 30)


@gpu
@pytest.mark.parametrize(
    "check",
    [
        unaligned_checks.special_values,
        unaligned_checks.long_sums,
        unaligned_checks.graphs_and_repeats,
        unaligned_checks.refusals,
    ],
)
def test_checks(check) -> None:
    passes(check)
