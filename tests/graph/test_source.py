"""Nodes in the user's names: variables, expressions, statements, parameters."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from compare import fresh  # noqa: F401
from torch import Tensor, nn
from torch.fx import Node

from fx_fuser.graph.read.canonical import Arg, Expr
from fx_fuser.graph.read.naming import called, infix, name_of, statement
from fx_fuser.graph.read.source import end_of, source_of


class Written(nn.Module):
    """Much that is hard to name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act, self.rows = nn.Linear(6, 6), nn.SiLU(), nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, z: Tensor, y: Tensor) -> Any:
        s = z * torch.sigmoid(z) * 2.0
        t = torch.sigmoid(torch.cos(z).sin()).sum() + y * s - 1
        y += t
        y[0] = 3
        tanh = y * torch.tanh(y) * 2.0
        for row in self.rows:
            tanh = self.act(self.lin(tanh)) * row(tanh)
        r = (tanh
             * 3.0 + 1)  # fmt: skip
        r.mul_(2)
        return z * s * (tanh - r) * 2.0, -t


NAMES = {
    "torch.sigmoid(z)", "z * torch.sigmoid(z)", "s", "torch.cos(z)", "torch.cos(z).sin()",
    "torch.sigmoid(torch.cos(z).sin())", "y * s", "t", "y", "torch.tanh(y)", "y * torch.tanh(y)",
    "tanh", "self.lin(tanh)", "self.act(self.lin(tanh))", "row(tanh)", "r", "r.mul_(2)", "z * s",
    "tanh - r", "z * s * (tanh - r)", "z * s * (tanh - r) * 2.0", "-t", "z",
    "self.lin.weight", "self.lin.bias", "self.rows[0].weight", "self.rows[0].bias",
    "torch.sigmoid(torch.cos(z).sin()).sum()", "torch.sigmoid(torch.cos(z).sin()).sum() + y * s",
}  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> list[Node]:
    found: list[Node] = []

    def backend(gm: Any, inputs: Any) -> Any:
        end = end_of(gm)
        assert end is not None and not end.breaks and end.place.startswith("test_source.py:")
        found.extend(n for n in gm.graph.nodes if n.op != "output")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Written(), backend=backend)(torch.randn(3, 6), torch.randn(3, 6))
    return found


MARKED = sys.version_info >= (3, 11) and not torch.__version__.startswith("2.11.")


@pytest.mark.skipif(not MARKED, reason="the line is not marked here")
def test_names(graph: list[Node]) -> None:
    quoted = {called(n).strip("`") for n in graph}
    assert quoted - {"mul", "setitem"} == NAMES  # a part of a longer statement, and no value


def test_names_where_the_line_is_not_marked(graph: list[Node]) -> None:
    """As torch 2.11 has it: fewer names, but no wrong ones."""
    traces = [n.meta.get("stack_trace") for n in graph]
    marked = {n: called(n) for n in graph}
    try:
        for node, trace in zip(graph, traces):
            node.meta["stack_trace"] = re.sub(r"\n +[~^]+(?=\n|$)", "", trace or "")
        plain = {n: called(n) for n in graph}
    finally:
        for node, trace in zip(graph, traces):
            node.meta["stack_trace"] = trace
    quoted = {n: said for n, said in plain.items() if said.startswith("`")}
    assert {n: said for n, said in quoted.items() if said != marked[n]} == {}
    assert {plain[n] for n in graph if n not in quoted} == {"mul", "setitem", "linear", "silu"}


def test_statements(graph: list[Node]) -> None:
    said = {statement(n).partition("`,")[0].strip("`") for n in graph}
    assert {"r.mul_(2)", "y[0] = 3", "y += t"} <= said


def test_a_variable_is_no_other_name_that_contains_it(graph: list[Node]) -> None:
    tanh = next(n for n in graph if called(n) == "`torch.tanh(y)`")
    assert name_of(tanh) is None  # though FX calls it tanh, and so is the variable of the line


def test_a_graph_without_a_source() -> None:
    node = next(iter(torch.fx.symbolic_trace(lambda input: input + 1).graph.nodes))
    assert source_of(node) is None and called(node) == "`input`"


def test_epilogues_are_written_as_one_would() -> None:
    z, a = Arg("z"), Arg("a")
    assert infix(Expr("mul", (Expr("add", (z, 1.0)), a))) == "(z + 1.0) * a"
    assert infix(Expr("add", (Expr("mul", (z, a)), a))) == "z * a + a"
    assert infix(Expr("div", (a, Expr("mul", (z, 2))))) == "a / (z * 2)"
    assert infix(Expr("div", (a, Expr("div", (z, 2))))) == "a / (z / 2)"
    assert infix(Expr("pow", (z,), (("exponent", 2),))) == "pow(z, exponent=2)"
