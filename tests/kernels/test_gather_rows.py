"""Gathers along rows, and their gradient, on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import gather_rows_checks
import pytest
from checks import passes
from sm90 import gpu_from_sm80
from torch import Tensor

from benchmarks.sm90 import CUDA
from fx_fuser.kernels.attention import gathered
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.attention_bias.gathered import BACKWARD, FORWARD, ORDER


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function, by the kernels alone."""

    def refused(*_: object) -> list[Tensor]:
        raise AssertionError("the kernel does not take this")

    for name in (FORWARD, ORDER, BACKWARD):
        known = run._functions[name]
        monkeypatch.setitem(run._functions, name, dataclasses.replace(known, in_torch=refused))
    load.prepare(gathered.offered(), CUDA)
    return lambda name, *given: run.MANY(*run.arguments(name, given))


@gpu_from_sm80
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(call: Any, seed: int) -> None:
    passes(gather_rows_checks.sweep, call, seed, 40)


@gpu_from_sm80
@pytest.mark.parametrize("check", [gather_rows_checks.in_order, gather_rows_checks.deberta])
def test_checks(check: Any, call: Any) -> None:
    passes(check, call)
