"""What `torch.export` records: ATen's own operations, each an overload with a schema.

Where Dynamo records `torch.mul` or `x.mul_(y)`, an exported graph has `aten.mul.Tensor` or
`aten.mul_.Tensor`. torch makes `torch.mul` from the schemas of those overloads. So an overload
means what its function means, and its arguments have the same names, except `self`, which the
function calls `input`. There is no second table of meanings: `lookup` finds the entry of the
function in a table of ours, and `by_name` calls a rule of the function with the overload's
arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read.expr import Expr, Unsupported
from fx_fuser.graph.read.nodes import meta_tensor

aten = torch.ops.aten


def lookup(overload: OpOverload, table: Mapping[Any, Any]) -> Any:
    """The table's entry of the function that this overload belongs to, or None.

    The functions of `F` come last: F.elu and F.batch_norm differ from ATen's.
    """
    if overload.namespace != "aten" or torch.Tag.inplace_view in overload.tags:
        return None  # x.t_() changes the shape of x, and no later node shows it
    return next((table[key] for key in _functions(overload) if key in table), None)


def _functions(overload: OpOverload) -> Iterator[Any]:
    packet = overload._overloadpacket
    name = packet.__name__
    yield packet
    for module in (torch, torch._C._nn, torch._C._special, F):  # type: ignore[attr-defined]
        yield getattr(module, name, None)
        yield getattr(module, name.removesuffix("_"), None)
    yield name.removesuffix("_")  # a method, and its in-place twin


def by_name(rule: Callable[..., Any], overload: OpOverload) -> Callable[..., Any]:
    """The rule, to be called with the overload's arguments.

    It raises TypeError at an argument that it does not have, such as `out` and `generator`. What
    the rule takes by position, such as the operands of an einsum, is passed in the schema's order.
    """
    names = [a.name for a in overload._schema.arguments]
    kinds = {p.kind for p in inspect.signature(rule).parameters.values()}

    def called(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args)), **kwargs}
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return rule(*named.values())
        return rule(**{"input" if name == "self" else name: v for name, v in named.items()})

    return called


# ---- operations that have no function ----------------------------------------------------------


def _convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    output_padding: Any,
    groups: Any,
) -> Expr:
    """In two dimensions, not transposed: `run_decompositions` turns a conv2d into it."""
    tensor = meta_tensor(input) if isinstance(input, Node) else None
    if tensor is None or tensor.ndim != 4 or transposed is not False:
        raise Unsupported
    attrs = ("stride", stride), ("padding", padding), ("dilation", dilation), ("groups", groups)
    return Expr("conv2d", (input, weight, bias), attrs)


def _clone(input: Any, *, memory_format: Any = None) -> Expr:
    """`run_decompositions` turns a dropout in eval mode into it."""
    if memory_format not in (None, torch.preserve_format):
        raise Unsupported
    return Expr("identity", (input,))


RULES: list[tuple[Callable[..., Expr], list[Any]]] = [
    (_convolution, [aten.convolution]),
    (_clone, [aten.clone]),
]


# ---- checks of metadata ------------------------------------------------------------------------


def drop_proven_checks(graph: Graph) -> None:
    """Erase the checks that torch.export puts before a cast, where the graph's own fake tensors
    prove them. Each would count as a reader of its value."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default and not node.users:
            named = by_name(_is_proven, node.target)
            if named(*node.args, **node.kwargs):
                graph.erase_node(node)


def _is_proven(
    a: Any,
    size: Any = None,
    stride: Any = None,
    dtype: Any = None,
    device: Any = None,
    layout: Any = None,
) -> bool:
    tensor = meta_tensor(a)
    if tensor is None or (layout is not None and layout != tensor.layout):
        return False
    lengths = ((size, tensor.shape), (stride, tensor.stride()))
    return (
        dtype in (None, tensor.dtype)
        and device in (None, tensor.device)
        and all(
            said is None
            or (len(said) == len(has) and all(map(statically_known_true, map(_same, said, has))))
            for said, has in lengths
        )
    )


def _same(a: Any, b: Any) -> Any:
    return a == b
