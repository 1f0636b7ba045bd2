"""Where the convolution of a shortcut is computed: `fx_fuser.passes.shortcuts`."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from folded_nets import FORCED, check, random_norm
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from fx_fuser.ops import run
from fx_fuser.passes import folding, shortcuts

_aten = torch.ops.aten


# ---- through the backend -------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    """The folded convolutions of Inductor's graph, as they come."""
    seen: list[Node] = []
    inner = folding.Folding.__call__

    def watched(self: folding.Folding, graph: Graph) -> None:
        inner(self, graph)
        seen.extend(n for n in graph.nodes if "conv2d_folded" in str(run.called(n)[0]))

    monkeypatch.setattr(folding.Folding, "__call__", watched)
    torch._dynamo.reset()
    with fresh_cache():  # on a hit no pass runs
        yield seen
    torch._dynamo.reset()


def _layer(channels: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, random_norm(outputs))


class Block(nn.Module):
    """A first layer, and a block with a shortcut. RegNet computes that first, ResNet last."""

    def __init__(self, inner: int, outputs: int, stride: int, shortcut_first: bool) -> None:
        super().__init__()
        self.stem, self.shortcut_first = _layer(3, 8, 3), shortcut_first
        self.a, self.b = _layer(8, inner), _layer(inner, inner, 3, stride)
        self.c, self.proj = _layer(inner, outputs), _layer(8, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        if self.shortcut_first:
            return (self.proj(x) + self.c(self.b(self.a(x).relu()).relu())).relu()
        return (self.c(self.b(self.a(x).relu()).relu()) + self.proj(x)).relu()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_shortcut_smaller_than_its_image_comes_first(order: list[Node], dynamic: bool) -> None:
    """The peak is the same: x and proj and a, or x and a and b. After that x is gone."""
    model = Block(18, 18, 2, shortcut_first=True).eval()
    check(model, torch.randn(3, 3, 40, 40), dynamic=dynamic)
    stem, *others = order[:5]
    assert [stem in n.all_input_nodes for n in others] == [True, True, False, False]
    proj, a, b, c = others
    assert a in b.all_input_nodes and {proj, b} <= set(c.all_input_nodes)


@pytest.mark.slow
@pytest.mark.parametrize("shortcut_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_shortcut_larger_than_its_image_comes_last(
    order: list[Node], shortcut_first: bool
) -> None:
    check(Block(8, 32, 1, shortcut_first).eval(), torch.randn(3, 3, 40, 40))
    stem, a, b, proj, c = order
    assert stem in a.all_input_nodes and a in b.all_input_nodes
    assert stem in proj.all_input_nodes and {proj, b} <= set(c.all_input_nodes)


class _Sines(CustomGraphPass):
    """A pass of the user's, whose nodes have no value: Inductor finds it."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_aten.tanh.default):
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(_aten.sin.default, node.args))

    def uuid(self) -> bytes:
        return b"sines"


@pytest.mark.slow
def test_a_users_pass_need_not_say_what_its_nodes_make(order: list[Node]) -> None:
    first, last = _layer(3, 8, 3).eval(), nn.Conv2d(8, 8, 1)

    def model(x: Tensor, curve: Callable[[Tensor], Tensor]) -> Tensor:
        image = curve(x.sum(1, keepdim=True))
        return torch.exp(torch.sigmoid(last(first(x).relu())) * image) + image.sum()

    options = {**FORCED, "post_grad_custom_post_pass": _Sines()}
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        found = torch.compile(model, backend="fx_fuser", options=options)(x, torch.tanh)
        torch.testing.assert_close(found, model(x, torch.sin))
    assert order


@pytest.mark.slow
def test_a_failure_costs_the_order_alone(
    order: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: shortcuts.Places, reader: Node, operand: Node) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(shortcuts.Places, "improve", fail)
    model, x = Block(18, 18, 2, shortcut_first=True).eval(), torch.randn(3, 3, 16, 16)
    with pytest.warns(UserWarning, match="leaves the order of a graph .* on purpose"):
        check(model, x, strict=False)
    assert len(order) == 5
    torch._dynamo.reset()
    with pytest.raises(Exception, match="on purpose"):
        check(model, x)


# ---- graphs of any kind --------------------------------------------------------------------------


class _Peak(Interpreter):
    """Runs a graph; `peak`: the most elements alive, its inputs left out."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.peak = 0
        self.inputs: set[int] = set()

    def run_node(self, n: Node) -> object:
        made = super().run_node(n)
        values = [v for v in (*self.env.values(), made) if isinstance(v, Tensor)]
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
        if n.op == "placeholder":
            self.inputs |= storages.keys()
        alive = sum(size for at, size in storages.items() if at not in self.inputs)
        self.peak = max(self.peak, alive)
        return made


def _random_graph(draw: random.Random) -> tuple[Graph, list[Tensor]]:
    """Of images whose sizes differ, views among them."""
    graph, mode = Graph(), FakeTensorMode()
    inputs = [torch.randn(1, 2, 4, 4) for _ in range(2)]
    images = []
    for i, value in enumerate(inputs):
        images.append(graph.placeholder(f"x{i}"))
        images[-1].meta["val"] = mode.from_tensor(value)

    def add(target: object, *args: object) -> None:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        with mode:
            node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))  # type: ignore[operator]
        images.append(node)

    for _ in range(draw.randrange(8, 24)):
        x, y = draw.choices(images, k=2)
        kind = draw.randrange(5)
        if kind == 0:
            add(_aten.cat.default, [x, y], 1)
        elif kind == 1 and x.meta["val"].shape[1] > 1:
            add(_aten.slice.Tensor, x, 1, 0, x.meta["val"].shape[1] // 2)
        elif kind == 2 and x.meta["val"].shape == y.meta["val"].shape:
            add(_aten.add.Tensor, x, y)
        elif kind == 3:
            add(_aten.sum.dim_IntList, x, [1], True)
        else:
            add(_aten.relu.default, x)
    graph.output(tuple(images[-2:]))
    return graph, inputs


def _run(graph: Graph, inputs: list[Tensor]) -> tuple[object, int]:
    run = _Peak(GraphModule(nn.Module(), graph))
    return run.run(*inputs), run.peak


@pytest.mark.slow
def test_what_is_computed_stays_and_the_peak_does_not_grow() -> None:
    moved = lower = 0
    for seed in range(400):
        draw = random.Random(seed)
        graph, inputs = _random_graph(draw)
        wanted, before = _run(graph, inputs)
        for reader in list(graph.nodes):
            if reader.op == "call_function" and len(reader.all_input_nodes) > 1:
                names = [n.name for n in graph.nodes]
                places = shortcuts.Places(graph)
                for operand in reader.all_input_nodes:
                    places.improve(reader, operand)
                graph.lint()
                moved += names != [n.name for n in graph.nodes]
        found, after = _run(graph, inputs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert after <= (1 + shortcuts._ALIKE) * before, (
            f"seed {seed}: {before} bytes, then {after}"
        )
        lower += after < before
    assert moved > 50 and lower > 3


@pytest.mark.parametrize(
    ("between", "moves"),
    [
        ([(_aten.relu_.default,)], False),
        ([(_aten.rand_like.default,)], False),
        # so that backward draws the same again
        ([(run_and_save_rng_state, _aten.rand_like.default)], False),
        ([], True),
        # as a layer's weight is that of many which one `fold` makes
        ([(operator.getitem, i) for i in range(60)], True),
    ],
    ids=["writes", "draws", "draws and keeps the state", "nothing", "makes nothing"],
)
def test_over_what_a_shortcut_is_moved(between: list[tuple[Any, ...]], moves: bool) -> None:
    graph, mode = Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.randn(1, 4, 8, 8))

    def add(target: Any, *args: object) -> Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        return node

    image = add(_aten.neg.default, x)
    weights = add(_aten.split.Tensor, add(_aten.new_zeros.default, x, [60]), 1)
    for target, *more in between:
        add(target, *((weights, *more) if target is operator.getitem else (*more, image)))
    way = add(_aten.sum.dim_IntList, add(_aten.relu.default, image), [1], True)
    shortcut = add(_aten.sum.dim_IntList, image, [1], True)
    reader = add(_aten.add.Tensor, way, shortcut)
    graph.output(reader)
    shortcuts.Places(graph).improve(reader, shortcut)
    assert (shortcut.prev is image) == moves
