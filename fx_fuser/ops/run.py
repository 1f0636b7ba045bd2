"""The ops that graphs call for what fx_fuser runs: one family for all, forward and backward.

    fx_fuser::run(Tensor[] t, str program) -> Tensor                                only y
    fx_fuser::run.many(Tensor[] t, str program, SymInt[]? sizes=None) -> Tensor[]   all results
    fx_fuser::run.in_torch, likewise                                by torch's operations
    fx_fuser::run.import_fx_fuser, likewise, but -> Tensor          of an exported program

`program` is the name of a function and its arguments, `t` those that are tensors, `sizes` those
that are known only at the call: in inference hardly ever, so `run` does not take them. Most of an
op's host time goes to its arguments, which torch converts one by one at each call, absent ones too:
an op with 24 of them and four results took 14 us, one with four and one 2.6
(kernels_cu/conv/NOTES.md). Each text is parsed once, here and in kernels_cu/host/run.h. Unlike a
handle, it can go through Inductor's caches.

Words are separated by single spaces. An argument's first letter says what it is:

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

import contextlib
import functools
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.native import load
from fx_fuser.native.kernel_spec import CUDA_TYPES, KernelSpec

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_CALL = "(Tensor[] t, str program, SymInt[]? sizes=None)"
_LIBRARY.define("run(Tensor[] t, str program) -> Tensor")
_LIBRARY.define(f"run.many{_CALL} -> Tensor[]")
# Its types differ from those of `run.many`: torch 2.11 and 2.15 confuse two overloads of the same
# types when they free them, which aborts the process at its end.
_LIBRARY.define("run.in_torch(Tensor[] t, str program, SymInt[] sizes=[]) -> Tensor[]")
_LIBRARY.define(f"run.import_fx_fuser{_CALL} -> Tensor")
ONE = torch.ops.fx_fuser.run.default
MANY = torch.ops.fx_fuser.run.many
IN_TORCH = torch.ops.fx_fuser.run.in_torch
EXPORTED = torch.ops.fx_fuser.run.import_fx_fuser  # fx_fuser.ops.exported
_DTYPES = {name: dtype for dtype, name in CUDA_TYPES.items()}
Arguments = tuple[Any, ...]  # of an op, without `sizes` if there are none


# ---- functions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    in_torch: Callable[..., Sequence[Tensor]]
    like: Callable[..., Sequence[Tensor]]


_functions: dict[str, _Function] = {}


def define(
    name: str, in_torch: Callable[..., Sequence[Tensor]], like: Callable[..., Sequence[Tensor]]
) -> None:
    """Defines a function that programs may name; its first result is y. like: for fake tensors.

    On CUDA kernels_cu/host/run.h says what runs; what that does not take comes back to `in_torch`.
    """
    _functions[name] = _Function(in_torch, like)


def define_loader(name: str, kind: str, offered: Callable[[], Iterable[KernelSpec]]) -> None:
    """Defines the op that a function calls if its kernel is not loaded: if Inductor's cache had the
    graph, no pass has seen it. It returns nothing: if the kernel does not build, the function finds
    none again, and runs by the library from then on.

    kind: what a warning calls the operation; offered: all of its kernels.
    """

    def prepare(on: Tensor, kernel: str) -> None:
        try:
            load.prepare([{spec.name: spec for spec in offered()}[kernel]], on.device)
        except Exception as error:
            warnings.warn(
                f"fx_fuser leaves {kind} to the library: {type(error).__name__}: {error}; "
                "please report it",
                stacklevel=2,
            )

    _LIBRARY.define(f"{name}(Tensor on, str kernel) -> ()")
    _LIBRARY.impl(name, prepare, "CompositeExplicitAutograd")


def _many(
    fake: bool, t: Sequence[Tensor], program: str, sizes: Sequence[int] | None = None
) -> list[Tensor]:
    name, filled = read(program)
    if name not in _functions:
        raise RuntimeError(
            f"fx_fuser: run does not know the function {name}; if an exported program of another "
            "version of fx_fuser calls it, fuse the program again"
        )
    function = _functions[name]
    with _named(name):
        return [*(function.like if fake else function.in_torch)(*filled(t, sizes))]


def _named(name: str) -> Any:
    """Names the function in a profile."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"fx_fuser::run {name}")
    return contextlib.nullcontext()


def _one(fake: bool, *given: Any) -> Tensor:
    return _many(fake, *given)[0]


for _name, _made, _key in (
    ("run", _one, "CPU"),  # on CUDA: kernels_cu/host/run.h
    ("run.many", _many, "CPU"),
    ("run.in_torch", _many, "CompositeExplicitAutograd"),
    ("run.import_fx_fuser", _one, "CompositeExplicitAutograd"),
):
    _LIBRARY.impl(_name, functools.partial(_made, False), _key)
    torch.library.register_fake(f"fx_fuser::{_name}", functools.partial(_made, True), lib=_LIBRARY)


# ---- programs ------------------------------------------------------------------------------------


def arguments(function: str, args: Sequence[Any]) -> Arguments:
    """The arguments of an op for a call of this function. A node stands for its value."""
    tensors: list[Tensor] = []
    sizes: list[Any] = []
    program = " ".join((function, *_words(args, tensors, sizes)))
    return tensors, program, *([sizes] if sizes else [])


def one(t: list[Tensor], program: str, *sizes: list[Any]) -> Callable[[], Tensor]:
    """The call that returns only y."""
    return (lambda: MANY(t, program, *sizes)[0]) if sizes else functools.partial(ONE, t, program)


def called(node: Node) -> tuple[Any, Sequence[Any]]:
    """What a node calls and its arguments; for these ops, the function's name and its arguments."""
    if node.target not in (ONE, MANY, IN_TORCH, EXPORTED):
        return node.target, node.args
    t, program, *sizes = node.args
    name, filled = read(program)  # type: ignore[arg-type]
    return name, filled(t, *sizes)


def _words(args: Sequence[Any], tensors: list[Tensor], sizes: list[Any]) -> Iterator[str]:
    for given in args:
        value = given.meta["val"] if isinstance(given, Node) else given
        if isinstance(value, Tensor):
            tensors.append(given)
            yield "t"
        elif isinstance(value, torch.SymInt):
            sizes.append(given)
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
def read(program: str) -> tuple[str, Callable[..., list[Any]]]:
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


def _filled(values: list[Any], t: Sequence[Any], sizes: Any = None) -> list[Any]:
    return [
        (t if value.of == "t" else sizes)[value.at]
        if type(value) is _Place
        else (_filled(value, t, sizes) if type(value) is list else value)
        for value in values
    ]


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
