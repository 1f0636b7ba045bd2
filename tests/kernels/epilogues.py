"""Random epilogues over all ops, and values for their leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser.graph.epilogue import ANCHOR_DTYPES, Epilogue, Step
from fx_fuser.graph.read.operations import OPS

# op → the forms of its arguments, a letter each: v any value, t a tensor, s a number.
FORMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OPS, ("v",)),
    **dict.fromkeys(("add", "sub", "rsub"), ("vv", "vvs")),
    **dict.fromkeys(("mul", "div"), ("vv",)),
    **dict.fromkeys(("minimum", "maximum"), ("tt",)),  # torch's take no numbers
    "rdiv": ("vs",),
    **dict.fromkeys(("addcmul", "addcdiv"), ("ttt", "ttts")),
    "lerp": ("ttt", "tts"),
    "where": ("vvv",),
    "clamp": ("vss", "v-s", "vs-"),
    "hardtanh": ("vss",),
}
ATTRS: dict[str, dict[str, Sequence[Any]]] = {
    "cast": {"dtype": ANCHOR_DTYPES},
    "pow": {"exponent": (2.0, 0.5, -1.5, 3.0, 1e-3, 1e20, float("inf"))},
    "gelu": {"approximate": ("none", "tanh")},
    "softplus": {"beta": (1.0, 0.7), "threshold": (20.0, 1.5)},
    "leaky_relu": {"negative_slope": (0.01, 0.2, -0.5, 0.0)},
    "elu": {"alpha": (1.0, 1.67, -0.5), "scale": (1.0, 1.05), "input_scale": (1.0, 2.0)},
    "threshold": {"threshold": (0.1, -1.0), "value": (20.0, float("-inf"))},
    "hardshrink": {"lambd": (0.5, 0.0, -1.0)},
    "softshrink": {"lambd": (0.5, 0.0)},
}
assert all({*map(len, FORMS[name])} == {*op.takes} for name, op in OPS.items())
assert all((*ATTRS.get(name, ()),) == op.attrs for name, op in OPS.items())


def every_step(op: str) -> Iterator[Step]:
    """One step over z and other leaves for each form of an op and each value of an attribute."""
    options = ATTRS.get(op, {})
    longest = max(map(len, options.values()), default=1)
    for form in FORMS[op]:
        args: list[str | None] = []
        for letter in form:
            numbers = sum(a is not None and a[0] == "s" for a in args)
            tensors = sum(a is not None and a[0] == "t" for a in args)
            leaf = f"s{numbers}" if letter == "s" else f"t{tensors}" if args else "z"
            args.append(None if letter == "-" else leaf)
        for i in range(longest):
            yield Step(op, tuple(args), tuple((n, v[i % len(v)]) for n, v in options.items()))


class Maker:
    """Makes random epilogues from a seed, of these ops."""

    def __init__(self, seed: int, ops: Sequence[str] = tuple(OPS)) -> None:
        self.draw = random.Random(seed)
        self.ops = ops
        self.tensors = self.numbers = 0

    def leaf(self, letter: str) -> str:
        if letter == "s":
            self.numbers += 1
            return f"s{self.numbers - 1}"
        if self.tensors and self.draw.random() < 0.3:
            return f"t{self.draw.randrange(self.tensors)}"
        self.tensors += 1
        return f"t{self.tensors - 1}"

    def step(self, made: Sequence[str], op: str = "", holding: str = "") -> Step:
        """A step over the values so far, including z; holding: a value that it must read."""
        op = op or self.draw.choice(self.ops)
        args: list[str | None] = []
        for letter in self.draw.choice(FORMS[op]):
            if letter == "-":
                args.append(None)
            elif letter == "s" or (letter == "v" and args and self.draw.random() < 0.2):
                args.append(self.leaf("s"))
            elif self.draw.random() < 0.5:
                args.append(self.draw.choice(made))
            else:
                args.append(self.leaf("t"))
        if holding and holding not in args:
            args[0] = holding
        attrs = tuple((n, self.draw.choice(v)) for n, v in ATTRS.get(op, {}).items())
        return Step(op, tuple(args), attrs)

    def epilogue(self, steps: int) -> Epilogue:
        made, found = ["z"], list[Step]()
        for i in range(steps):
            last = i + 1 == steps
            found.append(self.step(made, holding=made[-1] if last else ""))
            made.append(f"v{i}")
        return Epilogue(tuple(found))


def values_of(
    epilogue: Epilogue, generator: torch.Generator, shape: Sequence[int] = (3, 4)
) -> dict[str, Tensor | float]:
    """Of its leaves: tensors with a gradient, numbers."""
    made: dict[str, Tensor | float] = {}
    for name in sorted(epilogue.leaves | {"z"}):
        if name[0] == "s":
            made[name] = 0.37 * int(name[1:]) - 0.9  # increasing: bounds are in order
        else:
            made[name] = torch.randn(*shape, generator=generator).requires_grad_()
    return made
