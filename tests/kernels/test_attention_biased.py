"""Attention with a bias on a GPU, with dropout too."""

from __future__ import annotations

import attention_bias_backward_checks
import attention_bias_checks
import attention_bias_dropout_checks
import pytest
from checks import passes
from sm90 import gpu

shapes = pytest.mark.parametrize("shape", attention_bias_checks.SHAPES)


@gpu
@shapes
def test_random_sizes_and_strides(shape: int) -> None:
    passes(attention_bias_checks.sweep, 60, shape, shape)


@gpu
@shapes
@pytest.mark.parametrize(
    "check",
    [
        attention_bias_checks.hard_biases,
        attention_bias_checks.far_below,
        attention_bias_checks.not_numbers,
        attention_bias_checks.repeats,
    ],
)
def test_checks(check, shape: int) -> None:
    passes(check, shape)


@gpu
def test_refusals() -> None:
    passes(attention_bias_checks.refusals)


@gpu
@shapes
def test_random_gradients(shape: int) -> None:
    passes(attention_bias_backward_checks.sweep, 60, shape, shape)


@gpu
@shapes
@pytest.mark.parametrize(
    "check", [attention_bias_backward_checks.hidden, attention_bias_backward_checks.repeats]
)
def test_checks_of_the_backward(check, shape: int) -> None:
    passes(check, shape)


@gpu
def test_refusals_of_the_backward() -> None:
    passes(attention_bias_backward_checks.refusals)


@gpu
def test_random_sizes_with_dropout() -> None:
    passes(attention_bias_dropout_checks.sweep, 60, 0)


@gpu
@pytest.mark.parametrize(
    "check",
    [
        attention_bias_dropout_checks.which,
        attention_bias_dropout_checks.hidden,
        attention_bias_dropout_checks.refusals,
        attention_bias_dropout_checks.repeats,
    ],
)
def test_checks_of_dropout(check) -> None:
    passes(check)
