"""DTensors: an anchor with its tail, moved to the local shards before matching.

    x: DTensor, replicated; w, b: DTensors, Shard(0)          x', w', b' = to_local of x, w, b
    z = linear(x, w, b)                                       z = linear(x', w', b')
    y = silu(z.redistribute(Shard(-1)).to_local())        →   y = silu(z)

`ColwiseParallel` and `RowwiseParallel` write the left side. On the right all are plain tensors of
local sizes, which are matched, checked, timed and fused like any others; and no op of fx_fuser
needs a sharding rule in DTensor's dispatcher, nor do those of its backward. A value that other
operations read as a DTensor is made one again. As elsewhere, this edits the copy of the graph that
is searched, and what is not fused is put back as the user wrote it.

`to_local` says how a gradient is placed, which is the other half of each rule: where z is sharded
and an operand is not, each rank has a part of the operand's gradient (`Partial`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from fx_fuser.graph.epilogue import OPS
from fx_fuser.graph.naming import called
from fx_fuser.graph.nodes import called_in_place, inputs_of, is_dtensor, meta_tensor, storages
from fx_fuser.graph.sites import site_at
from fx_fuser.graph.source import op_of
from fx_fuser.graph.view import View

Placements = tuple[Any, ...]  # one a dimension of the mesh
_KEY = "fx_fuser_placement"
_AS_WRITTEN = ("op", "target", "args", "kwargs")
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")

# A linear along one dimension of the mesh, x [*, M, K], weight [N, K], bias [N], z [*, M, N]:
# which dimension of each is sharded, or R: replicated, P: each rank has a summand. In the last
# three columns, the same of the gradients.
_LINEAR = {
    # x    w    b      z    dx   dw   db
    ("R", "N", "N"): ("N", "P", "N", "N"),  # column-wise
    ("K", "K", "R"): ("P", "K", "K", "R"),  # row-wise; each rank adds its share of the bias
    ("M", "R", "R"): ("M", "M", "P", "P"),  # a batch or a sequence
    ("R", "R", "R"): ("R", "R", "R", "R"),
}


class NoRuleError(Exception):
    """Why an operation cannot run on local shards, with the operand and its placement."""


def reason_of(node: Node) -> str:
    """Why an anchor of DTensors was left as it is; empty if it is none."""
    found: str = node.meta.get(_KEY, "")
    return found


# ---- what stands in the graph ------------------------------------------------------------------
# Functions made for one node each. Until torch 2.13 a placement cannot be an argument in a graph.


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    function.writes_nothing = True  # type: ignore[attr-defined]
    return function


def _to_local(gradient: Placements) -> Callable[[Any], Tensor]:
    def to_local(value: Any) -> Tensor:
        local: Tensor = value.to_local(grad_placements=gradient)
        return local

    return _reading(to_local)


def _to_share(gradient: Placements, parts: int) -> Callable[[Any], Tensor]:
    def to_share(value: Any) -> Tensor:
        local = value.to_local(grad_placements=gradient)
        share: Tensor = _Share.apply(local, parts)  # type: ignore[no-untyped-call]
        return share

    return _reading(to_share)


def _from_local(placements: Placements) -> Callable[[Tensor, Any], Any]:
    def from_local(local: Tensor, like: Any) -> Any:
        return type(like).from_local(local, like.device_mesh, placements, run_check=False)

    return _reading(from_local)


class _Share(torch.autograd.Function):
    """A rank's share of a replicated tensor that all ranks add to a sum, divided as DTensor does.

    The sum's gradient is replicated, and so is then the tensor's: no share of it is taken.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, parts: int) -> Tensor:
        return value / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


# ---- rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Local:
    """An operation that can run on local shards.

    value: its DTensor. like: a node with a DTensor on the same mesh. gradients: operand → the
    placements of its gradient. shares: operand → among how many ranks it is divided.
    """

    value: Any
    like: Node
    gradients: dict[Node, Placements]
    shares: dict[Node, int] = field(default_factory=dict)


def _types() -> tuple[type, type, type]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate, Shard, Partial


def _kind(placement: Any, dims: Mapping[int, str]) -> str:
    """R, or the name of the sharded dimension; any other placement has none."""
    replicate, shard, _ = _types()
    if type(placement) is replicate:
        return "R"
    return dims.get(placement.dim, "") if type(placement) is shard else ""


def _linear(node: Node, operands: Mapping[str, tuple[Node | None, Any]]) -> _Local:
    """operands: name → node and DTensor, or two None."""
    replicate, _, partial = _types()
    (x, left), (weight, right), (bias, vector) = operands.values()
    y: Any = meta_tensor(node)
    assert x is not None and weight is not None
    rows = {dim: "M" for dim in range(left.ndim - 1)}
    dims = ({**rows, left.ndim - 1: "K"}, {0: "N", 1: "K"}, {0: "N"})
    gradients: dict[Node, list[Any]] = {n: [] for n in (x, weight, bias) if n is not None}
    if len(gradients) < 2 + (bias is not None):
        raise NoRuleError("one tensor is two of its operands")
    parts = 1
    for i, of_x in enumerate(left.placements):
        of_bias = of_x if vector is None else vector.placements[i]
        given = (of_x, right.placements[i], of_bias)
        kinds = [_kind(p, own) for p, own in zip(given, dims)]
        if vector is None:  # as if it were placed as its rule says
            kinds[2] = "N" if kinds[1] == "N" else "R"
        rule = _LINEAR.get((kinds[0], kinds[1], kinds[2]))
        if rule is None:
            raise NoRuleError(_without_rule(operands))
        column = y.ndim - 1
        placed = {"R": replicate(), "P": partial(), "M": of_x, "N": _types()[1](column)}[rule[0]]
        if y.placements[i] != placed:
            raise NoRuleError(f"DTensor places its result {y.placements}")
        if rule[0] == "P":
            parts *= left.device_mesh.size(i)
        for own, placement, kind in zip(gradients.values(), given, rule[1:]):
            own.append(partial() if kind == "P" else placement)
    known = {node: tuple(placed) for node, placed in gradients.items()}
    shares = {bias: parts} if bias is not None and parts > 1 else {}
    return _Local(y, weight, known, shares)


def _without_rule(operands: Mapping[str, tuple[Node | None, Any]]) -> str:
    said = (
        f"{called(node)} as {value.placements}" for node, value in operands.values() if node
    )
    return f"there is no rule for operands placed so: {', '.join(said)}"


def _pointwise(node: Node, operands: Mapping[Node, Any]) -> _Local:
    """operands: node → DTensor."""
    replicate, shard, partial = _types()
    y: Any = meta_tensor(node)
    gradients: dict[Node, Placements] = {}
    for operand, value in operands.items():
        placed: list[Any] = []
        for of_y, own in zip(y.placements, value.placements):
            if type(of_y) not in (replicate, shard):
                raise NoRuleError(f"its result is placed as {y.placements}")
            dim = of_y.dim - y.ndim + value.ndim if type(of_y) is shard else None
            is_whole = type(own) is replicate
            # Along a sharded dimension: a shard of the same, or broadcast from one element.
            if dim is None and is_whole:
                placed.append(own)
            elif dim is not None and is_whole and (dim < 0 or _is(value.shape[dim] == 1)):
                placed.append(partial())
            elif type(own) is shard and own.dim == dim and _is(value.shape[dim] == y.shape[of_y.dim]):
                placed.append(own)
            else:
                reason = f"{called(operand)} is placed as {value.placements}, the result as "
                raise NoRuleError(f"{reason}{y.placements}")
        gradients[operand] = tuple(placed)
    return _Local(y, next(iter(operands)), gradients)


def _is(known: Any) -> bool:
    return statically_known_true(known)


def _are_even(value: Any) -> bool:
    """Has each rank a shard of the same size, in the memory order of the whole?"""
    _, shard, _ = _types()
    local, mesh = value._local_tensor, value.device_mesh
    sizes = [*local.shape]
    for i, placement in enumerate(value.placements):
        if type(placement) is shard:
            sizes[placement.dim] = sizes[placement.dim] * mesh.size(i)
    return len(sizes) == value.ndim and all(_is(a == b) for a, b in zip(sizes, value.shape))


# ---- finding -----------------------------------------------------------------------------------


class _Finder:
    """Finds what can run on local shards, and edits nothing but the reasons in meta.

    found: the operations. base: DTensor or its `to_local` → the operation whose local result it is.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.found: dict[Node, _Local] = {}
        self.base: dict[Node, Node] = {}
        for node in view.nodes:
            with suppress(NoRuleError):  # a tail ends there
                self._read(node)

    def _read(self, node: Node) -> None:
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and source in self.base and self._is_kept(node, source):
            self.base[node] = self.base[source]
            return
        if not is_dtensor(meta_tensor(node)):
            return
        site = None
        with suppress(Exception):  # a node that cannot be read raises again in `find`
            site = site_at(self.view, node)
        if site is not None:
            try:
                local = self._anchor(node, site.operands)
            except NoRuleError as rule:
                node.meta[_KEY] = str(rule)
                raise
        else:
            local = self._operation(node)
        if local is not None:
            self.found[node], self.base[node] = local, node

    def _is_kept(self, node: Node, source: Node) -> bool:
        """Is it a `to_local`, or a `redistribute` that changes nothing, of this DTensor?"""
        name, given = _call_of(node)
        old, new = meta_tensor(source), meta_tensor(node)
        if self.view.region[node] != self.view.region[source] or not is_dtensor(old):
            return False
        if name == "to_local":
            return given.keys() <= {"grad_placements"} and not any(
                placed is not None and tuple(placed) != old.placements for placed in given.values()
            ) and _types()[2] not in map(type, old.placements)
        return (
            name == "redistribute"
            and given.keys() <= {"device_mesh", "placements", "async_op"}
            and is_dtensor(new)
            and new.placements == old.placements  # type: ignore[union-attr]
            and new.device_mesh == old.device_mesh  # type: ignore[union-attr]
            and new.dtype == old.dtype  # type: ignore[union-attr]
        )

    def _anchor(self, node: Node, named: Mapping[str, Node | None]) -> _Local:
        written = self.view.written(node)
        if written is None or written.op != "linear":
            raise NoRuleError(f"there is no rule for {op_of(node)} of DTensors")
        self._check(node)
        return _linear(node, {n: (o, o and meta_tensor(o)) for n, o in named.items()})

    def _operation(self, node: Node) -> _Local | None:
        written, operands = self.view.written(node), inputs_of(node)
        if written is None or written.op not in OPS or self.base.keys().isdisjoint(operands):
            return None
        self._check(node)
        return _pointwise(node, {o: meta_tensor(o) for o in operands})

    def _check(self, node: Node) -> None:
        """All are DTensors on one mesh, of even shards, and nothing writes to them."""
        operands = inputs_of(node)
        value: Any = meta_tensor(node)
        for operand in (*operands, node):
            own: Any = meta_tensor(operand)
            if not is_dtensor(own):
                raise NoRuleError(f"{called(operand)} is no DTensor, unlike {called(node)}")
            if own.device_mesh != value.device_mesh:
                raise NoRuleError(f"{called(operand)} is on another mesh")
            if not _are_even(own):
                shape = f"{tuple(own.shape)}, placed as {own.placements}"
                raise NoRuleError(f"{called(operand)} of shape {shape}, is not divided evenly")
        if called_in_place(node) or storages((*operands, node)) & {None, *self.view.written_at}:
            raise NoRuleError(f"something writes to the memory of {called(node)} or of an operand")


def _call_of(node: Node) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a DTensor's method. In torch 2.11 Dynamo records a closure over them."""
    if node.op == "call_method":
        name, args, kwargs = str(node.target), node.args[1:], node.kwargs
    else:
        name = getattr(node.target, "__name__", "")
        cells = dict(
            zip(
                getattr(getattr(node.target, "__code__", None), "co_freevars", ()),
                (cell.cell_contents for cell in getattr(node.target, "__closure__", None) or ()),
            )
        )
        if not name.startswith("prim_") or not {"args_as_value", "kwargs_as_value"} <= cells.keys():
            return "", {}
        name = name.removeprefix("prim_")
        args, kwargs = tuple(cells["args_as_value"]), cells["kwargs_as_value"]
    names = {"redistribute": ("device_mesh", "placements")}.get(name, ())
    if len(args) > len(names):
        return "", {}
    return name, {**dict(zip(names, args)), **kwargs}


# ---- editing -----------------------------------------------------------------------------------


def localize(graph: Graph) -> Localized:
    """Move every operation that can be to the local shards."""
    if not any(is_dtensor(meta_tensor(node)) for node in graph.nodes):
        return Localized(graph, {}, {})
    finder = _Finder(View(graph))
    return Localized(graph, finder.found, finder.base)


class Localized:
    """What runs on local shards in one graph, and how to put it back. base: see `_Finder`."""

    def __init__(
        self, graph: Graph, found: Mapping[Node, _Local], base: Mapping[Node, Node]
    ) -> None:
        self._graph = graph
        self._found = found
        self._base = base
        self._nodes = [node for node in graph.nodes if node in base]
        self._written = {n: {k: getattr(n, k) for k in _AS_WRITTEN} for n in self._nodes}
        self._meta = {n: dict(n.meta) for n in self._nodes}
        self._made: list[Node] = []
        self._whole: dict[Node, Node] = {}  # DTensor as written → the node that makes it again
        self._edit()

    def _edit(self) -> None:
        written = {n: [r for r in n.users if r not in self._base] for n in self._nodes}
        for node in self._nodes:
            if node in self._found:
                local = {o: self._local_of(node, o) for o in self._found[node].gradients}
                now = functools.partial(_looked_up, local)
                node.args, node.kwargs = map_arg((node.args, node.kwargs), now)
                node.meta["example_value"] = _fake(self._found[node].value)
        for node, readers in written.items():
            for reader in readers:
                is_whole = is_dtensor(self._meta[node]["example_value"])
                now = self._made_whole(node, self._base[node]) if is_whole else self._base[node]
                reader.replace_input_with(node, now)
        for node in reversed(self._nodes):
            if node not in self._found:
                self._graph.erase_node(node)

    def _local_of(self, node: Node, operand: Node) -> Node:
        """The operand's local shard, as this operation reads it."""
        local = self._found[node]
        gradient, parts = local.gradients[operand], local.shares.get(operand, 1)
        source = operand
        if operand in self._base:
            base = self._base[operand]
            if parts == 1 and gradient == self._found[base].value.placements:
                return base
            source = self._made_whole(operand, base)
        function = _to_local(gradient) if parts == 1 else _to_share(gradient, parts)
        with self._graph.inserting_before(node):
            made = self._graph.call_function(function, (source,))
        made.meta = {k: v for k, v in source.meta.items() if k in _KEPT_META}
        made.meta["example_value"] = _fake(source.meta["example_value"], parts > 1)
        self._made.append(made)
        return made

    def _made_whole(self, written: Node, local: Node) -> Node:
        """The DTensor that a node was as the user wrote it, of its local shard."""
        if written not in self._whole:
            base = self._base[written]
            like = self._found[base].like
            while like in self._base:
                like = self._found[self._base[like]].like
            with self._graph.inserting_after(local):
                function = _from_local(self._found[base].value.placements)
                made = self._graph.call_function(function, (local, like))
            made.meta = {k: v for k, v in self._meta[written].items() if k in _KEPT_META}
            made.meta["example_value"] = self._meta[written]["example_value"]
            self._whole[written] = made
        return self._whole[written]

    def restore(self, results: Mapping[Node, Node]) -> None:
        """Put back what was not fused. results: fused node → the node of its match's result."""
        now: dict[Node, Node] = {}  # node as written → what has its value
        restored: set[Node] = set()  # what reads DTensors again
        last: dict[Node, Node] = {}  # operation → the last of what was put back behind it
        locals_: dict[Node, Node] = {}  # operation → the user's own `to_local` of it

        def value_of(node: Node) -> Node:
            if node not in self._base:
                return results.get(node, node)
            if node not in now:  # fused
                result = results[self._base[node]]
                whole = is_dtensor(self._meta[node]["example_value"])
                now[node] = self._made_whole(node, result) if whole else result
            return now[node]

        for node in self._nodes:
            base = self._base[node]
            if base in results:
                continue
            written = self._written[node]
            with self._graph.inserting_before(node if node is base else last[base].next):
                args, kwargs = map_arg((written["args"], written["kwargs"]), value_of)
            if node is base:
                node.args, node.kwargs = args, kwargs
                now[node] = node
            else:
                with self._graph.inserting_after(last[base]):
                    now[node] = self._graph.create_node(
                        written["op"], written["target"], args, kwargs, name=node.name
                    )
                if not is_dtensor(self._meta[node]["example_value"]):
                    locals_.setdefault(base, now[node])
            now[node].meta = dict(self._meta[node])
            last[base] = now[node]
            restored.add(now[node])
        for node, whole in self._whole.items():
            if node in now and self._base[node] not in results:
                whole.replace_all_uses_with(now[node])
        self._show_local(restored, locals_, results)
        for made in reversed([*self._made, *self._whole.values()]):
            if not made.users:
                self._graph.erase_node(made)

    def _show_local(
        self, restored: set[Node], own: dict[Node, Node], results: Mapping[Node, Node]
    ) -> None:
        """Give the local shard of each operation that was put back to those that still read it."""
        for node in self._found:
            if node in results:
                continue
            whole = {self._whole[n] for n, b in self._base.items() if b is node and n in self._whole}
            for reader in [r for r in node.users if r not in restored | whole]:
                if node not in own:
                    with self._graph.inserting_after(node):
                        placed = self._found[node].value.placements
                        own[node] = self._graph.call_function(_to_local(placed), (node,))
                    own[node].meta = dict(node.meta)
                    own[node].meta["example_value"] = _fake(self._found[node].value)
                reader.replace_input_with(node, own[node])


def _looked_up(known: Mapping[Node, Node], node: Node) -> Node:
    return known.get(node, node)


def _fake(value: Any, is_new: bool = False) -> Tensor:
    """The fake local shard of a fake DTensor. is_new: not in its memory."""
    with torch.set_grad_enabled(value.requires_grad):
        local: Tensor = value.to_local()
        return local * 1 if is_new else local
