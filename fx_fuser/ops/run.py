"""The op that graphs call for all that fx_fuser runs, of which y alone is wanted.

    fx_fuser::run(Tensor[] t, SymInt[] sizes, str program) -> Tensor

`program` is the name of a function and its arguments, `t` those that are tensors, `sizes` those
that are known at the call only. What an op takes the host is mostly its arguments, which torch
converts one by one at each call: an op with 24 of them and four results took 14 us, one with four
and one 2.6 (kernels_cu/conv/NOTES.md). The text is read once a text, here and in
kernels_cu/host/run.h. It goes through Inductor's caches, as a number of ours would not.

Words stand between single spaces. An argument's first letter says what it is:

    t          the next tensor
    n          the next size
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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.native.kernel_spec import CUDA_TYPES

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LIBRARY.define("run(Tensor[] t, SymInt[] sizes, str program) -> Tensor")
_LIBRARY.define("run_in_torch(Tensor[] t, int[] sizes, str program) -> Tensor[]")
OP = torch.ops.fx_fuser.run.default
_DTYPES = {name: dtype for dtype, name in CUDA_TYPES.items()}
Arguments = tuple[list[Tensor], list[Any], str]  # of the op; a size is an int or a torch.SymInt


# ---- functions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    in_torch: Callable[..., Sequence[Tensor]]
    like: Callable[..., Sequence[Tensor]]


_functions: dict[str, _Function] = {}


def define(
    name: str, in_torch: Callable[..., Sequence[Tensor]], like: Callable[..., Sequence[Tensor]]
) -> None:
    """A function that programs may name, whose first result is y. like: of fake tensors.

    On CUDA kernels_cu/host/run.h names what runs; what that does not take comes back to `in_torch`.
    """
    _functions[name] = _Function(in_torch, like)


def _found(fake: bool, t: Sequence[Tensor], sizes: Sequence[int], program: str) -> Sequence[Tensor]:
    name, filled = read(program)
    function = _functions[name]
    return (function.like if fake else function.in_torch)(*filled(t, sizes))


def _run(fake: bool, t: Sequence[Tensor], sizes: Sequence[int], program: str) -> Tensor:
    return _found(fake, t, sizes, program)[0]


_LIBRARY.impl("run", functools.partial(_run, False), "CPU")
torch.library.register_fake("fx_fuser::run", functools.partial(_run, True), lib=_LIBRARY)
_LIBRARY.impl(
    "run_in_torch",
    lambda *given: [*_found(False, *given)],
    "CompositeExplicitAutograd",
)


# ---- programs ------------------------------------------------------------------------------------


def arguments(function: str, args: Sequence[Any]) -> Arguments:
    """The arguments of the op for a call of this function."""
    tensors: list[Tensor] = []
    sizes: list[Any] = []
    return tensors, sizes, " ".join((function, *_words(args, tensors, sizes)))


def called(node: Node) -> tuple[Any, Sequence[Any]]:
    """What a node calls and its arguments; of the op, the function's name and its arguments."""
    if node.target is not OP:
        return node.target, node.args
    t, sizes, program = node.args
    name, filled = read(program)  # type: ignore[arg-type]
    return name, filled(t, sizes)  # type: ignore[arg-type]


def _words(args: Sequence[Any], tensors: list[Tensor], sizes: list[Any]) -> Iterator[str]:
    for value in args:
        if isinstance(value, Tensor):
            tensors.append(value)
            yield "t"
        elif isinstance(value, torch.SymInt):
            sizes.append(value)
            yield "n"
        elif value is None:
            yield "-"
        elif isinstance(value, (list, tuple)):
            yield f"#{len(value)}"
            yield from _words(value, tensors, sizes)
        elif isinstance(value, str):
            yield f"s{len(value.encode())}:{value}"
        elif isinstance(value, torch.dtype):
            yield f"d{CUDA_TYPES[value]}"
        elif isinstance(value, bool):
            yield f"b{int(value)}"
        elif isinstance(value, int):
            yield f"i{value}"
        else:
            yield f"f{struct.pack('>d', value).hex()}"


@functools.lru_cache(maxsize=4096)
def read(program: str) -> tuple[str, Callable[[Sequence[Any], Sequence[Any]], list[Any]]]:
    """The function that a program names, and its arguments from its tensors and sizes."""
    name, _, rest = program.partition(" ")
    # Bytes, as in C++: that is what the length of a str counts.
    words = _Words(rest.encode())
    values: list[Any] = []
    while words.left:
        values.append(words.argument())
    return name, functools.partial(_filled, values)


@dataclass(frozen=True)
class _Place:
    of: str  # "t" or "n"
    at: int


def _filled(value: Any, t: Sequence[Any], sizes: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_filled(one, t, sizes) for one in value]
    if isinstance(value, _Place):
        return (t if value.of == "t" else sizes)[value.at]
    return value


class _Words:
    def __init__(self, text: bytes) -> None:
        self.left = text
        self._counts = {"t": 0, "n": 0}

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
        if kind in self._counts:
            self._counts[kind] += 1
            return _Place(kind, self._counts[kind] - 1)
        return {
            "-": lambda: None,
            "i": lambda: int(said),
            "b": lambda: said == "1",
            "f": lambda: struct.unpack(">d", bytes.fromhex(said))[0],
            "d": lambda: _DTYPES[said],
        }[kind]()
