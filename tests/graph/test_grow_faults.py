"""Grown tails: a fault costs its site alone, the gate decides, and work grows with the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import GROWTH, Program, compiled, epilogues, fused, recorded, slow_but
from test_matcher_cost import GRAPHS, Builder, residual_layers, seconds_in_the_backend, work
from test_site_faults import Boom, of_first, raising_at, told
from torch import Tensor, nn
from torch.fx import GraphModule

import fx_fuser
from fx_fuser import backend, kernels, reading
from fx_fuser.errors import OptionError
from fx_fuser.graph.match import grow, match
from fx_fuser.graph.match.bind import Bound, bind
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read import sites
from fx_fuser.ops import calls, checks
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, gate, plan

OPTIONS = Options(cpu_ops=True, strict=True, **{**GROWTH, "patterns": ()})


# ---- faults ----------------------------------------------------------------------------------


def _site_of_first(view: Any, site: Any, *rest: Any) -> bool:
    return "first" in site.operands["weight"].name


# Where → owner, name, and of its arguments whether they are of the first site.
PLACES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "growing": (reading, "grow", _site_of_first),
    "its regions": (grow, "_regions", _site_of_first),
    "z alone": (reading, "alone", _site_of_first),
    "whether there is a kernel": (plan, "no_gain", lambda m, *_: of_first(m)),
    "a check": (checks, "fault_of", of_first),
    "the candidates": (kernels, "candidates", lambda case: of_first(case)),
    "the choice": (plan, "_pick", lambda m, *_: of_first(m)),
    "the call": (calls, "graph_call", lambda m, *_: of_first(m)),
    "what it saves": (backend, "saved", lambda m, *_: of_first(m)),
    "what it keeps": (backend, "kept", lambda m, *_: of_first(m)),
    "binding": (Match, "bound", of_first),
}
# What the gate does where a tail may earn a kernel: on a GPU.
AT_GATE: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "tensors of our own": (bench_ops, "tensors_of", lambda m: of_first(m)),
    "the tail's kernels": (calls, "kernel_specs", lambda m, *_: of_first(m) and len(m.nodes) > 1),
    "the measurement": (gate, "_measured", lambda m, *_: of_first(m)),
}


def _model() -> Program:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.other(F.gelu(m.first(x)) * 2.0)) + 3.0

    return Program(body, first=nn.Linear(8, 6), other=nn.Linear(6, 5))


def _z_first(monkeypatch: pytest.MonkeyPatch, measured: str = "it gains") -> None:
    """As on a GPU, where z alone is planned first; what is measured of the whole is given."""
    monkeypatch.setattr(gate, "_first", lambda m, options: getattr(m, "alone", None) or m)
    monkeypatch.setattr(gate, "_structures", set())
    monkeypatch.setattr(gate, "_measured", lambda *_: measured)


def _bound_or_raise(m: Match) -> Bound:
    if of_first(m):
        raise Boom("our own fault")
    return bind(m.view, m.site, m.nodes)


@pytest.fixture(params=[*PLACES, *AT_GATE])
def place(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    owner, name, is_first = {**PLACES, **AT_GATE}[request.param]
    if request.param in AT_GATE:
        _z_first(monkeypatch)
    if name == "bound":
        monkeypatch.setattr(Match, name, property(_bound_or_raise))  # instead of a cached one
    else:
        monkeypatch.setattr(owner, name, raising_at(owner, name, is_first))
    return str(request.param)


@pytest.mark.one_in(3)
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_the_other_site_is_grown(place: str, train: bool) -> None:
    model, x = _model().train(train), torch.randn(4, 8)
    with torch.set_grad_enabled(train):
        value, said = told(lambda: compiled(model, **GROWTH, strict=False)(x))
        torch.testing.assert_close(value, model(x))
    assert fused() == {"auto_linear": 1}
    (message,) = said
    head, line, last = message.splitlines()
    assert head == "fx_fuser failed at these sites; running them unfused:"
    assert line.startswith("auto_linear, test_grow_faults.py:")
    assert line.endswith(": Boom: our own fault")
    assert last == "Please report it."
    if train:
        value.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.one_in(3)
def test_strict_raises(place: str) -> None:
    with pytest.raises(Exception, match="our own fault"):
        compiled(_model(), **GROWTH, strict=True)(torch.randn(4, 8))


@pytest.mark.one_in(3)
def test_the_report_says_so(place: str) -> None:
    options = {"cpu_ops": True, **GROWTH}
    report = fx_fuser.explain(_model(), torch.randn(4, 8), options=options)
    assert [site.pattern for site in report.fused] == ["auto_linear"]
    assert [site.reason for site in report.refused] == ["Boom: our own fault"]


@pytest.mark.parametrize("strict", [False, True])
def test_an_anchor_that_cannot_be_read_costs_itself(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no site to tell of, so nothing is told; strict raises."""
    right = sites.site_at

    def site_at(view: Any, node: Any) -> Any:
        site = right(view, node)
        if site is not None and "first" in site.operands["weight"].name:  # type: ignore[union-attr]
            raise Boom("our own fault")
        return site

    for owner in (sites, match, reading):
        monkeypatch.setattr(owner, "site_at", site_at)
    model, x = _model(), torch.randn(4, 8)
    if strict:
        with pytest.raises(Exception, match="our own fault"):
            compiled(model, **GROWTH)(x)
        return
    value, said = told(lambda: compiled(model, **GROWTH, strict=False)(x))
    torch.testing.assert_close(value, model(x))
    assert fused() == {"auto_linear": 1} and said == []


def test_a_bad_option_is_no_fault_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(*_: Any) -> Any:
        raise OptionError("give another")

    monkeypatch.setattr(plan, "no_gain", candidates)
    with pytest.raises(Exception, match="give another"):
        compiled(_model(), **GROWTH, strict=False)(torch.randn(4, 8))


# ---- the gate --------------------------------------------------------------------------------

WHOLE = ["v0 = gelu(z, approximate=none); v1 = mul(v0, s0)", "v0 = tanh(z); v1 = add(v0, s0)"]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "measured, most, takes",
    [("it gains", 64, WHOLE), ("", 64, ["", ""]), ("it gains", 1, [WHOLE[0], ""]),
     ("it gains", 0, ["", ""])],
    ids=["gains", "gains nothing", "one structure", "no structure"],
)  # fmt: skip
def test_what_is_measured_decides(
    measured: str, most: int, takes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _z_first(monkeypatch, measured)
    model, x = _model(), torch.randn(4, 8)
    with recorded() as graphs:
        value = compiled(model, **GROWTH, max_structures=most)(x)
    torch.testing.assert_close(value, model(x))
    assert epilogues(graphs) == takes and fused() == {"auto_linear": 2}


@pytest.mark.slow
def test_a_structure_that_is_compiled_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tail three times is one."""

    def body(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(m.first(x)) * 0.5
        return torch.exp(m.first(x))

    _z_first(monkeypatch)
    with recorded() as graphs:
        compiled(Program(body, first=nn.Linear(8, 8)), **GROWTH, max_structures=1)(
            torch.randn(4, 8)
        )
    assert epilogues(graphs) == ["v0 = tanh(z); v1 = mul(v0, s0)"] * 3 + [""]


# ---- cost ------------------------------------------------------------------------------------


def running_sum(n: int) -> GraphModule:
    """Each anchor's tail runs into that of the next."""
    b = Builder()
    x = b.input(3, 4)
    total = b.linear(x)
    for _ in range(n - 1):
        total = b.call(torch.add, total, b.linear(x))
    return b.module(total)


def products_then_sum(n: int) -> GraphModule:
    b = Builder()
    x = b.input(3, 4)
    first, *rest = [b.linear(x) for _ in range(n)]
    for z in rest:
        first = b.call(torch.add, b.call(torch.tanh, first), z)
    return b.module(first)


GROWN = {graph: fuses for graph, (_, fuses) in GRAPHS.items()} | {
    running_sum: True,
    products_then_sum: True,
}


@pytest.mark.slow
@pytest.mark.parametrize("graph", GROWN, ids=lambda f: f.__name__)
def test_work_grows_with_the_graph(
    graph: Callable[[int], GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    # From 64 on a tail is as long as it may be, which theirs are only then.
    n = 300 if graph in (running_sum, products_then_sum) else 100
    (once, few), (twice, more) = (work(monkeypatch, graph(m), OPTIONS) for m in (n, 2 * n))
    assert 0 < twice <= 2.2 * once
    if GROWN[graph]:
        assert (len(few), len(more)) == (n, 2 * n)
    assert all(name.startswith("auto_") for name in (*few, *more))


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph", slow_but([residual_layers], [running_sum, products_then_sum, residual_layers])
)
def test_400_anchors_take_no_time(
    graph: Callable[[int], GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = graph(400)
    seconds = seconds_in_the_backend(monkeypatch)
    assert len(backend.fuse(gm, OPTIONS).matches) == 400
    assert 0 < sum(seconds) < 5


@pytest.mark.parametrize("offered", [True, False])
def test_a_tail_that_forbids_the_product_is_not_compiled(
    offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`F.linear(x, w) + t64`: z alone takes the split product, whose accumulators are float."""
    asked: list[Any] = []
    of_whole = [{"product": "library"}, *([{"product": "split"}] if offered else [])]
    monkeypatch.setattr(kernels, "candidates", lambda case: of_whole)
    monkeypatch.setattr(gate.plan, "prepare", asked.append)
    monkeypatch.setattr(gate.bench_ops, "tensors_of", lambda match: [])
    monkeypatch.setattr(gate.calls, "kernel_specs", lambda match, choices: [])
    tail = mock.Mock(site=mock.Mock(kind="linear"))
    built = gate._built({0: (tail, {"product": "split"})}, Options(), {})
    assert list(built) == ([0] if offered else [])
