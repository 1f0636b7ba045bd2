"""Views as permutations and regroupings of dimensions, and what undoes them.

A view of z commutes with pointwise work: op(view(z), t) is view(op(z, t')), where t' is t seen
through the view's inverse. A regrouping is what `view`, `reshape`, `flatten`, `unflatten`,
`squeeze` and `unsqueeze` do: neighbouring dimensions of equal product become others.

Sizes may be symbolic. Nothing here adds a guard: what is not known to hold does not hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read.nodes import inputs_of, is_torchs, meta_tensor
from fx_fuser.graph.read.source import called_name

Size = int | torch.SymInt
Group = tuple[tuple[Size, ...], tuple[Size, ...]]
PERMUTATIONS = frozenset(
    "transpose swapaxes swapdims permute movedim moveaxis t T mT numpy_T".split()  # noqa: SIM905
)
REGROUPINGS = frozenset(
    "view reshape flatten unflatten ravel squeeze unsqueeze view_as reshape_as _unsafe_view".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Permutation:
    """Dimension i of the view is dimension order[i] of its input."""

    order: tuple[int, ...]


@dataclass(frozen=True)
class Regrouping:
    """Neighbouring dimensions, as (their sizes in the input, those in the view). The products are
    equal; a dimension of size 1 that one side lacks is a group with an empty side."""

    groups: tuple[Group, ...]


Step = Permutation | Regrouping


@dataclass(frozen=True)
class Call:
    """A method of Tensor with its arguments, and the sizes and strides of its result. Strides are
    None if the result is not a view of the original tensor."""

    method: str
    args: tuple[Any, ...]
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...] | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake result. tensor: the original fake tensor."""
        if self.strides is None:
            return tensor.new_empty(self.sizes)
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset())


def is_view(node: Node) -> bool:
    """Is it a call of a name above, or an index that only adds dimensions?"""
    is_named = _name(node) in PERMUTATIONS | REGROUPINGS or _is_unsqueezing(node)
    return is_named and is_torchs(node)


def _is_unsqueezing(node: Node) -> bool:
    """Is it `x[:, None]`, `x[..., None]` or the like?"""
    if _name(node) != "getitem" or len(node.args) != 2:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    whole = (part is None or part is Ellipsis or part == slice(None) for part in index)
    return all(whole) and None in index


def _name(node: Node) -> str:
    name = called_name(node)
    return str(node.args[1]) if name == "getattr" and len(node.args) == 2 else name


def step_of(node: Node, source: Node) -> Step | None:
    """What the view `node` does to the dimensions of `source`; None if it is not a known view. A
    reshape that copies counts as one: its layout shows in the result's."""
    x, y = meta_tensor(source), meta_tensor(node)
    if x is None or y is None or not is_view(node) or inputs_of(node)[:1] != (source,):
        return None
    if any(meta_tensor(other) is not None for other in inputs_of(node)[1:]):
        return None  # view_as, whose other tensor would be read too
    if x.dtype != y.dtype:
        return None
    if _name(node) in PERMUTATIONS:
        order = _order(node, source, x.ndim)
        return None if order is None else Permutation(order)
    groups = _groups(tuple(x.shape), tuple(y.shape))
    return None if groups is None else Regrouping(groups)


def _order(node: Node, source: Node, rank: int) -> tuple[int, ...] | None:
    """Found by calling it on a tensor whose sizes name its dimensions."""
    named = torch.empty([*range(2, 2 + rank)], device="meta")
    try:
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda n: named if n is source else _number(n)
        )
        if node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (TypeError, IndexError, RuntimeError):
        return None
    return tuple(size - 2 for size in made.shape)


def _number(node: Node) -> Any:
    raise TypeError(f"{node} is not a constant dimension")


def _groups(before: tuple[Size, ...], after: tuple[Size, ...]) -> tuple[Group, ...] | None:
    found: list[Group] = []
    i = j = 0
    while i < len(before) or j < len(after):
        a, b = before[i:], after[j:]
        group = _first_group(a, b)
        if group is None:
            return None
        found.append((a[: group[0]], b[: group[1]]))
        i, j = i + group[0], j + group[1]
    return tuple(found)


def _first_group(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[int, int] | None:
    """How many dimensions of each side are the first group."""
    if a and b and is_same(a[0], b[0]):
        return 1, 1
    if b and is_same(b[0], 1):
        return 0, 1
    if a and is_same(a[0], 1):
        return 1, 0
    lengths = ((m, n) for m in range(1, len(a) + 1) for n in range(1, len(b) + 1))
    same = (pair for pair in lengths if is_same(math.prod(a[: pair[0]]), math.prod(b[: pair[1]])))
    return min(same, key=sum, default=None)


def is_same(a: Size, b: Size) -> bool:
    """Are they equal, whatever the sizes are?"""
    return statically_known_true(a == b)


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(is_same, a, b))


def same_steps(a: Sequence[Step], b: Sequence[Step]) -> bool:
    """Do they move every element to the same place?"""
    return len(a) == len(b) and all(map(_same_step, a, b))


def _same_step(a: Step, b: Step) -> bool:
    if isinstance(a, Regrouping) and isinstance(b, Regrouping):
        return len(a.groups) == len(b.groups) and all(
            same_sizes(x, u) and same_sizes(y, v) for (x, y), (u, v) in zip(a.groups, b.groups)
        )
    return a == b


# ---- the inverse --------------------------------------------------------------------------------


class _NoInverseError(Exception):
    pass


def inverse(steps: Sequence[Step], tensor: torch.Tensor) -> tuple[Call, ...] | None:
    """The calls by which a tensor that broadcasts to the view's result is seen before the view;
    None if that needs a copy of more than one group of dimensions, or an unknown size.

    A vector over some of the dimensions that a view split, say over the elements of each head, is
    repeated over the others.
    """
    undone = _Undone(list(tensor.shape), list(tensor.stride()))
    last = steps[-1]
    rank = len(last.order) if isinstance(last, Permutation) else sum(len(b) for _, b in last.groups)
    try:
        for _ in range(rank - tensor.ndim):
            undone.unsqueeze(0)
        for step in reversed(steps):
            if isinstance(step, Permutation):
                undone.permute(tuple(map(step.order.index, range(len(step.order)))))
            else:
                undone.regroup(step.groups)
    except _NoInverseError:
        return None
    return tuple(undone.calls)


class _Undone:
    """A tensor's sizes and strides as calls change them. strides: None after a copy."""

    def __init__(self, sizes: list[Size], strides: list[Size]) -> None:
        self.sizes = sizes
        self.strides: list[Size] | None = strides
        self.calls: list[Call] = []

    def _call(self, method: str, *args: Any) -> None:
        strides = None if self.strides is None else tuple(self.strides)
        self.calls.append(Call(method, args, tuple(self.sizes), strides))

    def _set(self, start: int, end: int, sizes: Sequence[Size], strides: Sequence[Size]) -> None:
        self.sizes[start:end] = sizes
        if self.strides is not None:
            self.strides[start:end] = strides

    def unsqueeze(self, place: int) -> None:
        self._set(place, place, [1], [1])
        self._call("unsqueeze", place)

    def squeeze(self, place: int) -> None:
        self._set(place, place + 1, [], [])
        self._call("squeeze", place)

    def permute(self, order: tuple[int, ...]) -> None:
        self.sizes = [self.sizes[i] for i in order]
        if self.strides is not None:
            self.strides = [self.strides[i] for i in order]
        self._call("permute", order)

    def regroup(self, groups: Sequence[Group]) -> None:
        """From each group's sizes after the view to those before it. The last group first, so that
        the others keep their places."""
        start = len(self.sizes)
        for before, after in reversed(groups):
            start -= len(after)
            if not after:
                self.unsqueeze(start)
            elif not before:
                self.squeeze(start)
            elif (len(before), len(after)) != (1, 1):
                self._exchange(start, before, after)

    def _exchange(self, start: int, before: tuple[Size, ...], after: tuple[Size, ...]) -> None:
        end = start + len(after)
        mine = self.sizes[start:end]
        if all(is_same(size, 1) for size in mine):
            before = (1,) * len(before)
        elif not same_sizes(mine, after):
            self._repeat(start, after)
        if len(after) > 1:
            self._flatten(start, end)
        if len(before) > 1:
            self._unflatten(start, before)

    def _repeat(self, start: int, after: tuple[Size, ...]) -> None:
        """Expand a group. Flattening then copies, which is cheap if nothing else has a size."""
        others = self.sizes[:start] + self.sizes[start + len(after) :]
        constant = all(isinstance(size, int) for size in after)
        if not constant or not all(is_same(size, 1) for size in others):
            raise _NoInverseError
        self.sizes[start : start + len(after)] = after
        self.strides = None
        self._call("expand", tuple(self.sizes))

    def _flatten(self, start: int, end: int) -> None:
        sizes = self.sizes[start:end]
        inner: Size = 1
        if self.strides is not None:
            lie = [(n, s) for n, s in zip(sizes, self.strides[start:end]) if not is_same(n, 1)]
            if not all(is_same(s, n * t) for (_, s), (n, t) in itertools.pairwise(lie)):
                raise _NoInverseError
            inner = lie[-1][1] if lie else 1
        self._set(start, end, [math.prod(sizes)], [inner])
        self._call("flatten", start, end - 1)

    def _unflatten(self, start: int, sizes: tuple[Size, ...]) -> None:
        if sum(not isinstance(size, int) for size in sizes) > 1:
            raise _NoInverseError
        strides: list[Size] = []
        if self.strides is not None:
            inner = self.strides[start]
            strides = [inner * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self._set(start, start + 1, sizes, strides)
        said = tuple(size if isinstance(size, int) else -1 for size in sizes)
        self._call("unflatten", start, said)
