"""A match → its epilogue: the user's own operations over the matched nodes.

Matching finds the nodes of a pattern, and may read them as sums and products of anything. What runs
is read off those nodes here: every operation once, as the user wrote it, in the order and
association of the graph. Only the two operands of one addition or multiplication may be exchanged.
Names are given by first use. So the same computation has the same text wherever it occurs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fx_fuser.graph.epilogue import Epilogue, Step
from fx_fuser.graph.read.canonical import Expr, Operand, Unsupported, is_number
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.sites import Site
from fx_fuser.graph.read.view import View


@dataclass(frozen=True)
class Bound:
    """An epilogue and its operands.

    tensors: the nodes of t0…; numbers: the values of s0…. items: a number that changes from call to
    call is a 0-d tensor; that tensor → the node of its `item()`, which the user's operations read.
    """

    epilogue: Epilogue
    tensors: tuple[Node, ...] = ()
    numbers: tuple[float, ...] = ()
    items: dict[Node, Node] = field(default_factory=dict)


def bind(view: View, site: Site, nodes: Iterable[Node]) -> Bound:
    """The matched nodes after the anchor, as written.

    Raises:
        Unsupported: one of them is not an epilogue operation.
    """
    binder = _Binder(view, site)
    for node in sorted(set(nodes) - set(site.nodes), key=view.order.__getitem__):
        written = view.written(node)
        if written is None:
            raise Unsupported(f"{node} is not an epilogue operation")
        binder.made[node] = binder.step(written)
    found = Epilogue(tuple(binder.steps))
    return Bound(found, tuple(binder.tensors), tuple(binder.numbers), binder.items)


class _Binder:
    def __init__(self, view: View, site: Site) -> None:
        self.view = view
        self.made: dict[Node, str] = {site.node: "z"}
        self.steps: list[Step] = []
        self.tensors: dict[Node, str] = {}
        self.numbers: list[float] = []
        self.items: dict[Node, Node] = {}

    def step(self, expr: Expr) -> str:
        op = OPS.get(expr.op)
        if op is None:
            raise Unsupported(f"{expr.op} is not an epilogue operation")
        if any(scalar_behind(expr.args[place]) is not None for place in op.fixed):
            raise Unsupported(f"{expr.op} takes a number that changes from call to call")
        for place, name in op.with_dimensions:
            if _has_no_dimensions(expr.args[place]):
                raise Unsupported(f"the {name} of {expr.op} is a tensor without dimensions")
        made = [self.step(a) if isinstance(a, Expr) else a for a in expr.args]
        if op.total is not None and len(made) == 2:
            made.sort(key=self._rank)
        self.steps.append(Step(expr.op, tuple(map(self._name, made)), expr.attrs))
        return f"v{len(self.steps) - 1}"

    def _rank(self, operand: Operand | str) -> tuple[int, int]:
        """Order: computed values, the newest first; z; other tensors; numbers."""
        name = self.made.get(operand) if isinstance(operand, Node) else operand
        if name == "z":
            return 1, 0
        if isinstance(name, str):
            return 0, -int(name[1:])
        return (2, 0) if isinstance(operand, Node) else (3, 0)

    def _name(self, operand: Operand | str) -> str | None:
        if operand is None or isinstance(operand, str):
            return operand
        if is_number(operand):
            self.numbers.append(float(operand))  # type: ignore[arg-type]
            return f"s{len(self.numbers) - 1}"
        if not isinstance(operand, Node):
            raise Unsupported(f"{operand!r} is neither a tensor nor a number")
        if operand in self.made:
            return self.made[operand]
        scalar = scalar_behind(operand)
        if scalar is not None:
            self.items[scalar] = operand
            operand = scalar
        return self.tensors.setdefault(operand, f"t{len(self.tensors)}")


def _has_no_dimensions(operand: object) -> bool:
    tensor = meta_tensor(operand) if isinstance(operand, Node) else None
    return tensor is not None and tensor.ndim == 0


def scalar_behind(operand: object) -> Node | None:
    """The 0-d tensor behind a number that changes from call to call, or None.

    Dynamo passes a Python float that has changed as a tensor and takes its `item()`. Giving a
    SymFloat to a `float` argument would recompile for every value; a 0-d tensor does not.
    """
    if not isinstance(operand, Node) or (operand.op, operand.target) != ("call_method", "item"):
        return None
    scalar = operand.args[0]
    tensor = meta_tensor(scalar) if isinstance(scalar, Node) else None
    detached = tensor is not None and tensor.ndim == 0 and not tensor.requires_grad
    is_float = isinstance(operand.meta.get("example_value"), torch.SymFloat)
    return scalar if detached and is_float else None  # type: ignore[return-value]
