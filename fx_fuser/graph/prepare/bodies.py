"""The graphs of one Dynamo graph module: its own, those of its regions, and copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.read.nodes import TRANSPARENT


def bodies(gm: GraphModule) -> Iterator[GraphModule]:
    """The module itself, and the bodies of checkpointed and nested compile regions in it."""
    yield gm
    for node in gm.graph.nodes:
        if node.op != "get_attr" or not node.users:
            continue
        body = getattr(gm, str(node.target), None)
        if not isinstance(body, GraphModule) or _has_policy(body):
            continue
        if all(map(_is_transparent, node.users)):
            yield from bodies(body)


def _is_transparent(node: Node) -> bool:
    return getattr(node.target, "__name__", str(node.target)) in TRANSPARENT


def _has_policy(body: GraphModule) -> bool:
    """A selective checkpoint's policy (`context_fn`) names ops: fused ops must not replace them."""
    return "_checkpoint_context_fn" in body.meta


def twin(gm: GraphModule) -> GraphModule:
    """Another module with graphs of its own."""
    made = copy.deepcopy(gm)
    for old, new in zip(bodies(gm), bodies(made)):
        new.graph = copy_of(old.graph)
    return made


def copy_of(graph: Graph) -> Graph:
    """A copy to edit. Keeps the placeholders' sources, Dynamo's attributes that fx drops."""
    made = copy.deepcopy(graph)
    made.owning_module = graph.owning_module  # it has the bodies of higher-order operators
    for old, new in zip(graph.nodes, made.nodes):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return made


@contextmanager
def restorable(gm: GraphModule) -> Iterator[Callable[[], None]]:
    """Yields a function that puts back the graphs the module and its bodies have now."""
    originals = [(module, module.graph) for module in bodies(gm)]

    def restore() -> None:
        for module, graph in originals:
            module.graph = graph

    yield restore
