"""What a node of an FX graph reads, writes and holds."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

# `iadd` of `add`, `iand` of `and_`; not `invert` or `index`.
_IN_PLACE_OPERATORS = {
    f
    for n, f in vars(operator).items()
    if n.startswith("i") and (hasattr(operator, n[1:]) or hasattr(operator, f"{n[1:]}_"))
}
# Functions that write to an argument although neither their name nor an argument says so.
_STATISTICS: dict[Any, int] = {
    F.batch_norm: 1,
    F.instance_norm: 1,
    torch.batch_norm: 3,
    torch.instance_norm: 3,
    torch.native_batch_norm: 3,
    torch.batch_norm_gather_stats: 3,
    torch.batch_norm_gather_stats_with_counts: 3,
    torch.batch_norm_update_stats: 1,
}  # function → place of the running mean, which the running variance follows
# Overloads of ATen that take running statistics and do not write them.
_READ_STATISTICS = ("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
# Functions that return their input itself in eval mode, though a fake tensor of it is a copy
# (on torch 2.11, not on 2.15).
_TORCH_DROPOUTS = ("", "feature_", "alpha_", "feature_alpha_")
DROPOUTS = frozenset(
    getattr(module, f"{name}dropout{suffix}")
    for module, name, suffixes in (
        (F, "", ("", "1d", "2d", "3d")),
        *((F, name, ("",)) for name in ("alpha_", "feature_alpha_")),
        *((torch, name, ("", "_")) for name in _TORCH_DROPOUTS),
    )
    for suffix in suffixes
) | frozenset(
    getattr(torch.ops.aten, f"{name}dropout{suffix}").default
    for name in _TORCH_DROPOUTS
    for suffix in ("", "_")
)


def in_place_name(name: str) -> bool:
    if name.startswith("__i") and name.endswith("__"):  # x.__iadd__(1)
        return name not in ("__invert__", "__index__", "__int__", "__init__", "__iter__")
    return name.endswith("_") and not name.endswith("__")


def meta_tensor(node: Node) -> torch.Tensor | None:
    """The fake tensor Dynamo computed for this node, or None."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def as_written(node: Node) -> dict[str, Any]:
    """What it calls, as attributes: they can be set again after an edit."""
    return {name: getattr(node, name) for name in ("op", "target", "args", "kwargs")}


def is_dtensor(value: object) -> bool:
    """Is it a DTensor?  Does not import the class, which takes time: without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def hint_of(size: int | torch.SymInt) -> int | None:
    """A size as it is in this trace, or None if it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return hint if isinstance(hint, int) else None


def storages(nodes: Iterable[Node]) -> set[Any]:
    """Identities of the memory behind the nodes' tensors; None stands for memory unknown.

    Fake tensors keep aliasing: a base, its views and its in-place results share one storage.
    """
    found: set[Any] = set()
    for node in _with_undropped(nodes):
        value = node.meta.get("example_value")
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
                try:
                    found.add(tensor.untyped_storage()._cdata)
                except (NotImplementedError, RuntimeError):  # wrapper subclasses, sparse tensors
                    found.add(None)
            elif tensor is None and node.op != "get_attr":
                found.add(None)
    return found


def _with_undropped(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, and the inputs of dropouts among them, which may return their input."""
    for node in nodes:
        yield node
        while node.op == "call_function" and node.target in DROPOUTS:
            trains = (argument_of(node, 2, "training"), node.kwargs.get("train"))
            argument = input_of(node)
            random = True in trains and argument_of(node, 1, "p") != 0
            if random or not isinstance(argument, Node):
                break
            node = argument
            yield node


# ---- who writes what ------------------------------------------------------------------------


def nodes_in(value: Any) -> Iterator[Node]:
    """The nodes anywhere inside an argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        yield from nodes_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))


def inputs_of(node: Node) -> tuple[Node, ...]:
    """Every node among the arguments, in order, each once."""
    return tuple(dict.fromkeys(nodes_in((node.args, node.kwargs))))


def argument_of(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def input_of(node: Node) -> Any:
    """The first argument: `input` of torch's functions, `self` of ATen's."""
    return argument_of(node, 0, "self" if "self" in node.kwargs else "input")


def called_in_place(node: Node) -> bool:
    """Does this call change its first argument and return it?"""
    target = node.target
    if node.op == "call_method":
        return in_place_name(str(target))
    if node.op != "call_function":
        return False
    if target in _IN_PLACE_OPERATORS:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return _returns_what_it_writes(target)
    if not _is_torch_function(target):
        return False
    if in_place_name(getattr(target, "__name__", "")):
        return True
    try:  # F.silu(z, True) as well as F.silu(z, inplace=True)
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return node.kwargs.get("inplace") is True
    return bound.arguments.get("inplace") is True


def _returns_what_it_writes(overload: torch._ops.OpOverload) -> bool:
    """Does the schema say so of the first argument?  An `out=` is not the first."""
    given, returned = overload._schema.arguments[:1], overload._schema.returns
    if len(returned) != 1 or not given or not given[0].is_write or returned[0].alias_info is None:
        return False
    return bool(returned[0].alias_info.is_write)


def _is_torch_function(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    owner = getattr(target, "__self__", None)
    return (
        module.split(".")[0] == "torch"
        or getattr(owner, "__module__", "").startswith("torch")
        or getattr(owner, "__name__", "").startswith("torch")
        or (isinstance(owner, type) and owner.__name__.startswith("_VariableFunctions"))
    )


def is_torchs(node: Node) -> bool:
    """Is it a method, an operator, or a torch function?  A user's function or custom operator may
    have the name of one, such as `clone`, and do something else."""
    target = node.target
    if node.op != "call_function":
        return node.op == "call_method"
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet: Any = getattr(target, "_overloadpacket", target)
        return str(packet._qualified_op_name).partition("::")[0] == "aten"
    if getattr(target, "__module__", None) in ("_operator", "builtins"):
        return True
    return _is_torch_function(target)


# Higher-order operators whose body is ordinary model code, run once per call.
TRANSPARENT = ("tag_activation_checkpoint", "invoke_subgraph", "wrap")


def body_of(node: Node) -> GraphModule | None:
    """The body that a transparent higher-order operator runs; None for any other node."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in TRANSPARENT:
        return None
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or first.op != "get_attr":
        return None
    body = getattr(node.graph.owning_module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def _renormalises(node: Node) -> bool:
    """An embedding with `max_norm` scales the rows of its weight."""
    return argument_of(node, 3, "max_norm") is not None


def writes_of(node: Node) -> tuple[Node, ...]:
    """The arguments whose memory this node may write; all of them if that is unknown."""
    if node.op in ("placeholder", "get_attr", "output"):
        return ()
    written: Sequence[Any] | None = None
    if node.op == "call_method":
        name = str(node.target)
        changes = in_place_name(name) or name in ("__setitem__", "__delitem__")
        written = node.args[:1] if changes else ()
    elif node.op == "call_function":
        written = _written_by_function(node)
    return inputs_of(node) if written is None else tuple(nodes_in(written))


def _written_by_function(node: Node) -> Sequence[Any] | None:
    """The arguments that a function may write to; None if that is unknown."""
    target = node.target
    if getattr(target, "writes_nothing", False) is True:  # of `graph.prepare.localize`
        return ()
    if target in (getattr, abs) or getattr(target, "__module__", None) in ("_operator", "math"):
        changes = target in _IN_PLACE_OPERATORS or target in (operator.setitem, operator.delitem)
        return node.args[:1] if changes else ()
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = (getattr(target, o) for o in target.overloads())
        return None if any(o._schema.is_mutable for o in overloads) else ()
    if isinstance(target, torch._ops.HigherOrderOperator):
        body = body_of(node)
        unwritten = body is not None and not any(map(writes_of, body.graph.nodes))
        return () if unwritten else None
    # Dynamo's wrappers of numpy functions and operators, some of which write: `a += 1`.
    is_numpy = type(target).__module__ == "torch._dynamo.utils"
    if is_numpy or not _is_torch_function(target):
        return None
    return _written_by_torch(node)


def _written_by_schema(node: Node, target: torch._ops.OpOverload) -> list[Any]:
    names = [a.name for a in target._schema.arguments if a.is_write]
    positions = {a.name: i for i, a in enumerate(target._schema.arguments)}
    if "running_mean" in positions and not names:  # their schemas do not say that they write
        place = positions.get("training", len(positions))
        reads = target._overloadpacket.__name__ in _READ_STATISTICS
        reads |= argument_of(node, place, "training") is False
        names = [] if reads else ["running_mean", "running_var"]
    return [argument_of(node, positions[name], name) for name in names]


def _written_by_torch(node: Node) -> list[Any]:
    """What a function of torch or torch.nn.functional writes."""
    target = node.target
    written = [node.kwargs.get("out")]
    if called_in_place(node):
        written += node.args[:1] or (node.kwargs.get("input"),)
    if target in (F.embedding, F.embedding_bag) and _renormalises(node):
        written.append(argument_of(node, 1, "weight"))
    norms = (F.batch_norm, torch.batch_norm)
    reads = target in norms and argument_of(node, 5, "training") in (None, False)
    first = None if reads else _STATISTICS.get(target)
    if first is not None:
        written.append(argument_of(node, first, "running_mean"))
        written.append(argument_of(node, first + 1, "running_var"))
    return written
