"""Which values of a graph come from a tensor of the user's own class, `class Image(torch.Tensor)`.

Dynamo traces the class's `__torch_function__` into the graph and gives the result its class back;
the fake tensors in between are plain. But the graph is called with tensors of that class. On the
first call, torch checks custom ops for results that alias their arguments, in a dispatch mode that
raises TypeError at a class it does not know: at a fused op, and where autograd saves such a tensor
for one. (Inductor's kernels are not ops.) And in a backward that runs eagerly,
`__torch_function__` would change what a fused op computes.

Which of the values in between are plain at run time depends on the compiler: `x * 1.0` may be x
itself. So everything computed from such a tensor counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.nn import Parameter

_KEY = "fx_fuser_subclass"


class Origin(NamedTuple):
    """The input or attribute from which a value comes, and the name of its class."""

    node: Node
    kind: str


def origin_of(node: Node) -> Origin | None:
    """Where the value got its class, or None if it is plain."""
    found: Origin | None = node.meta.get(_KEY)
    return found


def mark(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Record the `origin_of` the nodes of the graph and of the bodies it calls, in their meta.

    inputs: the values that the graph is called with.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, inputs):
        if is_user_class(value):
            node.meta[_KEY] = Origin(node, type(value).__name__)
    _spread(gm)


def _spread(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        value = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if is_user_class(value):
            node.meta[_KEY] = Origin(node, type(value).__name__)
        origin = next((o for n in node.all_input_nodes if (o := origin_of(n))), None)
        if origin is not None:
            node.meta[_KEY] = origin
        if isinstance(value, GraphModule):
            _mark_body(value, node)


def _mark_body(body: GraphModule, node: Node) -> None:
    """If one argument is of such a class, all count as such."""
    given = (o for user in node.users for n in user.all_input_nodes if (o := origin_of(n)))
    origin = next(given, None)
    for inner in body.graph.nodes:
        if origin is not None and inner.op == "placeholder":
            inner.meta[_KEY] = origin
    _spread(body)


def is_user_class(value: Any) -> bool:
    """Is it a tensor of a subclass without a `__torch_dispatch__` of its own?

    Subclasses with one (DTensor) show in their fake tensors, and AOTAutograd desugars them.
    A Parameter subclass without a `__torch_function__` of its own behaves as a plain tensor.
    """
    kind = type(value)
    if not isinstance(value, torch.Tensor) or kind in (torch.Tensor, Parameter):
        return False
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return Parameter not in kind.__mro__ or kind.__torch_function__ is not _NO_FUNCTION


_NO_FUNCTION = Parameter.__torch_function__
