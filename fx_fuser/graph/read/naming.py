"""Nodes of a graph in the names, words and lines of the user's source.

FX calls a value `mul_3`; the user wrote `r = z * s`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.graph.read.canonical import Arg, Expr, Operand
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.source import op_of, source_of
from fx_fuser.graph.read.view import View

SHARD_OF = "fx_fuser_shard_of"  # in the meta of a DTensor's local shard: the node of the DTensor
_LONGEST = 48  # characters that are quoted
_ITEM = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\['([^']+)'\]")


def at(node: Node) -> str:
    """For the end of a phrase: `, model.py:88`, or nothing where the line is not known."""
    source = source_of(node)
    return "" if source is None else f", {source.place}"


def place_of(node: Node) -> str:
    source = source_of(node)
    return op_of(node) if source is None else source.place


def name_of(node: Node) -> str | None:
    """The user's own name of the value, or None: a variable, an input, `self.up.weight`."""
    if node.op == "placeholder":
        return _source_name(node)
    if node.op == "get_attr":
        return str(node.target)
    source, variable = source_of(node), re.sub(r"_\d+$", "", node.name)
    # Dynamo renames a node to the variable it is stored in.
    stored = rf"(?<![\w.]){re.escape(variable)}\s*(,[^=]*|:[^=]*|[-+*/@])?=(?!=)"
    if source is None or not re.search(stored, source.code):
        return None
    inner = source.expression and not source.code.endswith(f"= {source.expression}")
    return None if inner and variable == op_of(node) else variable  # tanh = h * torch.tanh(h)


def _source_name(node: Node) -> str | None:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return str(node.target)
    name: str = source.name
    if not re.match(r"[LG]\['\w+'\]", name) or "___" in name:
        return None  # Dynamo's own name, say of a stack entry at a graph break

    def item(found: re.Match[str]) -> str:
        member, key = found.groups()
        if member is None:
            return f"[{key!r}]"
        return f".{member}" if member.isidentifier() else f"[{member}]"

    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", _ITEM.sub(item, name)).replace('"', "'")


def called(node: Node) -> str:
    """The value in the user's words: `z`, or `torch.sigmoid(z)` if it has no name."""
    node = node.meta.get(SHARD_OF, node)
    name, source = name_of(node), source_of(node)
    if name is None and source is not None and node.op != "placeholder":
        name = source.expression
    if not name:
        return "a value from before the graph break" if node.op == "placeholder" else op_of(node)
    return f"`{name if len(name) <= _LONGEST else name[: _LONGEST - 1] + '…'}`"


def statement(node: Node) -> str:
    """What the node does, as it stands in the source: "`x.add_(1)`, model.py:31"."""
    source = source_of(node)
    text = op_of(node) if source is None else source.expression or source.code or op_of(node)
    return f"`{text[:_LONGEST]}`{at(node)}"


def infix(expr: Operand, inside: str = "") -> str:
    """An epilogue as one would write it: `sigmoid(z) * a + b`."""
    if isinstance(expr, Node):
        return called(expr).strip("`")
    if not isinstance(expr, Expr):
        return expr.name if isinstance(expr, Arg) else str(expr)
    sign = OPS[expr.op].sign if expr.op in OPS else ""
    if not sign:
        parts = [infix(a) for a in expr.args] + [f"{k}={v}" for k, v in expr.attrs]
        return f"{expr.op}({', '.join(parts)})"
    text = sign.join(infix(a, expr.op) for a in expr.args)
    return f"({text})" if inside == "div" or (inside == "mul" and expr.op != "mul") else text


def returned(view: View) -> str:
    """Why a value leaves the graph: the user returns it, or needs it after a graph break."""
    end = view.end
    if end is None:
        return "returned"
    if not end.breaks:
        return f"returned, {end.place}"
    code = f" (`{end.code[:_LONGEST]}`)" if end.code else ""
    return f"needed after the graph breaks at {end.place}{code}"


def without_break(view: View) -> str:
    """The edit that removes the graph break, if we know one."""
    if view.end is not None and view.end.breaks and view.end.code.startswith("print("):
        return "put the print under `if not torch.compiler.is_compiling():`"
    return ""


def shape_of(value: Any) -> str:
    """Sizes as in `[3, 6]`, or `[?]` if it is not a tensor known at compile time."""
    known = isinstance(value, torch.Tensor)
    return "[" + ", ".join(map(str, value.shape)) + "]" if known else "[?]"


def dtype_of(value: Any) -> str:
    return str(getattr(value, "dtype", "unknown")).removeprefix("torch.")
