"""Attention by fp16 halves on a GPU."""

from __future__ import annotations

import attention_checks
import pytest
from checks import passes
from sm90 import gpu


@gpu
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_random_sizes_and_strides(shape: int) -> None:
    passes(attention_checks.sweep, 60, shape, shape, most=515)


@gpu
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_many_keys(shape: int) -> None:
    passes(attention_checks.many_keys, shape)


@gpu
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
@pytest.mark.parametrize(
    "check",
    [
        attention_checks.few_last_keys,
        attention_checks.hard_values,
        attention_checks.one_key,
        attention_checks.special_values,
        attention_checks.repeats,
    ],
)
def test_checks(check, shape: int) -> None:
    passes(check, shape)


@gpu
def test_refusals() -> None:
    passes(attention_checks.refusals)


@gpu
@pytest.mark.parametrize("shape", attention_checks.SHAPES)
def test_10_000_launches(shape: int) -> None:
    passes(attention_checks.repeats, shape, 10_000)
