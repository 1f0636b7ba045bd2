"""How many layers' weights one call folds, by what a graph keeps in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from folded_nets import check, random_norm
from torch import nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from fx_fuser.passes import folding
from fx_fuser.passes.memory import Memory, storages_of

_aten = torch.ops.aten


class Narrowing(nn.Sequential):
    """Its first layers have the largest images, its last ones most weights."""

    def __init__(self) -> None:
        widths = (3, 8, 8, 8, 16, 32, 64)
        layers = [
            nn.Sequential(
                nn.Conv2d(c, o, 3, 2 if i > 2 else 1, 1, bias=False), random_norm(o), nn.ReLU()
            )
            for i, (c, o) in enumerate(itertools.pairwise(widths))
        ]
        super().__init__(*layers)
        self.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "side, folds",
    [
        (96, [3, 3]),  # the fourth layer's weights would be one too many where two images are alive
        (8, [5, 1]),  # the last layer's weights are the peak
    ],
)
def test_what_is_folded_at_a_time_leaves_the_peak(
    side: int, folds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one call folds lives until its last layer has run."""
    peaks: list[int] = []
    sizes: list[int] = []
    inner = folding.Folding.__call__

    def watched(self: folding.Folding, graph: Graph) -> None:
        peaks.append(Memory(graph).peak)
        inner(self, graph)
        peaks.append(Memory(graph).peak)
        nodes = graph.find_nodes(op="call_function", target=torch.ops.fx_fuser.fold.default)
        sizes.extend(len(node.args[0]) for node in nodes)

    with monkeypatch.context() as patch, fresh_cache():
        patch.setattr(folding.Folding, "__call__", watched)
        check(Narrowing(), torch.randn(2, 3, side, side))
    before, after = peaks
    assert sizes == folds and after <= before * (1 + 1 / 256)


def made_of(*shapes: tuple[int, ...]) -> tuple[Graph, list[Node]]:
    """A chain of gemms, each result read by the next and by nobody else."""
    graph, nodes = Graph(), list[Node]()
    with FakeTensorMode():
        weight = graph.placeholder("weight")
        weight.meta["val"] = torch.empty(4, 4)
        last = weight
        for shape in shapes:
            last = graph.call_function(_aten.mm.default, (last, weight))
            last.meta["val"] = torch.empty(shape)
            nodes.append(last)
        graph.output(last)
    return graph, nodes


def test_bytes_alive_from_the_maker_to_the_last_reader() -> None:
    graph, (a, b, c) = made_of((4, 4), (4, 8), (4, 2))
    memory = Memory(graph)
    assert [sum(size for _, size in storages_of(n)) for n in (a, b, c)] == [64, 128, 32]
    assert memory.peak == 64 + 128
    assert memory.has_room_for([b])
    assert memory.has_room_for([a]) and not memory.has_room_for([a, b, c])


def test_what_inductor_fuses_takes_no_memory() -> None:
    graph, (a,) = made_of((4, 4))
    with graph.inserting_after(a), a.meta["val"].fake_mode:
        wide = graph.call_function(_aten.exp.default, (a,))
        wide.meta["val"] = torch.empty(400, 4)
    with graph.inserting_after(wide), a.meta["val"].fake_mode:
        end = graph.call_function(_aten.sum.default, (wide,))
        end.meta["val"] = torch.empty(())
    assert Memory(graph).peak == 64


def test_room_that_a_group_has_taken_is_gone() -> None:
    """Two groups, each of which fits by itself, meet where the second begins."""
    graph, nodes = made_of((4, 64), *[(4, 32)] * 6)
    memory = Memory(graph)
    assert memory.peak == 1024 + 512
    assert memory.has_room_for(nodes[2:4]) and memory.has_room_for(nodes[4:6])
    memory.join(nodes[2:4])
    assert not memory.has_room_for(nodes[4:6])


def test_weights_on_two_gpus_are_folded_apart() -> None:
    """A launch runs on one of them."""
    graph, devices = Graph(), ("cuda:0", "cuda:0", "cuda:1")
    weights, made = [graph.placeholder(f"w{i}") for i in range(3)], []
    with FakeTensorMode():
        for weight, device in zip(weights, devices):
            args = ([weight], [weight, weight], [0], [1e-5], [0, 32, 64], "", torch.float32, weight)
            fold = graph.call_function(torch.ops.fx_fuser.fold.default, args)
            weight.meta["val"] = torch.empty(4, 4, 1, 1, device=device)
            fold.meta["val"] = torch.empty(64, device=device)
            with graph.inserting_after(fold):
                view = graph.call_function(_aten.as_strided.default, (fold, [4], [1], 32))
            view.meta["val"] = fold.meta["val"].as_strided([4], [1], 32)
            made.append((fold, view))
    graph.output(tuple(view for _, view in made))
    first, second, third = (fold for fold, _ in made)
    assert list(folding._groups(graph)) == [[first, second], [third]]
