"""Where in the user's source does a node come from?  File, line and the expression on it.

Dynamo records the stack frames of each node. After torch 2.11, from Python 3.11 on, it also marks
where in the line the expression begins. Where it ends comes from parsing the line.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

_FRAME = re.compile(
    r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in [^\n]*'
    r"(\n {4}(?P<code>[^\n]*))?(\n {4}(?P<marks>[ ^~]*))?"
)
_OPERATORS: dict[str, type[ast.operator]] = {
    "mul": ast.Mult,
    "add": ast.Add,
    "sub": ast.Sub,
    "truediv": ast.Div,
    "matmul": ast.MatMult,
    "pow": ast.Pow,
}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NEARBY = 24  # nodes before one that may be from the same line


@dataclass(frozen=True)
class Source:
    """code: the line. expression: the part of it that is the node; empty if that is uncertain."""

    file: str
    line: int
    code: str = ""
    expression: str = ""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True)
class End:
    """Where Dynamo ended a graph. breaks: the rest of the function is in another graph."""

    breaks: bool
    place: str
    code: str = ""
    why: str = ""


def source_of(node: Node) -> Source | None:
    """The innermost frame that Dynamo recorded for the node, or None."""
    trace = node.meta.get("stack_trace") or ""
    found = _FRAME.search(trace, max(trace.rfind('File "'), 0))
    if isinstance(node.target, OpOverload):  # torch.export records the frames within nn.Linear too
        own = [f for f in _FRAME.finditer(trace) if not f["file"].startswith(_TORCH)]
        found = own[-1] if own else found
    if found is None:
        return None
    code, marks = (found["code"] or "").strip(), found["marks"] or ""
    mark = re.search(r"[\^~]+", marks)
    fitting = _fitting(code, op_of(node), None if mark is None else mark.start())
    if mark is not None and "~" in mark[0]:  # since torch 2.15: they mark this very operation
        fitting = tuple(t for t in fitting if len(t) == len(mark[0])) or fitting
    text = fitting[_nth_at(node, trace) % len(fitting)] if fitting else ""
    return Source(found["file"], int(found["line"]), code, text)


def end_of(gm: Any) -> End | None:
    """How the graph Dynamo recorded ends, or None where that is not known."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    if frame.filename.startswith("<"):  # the code of a GraphModule, say of an exported program
        return None
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    why = str(reason.reason).partition("\n")[0] if reason.graph_break else ""
    return End(bool(reason.graph_break), place, (frame.line or "").strip(), why)


def op_of(node: Node) -> str:
    """Name of the function or method that makes the value."""
    target = getattr(node.target, "_overloadpacket", node.target)  # `add` of aten.add.Tensor
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def called_name(node: Node) -> str:
    """Name of the function or method, without the underscore of an in-place one."""
    return "output" if node.op == "output" else op_of(node).rstrip("_")


def _nth_at(node: Node, trace: str) -> int:
    """How many earlier nodes have this operation and stack trace: 1 for `* c` of `a * b * c`."""
    count, before = 0, node.prev
    for _ in range(_NEARBY):
        if before.op == "root":
            break
        count += before.target == node.target and before.meta.get("stack_trace") == trace
        before = before.prev
    return count


@functools.lru_cache(maxsize=4096)
def _fitting(code: str, op: str, column: int | None) -> tuple[str, ...]:
    """The expressions of a line that may be this operation, in the order they are computed.

    column: where it begins, if that is known.
    """
    try:
        tree = ast.parse(f"{code} pass" if code.endswith(":") else code)
    except (SyntaxError, ValueError):  # a part of a longer statement
        return ()
    start = None if column is None else len(code[:column].encode())
    calls: list[ast.expr] = []
    named: list[ast.expr] = []
    for e in ast.walk(tree):
        if not isinstance(e, ast.expr) or (start is not None and e.col_offset != start):
            continue
        if (isinstance(e, ast.BinOp) and type(e.op) is _OPERATORS.get(op)) or (
            isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub) and op == "neg"
        ):
            named.append(e)
        elif isinstance(e, ast.Call):
            called = e.func.attr if isinstance(e.func, ast.Attribute) else ""
            called = e.func.id if isinstance(e.func, ast.Name) else called
            (named if called == op else calls).append(e)
    if not named and (start is not None or len(calls) == 1):
        named = sorted(calls, key=_end)[:1]  # a module's call: `self.up(x)`
    texts = (ast.get_source_segment(code, e) for e in sorted(named, key=_end))
    return tuple(text for text in texts if text)


def _end(e: ast.expr) -> int:
    return e.end_col_offset or 0
