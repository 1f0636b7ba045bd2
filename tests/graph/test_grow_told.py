"""Grown tails: which options ask for them, what is told of them, and that they are verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CONV, GROWTH, MUL, Body, check, compiled, fused, leaf, linear_program
from torch import Tensor
from torch._dynamo.utils import counters
from verify_cases import BREAKS

import fx_fuser
from fx_fuser import registry
from fx_fuser.errors import PatternError


def _written(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    z = torch.tanh(m.lin(x))
    x.add_(1)
    return torch.exp(z)


def _many_operations(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    for _ in range(70):
        z = torch.sigmoid(z)
    return z


# ---- options and what is told ----------------------------------------------------------------


def _tail(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.lin(x)) * 2.0


NO_GROWTH: dict[str, dict[str, Any]] = {
    "turned off": {"auto": False},
    "patterns chosen": {"patterns": [MUL], "auto": None},
    "no patterns": {"patterns": [], "auto": None},
    "inner eager": {"inner": "eager", "auto": None},
    "no kernels": {"cpu_ops": False, "auto": True},
}


@pytest.mark.parametrize("name", NO_GROWTH)
def test_nothing_grows(name: str) -> None:
    check(linear_program(_tail), leaf(4, 8), fuses={}, **NO_GROWTH[name])


@pytest.mark.parametrize(
    "options",
    [{"auto": None}, {"inner": "eager", "auto": True}, {"patterns": [f"-{CONV}"], "auto": None}],
    ids=["by default", "asked for with inner eager", "a pattern turned off"],
)
def test_it_grows(options: dict[str, Any]) -> None:
    check(linear_program(_tail), leaf(4, 8), fuses={"auto_linear": 1}, **options)


def test_with_inner_eager_the_model_may_be_differentiated_twice() -> None:
    model, x = linear_program(_tail), leaf(4, 8)
    y = compiled(model, inner="eager", auto=None)(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert x.grad is not None and fused() == {}


def test_double_backward_through_a_grown_site_is_an_error() -> None:
    model, x = linear_program(_tail), leaf(4, 8)
    y = compiled(model, inner="eager", auto=True)(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward(.|\n)*'patterns': \[\]"):
        dx.square().sum().backward()


def _summed(m: Any, x: Tensor) -> Tensor:
    z = torch.tanh(m.lin(x))
    return z.sum(-1)


def _viewed(m: Any, x: Tensor) -> Tensor:
    z = torch.tanh(m.lin(x))
    return z.view(-1)


def _copied(m: Any, x: Tensor) -> Tensor:
    z = torch.tanh(m.lin(x))
    return z.t().reshape(-1) * 2.0


STOPS: dict[str, tuple[Body, str]] = {
    "nothing follows": (lambda m, x: m.lin(x), ""),
    "a reduction": (_summed, "before `z.sum(-1)`"),
    "a view of the result": (_viewed, ""),
    "a view that is copied": (_copied, "the result has strides (1, 4)"),
    "the end": (_tail, ""),
    "too many operations": (_many_operations, "after 64 operations"),
    "a write": (_written, "before the fused op would read it"),
}


@pytest.mark.parametrize("name", STOPS)
def test_explain_says_where_it_stops(name: str) -> None:
    body, words = STOPS[name]
    report = fx_fuser.explain(
        linear_program(body), torch.randn(4, 8), options={"cpu_ops": True, **GROWTH}
    )
    site = report.fused[0]
    assert (site.pattern, site.op) == ("auto_linear", "fx_fuser::linear")
    assert words in site.stop and bool(site.stop) == bool(words)
    assert ("(ends " in str(report)) == bool(words)
    assert type(report).from_json(report.to_json()) == report


def test_explain_lists_grown_sites_beside_named_ones() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        return z * torch.sigmoid(z) * 2.0 + torch.tanh(m.bare(x))

    model, x = linear_program(body), torch.randn(4, 8)
    report = fx_fuser.explain(model, x, options={"cpu_ops": True})
    assert sorted(s.pattern for s in report.fused) == ["auto_linear", MUL]
    assert report.refused == [] and report.others == {}
    plain = fx_fuser.explain(model, x)
    assert [s.pattern for s in plain.fused] == [MUL]
    assert all(not s.pattern.startswith("auto_") for s in plain.refused)


@pytest.mark.slow
def test_a_site_that_cannot_even_be_alone_is_refused_with_its_reason() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda v: torch.tanh(m.lin(v)))(x)

    model, x = linear_program(body), torch.randn(4, 8)
    report = fx_fuser.explain(model, x, options={"cpu_ops": True, **GROWTH})
    assert report.fused == []
    (miss,) = report.refused
    assert miss.pattern == "auto_linear" and "functorch transform" in miss.reason


def test_no_pattern_is_named_as_grown_tails_are() -> None:
    known = fx_fuser.registered_patterns()
    for name in ("auto_linear", "auto_mine"):
        with pytest.raises(PatternError, match="names that begin with 'auto_'"):
            fx_fuser.register_pattern(lambda x, w: torch.tanh(x @ w), name=name)
    fx_fuser.register_pattern(_registered, name="automatic")
    registry._patterns[:] = known


def _registered(x, weight):  # type: ignore[no-untyped-def]
    return torch.tanh(x @ weight)


# ---- verified --------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_is_right_stays(inner: str, train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return F.gelu(m.lin(x)) * m.s + torch.tanh(m.bare(x))

    counts = {"auto_linear": 2}
    settings = {"inner": inner, "verify": "first_call", **GROWTH}
    check(linear_program(body), leaf(4, 8), fuses=counts, train=train, leaves=("add",), **settings)
    assert not counters["fx_fuser_wrong"]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("verify", ["first_call", "always"])
@pytest.mark.parametrize("what", BREAKS)
def test_a_wrong_one_goes_back(what: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in ten thousand, at the grown site alone."""
    BREAKS[what](monkeypatch, "auto_linear")

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        return z * torch.sigmoid(z) * 2.0 + torch.tanh(m.bare(x))

    model, x = linear_program(body), leaf(4, 8)
    with pytest.warns(UserWarning, match="auto_linear, test_grow_told.py:.* on these inputs"):
        y = compiled(model, verify=verify, auto=None, strict=False)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, model(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, torch.autograd.grad(model(x).sum(), x)[0], rtol=1e-5, atol=1e-6)
    looks = 1 if verify == "first_call" else 2  # when compiling, and at the call
    assert fused() == {MUL: 1} and counters["fx_fuser_wrong"] == {"auto_linear": looks}


def test_strict_raises_at_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS["values"](monkeypatch, "auto_linear")
    run = compiled(linear_program(_tail), verify="first_call", **GROWTH)
    with pytest.raises(Exception, match=r"VerifyError(.|\n)*auto_linear(.|\n)*output value"):
        run(leaf(4, 8))
