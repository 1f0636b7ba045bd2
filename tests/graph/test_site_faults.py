"""A fault of fx_fuser at one site costs that site: the other fuses, and one warning says why."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, MUL, Program, compiled, fused
from torch import Tensor, nn

import fx_fuser
from fx_fuser import backend, kernels, reading
from fx_fuser.errors import OptionError
from fx_fuser.graph.match.bind import Bound, bind
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.sites import site_at
from fx_fuser.ops import calls, checks
from fx_fuser.planning import plan


class Boom(Exception):
    pass


def of_first(match: Any) -> bool:
    return "first" in match.site.operands["weight"].name


def raising_at(owner: Any, name: str, is_first: Callable[..., bool]) -> Callable[..., Any]:
    right = getattr(owner, name)

    @functools.wraps(right)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_first(*args):
            raise Boom("our own fault")
        return right(*args, **kwargs)

    return wrapped


def _find_first(view: Any, patterns: Any, check: Any, node: Any) -> bool:
    site = site_at(view, node)
    return site is not None and "first" in site.operands["weight"].name


# Where → owner, name, and of its arguments whether they are of the first site.
PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "matching": (reading, "find", _find_first),
    "a check": (checks, "fault_of", of_first),
    "the candidates": (kernels, "candidates", lambda case: of_first(case)),
    "the choice": (plan, "_pick", lambda match, *_: of_first(match)),
    "the call": (calls, "graph_call", lambda match, *_: of_first(match)),
    "what it saves": (backend, "saved", lambda match, *_: of_first(match)),
    "what it keeps": (backend, "kept", lambda match, *_: of_first(match)),
    "binding": (Match, "bound", of_first),
}


def _model() -> Program:
    def body(m: Any, x: Tensor) -> Tensor:
        z = m.other(F.silu(m.first(x)) * 2.0)
        return z + torch.sigmoid(z) * 3.0

    return Program(body, first=nn.Linear(8, 6), other=nn.Linear(6, 5))


# A site at which a named pattern fails is not grown either.
grown = pytest.mark.parametrize("auto", [False, True], ids=["named", "grown"])


@pytest.fixture(params=PLACES)
def place(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    owner, name, is_first = PLACES[request.param]
    if name == "bound":
        monkeypatch.setattr(Match, name, property(_bound_or_raise))  # instead of a cached one
    else:
        monkeypatch.setattr(owner, name, raising_at(owner, name, is_first))
    return str(request.param)


def _bound_or_raise(match: Match) -> Bound:
    if of_first(match):
        raise Boom("our own fault")
    return bind(match.view, match.site, match.nodes)


def told(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = run()
    return value, [str(w.message) for w in caught if "fx_fuser" in str(w.message)]


@pytest.mark.one_in(2)
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@grown
def test_the_other_site_fuses(auto: bool, place: str, train: bool) -> None:
    model, x = _model().train(train), torch.randn(4, 8)
    with torch.set_grad_enabled(train):
        value, said = told(lambda: compiled(model, strict=False, auto=auto)(x))
        torch.testing.assert_close(value, model(x))
    assert fused() == {ADD: 1}
    (message,) = said
    head, line, last = message.splitlines()
    assert head == "fx_fuser failed at these sites; running them unfused:"
    assert ", test_site_faults.py:" in line and line.endswith(": Boom: our own fault")
    assert last == "Please report it."
    if train:
        value.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.each_once
@grown
def test_strict_raises(auto: bool, place: str) -> None:
    with pytest.raises(Exception, match="our own fault"):
        compiled(_model(), strict=True, auto=auto)(torch.randn(4, 8))


@pytest.mark.each_once
@grown
def test_the_report_says_so(auto: bool, place: str) -> None:
    options = {"cpu_ops": True, "auto": auto}
    report = fx_fuser.explain(_model(), torch.randn(4, 8), options=options)
    assert [site.pattern for site in report.fused] == [ADD]
    assert [site.reason for site in report.refused] == ["Boom: our own fault"]


def test_a_node_that_no_pattern_is_for_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no pattern for a convolution alone, whose failure cost the whole graph."""
    right = reading.find

    def find(view: Any, patterns: Any, check: Any, node: Any) -> Any:
        if site_at(view, node) is not None and "conv" in str(node.name):
            raise Boom("our own fault")
        return right(view, patterns, check, node)

    monkeypatch.setattr(reading, "find", find)

    def body(m: Any, x: Tensor) -> Tensor:
        return F.silu(m.lin(m.conv(x).mean((2, 3)))) * 2.0

    model = Program(body, conv=nn.Conv2d(3, 8, 3), lin=nn.Linear(8, 6))
    value, said = told(lambda: compiled(model, strict=False)(torch.randn(2, 3, 5, 5)))
    assert value.shape == (2, 6) and fused() == {MUL: 1} and said == []


def test_a_bad_option_is_no_fault_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(case: Any) -> Sequence[Any]:
        raise OptionError("give another")

    monkeypatch.setattr(kernels, "candidates", candidates)
    with pytest.raises(Exception, match="give another"):
        compiled(_model(), strict=False)(torch.randn(4, 8))
