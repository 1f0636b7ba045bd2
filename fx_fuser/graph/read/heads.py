"""Which losses follow a Linear, and what is in between: operations that move rows of its logits,
and operations that scale or cap each logit.

    F.cross_entropy(F.linear(x, weight, bias)[…, :-1, :].float().view(-1, V), labels)
    F.cross_entropy((F.linear(x, weight) / 30).tanh().view(-1, V) * 30, labels)

For `fx_fuser.passes.head_loss`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.graph.read.expr import is_number
from fx_fuser.graph.read.nodes import argument_of, is_torchs, meta_tensor
from fx_fuser.graph.read.sites import Site, site_at
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

_CASTS = {"float", "to", "type", "type_as", "half", "bfloat16", "contiguous"}
_RESHAPES = {"view", "reshape"}
_MOVING = _CASTS | _RESHAPES | {"flatten", "getitem"}
_LOSSES = (F.cross_entropy, F.nll_loss)
# An operation that moves rows of logits, and can move those of x alike: a name of `MOVES` and its
# arguments (for a reshape, all sizes but the last). None: a cast, which moves nothing.
Step = tuple[str, tuple[Any, ...]] | None


class Tail(NamedTuple):
    """What is between a Linear and its loss: values are `before` times the logits, with a soft cap
    `after` times the tanh of that. after: 0 without a cap. smoothing: label smoothing."""

    before: float = 1.0
    after: float = 0.0
    smoothing: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self == Tail()


PLAIN = Tail()


@dataclass(frozen=True)
class Head:
    """head: the Linear. steps: from its logits to the loss, in the order of the graph. nodes: from
    the loss back to the Linear. logits: those of the Linear and those after each step, before any
    softmax. tails: how each of these is made from the Linear's."""

    head: Site
    steps: tuple[Step, ...]
    nodes: tuple[Node, ...]
    logits: tuple[Node, ...]
    tails: tuple[Tail, ...]

    @property
    def kind(self) -> torch.dtype:
        """The dtype of the logits that the Linear makes."""
        return value_of(self.head.node).dtype


def value_of(node: Node) -> Any:
    """The fake tensor of a node that has one."""
    return meta_tensor(node)


def has_losses(graph: Graph) -> bool:
    return any(is_loss(n) or is_log_sum_exp(n) or is_indexed(n) for n in graph.nodes)


def is_indexed(node: Node) -> bool:
    """Is it `likely[rows, labels]`, of tensors?"""
    places = node.args[1] if node.target is operator.getitem else None
    if not isinstance(places, tuple) or len(places) != 2:
        return False
    return all(isinstance(n, Node) and value_of(n) is not None for n in (node.args[0], *places))


def is_loss(node: Node) -> bool:
    """May it be one?  Also a gather of log_softmax, or of some rows of one."""
    if node.target in _LOSSES:
        return True
    if called_name(node) != "gather" or not is_torchs(node):
        return False
    likely = argument_of(node, 0, "input")
    while isinstance(likely, Node) and called_name(likely) in _MOVING and is_torchs(likely):
        likely = likely.args[0] if likely.args else None
    return isinstance(likely, Node) and called_name(likely) == "log_softmax"


def is_log_sum_exp(node: Node) -> bool:
    """Is it the log-sum-exp of each row?"""
    if called_name(node) != "logsumexp" or not is_torchs(node):
        return False
    dim, value = argument_of(node, 1, "dim"), argument_of(node, 0, "input")
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    ndim = getattr(value_of(value), "ndim", 0) if isinstance(value, Node) else 0
    return len(dims) == 1 and type(dims[0]) is int and dims[0] in (-1, ndim - 1)


def is_pick(node: Node) -> bool:
    """May it be a gather of logits at labels?  A gather of log_softmax is a loss."""
    return called_name(node) == "gather" and is_torchs(node) and not is_loss(node)


def read_head(view: View, node: Node) -> Head | None:
    """The Linear whose rows a loss, a log-sum-exp or a gather reads, through operations that move
    rows, scale or cap; None if there is none."""
    steps: list[Step] = []
    moved: list[tuple[Node, Factor]] = []
    first = argument_of(node, 0, "input")
    if not isinstance(first, Node):
        return None
    at, nodes = view.value(node, first), [node]
    # The other losses need a log_softmax before them.
    is_normalised = node.target is F.cross_entropy or not is_loss(node)
    while True:
        if type(value_of(at)) is not FakeTensor:
            return None
        nodes.append(at)
        site = site_at(view, at)
        if site is not None:
            tails = _tails([factor for _, factor in reversed(moved)])
            if not is_normalised or site.kind not in ("linear", "matmul") or tails is None:
                return None
            logits = (at, *(value for value, _ in reversed(moved)))
            return Head(site, tuple(reversed(steps)), tuple(nodes), logits, tails)
        scaled, factor = _scaled(view, at) if is_normalised else (None, 1.0)
        before = scaled or (at.args[0] if at.args else None)
        if not isinstance(before, Node) or type(value_of(before)) is not FakeTensor:
            return None
        before = view.value(at, before)
        if scaled is not None:
            steps.append(None)
            moved.append((at, factor))
        elif not is_normalised and _is_log_softmax(at):
            is_normalised, moved = True, []
        elif _moves_rows(at, before, steps):
            moved.append((at, 1.0))
        else:
            return None
        at = before


Factor = float | None  # what a step multiplies by; None: it is a tanh


def _scaled(view: View, node: Node) -> tuple[Node | None, Factor]:
    """The node that this one is a multiple or the tanh of, and the factor."""
    expr = view.canonical(node)
    if expr is None or expr.op not in ("mul", "tanh"):
        return None, 1.0
    values = [v for v in expr.args if isinstance(v, Node)]
    numbers = [v for v in expr.args if is_number(v)]
    if len(values) != 1 or len(values) + len(numbers) != len(expr.args):
        return None, 1.0
    return values[0], float(numbers[0]) if numbers else None  # type: ignore[arg-type]


def _tails(factors: Sequence[Factor]) -> tuple[Tail, ...] | None:
    """The tail of the values after each step, the Linear's first; None if `Tail` cannot say it."""
    tail = Tail()
    found = [tail]
    for factor in factors:
        if factor is None and tail.after:
            return None
        if factor is None:
            tail = Tail(tail.before, 1.0)
        elif tail.after:
            tail = Tail(tail.before, tail.after * factor)
        else:
            tail = Tail(tail.before * factor)
        if not all(1e-30 < abs(v) < 1e30 for v in (tail.before, tail.after or 1.0)):
            return None
        found.append(tail)
    return tuple(found)


def _is_log_softmax(node: Node) -> bool:
    """Is it the log_softmax of each row?"""
    dim = argument_of(node, 1, "dim")
    is_row = type(dim) is int and dim % value_of(node).ndim == value_of(node).ndim - 1
    return called_name(node) == "log_softmax" and is_torchs(node) and is_row


def _moves_rows(node: Node, before: Node, steps: list[Step]) -> bool:
    """Are the node's rows those of the node before, perhaps not all?  Adds the step."""
    name, was, now = called_name(node), value_of(before), value_of(node)
    if not (is_torchs(node) and was.ndim and now.ndim and now.device == was.device):
        return False
    width = was.shape[-1]
    if not isinstance(width, int) or now.shape[-1] != width:
        return False
    if name in _CASTS:
        steps.append(None)
        return now.ndim == was.ndim
    if name in _RESHAPES:
        *leading, last = _sizes(node)
        steps.append(("reshape", tuple(leading)))
        return isinstance(last, int) and last in (width, -1) and now.dtype == was.dtype
    if name == "flatten":
        first, last = (argument_of(node, i, n) for i, n in ((1, "start_dim"), (2, "end_dim")))
        steps.append(("flatten", (first or 0, last)))
        return type(last) is int and last % was.ndim < was.ndim - 1
    if name == "getitem":
        steps.append(("getitem", (node.args[1],)))
        return _keeps_columns(node.args[1], was.ndim)
    return False


MOVES: dict[str, Callable[..., Any]] = {
    "reshape": torch.reshape,
    "flatten": torch.flatten,
    "getitem": operator.getitem,
    "t": torch.t,
}


def _sizes(node: Node) -> tuple[Any, ...]:
    """The arguments of a view or a reshape: sizes, unless it is called with something else."""
    given = node.args[1:] or tuple(node.kwargs.values())
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = tuple(given[0])
    return given or (None,)


def _keeps_columns(index: Any, ndim: int) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is Ellipsis or type(entry) in (int, slice) for entry in entries):
        return False
    if len(entries) < ndim and entries[-1] is Ellipsis:
        return True
    if Ellipsis not in entries and len(entries) < ndim:
        return True
    last = entries[-1]
    return isinstance(last, slice) and (last.start or 0, last.stop, last.step) == (0, None, None)
