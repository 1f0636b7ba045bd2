"""A bounded run of the generated programs; `python tests/oracle/generate.py` is the longer one."""

from __future__ import annotations

import ast
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from generate import Illegal, attempt, check, load, run, runnable
from generator import generate
from near_misses import SPOILT
from torch import nn
from writer import Draw, NoSpelling

import fx_fuser
from fx_fuser import registry
from fx_fuser.graph.read.operations import OPS
from fx_fuser.ops import checks

SECONDS = 3  # a test; there are four


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("first", [0, pytest.param(10_000, marks=pytest.mark.slow)])
def test_programs(first: int, train: bool) -> None:
    tally = run(range(first, first + 10_000), train, seconds=SECONDS)
    assert tally.programs > 0
    for seed, failure in tally.failures.items():
        pytest.fail(f"{failure.message}\n{runnable(failure, seed, 'cpu')}")


def test_a_seed_is_a_program() -> None:
    made = [generate(Draw(7), fx_fuser.registered_patterns(), True) for _ in range(2)]
    assert made[0] == made[1]


@pytest.mark.slow
def test_every_kind_of_site_is_written() -> None:
    labels = set()
    for train in (False, True):
        for seed in range(300):
            try:
                program = generate(Draw(seed), fx_fuser.registered_patterns(), train)
            except NoSpelling:
                continue
            ast.parse(program.source)
            labels |= {label.partition(": ")[2] for label in program.labels}
    spoilt = {function.__name__.replace("_", " ") for function in SPOILT}
    assert labels >= spoilt | {"plain", "no_grad", "autocast", "checkpoint"}


@pytest.mark.slow
def test_any_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its traced epilogue: nothing of a pattern is known to the generator."""

    def generated_clamped(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return torch.clamp(F.gelu(F.linear(x, weight, bias)) - a, 0, 6)

    def generated_tanh(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.conv2d(x, weight, bias) / 2.0) * a

    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    patterns = [fx_fuser.register_pattern(p) for p in (generated_clamped, generated_tanh)]
    fused = 0
    for seed in range(8):
        try:
            failure = attempt(Draw(seed), patterns, True, "float64", "cpu")
        except (NoSpelling, Illegal):
            continue
        assert failure is None, failure
        fused += sum(torch._dynamo.utils.counters["fx_fuser"].values())
    assert fused
    assert {"gelu", "clamp", "tanh"} <= OPS.keys()


@pytest.mark.slow  # most of it is shrinking
def test_a_missing_check_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(c for c in checks.CHECKS if c is not checks.inner_values_unused)
    monkeypatch.setattr(checks, "CHECKS", kept)
    failures = run(range(200), False, "float64", seconds=30).failures
    seed, failure = next(iter(failures.items()))
    assert "inner value needed" in str(failure.program.labels)
    assert len(failure.program.labels) == 1, "the other sites were dropped"
    script = runnable(failure, seed, "cpu")
    assert "assert_fused(model, args" in script
    space = load(script)
    assert isinstance(space["Model"](), nn.Module)


def test_a_wrong_expectation_is_a_failure() -> None:
    patterns = fx_fuser.registered_patterns()
    program = generate(Draw(replay=()), patterns, False, "float64")
    assert program.expected == {patterns[0].name: 1} and check(program) is None
    kind, message = check(dataclasses.replace(program, expected={})) or ("", "")
    assert kind == "count" and "expected {}" in message
