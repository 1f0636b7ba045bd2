"""The backward of attention by fp16 halves on a GPU."""

from __future__ import annotations

import attention_backward_checks
import pytest
from checks import passes
from sm90 import gpu


@gpu
@pytest.mark.parametrize("shape", attention_backward_checks.SHAPES)
def test_random_sizes_and_strides(shape: int) -> None:
    passes(attention_backward_checks.sweep, 60, shape, shape)


@gpu
@pytest.mark.parametrize("shape", attention_backward_checks.SHAPES)
@pytest.mark.parametrize(
    "check",
    [
        attention_backward_checks.few_last_lines,
        attention_backward_checks.hard_values,
        attention_backward_checks.lengths,
        attention_backward_checks.special_values,
        attention_backward_checks.many_keys,
        attention_backward_checks.repeats,
        attention_backward_checks.rounding_of_lse,
    ],
)
def test_checks(check, shape: int) -> None:
    passes(check, shape)


@gpu
def test_refusals() -> None:
    passes(attention_backward_checks.refusals)
