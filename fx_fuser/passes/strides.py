"""A node's result gets other strides than were traced; what a user sees keeps the traced ones.

torch's attention kernels return the strides of the query; the plain formula, which torch takes for
some masks, returns a contiguous tensor. Most models then transpose and copy, which hides the
difference. Where it would show, a copy after the node restores the strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.graph.read.nodes import inputs_of, meta_tensor, storages, writes_of
from fx_fuser.graph.read.source import called_name

# Operations whose result has the same values whatever the strides of their first argument are. A
# user's function of such a name counts as one that may write to it.
_BLIND = {"contiguous", "flatten", "permute", "reshape", "swapaxes", "transpose", "view"}


class StridesError(Exception):
    """Why the strides cannot be kept."""


def keep(node: Node, now: Tensor) -> None:
    """Make `now` the node's value, and let only the traced strides show.

    now: a fake tensor of the same shape and dtype. Raises StridesError, and changes nothing.
    """
    was = meta_tensor(node)
    if type(was) is not FakeTensor:
        raise StridesError("its result is not a plain tensor")
    hidden = _hidden(node, now)
    if hidden is None:
        _restore(node, now, was)
    else:
        for reader, value in hidden.items():
            reader.meta["example_value"] = value


def _hidden(node: Node, now: Tensor) -> dict[Node, Tensor] | None:
    """The nodes whose strides change, with their new values, if nobody can tell; else None."""
    values, ends = {node: now}, list[Node]()
    for reader in _after(node):
        read = [n for n in inputs_of(reader) if n in values]
        if not read:
            continue
        if read != list(inputs_of(reader)) or called_name(reader) not in _BLIND:
            return None
        made, traced = _evaluated(reader, values), meta_tensor(reader)
        if made is None or traced is None or _kind(made) != _kind(traced):
            return None
        if made.stride() == traced.stride():
            ends.append(reader)  # which may share memory with `node` now, and did not before
        else:
            values[reader] = made
    memory = storages([*values, *ends])
    (output,) = node.graph.find_nodes(op="output")
    seen = [inputs_of(output), *(writes_of(n) for n in node.graph.nodes)]
    return None if any(memory & storages(nodes) for nodes in seen if nodes) else values


def _after(node: Node) -> Sequence[Node]:
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) + 1 :]


def _evaluated(reader: Node, values: dict[Node, Tensor]) -> Tensor | None:
    args, kwargs = torch.fx.map_arg((reader.args, reader.kwargs), values.__getitem__)
    try:
        with next(iter(values.values())).fake_mode:  # type: ignore[attr-defined]
            if reader.op == "call_method":
                made: Any = getattr(args[0], str(reader.target))(*args[1:], **kwargs)
            else:
                made = reader.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError):  # a `view` that these strides do not allow
        return None
    return made if isinstance(made, Tensor) else None


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _restore(node: Node, now: Tensor, was: FakeTensor) -> None:
    """Copy the value after the node, into the strides that were traced."""
    order = sorted(range(was.ndim), key=was.stride, reverse=True)
    inverse = [order.index(i) for i in range(was.ndim)]
    steps = [("permute", (order,)), ("contiguous", ()), ("permute", (inverse,))]
    if order == inverse == sorted(order):
        steps = steps[1:2]
    values = [now]
    with was.fake_mode, torch.set_grad_enabled(was.requires_grad):
        for name, args in steps:
            values.append(getattr(values[-1], name)(*args))
    if (_kind(values[-1]), values[-1].stride()) != (_kind(was), was.stride()):
        raise StridesError(f"its result would have strides {now.stride()}, not {was.stride()}")
    made, readers, graph = node, list(node.users), node.graph
    for (name, args), value in zip(steps, values[1:]):
        made = _method(graph, made, name, args)
        made.meta = {**node.meta, "example_value": value}
    made.meta["example_value"] = was
    node.meta["example_value"] = now
    for reader in readers:
        reader.replace_input_with(node, made)


def _method(graph: Graph, of: Node, name: str, args: tuple[Any, ...]) -> Node:
    with graph.inserting_after(of):
        return graph.call_method(name, (of, *args))
