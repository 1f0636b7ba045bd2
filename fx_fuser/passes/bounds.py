"""What numbers a mask of attention may hold, as far as the graph tells: `held`.

`fx_fuser.ops.attention` has extra work for a row whose largest number is finite and not `moderate`.
How the mask is made may show that there is none: from parameters, which are assumed moderate, from
constants, which are evaluated, and from choices between these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.read.nodes import argument_of, is_torchs, meta_tensor, storages
from fx_fuser.ops.attention import moderate

_LARGEST = 1 << 27  # elements of a tensor that is looked at
_MOST = 8  # numbers that are told apart
_FACTOR = 2.0**20  # up to which moderate numbers stay moderate: parameters are far smaller
# They return values of their first argument: all or some, in another place or another dtype.
_SELECTS = frozenset(
    """
    getitem index index_select gather take take_along_dim narrow select expand
    expand_as unsqueeze squeeze view reshape flatten unflatten permute transpose movedim swapaxes t
    numpy_T mT repeat repeat_interleave flip to type type_as float double half bfloat16 contiguous
    clone detach alias
    """.split()  # noqa: SIM905
)
# Those that leave rows as they are if the last dimension keeps its size.
_BY_ROWS = frozenset(
    """
    expand unsqueeze view reshape to type type_as float double half bfloat16 contiguous clone detach
    alias
    """.split()  # noqa: SIM905
)
_ADDS = {"add": 1.0, "radd": 1.0, "sub": -1.0}


@dataclass(frozen=True)
class Held:
    """What a tensor may hold. NaN is always possible.

    numbers: some numbers. others: moderate numbers as well. rows: there is no row (a row is along
    the last dimension) whose largest number is finite and not moderate.
    """

    numbers: frozenset[float] = frozenset()
    others: bool = False
    rows: bool = True

    @property
    def is_near(self) -> bool:
        """No number is finite and not moderate."""
        return not any(map(_is_far, self.numbers))

    @property
    def is_open(self) -> bool:
        """Does it, in a sum, leave the largest of a row as far, or as near, as it is?"""
        return self.is_near and -math.inf not in self.numbers

    def cast(self, dtype: torch.dtype) -> Held:
        """Rounded, as a tensor's cast would."""
        if not dtype.is_floating_point:
            return self
        rounded = frozenset(torch.tensor(n, dtype=dtype).item() for n in self.numbers)
        return replace(self, numbers=rounded)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Does a cast to the dtype keep every number?"""
        return not self.others and self.cast(dtype).numbers == self.numbers


_PARAMETER = Held(others=True)


@dataclass(frozen=True)
class Known:
    """What else is known about a graph's nodes.

    value: what the graph computes without any input; None for other nodes. given: placeholder of a
    body → argument of its call. written: the memory that something writes to in place.
    """

    value: Callable[[Node], Tensor | None]
    given: Mapping[Node, Node] = field(default_factory=dict)
    written: frozenset[Any] = frozenset()


def held(value: Any, known: Known) -> Held | None:
    """What a node or a number may hold; None if the graph does not tell."""
    if isinstance(value, (bool, int, float)):
        return _of_numbers([float(value)])
    tensor = meta_tensor(value) if isinstance(value, Node) else None
    if tensor is None:
        return None
    made = known.value(value)
    if made is not None:
        return _of_tensor(made)
    memory = storages([value])
    if None in memory or memory & known.written:
        return None
    if value in known.given:
        return held(known.given[value], known)
    found = _is_parameter(value, tensor) or _by_call(value, known)
    return found.cast(tensor.dtype) if found is not None else None


def _is_far(number: float) -> bool:
    return math.isfinite(number) and not moderate(number)


def _of_numbers(numbers: list[float]) -> Held:
    numbers = [n for n in numbers if not math.isnan(n)]
    return Held(frozenset(numbers), rows=not any(map(_is_far, numbers)))


def _of_tensor(made: Tensor) -> Held | None:
    with torch.no_grad():
        few = made
        for dim in range(made.ndim):
            few = few.narrow(dim, 0, 1) if few.stride(dim) == 0 and few.shape[dim] > 1 else few
        if few.numel() > _LARGEST:
            return None
        few = few.double()
        numbers: list[float] = few.unique().tolist()
        numbers = [n for n in numbers if not math.isnan(n)]
        far = [n for n in numbers if _is_far(n)]
        if len(far) > _MOST:
            return None
        rows = True
        if far:
            rows = made.ndim > 0 and not any(map(_is_far, few.amax(-1).unique().tolist()))
    if len(numbers) > _MOST:
        return Held(frozenset(far), True, rows)
    return Held(frozenset(numbers), False, rows)


def _is_parameter(node: Node, tensor: Tensor) -> Held | None:
    """A parameter, or another tensor that is trained, such as a prompt."""
    if node.op not in ("placeholder", "get_attr") or not tensor.is_floating_point():
        return None
    trained = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
    return _PARAMETER if trained else None


def _by_call(node: Node, known: Known) -> Held | None:
    name = name_of_call(node)
    if not is_torchs(node) or not node.args:
        return None
    first = node.args[0]
    if name in _SELECTS:
        of = meta_tensor(first) if isinstance(first, Node) else None
        if of is not None and of.dtype is torch.bool:
            return _of_numbers([0.0, 1.0])
        return _selected(node, name, held(first, known))
    if name == "embedding":
        return held(argument_of(node, 1, "weight"), known)
    if name in ("sigmoid", "tanh"):
        return Held(others=True)
    if name in _ADDS and not node.kwargs and len(node.args) == 2:
        other = _scaled(held(node.args[1], known), _ADDS[name])
        return _sum(held(first, known), other)
    if name in ("mul", "rmul", "truediv", "div", "neg") and not node.kwargs:
        return _product(node, name, known)
    if (parts := _parts_of_choice(node, name)) is not None:
        return _choice(*parts, known)
    return None


def _parts_of_choice(node: Node, name: str) -> tuple[Any, Any, Any] | None:
    """(yes, no, choice) of a `where` or a `masked_fill`."""
    if name == "where" and len(node.args) == 3:
        choice, yes = node.args[:2] if node.op == "call_function" else node.args[1::-1]
        return yes, node.args[2], choice
    if name == "masked_fill" and len(node.args) == 3:
        return node.args[2], node.args[0], node.args[1]
    return None


def always_taken(value: Node, known: Known) -> Node:
    """What a choice takes everywhere, if the graph decides it without any input; else the node
    itself. Where the choice has no gradient, what it takes may have one.

    transformers' T5 adds `where(shown, bias, lowest)`: if the mask shows all keys, that repeats for
    each sample a bias that all samples share.
    """
    parts = _parts_of_choice(value, name_of_call(value)) if is_torchs(value) else None
    if parts is None or not isinstance(choice := parts[2], Node):
        return value
    made = known.value(choice)
    if made is None or made.dtype is not torch.bool:
        return value
    if bool(made.all()):
        taken, other = parts[:2]
    elif not bool(made.any()):
        other, taken = parts[:2]
    else:
        return value
    was, now, left = (
        meta_tensor(v) if isinstance(v, Node) else None for v in (value, taken, other)
    )
    if was is None or type(now) is not FakeTensor:
        return value
    if (now.dtype, now.device) != (was.dtype, was.device):
        return value
    # What is not taken has a gradient of zeros, not None.
    if (left is not None and left.requires_grad) or (was.requires_grad and not now.requires_grad):
        return value
    # A value that is computed ahead is the one after all writes.
    if not storages([value, taken, choice]).isdisjoint({None, *known.written}):
        return value
    return always_taken(taken, known)


def name_of_call(node: Node) -> str:
    """`and` of `operator.and_`, `Tensor.__and__`; `masked_fill` of `masked_fill_`, and of ATen's
    `masked_fill.Scalar`."""
    target = getattr(node.target, "_overloadpacket", node.target)
    return str(getattr(target, "__name__", target)).strip("_")


def _selected(node: Node, name: str, of: Held | None) -> Held | None:
    if of is None or of.is_near or not of.rows:
        return of
    was, now = (meta_tensor(n) for n in (node.args[0], node))  # type: ignore[arg-type]
    keeps = name in _BY_ROWS and was is not None and now is not None and was.ndim > 0
    keeps = keeps and was.shape[-1] == now.shape[-1] > 1  # type: ignore[union-attr]
    return replace(of, rows=keeps)


def _sum(a: Held | None, b: Held | None) -> Held | None:
    if a is None or b is None:
        return None
    numbers = {x + y for x in a.numbers for y in b.numbers}
    # A moderate number does not change one that is not moderate, or not by much.
    for mine, its in ((a, b), (b, a)):
        if its.others:
            numbers |= {x for x in mine.numbers if not moderate(x)}
    numbers = {n for n in numbers if not math.isnan(n)}
    if len(numbers) > _MOST:
        return None
    rows = not any(map(_is_far, numbers)) or (a.is_open and b.rows) or (b.is_open and a.rows)
    return Held(frozenset(numbers), a.others or b.others, rows)


def _scaled(of: Held | None, factor: float) -> Held | None:
    """of · factor"""
    if of is None or (of.others and not abs(factor) <= _FACTOR):
        return None
    numbers = [n * factor for n in of.numbers]
    numbers = [n for n in numbers if not math.isnan(n)]
    rows = not any(map(_is_far, numbers)) or (of.rows and 0 < factor <= _FACTOR)
    return Held(frozenset(numbers), of.others, rows)


def _product(node: Node, name: str, known: Known) -> Held | None:
    if name == "neg":
        return _scaled(held(node.args[0], known), -1.0)
    if len(node.args) != 2:
        return None
    first, second = node.args
    if name in ("mul", "rmul") and isinstance(first, (int, float)):
        first, second = second, first
    if not isinstance(second, (int, float)) or (second == 0 and "div" in name):
        return None
    return _scaled(held(first, known), 1 / second if "div" in name else second)


def _choice(yes: Any, no: Any, choice: Any, known: Known) -> Held | None:
    """where(choice, yes, no)"""
    a, b = held(yes, known), held(no, known)
    if a is None or b is None:
        return None
    numbers = a.numbers | b.numbers
    rows = a.is_near and b.is_near
    made = known.value(choice) if isinstance(choice, Node) else None
    if not rows and made is not None and made.ndim > 0:  # each row has one that is moderate
        rows = (a.is_open and bool(made.any(-1).all())) or (
            b.is_open and bool((~made).any(-1).all())
        )
    return Held(numbers, a.others or b.others, rows) if len(numbers) <= _MOST else None
