"""Dropout in attention by fp16 halves on a GPU."""

from __future__ import annotations

import attention_dropout_checks
import pytest
from checks import passes
from sm90 import gpu


@gpu
def test_random_sizes_and_strides() -> None:
    passes(attention_dropout_checks.sweep, 60, 0)


@gpu
@pytest.mark.parametrize(
    "check",
    [
        attention_dropout_checks.lengths,
        attention_dropout_checks.one_key,
        attention_dropout_checks.dropped_queries,
        attention_dropout_checks.repaired,
        attention_dropout_checks.refusals,
        attention_dropout_checks.repeats,
    ],
)
def test_checks(check) -> None:
    passes(check)
