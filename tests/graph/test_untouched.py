"""What the user chooses to leave alone, and all that is not matched, stays as it was."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    CONV,
    MUL,
    OPTIONS,
    Body,
    Program,
    calls,
    check,
    compiled,
    fused,
    gate,
    leaf,
    linear_program,
    recorded,
)
from test_refusals import OTHER_LINEAR, _mul_parts
from test_refused_regions import REGIONS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fx_fuser
from fx_fuser.ops import checks

# ---- choices of the user --------------------------------------------------------------------


def _all_three(m: Any, x: Tensor, image: Tensor) -> Any:
    z = m.lin(x)
    u = m.lin2(x)
    return z * torch.sigmoid(z) * 2.0, u + 2.0 * torch.sigmoid(u), m.bn(m.conv(image)) * 2.0


CHOICES: dict[str, tuple[list[str], set[str]]] = {
    "one": ([MUL], {MUL}),
    "two": ([MUL, CONV], {MUL, CONV}),
    "without one": ([f"-{MUL}"], {ADD, CONV}),
    "without two": ([f"-{MUL}", f"-{ADD}"], {CONV}),
    "with and without": ([MUL, ADD, f"-{ADD}"], {MUL}),
    "without all": ([f"-{MUL}", f"-{ADD}", f"-{CONV}"], set()),
}


@pytest.mark.parametrize(
    "patterns, left",
    [
        pytest.param(
            *c, id=name, marks=[] if name in ("two", "without two") else [pytest.mark.slow]
        )
        for name, c in CHOICES.items()
    ],
)
def test_patterns_option(patterns: list[str], left: set[str]) -> None:
    model = Program(
        _all_three,
        lin=nn.Linear(8, 6),
        lin2=nn.Linear(8, 6),
        conv=nn.Conv2d(4, 6, 3),
        bn=nn.BatchNorm2d(6),
    )
    eager, got = copy.deepcopy(model), compiled(model, patterns=patterns)
    x, image = torch.randn(4, 8), torch.randn(3, 4, 8, 9)
    torch.testing.assert_close(got(x, image), eager(x, image))
    assert fused() == dict.fromkeys(left, 1)


@pytest.mark.parametrize("writes", [False, True])
def test_a_checkpoint_within_a_match(writes: bool) -> None:
    """It is no write of its arguments, unless something in its body is one."""

    def inner(t: Tensor) -> Tensor:
        return t.mul_(2.0) if writes else t * 2.0

    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        r = x.cos()
        z = m.lin(r)
        s = torch.sigmoid(z)
        other = checkpoint(inner, r, use_reentrant=False)
        return z * s * 2.0, other

    fuses = {} if writes else {MUL: 1}
    check(linear_program(body), torch.randn(4, 8), fuses=fuses, train=False, leaves=("mul",))


def test_selective_checkpoint_policy() -> None:
    """A policy names ops; a fused op would be one that it does not know."""
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def body(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda t: gate(m, t), x, use_reentrant=False, context_fn=context)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(linear_program(body), leaf(4, 8), fuses={})


@pytest.mark.slow
def test_fused_site_beside_a_refused_one() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.lin(x)
        u = m.bare(x)
        return z * torch.sigmoid(z) * 2.0, u * torch.sigmoid(u) * 2.0, u

    check(linear_program(body), leaf(4, 8), fuses={MUL: 1}, leaves=("linear", "sigmoid", "mul"))


# ---- the untouched graph --------------------------------------------------------------------


def _text(gm: torch.fx.GraphModule) -> str:
    return str(gm.graph)


@pytest.mark.parametrize("body", [_mul_parts, REGIONS["no_grad_sigmoid"][0], OTHER_LINEAR["tanh"]])
def test_unmatched_graph_is_passed_on_unchanged(body: Body) -> None:
    """The very module Dynamo made, with the very graph, whether refused or not even near."""
    seen: list[tuple[int, int, str]] = []

    def spy(gm: Any, inputs: Any) -> Any:
        seen.append((id(gm), id(gm.graph), _text(gm)))
        return gm.forward

    def backend(gm: Any, inputs: Any) -> Any:
        before = (id(gm), id(gm.graph), _text(gm))
        with mock.patch.object(fx_fuser.options.Options, "inner_compiler", lambda self: spy):
            result = fx_fuser.backend.fx_fuser(gm, inputs, options=OPTIONS)
        assert seen[-1] == before
        return result

    model = linear_program(
        lambda m, x: body(m, x) if body.__code__.co_argcount == 2 else body(m, x, x)
    )
    torch.compile(model, backend=backend)(leaf(4, 8))
    assert len(seen) == 1


def test_matched_graph_keeps_its_other_nodes() -> None:
    """To the letter: only the matched nodes change."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        before = torch.multiply(y.cos(), 3)
        z = m.lin(x)
        gated = z * torch.sigmoid(z) * 2.0
        return F.gelu(gated) + before / 2

    model = linear_program(body)
    with recorded() as graphs:
        compiled(model)(leaf(4, 8), leaf(4, 6))
    called = calls(graphs)
    assert fused() == {MUL: 1}
    assert {n: called[n] for n in ("cos", "multiply", "gelu", "truediv", "add")} == dict.fromkeys(
        ("cos", "multiply", "gelu", "truediv", "add"), 1
    )


def test_every_check_can_be_named() -> None:
    """explain() tells a user which check spoke only through its reason; none may be silent."""
    assert all(c.__doc__ for c in checks.CHECKS)
