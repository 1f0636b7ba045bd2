"""One attention of a graph, as a frozen description: `AttentionSite`.

    S = tail(q · kᵀ)          [*batch, rows, keys]
    P = post(softmax(S))      over keys
    O = P · v                 [*batch, rows, columns]

Dimensions are axes, which are numbers: `sizes[axis]`. Heads that share keys are axes of the batch
that k and v lack; a window is an axis that a view split off. So an operand is a tensor of the graph
and, for each of its dimensions, the axes that it runs over. Seeing it in another order takes no
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.graph.attention.axes import Dim
from fx_fuser.graph.attention.calls import ATTENTIONS
from fx_fuser.graph.prepare.reindex import Size
from fx_fuser.graph.read.canonical import Arg

SCORE = Arg("z")  # the value that a step is applied to


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph. dims: the axes of each of its dimensions. dtype: what it is cast to
    before it is used; None if it is not cast. parts: tensors of which it is the sum, where these
    are known to have fewer axes (the mask of torch's call)."""

    node: Node
    dims: tuple[Dim, ...]
    dtype: torch.dtype | None = None
    parts: tuple[Operand, ...] = ()

    def seen(self, tensor: Tensor, sizes: Sequence[Size], order: Dim) -> Tensor:
        """The tensor with one dimension per axis of `order`, of size 1 where it lacks the axis. A
        view, whatever its strides are."""
        mine = [axis for dim in self.dims for axis in dim]
        split = tensor.reshape([sizes[axis] for axis in mine])
        split = split.permute([mine.index(axis) for axis in order if axis in mine])
        return split[tuple(slice(None) if axis in mine else None for axis in order)]


@dataclass(frozen=True)
class Step:
    """An operation of the tail on SCORE, operands and numbers; its result has `dtype`.

    op: a name of `fx_fuser.graph.read.operations.OPS`, `causal` (-inf where the key's number is
    larger than the row's) or `dropout`.
    """

    op: str
    args: tuple[Arg | Operand | float, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionSite:
    """One attention.

    node: the one whose value is O. nodes: all of the attention's nodes, in order. views: nodes
    after `node` that only move its dimensions. result: the last of these, or node, with O's axes.
    sizes: of the axes. batch, rows, keys, inner, columns: axes; q is [*batch, *rows, *inner], k
    [*batch, *keys, *inner], v [*batch, *keys, *columns], each without the axes that it lacks.
    scores, values: the dtypes in which q and k are multiplied, and P and v. tail: the steps from
    q · kᵀ to S. weights: the dtype of softmax. post: the steps after it, a cast or a dropout, whose
    number is p. is_safe: a row of S that is all -inf gives 0, not NaN. dtype: of O.
    """

    node: Node
    nodes: tuple[Node, ...]
    views: tuple[Node, ...]
    result: Operand
    sizes: tuple[Size, ...]
    batch: Dim
    rows: Dim
    keys: Dim
    inner: Dim
    columns: Dim
    q: Operand
    k: Operand
    v: Operand
    scores: torch.dtype
    tail: tuple[Step, ...]
    weights: torch.dtype
    post: tuple[Step, ...]
    values: torch.dtype
    dtype: torch.dtype
    is_safe: bool = False

    @property
    def is_by_hand(self) -> bool:
        """Is it written as products and a softmax, not as torch's call?"""
        return self.node.target not in ATTENTIONS

    @property
    def is_random(self) -> bool:
        """Does a dropout drop anything?"""
        return any(step.op == "dropout" for step in self.post)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """q, k, v and those of the tail."""
        of_tail = (a for step in self.tail for a in step.args if isinstance(a, Operand))
        return (self.q, self.k, self.v, *of_tail)

    @property
    def tensors(self) -> tuple[Node, ...]:
        """The nodes of its operands and of what these are sums of."""
        found, queue = dict[Node, None](), [*self.operands]
        while queue:
            one = queue.pop(0)
            found[one.node] = None
            queue += one.parts
        return (*found,)


@dataclass(frozen=True)
class Refused:
    """An attention that has no description. node: its softmax, or the call; at: what stands in the
    way; reason: in words, without a full stop."""

    node: Node
    at: Node
    reason: str

    @property
    def is_by_hand(self) -> bool:
        return self.node.target not in ATTENTIONS


class RefusedError(Exception):
    """Why an attention cannot be described, and at which node."""

    def __init__(self, at: Node, reason: str) -> None:
        super().__init__(reason)
        self.at = at
