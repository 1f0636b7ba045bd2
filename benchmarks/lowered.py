"""Which graphs Inductor lowers: if two systems lower the same ones, they differ only by scatter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map


@contextmanager
def seen(into: list[str]) -> Iterator[None]:
    """Records a hash of each graph of ATen operations that Inductor lowers meanwhile, in order.

    The hash covers operations, arguments, dtypes, shapes and strides, and no names of nodes.
    """
    make = GraphLowering.__init__

    def noted(self: GraphLowering, gm: GraphModule, *args: Any, **kwargs: Any) -> None:
        into.append(_hash_of(gm))
        make(self, gm, *args, **kwargs)

    GraphLowering.__init__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering.__init__ = make  # type: ignore[method-assign]


def _hash_of(gm: torch.nn.Module) -> str:
    nodes = list(gm.graph.nodes)  # type: ignore[union-attr, arg-type]
    number = {node: f"%{i}" for i, node in enumerate(nodes)}
    found = hashlib.sha256()
    for node in nodes:
        called = "" if node.op == "placeholder" else str(node.target)
        arguments = map_arg((node.args, node.kwargs), lambda n: number[n])
        found.update(repr((node.op, called, str(arguments), _form_of(node))).encode())
    return found.hexdigest()


def _form_of(node: Node) -> str:
    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return str((value.dtype, value.device.type, tuple(value.shape), value.stride()))
        return value

    return str(tree_map(of, node.meta.get("val")))
