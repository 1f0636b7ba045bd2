"""Which losses stand behind a Linear, and what moves its logits' rows in between.

    F.cross_entropy(F.linear(x, weight, bias)[…, :-1, :].float().view(-1, V), labels)

For `fx_fuser.passes.head_loss`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fx_fuser.graph.read.nodes import argument_of, is_torchs, meta_tensor
from fx_fuser.graph.read.sites import Site, site_at
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

_CASTS = {"float", "to", "type", "type_as", "half", "bfloat16", "contiguous"}
_RESHAPES = {"view", "reshape"}
_LOSSES = (F.cross_entropy, F.nll_loss)
# What moves rows of logits, as it moves those of x: of `MOVES`, and its arguments; of a reshape,
# all sizes but the last. None: a cast, which moves nothing.
Step = tuple[str, tuple[Any, ...]] | None


@dataclass(frozen=True)
class Head:
    """head: the Linear. steps: from its logits to the loss, in the order of the graph. nodes: from
    the loss back to the Linear. logits: behind so many steps each, before any softmax."""

    head: Site
    steps: tuple[Step, ...]
    nodes: tuple[Node, ...]
    logits: tuple[Node, ...]

    @property
    def kind(self) -> torch.dtype:
        """Of the logits, as the Linear makes them."""
        return value_of(self.head.node).dtype


def value_of(node: Node) -> Any:
    """The fake tensor of a node that has one."""
    return meta_tensor(node)


def has_losses(gm: GraphModule) -> bool:
    return any(map(is_loss, gm.graph.nodes))


def is_loss(node: Node) -> bool:
    if node.target in _LOSSES:
        return True
    if called_name(node) != "gather" or not is_torchs(node):
        return False
    likely = argument_of(node, 0, "input")
    return isinstance(likely, Node) and called_name(likely) == "log_softmax"


def read_head(view: View, node: Node) -> Head | None:
    """The Linear whose rows a loss reads, through what moves rows; None if there is none."""
    steps: list[Step] = []
    moved: list[Node] = []  # by these
    at, nodes = view.value(node, argument_of(node, 0, "input")), [node]
    is_normalised = node.target is F.cross_entropy  # of log_softmax, which the other loss asks for
    while True:
        if type(value_of(at)) is not FakeTensor:
            return None
        nodes.append(at)
        site = site_at(view, at)
        if site is not None:
            is_head = is_normalised and site.kind in ("linear", "matmul")
            logits = (at, *reversed(moved))
            return Head(site, tuple(reversed(steps)), tuple(nodes), logits) if is_head else None
        before = at.args[0] if at.args else None
        if not isinstance(before, Node) or type(value_of(before)) is not FakeTensor:
            return None
        before = view.value(at, before)
        if not is_normalised and _is_log_softmax(at):
            is_normalised, moved = True, []
        elif _moves_rows(at, before, steps):
            moved.append(at)
        else:
            return None
        at = before


def _is_log_softmax(node: Node) -> bool:
    """Of each row."""
    dim = argument_of(node, 1, "dim")
    is_row = type(dim) is int and dim % value_of(node).ndim == value_of(node).ndim - 1
    return called_name(node) == "log_softmax" and is_torchs(node) and is_row


def _moves_rows(node: Node, before: Node, steps: list[Step]) -> bool:
    """Are the node's rows those of the node before, perhaps not all?  Then adds the step."""
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
    """Those that a view or a reshape asks for; one that is no size where it is called otherwise."""
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
