"""The matcher's cost grows with the graph, whatever the graph: no more work at a site than allowed,
and no look at the whole graph for one site."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, CONV, MUL, Program, compiled, fused
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fx_fuser import backend
from fx_fuser.graph.match import match, pattern
from fx_fuser.graph.match.bind import bind
from fx_fuser.graph.read import nodes, view
from fx_fuser.ops import checks
from fx_fuser.options import Options

OPTIONS = Options(cpu_ops=True, strict=True, auto=False)


class Builder:
    """A graph as Dynamo would record it, with an example value at each node."""

    def __init__(self) -> None:
        self.graph, self.mode, self.inputs = Graph(), FakeTensorMode(), 0

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(f"input_{self.inputs}")
        self.inputs += 1
        with self.mode:
            node.meta["example_value"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        with self.mode:
            value = target(*map_arg(args, lambda n: n.meta["example_value"]))
        node = self.graph.call_function(target, args)
        node.meta["example_value"] = value
        return node

    def method(self, name: str, *args: Any) -> Node:
        with self.mode:
            receiver, *rest = map_arg(args, lambda n: n.meta["example_value"])
            value = getattr(receiver, name)(*rest)
        node = self.graph.call_method(name, args)
        node.meta["example_value"] = value
        return node

    def linear(self, x: Node, n: int = 4) -> Node:
        return self.call(torch._C._nn.linear, x, self.input(n, 4))

    def swish(self, z: Node, y: Node) -> Node:
        return self.call(torch.mul, self.call(torch.mul, self.call(torch.sigmoid, z), y), 2.0)

    def module(self, *outputs: Node) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(nn.Module(), self.graph)


def residual_layers(n: int) -> GraphModule:
    """x = sigmoid(l(x)) * x + x: each layer's end is an operand of the next, and so on."""
    b = Builder()
    x = b.input(3, 4)
    for _ in range(n):
        x = b.call(torch.add, b.call(torch.mul, b.call(torch.sigmoid, b.linear(x)), x), x)
    return b.module(x)


def side_by_side(n: int) -> GraphModule:
    """All sites read one tensor, and all results are returned."""
    b = Builder()
    x, y = b.input(3, 4), b.input(3, 4)
    return b.module(*(b.swish(b.linear(x), y) for _ in range(n)))


def tails_far_away(n: int) -> GraphModule:
    """All Linears come first: every site spans the others."""
    b = Builder()
    x, y = b.input(3, 4), b.input(3, 4)
    products = [b.linear(x) for _ in range(n)]
    return b.module(*(b.swish(z, y) for z in products))


def writes_in_between(n: int) -> GraphModule:
    """A chain of writes to one buffer, which each site reads as it is then."""
    b = Builder()
    x, y, results = b.input(3, 4), b.input(3, 4), []
    for _ in range(n):
        b.method("add_", y, 1.0)
        results.append(b.swish(b.linear(x), y))
    return b.module(*results)


def norms_over_the_same_statistics(n: int) -> GraphModule:
    b = Builder()
    x = b.input(2, 4, 5, 5)
    vectors = [b.input(4) for _ in range(4)]
    for _ in range(n):
        c = b.call(torch.conv2d, x, b.input(4, 4, 1, 1))
        x = b.call(torch.mul, b.call(F.batch_norm, c, *vectors, True, 0.1, 1e-5), 0.5)
    return b.module(x)


def one_product_with_many_readers(n: int) -> GraphModule:
    b = Builder()
    x, y = b.input(3, 4), b.input(3, 4)
    z = b.linear(x)
    return b.module(*(b.swish(z, y) for _ in range(n)))


# Graph → sites of n that fuse; where it is 0, why they do not is what takes the time.
GRAPHS: dict[Callable[[int], GraphModule], tuple[str, bool]] = {
    residual_layers: (ADD, True),
    side_by_side: (MUL, True),
    tails_far_away: (MUL, True),
    writes_in_between: (MUL, True),
    norms_over_the_same_statistics: (CONV, False),
    one_product_with_many_readers: (MUL, False),
}


def work(
    monkeypatch: pytest.MonkeyPatch, gm: GraphModule, options: Options = OPTIONS
) -> tuple[int, list[str]]:
    """Operands compared, nodes bound and nodes whose memory was looked at, and the patterns that
    matched."""
    counted = 0

    def counting(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def counted_function(*args: Any) -> Any:
            nonlocal counted
            counted += size(*args)
            return function(*args)

        return counted_function

    with monkeypatch.context() as patch:
        patch.setattr(match.Work, "spend", counting(match.Work.spend, lambda *_: 1))
        for module in (checks, view):
            patch.setattr(module, "storages", counting(nodes.storages, lambda _: 1))
        patch.setattr(pattern, "bind", counting(bind, lambda view, site, nodes: len(nodes)))
        matches = backend.fuse(gm, options).matches
    return counted, [m.pattern.name for m in matches]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda f: f.__name__)
def test_work_grows_with_the_graph(
    graph: Callable[[int], GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, fuses = GRAPHS[graph]
    (once, few), (twice, more) = (work(monkeypatch, graph(n)) for n in (60, 120))
    assert 0 < twice <= 2.2 * once
    assert (few, more) == ([pattern] * 60 * fuses, [pattern] * 120 * fuses)


def test_many_writes_within_a_site_refuse_it() -> None:
    b = Builder()
    x, y, counter = b.input(3, 4), b.input(3, 4), b.input(dtype=torch.int64)
    z = b.linear(x)
    for _ in range(300):
        b.method("add_", counter, 1)
    outcome = backend.fuse(b.module(b.swish(z, y)), OPTIONS)
    assert not outcome.matches
    (site,) = outcome.report.refused
    assert "more than 256 operations within it write to memory" in site.reason


def test_a_site_beyond_the_bound_is_refused_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "MAX_WORK", 10)
    outcome = backend.fuse(side_by_side(2), OPTIONS)
    assert not outcome.matches
    assert all("more than 10 comparisons" in site.reason for site in outcome.report.refused)
    assert len(outcome.report.refused) == 2


# ---- the graphs that took exponential time -----------------------------------------------------


def squared(y: Tensor) -> Tensor:
    return y * y


def doubled(y: Tensor) -> Tensor:
    return y + y


def seconds_in_the_backend(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of the processor's: others may have it in between."""
    found: list[float] = []
    fuse = backend.fuse

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return fuse(*args, **kwargs)
        finally:
            found.append(time.process_time() - start)

    monkeypatch.setattr(backend, "fuse", timed)
    return found


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("step", [squared, doubled], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [20, 200])
def test_repeated_operands_take_no_time(
    n: int, step: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(m.lin(x))
        for _ in range(n):
            y = step(y)
        return y

    model, x = Program(body, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    seconds = seconds_in_the_backend(monkeypatch)
    assert torch.equal(compiled(model, inner="eager")(x), model(x))
    assert sum(seconds) < 0.5


def test_fibonacci_sums_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        a = b = torch.sigmoid(m.lin(x))
        for _ in range(40):
            a, b = b, a + b
        return b

    model, x = Program(body, lin=nn.Linear(4, 4)), torch.randn(3, 4)
    seconds = seconds_in_the_backend(monkeypatch)
    assert torch.equal(compiled(model, inner="eager")(x), model(x))
    assert sum(seconds) < 0.5


class Layers(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x)) * x + x
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [100, *(pytest.param(n, marks=pytest.mark.slow) for n in (400, 2000))]
)
def test_deep_nets_fuse_in_all_sites(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(n), torch.zeros(3, 4)
    seconds = seconds_in_the_backend(monkeypatch)
    with torch.no_grad():
        assert torch.equal(compiled(model, inner="eager")(x), model(x))
    assert fused() == {ADD: n}
    assert sum(seconds) < 5 * max(n / 400, 1)


@pytest.mark.slow
def test_a_deeper_graph_than_pythons_stack() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Dynamo may have raised it
    try:
        assert len(backend.fuse(residual_layers(1100), OPTIONS).matches) == 1100
    finally:
        sys.setrecursionlimit(before)
