"""The op that graphs call for a kernel op of which y alone is wanted, as in inference.

    fx_fuser::evaluate(Tensor[] tensors, str call) -> Tensor

`call` is the kernel op's name and all its arguments, `tensors` those among them. What an op takes
the host is mostly its arguments, which torch converts one by one at each call: an op with 24 of
them and four results took 14 us, one with four and one 2.6 (kernels_cu/conv/NOTES.md). The text
is read once a text, here and in kernels_cu/host/evaluate.h. It goes through
Inductor's caches, as a number of ours would not.

Words stand between single spaces. An argument's first letter says what it is:

    t          the next tensor
    -          None
    #3         a list of three, which follow
    i-1        an int
    b1         a bool
    f3ff0…     a float: the 16 digits of its bits
    s5:split   a str of 5 bytes
    dfloat     a dtype, by its name in CUDA
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.native.kernel_spec import CUDA_TYPES

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LIBRARY.define("evaluate(Tensor[] tensors, str call) -> Tensor")
OP = torch.ops.fx_fuser.evaluate.default
_DTYPES = {name: dtype for dtype, name in CUDA_TYPES.items()}


def arguments(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[list[Any], str] | None:
    """The arguments of `evaluate` for a call of this op, on tensors or on a graph's nodes of them;
    None if a number is not known yet, or a dtype is none of the kernels'."""
    tensors: list[Any] = []
    words = [op._schema.name.removeprefix("fx_fuser::")]
    for argument, value in zip(op._schema.arguments, args, strict=True):
        # torch takes an int for a float.
        is_float = str(argument.type) in ("float", "List[float]")
        for word in _words(value, is_float, tensors):
            if word is None:
                return None
            words.append(word)
    return tensors, " ".join(words)


def called(node: Node) -> tuple[Any, Sequence[Any]]:
    """What a node calls and its arguments; of `evaluate`, the op that this calls."""
    if node.target is not OP:
        return node.target, node.args
    tensors, call = node.args
    op, filled = read(call)  # type: ignore[arg-type]
    return op, filled(tensors)  # type: ignore[arg-type]


def _words(value: Any, is_float: bool, tensors: list[Any]) -> Iterator[str | None]:
    if isinstance(value.meta["val"] if isinstance(value, Node) else value, Tensor):
        tensors.append(value)
        yield "t"
    elif value is None:
        yield "-"
    elif isinstance(value, (list, tuple)):
        yield f"#{len(value)}"
        for one in value:
            yield from _words(one, is_float, tensors)
    elif isinstance(value, str):
        yield f"s{len(value.encode())}:{value}"
    elif isinstance(value, torch.dtype):
        yield f"d{CUDA_TYPES[value]}" if value in CUDA_TYPES else None  # no kernel makes it
    elif not isinstance(value, (bool, int, float)):
        yield None  # a torch.SymInt, say
    elif is_float:
        yield f"f{struct.pack('>d', value).hex()}"
    elif isinstance(value, bool):
        yield f"b{int(value)}"
    else:
        yield f"i{value}"


@functools.lru_cache(maxsize=4096)
def read(call: str) -> tuple[torch._ops.OpOverload, Callable[[Sequence[Tensor]], list[Any]]]:
    """The op that a text names, and its arguments from their tensors."""
    name, _, rest = call.partition(" ")
    # Bytes, as in C++: that is what the length of a str counts.
    words = _Words(rest.encode())
    values: list[Any] = []
    while words.left:
        values.append(words.argument())
    return getattr(torch.ops.fx_fuser, name).default, functools.partial(_filled, values)


class _Place(int):
    """Of a tensor."""


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_filled(one, tensors) for one in value]
    return tensors[value] if isinstance(value, _Place) else value


class _Words:
    def __init__(self, text: bytes) -> None:
        self.left = text
        self._tensors = 0

    def argument(self) -> Any:
        kind, self.left = self.left[:1].decode(), self.left[1:]
        if kind == "s":
            length, _, self.left = self.left.partition(b":")
            text, self.left = self.left[: int(length)], self.left[int(length) + 1 :]
            return text.decode()
        word, _, self.left = self.left.partition(b" ")
        said = word.decode()
        if kind == "#":
            return [self.argument() for _ in range(int(said))]
        if kind == "t":
            self._tensors += 1
            return _Place(self._tensors - 1)
        return {
            "-": lambda: None,
            "i": lambda: int(said),
            "b": lambda: said == "1",
            "f": lambda: struct.unpack(">d", bytes.fromhex(said))[0],
            "d": lambda: _DTYPES[said],
        }[kind]()


def _run(tensors: Sequence[Tensor], call: str) -> Tensor:
    op, filled = read(call)
    found = op(*filled(tensors))
    y: Tensor = found if isinstance(found, Tensor) else found[0]
    return y


_LIBRARY.impl("evaluate", _run, "CPU")  # on CUDA: kernels_cu/host/evaluate.h
torch.library.register_fake("fx_fuser::evaluate", _run, lib=_LIBRARY)
