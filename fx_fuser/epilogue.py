"""The pointwise tail of a pattern, as one expression with two readings: torch ops and CUDA text.

An epilogue is an `Expr` over `Arg` leaves: `Z`, the anchor's value, and the pattern's wildcards.
Each op of the table below is written once, with its torch meaning (the CPU kernel, the reference
of the tests, and by `torch.func.vjp` the pointwise backward) beside its CUDA meaning
(`kernels_cu/epilogue_math.cuh`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fx_fuser.spell import Arg, Expr, Operand, is_number

Z = Arg("z")

CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}


class Kernel(NamedTuple):
    """A kernel around the generated functor: its header in kernels_cu, and the header's macro."""

    header: str
    macro: str


POINTWISE = Kernel("pointwise.cuh", "FX_FUSER_POINTWISE")

ANCHOR_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Op:
    """One op: `torch(*args, **attrs)` on tensors and numbers, `cuda(*texts, **attrs)` on text."""

    torch: Callable[..., Any]
    cuda: Callable[..., str]


def _call(name: str) -> Callable[..., str]:
    return lambda *args: f"math::{name}({', '.join(args)})"


def _infix(sign: str) -> Callable[..., str]:
    return lambda *args: "(" + f" {sign} ".join(args) + ")"


def _clamp(x: Any, low: Any, high: Any) -> Any:
    return torch.clamp(x, low, high)


def _clamp_text(x: str, low: str | None, high: str | None) -> str:
    if low is not None:
        x = f"math::maximum({x}, {low})"
    return x if high is None else f"math::minimum({x}, {high})"


def _cast_text(x: str, dtype: torch.dtype) -> str:
    return f"math::round_to<{CUDA_TYPES[dtype]}>({x})"


def _number(value: float) -> str:
    value = float(value)
    if math.isfinite(value):
        return f"Acc({value!r})"
    return "Acc(NAN)" if math.isnan(value) else f"Acc({'-' if value < 0 else ''}INFINITY)"


OPS: dict[str, Op] = {
    "add": Op(lambda *xs: functools.reduce(operator.add, xs), _infix("+")),
    "mul": Op(lambda *xs: functools.reduce(operator.mul, xs), _infix("*")),
    "div": Op(operator.truediv, _infix("/")),
    "sigmoid": Op(torch.sigmoid, _call("sigmoid")),
    "tanh": Op(torch.tanh, _call("tanh")),
    "relu": Op(torch.relu, _call("relu")),
    "exp": Op(torch.exp, _call("exp")),
    "log": Op(torch.log, _call("log")),
    "sqrt": Op(torch.sqrt, _call("sqrt")),
    "rsqrt": Op(torch.rsqrt, _call("rsqrt")),
    "abs": Op(torch.abs, _call("abs")),
    "erf": Op(torch.erf, _call("erf")),
    "minimum": Op(torch.minimum, _call("minimum")),
    "maximum": Op(torch.maximum, _call("maximum")),
    "clamp": Op(_clamp, _clamp_text),
    "where": Op(lambda c, x, y: torch.where(c != 0, x, y), _call("where")),
    "cast": Op(lambda x, dtype: x.to(dtype).to(x.dtype), _cast_text),
    "pow": Op(torch.pow, lambda x, exponent: f"math::pow({x}, {_number(exponent)})"),
    "gelu": Op(
        F.gelu,
        lambda x, approximate: f"math::{'gelu_tanh' if approximate == 'tanh' else 'gelu'}({x})",
    ),
    "softplus": Op(
        F.softplus,
        lambda x, beta, threshold: f"math::softplus({x}, {_number(beta)}, {_number(threshold)})",
    ),
}


def substitute(expr: Operand, values: Mapping[str, Operand]) -> Operand:
    """`expr` with the named leaves replaced."""
    if isinstance(expr, Arg):
        return values.get(expr.name, expr)
    if isinstance(expr, Expr):
        return Expr(expr.op, tuple(substitute(a, values) for a in expr.args), expr.attrs)
    return expr


def flatten(expr: Operand) -> Operand:
    """Products of products and sums of sums as one n-ary op: their order has no meaning."""
    if not isinstance(expr, Expr):
        return expr
    args: list[Operand] = []
    for arg in map(flatten, expr.args):
        if isinstance(arg, Expr) and arg.op == expr.op and expr.op in ("add", "mul"):
            args += arg.args
        else:
            args.append(arg)
    return Expr(expr.op, tuple(args), expr.attrs)


def linear_part(expr: Operand) -> Operand | None:
    """`expr` without the terms that lack z; None where the rest is not linear in z."""
    if isinstance(expr, Arg):
        return expr if expr == Z else None
    if not isinstance(expr, Expr):
        return None
    with_z = [i for i, arg in enumerate(expr.args) if Z.name in leaves(arg)]
    parts = [linear_part(expr.args[i]) for i in with_z]
    if not parts or None in parts:
        return None
    if expr.op == "add":
        return parts[0] if len(parts) == 1 else Expr("add", tuple(parts))
    if (with_z == [0] and expr.op == "div") or (len(parts) == 1 and expr.op == "mul"):
        args = list(expr.args)
        args[with_z[0]] = parts[0]
        return Expr(expr.op, tuple(args), expr.attrs)
    return None


def leaves(expr: Operand) -> set[str]:
    """Names of the leaves that occur."""
    if isinstance(expr, Arg):
        return {expr.name}
    return set().union(*map(leaves, expr.args)) if isinstance(expr, Expr) else set()


def accumulation_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype an epilogue is computed in: float64 if anything is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def evaluate(expr: Operand, values: Mapping[str, Any]) -> Any:
    """The epilogue in torch ops; `values` gives each leaf a tensor or a number."""
    known: dict[Operand, Any] = {}

    def visit(e: Operand) -> Any:
        if isinstance(e, Arg):
            return values[e.name]
        if not isinstance(e, Expr):
            return e
        if e not in known:
            args = [visit(a) for a in e.args]
            if e.op in ("minimum", "maximum"):  # these take no numbers
                like = next(a for a in args if isinstance(a, torch.Tensor))
                args = [a if isinstance(a, torch.Tensor) else like.new_tensor(a) for a in args]
            known[e] = OPS[e.op].torch(*args, **dict(e.attrs))
        return known[e]

    return visit(expr)


def cuda_source(
    expr: Operand,
    tensors: Mapping[str, torch.dtype],
    scalars: Sequence[str],
    out: torch.dtype,
    title: str,
    kernel: Kernel = POINTWISE,
) -> str:
    """The translation unit of the kernel for one epilogue.

    tensors: leaf name → dtype, in the order the kernel takes its inputs, the anchor's value first.
    scalars: leaf names that are numbers at call time, in the order they are passed.
    The functor contract is that of `kernels_cu/pointwise.cuh`.
    """
    acc = CUDA_TYPES[accumulation_dtype((*tensors.values(), out))]
    names = {name: f"in[{i}]" for i, name in enumerate(tensors)}
    names |= {name: f"scalar[{i}]" for i, name in enumerate(scalars)}
    lines: list[str] = []
    known: dict[Operand, str] = {}

    def visit(e: Operand) -> str | None:
        if isinstance(e, Arg):
            return names[e.name]
        if e is None:
            return None
        if is_number(e):
            return _number(e)  # type: ignore[arg-type]
        assert isinstance(e, Expr)
        if e not in known:
            text = OPS[e.op].cuda(*(visit(a) for a in e.args), **dict(e.attrs))
            known[e] = f"v{len(lines)}"
            lines.append(f"    const Acc {known[e]} = {text};")
        return known[e]

    result = visit(expr)
    inputs = ", ".join(CUDA_TYPES[d] for d in tensors.values())
    body = "\n".join(lines)
    return f"""\
// Generated by fx_fuser.epilogue from {title}:
//   {expr}
// in: {", ".join(tensors)}{"; scalar: " + ", ".join(scalars) if scalars else ""}
#include "{kernel.header}"

namespace fx_fuser {{
struct Epilogue {{
  template <class Acc>
  __device__ __forceinline__ Acc operator()(const Acc (&in)[{len(tensors)}],
                                            const Acc (&scalar)[{max(len(scalars), 1)}]) const {{
{body}
    return {result};
  }}
}};
}}  // namespace fx_fuser

{kernel.macro}(fx_fuser::Epilogue, {len(scalars)}, {acc}, {CUDA_TYPES[out]}, {inputs})
"""
