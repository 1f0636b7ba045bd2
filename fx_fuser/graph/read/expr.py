"""Canonical expressions, whose leaves are nodes, names and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

import torch
from torch.fx import Node

Operand = Union["Expr", "Arg", Node, float, int, bool, None]


@dataclass(frozen=True)
class Arg:
    """A leaf of an epilogue: a value known by name, not yet by node."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Expr:
    """A canonical operation: `args` are values (expressions, nodes, numbers), `attrs` constants."""

    op: str
    args: tuple[Operand, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [str(a) for a in self.args] + [f"{k}={v}" for k, v in self.attrs]
        return f"{self.op}({', '.join(parts)})"


class Unsupported(Exception):
    """The call has no canonical form; its node stays opaque."""


def is_number(value: object) -> bool:
    """Is it a constant that is a float?  SymInt and SymFloat change from call to call, and integers
    beyond 2^53 are not exact floats."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
