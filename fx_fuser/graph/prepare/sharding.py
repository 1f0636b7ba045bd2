"""Which operations on DTensors can run on the local shards: the rules.

Each rule says, along one dimension of the mesh, how operands, result and the operands' gradients
are placed: where the result is sharded and an operand is not, each rank has a part of the
operand's gradient (`Partial`). There is no rule where DTensor itself would place the result
otherwise, or would redistribute an operand first.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read.naming import called
from fx_fuser.graph.read.nodes import called_in_place, inputs_of, is_dtensor, meta_tensor, storages
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.sites import site_at
from fx_fuser.graph.read.source import op_of
from fx_fuser.graph.read.view import View

Placements = tuple[Any, ...]  # one per dimension of the mesh
Operands = Mapping[str, tuple["Node | None", Any]]  # name → node and DTensor, or two None
_KEY = "fx_fuser_placement"

# linear, x [*, M, K], weight [N, K], bias [N], z [*, M, N]: which dimension of each is sharded, or
# R: replicated, P: each rank has a summand.
_LINEAR = {
    # x    w    b      z    dx   dw   db
    ("R", "N", "N"): ("N", "P", "N", "N"),  # column-wise
    ("K", "K", "R"): ("P", "K", "K", "R"),  # row-wise; each rank adds its share of the bias
    ("M", "R", "R"): ("M", "M", "P", "P"),  # a batch or a sequence
}
# There is no rule for a replicated z. Its gradient may arrive as summands (`Partial`), which
# `from_local` would add up, while DTensor keeps them as they are.


class NoRuleError(Exception):
    """Why an operation cannot run on local shards."""


def reason_of(node: Node) -> str:
    """Why an anchor of DTensors cannot run on local shards; empty for any other node."""
    found: str = node.meta.get(_KEY, "")
    return found


@dataclass(frozen=True)
class Local:
    """An operation that can run on local shards.

    value: its DTensor. like: a node with a DTensor on the same mesh. gradients: operand → the
    placements of its gradient. shares: operand → the number of ranks it is divided among.
    """

    value: Any
    like: Node
    gradients: dict[Node, Placements]
    shares: dict[Node, int] = field(default_factory=dict)


def _types() -> tuple[Any, Any, Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate, Shard, Partial


def _kind(placement: Any, dims: Mapping[int, str]) -> str:
    """R, or the name of the sharded dimension; empty for any other placement."""
    replicate, shard, _ = _types()
    if type(placement) is replicate:
        return "R"
    return dims.get(placement.dim, "") if type(placement) is shard else ""


def _linear(node: Node, operands: Operands) -> Local:
    _, shard, partial = _types()
    (x, left), (weight, right), (bias, vector) = operands.values()
    y: Any = meta_tensor(node)
    assert x is not None and weight is not None
    rows = dict.fromkeys(range(left.ndim - 1), "M")
    dims = ({**rows, left.ndim - 1: "K"}, {0: "N", 1: "K"}, {0: "N"})
    gradients: dict[Node, list[Any]] = {n: [] for n in (x, weight, bias) if n is not None}
    if len(gradients) < 2 + (bias is not None):
        raise NoRuleError("two of its operands are one tensor")
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
        placed = {"P": partial(), "M": of_x, "N": shard(y.ndim - 1)}[rule[0]]
        if y.placements[i] != placed:
            raise NoRuleError(f"DTensor places its result as {y.placements}")
        if rule[0] == "P":
            parts *= left.device_mesh.size(i)
        for own, placement, kind in zip(gradients.values(), given, rule[1:]):
            own.append(partial() if kind == "P" else placement)
    known = {operand: tuple(own) for operand, own in gradients.items()}
    shares = {bias: parts} if bias is not None and parts > 1 else {}
    return Local(y, weight, known, shares)


def _without_rule(operands: Operands) -> str:
    said = (f"{name} {v.placements}" for name, (node, v) in operands.items() if node is not None)
    return f"no rule for these placements: {', '.join(said)}"


def _pointwise(node: Node, operands: Mapping[Node, Any]) -> Local:
    """operands: node → DTensor."""
    replicate, shard, partial = _types()
    y: Any = meta_tensor(node)
    gradients: dict[Node, Placements] = {}
    for operand, value in operands.items():
        placed: list[Any] = []
        for of_y, own in zip(y.placements, value.placements):
            if type(of_y) is not shard:
                raise NoRuleError(f"its result is placed as {y.placements}")
            dim = of_y.dim - y.ndim + value.ndim
            # A shard of the same dimension, or broadcast along it from one element.
            if type(own) is replicate and (dim < 0 or _is(value.shape[dim] == 1)):
                placed.append(partial())
            elif own == shard(dim) and _is(value.shape[dim] == y.shape[of_y.dim]):
                placed.append(own)
            else:
                reason = f"{called(operand)} is placed as {value.placements}, the result as "
                raise NoRuleError(f"{reason}{y.placements}")
        gradients[operand] = tuple(placed)
    return Local(y, next(iter(operands)), gradients)


def _is(known: Any) -> bool:
    return statically_known_true(known)


def _is_even(value: Any) -> bool:
    """Do all ranks have shards of one size?  If not, sizes here are not those of other ranks."""
    _, shard, _ = _types()
    sizes = [*value._local_tensor.shape]
    for i, placement in enumerate(value.placements):
        if type(placement) is shard:
            sizes[placement.dim] = sizes[placement.dim] * value.device_mesh.size(i)
    same = (_is(a == b) for a, b in zip(sizes, value.shape))
    return isinstance(value._local_tensor, FakeTensor) and all(same)


def _is_remade(value: Any) -> bool:
    """Does `from_local` of its shard give its sizes and strides?"""
    local, mesh = value._local_tensor, value.device_mesh
    made = type(value).from_local(local, mesh, value.placements, run_check=False)
    pairs = zip((*made.shape, *made.stride()), (*value.shape, *value.stride()))
    return all(_is(a == b) for a, b in pairs)


# ---- finding -----------------------------------------------------------------------------------


class Finder:
    """What can run on local shards. Edits nothing, but notes in meta why an anchor cannot.

    found: the operations. base: each of them, a `redistribute` of it that changes nothing, or a
    `to_local` → the operation whose local result it is.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.found: dict[Node, Local] = {}
        self.base: dict[Node, Node] = {}
        for node in view.nodes:
            with suppress(NoRuleError):  # a tail ends there
                self._read(node)
        for node in [n for n in self.found if any(p.is_partial() for p in self._placed(n))]:
            self._drop_if_read(node)

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
        local: Local | None = None
        if site is None:
            local = self._operation(node)
        else:
            try:
                local = self._anchor(node, site.operands)
            except NoRuleError as rule:
                node.meta[_KEY] = str(rule)
        if local is not None:
            self.found[node], self.base[node] = local, node

    def _placed(self, node: Node) -> Placements:
        placements: Placements = self.found[node].value.placements
        return placements

    def _drop_if_read(self, node: Node) -> None:
        """Drop an operation whose summands are read other than to add them up.

        `from_local` would add up gradients that are summands; DTensor keeps them as they are.
        """
        same = [n for n, base in self.base.items() if base is node]
        readers = (r for n in same for r in n.users if is_dtensor(meta_tensor(n)))
        for reader in readers:
            if reader not in self.base and _call_of(reader)[0] != "redistribute":
                node.meta[_KEY] = f"{called(reader)} reads its summands"
                self.found.pop(node)
                for one in same:
                    self.base.pop(one)
                return

    def _is_kept(self, node: Node, source: Node) -> bool:
        """Is it a `to_local`, or a `redistribute` that changes nothing, of this DTensor?"""
        old: Any = meta_tensor(source)
        new: Any = meta_tensor(node)
        if not is_dtensor(old) or self.view.region[node] != self.view.region[source]:
            return False
        name, given = _call_of(node)
        if name == "to_local":
            usual = tuple(_types()[0]() if p.is_partial() else p for p in old.placements)
            placed = given.pop("grad_placements", None)
            return (placed is None or _same(placed, usual)) and not given
        return (
            name == "redistribute"
            and given.keys() <= {"device_mesh", "placements", "async_op"}
            and is_dtensor(new)
            and (new.placements, new.dtype) == (old.placements, old.dtype)
            and new.device_mesh == old.device_mesh
        )

    def _anchor(self, node: Node, named: Mapping[str, Node | None]) -> Local:
        written = self.view.written(node)
        if written is None or written.op != "linear":
            raise NoRuleError(f"there is no rule for {op_of(node)} of DTensors")
        self._check(node)
        return _linear(node, {n: (o, o and meta_tensor(o)) for n, o in named.items()})

    def _operation(self, node: Node) -> Local | None:
        written, operands = self.view.written(node), inputs_of(node)
        if written is None or written.op not in OPS or self.base.keys().isdisjoint(operands):
            return None
        self._check(node)
        return _pointwise(node, {o: meta_tensor(o) for o in operands})

    def _check(self, node: Node) -> None:
        """All are DTensors on one mesh, with even shards, and nothing writes to them."""
        operands = inputs_of(node)
        value: Any = meta_tensor(node)
        for operand in (*operands, node):
            own: Any = meta_tensor(operand)
            if not is_dtensor(own):
                raise NoRuleError(f"{called(operand)} is not a DTensor, unlike {called(node)}")
            if own.device_mesh != value.device_mesh:
                raise NoRuleError(f"{called(operand)} is on another mesh")
            if not _is_even(own):
                shape = f"{tuple(own.shape)}, placed as {own.placements}"
                raise NoRuleError(f"{called(operand)} of shape {shape}, is not divided evenly")
        if not _is_remade(value):
            raise NoRuleError(f"the shards of {called(node)} are not laid out like the whole")
        if called_in_place(node) or storages((*operands, node)) & {None, *self.view.written_at}:
            raise NoRuleError(f"something writes to the memory of {called(node)} or of an operand")


def _same(given: Any, placements: Placements) -> bool:
    return isinstance(given, (tuple, list)) and tuple(given) == placements


def _call_of(node: Node) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a DTensor's method. In torch 2.11 Dynamo records a closure of them."""
    name, args, kwargs = str(node.target), node.args[1:], dict(node.kwargs)
    if node.op != "call_method":
        target: Any = node.target
        name = getattr(target, "__name__", "")
        if not name.startswith("prim_"):
            return "", {}
        cells = inspect.getclosurevars(target).nonlocals
        args, kwargs = tuple(cells.get("args_as_value", ())), dict(cells.get("kwargs_as_value", {}))
        name = name.removeprefix("prim_")
    names = ("device_mesh", "placements") if name == "redistribute" else ()
    return (name, dict(zip(names, args)) | kwargs) if len(args) <= len(names) else ("", {})
