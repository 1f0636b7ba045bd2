"""Which nodes of a graph are one op: a loss, and log-sum-exps of the same logits.

    lse = logits.logsumexp(-1)
    F.cross_entropy(logits, labels) + 1e-4 * lse.square().mean()
    lse - logits.gather(-1, labels[..., None]).squeeze(-1)

Each has a gradient of its own for each row, and all use the same softmax: so their gradients with
respect to the logits are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read.expr import is_number
from fx_fuser.graph.read.heads import (
    Head,
    Step,
    Tail,
    is_log_sum_exp,
    is_loss,
    is_pick,
    read_head,
    value_of,
)
from fx_fuser.graph.read.nodes import (
    argument_of,
    hint_of,
    is_torchs,
    meta_tensor,
    nodes_in,
    storages,
)
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

_VIEWS = {"view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous"}
_NO_LABEL = -(1 << 63)  # no index of a gather: it ignores none
# Losses' arguments after input and target, and their defaults. Only cross_entropy has the last one.
_ARGUMENTS = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


class Stays(Exception):
    """Why a loss after a Linear stays as written."""


@dataclass(frozen=True)
class Given:
    """What a loss is given besides its logits."""

    labels: Node
    ignored: int
    reduction: str
    smoothing: float = 0.0


@dataclass(frozen=True)
class Parts:
    """loss: the one loss or gather of logits. given: what it is given. labels: its labels, in any
    shape. tail: between the Linear and all of them. steps: of rows. at: the node before which the
    op is made."""

    loss: Node
    given: Given
    labels: Node
    tail: Tail
    steps: tuple[Step, ...]
    at: Node


def heads_of(view: View, node: Node, head: Head) -> dict[Node, Head]:
    """The head of the node; with a log-sum-exp among them, also those of all other losses,
    log-sum-exps and gathers with a gradient that read the logits of its Linear."""
    found = {node: head}
    for other in view.nodes:
        if other is node or not (is_loss(other) or is_log_sum_exp(other) or is_pick(other)):
            continue
        own = read_head(view, other) if value_of(other).requires_grad else None
        if own is not None and own.head.node is head.head.node:
            found[other] = own
    return found if any(map(is_log_sum_exp, found)) else {node: head}


def parts_of(view: View, heads: dict[Node, Head]) -> Parts:
    losses = [n for n in heads if not is_log_sum_exp(n)]
    if len(losses) > 1:
        raise Stays("its logits have several losses and a log-sum-exp")
    (loss,) = losses
    head = heads[loss]
    given = _picked(loss) if called_name(loss) == "gather" else _reduced(loss)
    if len({one.tails[-1] for one in heads.values()}) > 1:
        raise Stays("it reads other multiples of the logits than a log-sum-exp")
    tail = head.tails[-1]._replace(smoothing=given.smoothing)
    if len(heads) == 1:
        return Parts(loss, given, given.labels, tail, head.steps, loss)
    are_whole = all(map(reads_all, heads.values()))
    if not are_whole and any(_moves(one) != _moves(head) for one in heads.values()):
        raise Stays("a log-sum-exp reads other rows of its logits")
    labels = _made_of(given.labels)
    at = _place(view, heads, labels[-1], are_whole)
    if _are_written(view, labels, at, loss):
        raise Stays("its labels are written to near its log-sum-exp")
    return Parts(loss, given, labels[-1], tail, () if are_whole else head.steps, at)


def reads_all(head: Head) -> bool:
    """Is it known to read all rows of the Linear's logits, however many there are?"""
    made, used = (value_of(n).numel() for n in (head.logits[0], head.nodes[1]))
    return statically_known_true(made == used)


def _moves(head: Head) -> tuple[Step, ...]:
    """Which rows it reads, in which order."""
    steps = [step for step in head.steps if step is not None]
    while steps and steps[-1][0] in ("reshape", "flatten"):
        steps.pop()
    return tuple(steps)


def _made_of(labels: Node) -> list[Node]:
    """The labels, and what has them in the same order before each view. The last is not a view."""
    found = [labels]
    while called_name(labels) in _VIEWS and is_torchs(labels):
        before = labels.args[0] if labels.args else None
        value = meta_tensor(before) if isinstance(before, Node) else None
        if value is None or hint_of(value.numel()) != hint_of(value_of(labels).numel()):
            break
        labels = before  # type: ignore[assignment]
        found.append(labels)
    return found


def _are_written(view: View, labels: Sequence[Node], at: Node, loss: Node) -> bool:
    """May the labels change between where the op reads them and where the loss did?"""
    read = [view.order[n] for n in (*labels[:-1], at, loss)]
    nodes = view.nodes[min(read) : max(read)]
    written = storages(n for one in nodes for n in view.writers.get(one, ()))
    return not written.isdisjoint({None, *storages(labels)})


def _place(view: View, heads: dict[Node, Head], labels: Node, are_whole: bool) -> Node:
    """After everything that the op reads, and before everything that reads its results."""
    first, *_, last = sorted(heads, key=view.order.__getitem__)
    readers = [n for node in heads for n in view.readers[node]]
    if all(view.order[n] > view.order[last] for n in readers):
        return last
    made = [labels] if are_whole else [labels, *nodes_in(heads[first].steps)]
    if all(view.order[n] < view.order[first] for n in made):
        return first
    raise Stays("its log-sum-exp is read before its labels are made")


def _reduced(node: Node) -> Given:
    given: dict[str, Any] = {
        name: default if (found := argument_of(node, i, name)) is None else found
        for i, (name, default) in enumerate(_ARGUMENTS.items(), 2)
    }
    if given["weight"] is not None:
        raise Stays("it has class weights")
    smoothing = given["label_smoothing"]
    if not is_number(smoothing) or not 0.0 <= smoothing < 1.0:
        raise Stays(f"its label smoothing is {smoothing}, not a number from 0 to below 1")
    if given["size_average"] is not None or given["reduce"] is not None:
        raise Stays("it has arguments that torch has deprecated")
    if type(given["ignore_index"]) is not int:
        raise Stays("its ignore_index is not an int")
    logits, labels = (argument_of(node, i, n) for i, n in enumerate(("input", "target")))
    if value_of(logits).ndim != 2 or _indices(labels).ndim != 1:
        raise Stays("its input is not [rows, classes]")
    return Given(labels, given["ignore_index"], given["reduction"], float(smoothing))


def _indices(labels: Any) -> Any:
    target = meta_tensor(labels) if isinstance(labels, Node) else None
    if type(target) is not FakeTensor or target.dtype is not torch.int64:
        raise Stays("its target is not a tensor of indices")
    return target


def _picked(node: Node) -> Given:
    """What a gather, of log-probabilities or of logits, is given."""
    likely, dim, index = (argument_of(node, i, n) for i, n in enumerate(("input", "dim", "index")))
    *rows, of_row = _indices(index).shape
    is_one_a_row = dim in (-1, len(rows)) and of_row == 1 and rows == [*value_of(likely).shape[:-1]]
    if not is_one_a_row or argument_of(node, 3, "sparse_grad"):
        raise Stays("it does not pick one value per row")
    return Given(index, _NO_LABEL, "none")
