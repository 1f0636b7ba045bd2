"""The operations that an epilogue may have: `OPS`, with all that is known about each.

To add one, add an entry. What it means in torch (the CPU kernel, the reference of the tests and, by
`torch.autograd.grad`, the pointwise backward), its CUDA text (of functions of
`kernels_cu/common/epilogue_math.cuh`), its derivative and what matching may do with it are fields.
How users call it is found by its name, if it has one argument and no attributes; else by a rule in
`fx_fuser.graph.read.functions` or, for arithmetic, `fx_fuser.graph.read.canonical`.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fx_fuser.graph.read.expr import Expr, is_number
from fx_fuser.native.kernel_spec import CUDA_TYPES

Args = Sequence[str | None]
Attrs = tuple[tuple[str, Any], ...]
# Writes a step, `emit(op, *args, attrs=())`, and returns the name of its value.
Emit = Callable[..., str]
# (emit, dy, place, args, attrs) → the gradient of the argument at that place, if the operation is
# linear in it.
Slope = Callable[[Emit, str, int, Args, Attrs], str | None]


@dataclass(frozen=True)
class PointwiseOp:
    """One operation: `torch(*args, **attrs)` on values, `cuda(*texts, **attrs)` in a kernel's text.

    takes: how many arguments there may be. attrs: names of its attributes. aliases: how else it is
    called, if it has one argument and no attributes.

    Derivative. reads: (place of an argument, count) → places of the arguments that it reads. slope:
    None if it is linear in no argument. saves_arguments: autograd saves the arguments that it
    reads, not the result or something in between.

    Matching. meaning: the operation as sums and products of others. total: computes it of numbers,
    if it is the sum or the product: nested ones match as one of many terms, and two operands may be
    exchanged, the only change that a canonical form may make. is_symmetric: operands match in
    either order. returns_input: the result may be the tensor that it is given. sign: the infix
    sign between two operands. off_by_one: the operation that may have been meant instead.

    Binding. fixed: places where torch computes with a number differently than with a 0-d tensor.
    with_dimensions: places where it does not accept a 0-d tensor, and their names.
    """

    name: str
    torch: Callable[..., Any]
    cuda: Callable[..., str]
    takes: tuple[int, ...] = (1,)
    attrs: tuple[str, ...] = ()
    aliases: tuple[Any, ...] = ()
    reads: Callable[[int, int], Sequence[int]] = lambda place, count: range(count)
    slope: Slope | None = None
    saves_arguments: bool = False
    meaning: Callable[..., Expr] | None = None
    total: Callable[[Iterable[float]], float] | None = None
    is_symmetric: bool = False
    returns_input: bool = False
    sign: str = ""
    off_by_one: str = ""
    fixed: tuple[int, ...] = ()
    with_dimensions: tuple[tuple[int, str], ...] = ()


def pointwise(
    name: str,
    function: Callable[..., Any] | None = None,
    cuda: Callable[..., str] | None = None,
    **facts: Any,
) -> PointwiseOp:
    """By default torch's and CUDA's function of this name; attributes are literals in the text."""
    function = function or getattr(torch if hasattr(torch, name) else F, name)
    return PointwiseOp(name, function, cuda or _call(name), **facts)


def is_sum_or_product(op: str) -> bool:
    return op in OPS and OPS[op].total is not None


# ---- CUDA text ------------------------------------------------------------------------------


def _call(name: str) -> Callable[..., str]:
    return lambda *args, **attrs: _called(name, *args, *map(_literal, attrs.values()))


def _called(name: str, *args: str) -> str:
    return f"math::{name}({', '.join(args)})"


def _div_text(x: str, y: str) -> str:
    """As ATen: a division by a host number is a multiplication by its reciprocal."""
    return f"math::{'div_by_number' if y.startswith('scalar[') else 'div'}({x}, {y})"


def _clamp_text(x: str, low: str | None, high: str | None) -> str:
    if low is not None:
        x = f"math::maximum({x}, {low})"
    return x if high is None else f"math::minimum({x}, {high})"


def _literal(value: float) -> str:
    """A number as a C++ literal; C++ has none for inf and nan."""
    if math.isfinite(value):
        return f"Acc({value!r})"
    return "Acc(NAN)" if math.isnan(value) else f"Acc({'-' if value < 0 else ''}INFINITY)"


# ---- in torch -------------------------------------------------------------------------------


def _add(x: Any, y: Any, alpha: Any = None) -> Any:
    return x + y if alpha is None else torch.add(x, y, alpha=alpha)


def _sub(x: Any, y: Any, alpha: Any = None) -> Any:
    if alpha is None:
        return x - y
    if isinstance(x, torch.Tensor):
        return torch.sub(x, y, alpha=alpha)
    return torch.rsub(y, x, alpha=alpha)


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return torch.rsub(x, y, alpha=alpha)


# ---- derivatives ----------------------------------------------------------------------------


def _none(place: int, count: int) -> Sequence[int]:
    return ()


def _factor_of(scaled: int) -> Callable[[int, int], Sequence[int]]:
    """x ± factor · y: the derivative by y, the argument at place `scaled`, reads the factor."""
    return lambda place, count: (2,) if place == scaled and count == 3 else ()


def _others(place: int, count: int) -> Sequence[int]:
    return [i for i in range(count) if i != place]


def _slope_of_sum(scaled: int, is_negative: bool) -> Slope:
    """The slope of x ± factor · y, where y is the argument at place `scaled`."""

    def slope(emit: Emit, dy: str, place: int, args: Args, attrs: Attrs) -> str:
        if place != scaled:
            return dy
        if len(args) == 3:
            dy = emit("mul", dy, args[2])
        return emit("neg", dy) if is_negative else dy

    return slope


def _slope_of_addcmul(emit: Emit, dy: str, place: int, args: Args, attrs: Attrs) -> str:
    if place == 0:
        return dy
    other = args[3 - place]
    return emit("mul", dy, emit("mul", other, args[3]) if len(args) == 4 else other)


# ---- meanings -------------------------------------------------------------------------------


def _scaled(x: Any, factor: Any) -> Any:
    """x · factor; numbers are multiplied here, and a factor of one needs no multiplication."""
    if is_number(x) and is_number(factor):
        return x * factor
    return x if is_number(factor) and factor == 1 else Expr("mul", (x, factor))


def _divided(x: Any, divisor: Any) -> Expr:
    if not is_number(divisor) or is_number(x):
        return Expr("div", (x, divisor))
    reciprocal = 1.0 / divisor if divisor else math.copysign(math.inf, divisor)
    return Expr("mul", (x, reciprocal))


# ---- the operations -------------------------------------------------------------------------

_ENTRIES = (
    # A call that returns its input, such as dropout in eval mode.
    pointwise("identity", lambda x: x, lambda x: x, reads=_none, returns_input=True,
              slope=lambda emit, dy, *_: dy),
    pointwise("add", _add, takes=(2, 3), reads=_factor_of(1), slope=_slope_of_sum(1, False),
              meaning=lambda x, y, alpha=1: Expr("add", (x, _scaled(y, alpha))),
              total=sum, sign=" + ", off_by_one="mul"),
    pointwise("sub", _sub, takes=(2, 3), reads=_factor_of(1), slope=_slope_of_sum(1, True),
              meaning=lambda x, y, alpha=1: Expr("add", (x, _scaled(_scaled(y, -1), alpha)))),
    # Not sub the other way around: gradients would add up in another order.
    pointwise("rsub", _rsub, lambda x, y, *alpha: _called("sub", y, x, *alpha),
              takes=(2, 3), reads=_factor_of(0), slope=_slope_of_sum(0, True),
              meaning=lambda x, y, alpha=1: Expr("add", (y, _scaled(_scaled(x, -1), alpha)))),
    pointwise("mul", operator.mul, takes=(2,), reads=_others, saves_arguments=True,
              slope=lambda emit, dy, place, args, _: emit("mul", dy, args[1 - place]),
              total=math.prod, sign=" * ", off_by_one="add"),
    pointwise("div", operator.truediv, _div_text, takes=(2,), fixed=(0,), saves_arguments=True,
              reads=lambda place, count: (0, 1) if place else (1,),
              slope=lambda emit, dy, place, args, _: None if place else emit("div", dy, args[1]),
              meaning=_divided, sign=" / ", off_by_one="mul"),
    # A number over a tensor: torch multiplies it by the tensor's reciprocal.
    pointwise("rdiv", lambda y, number: number / y,
              lambda y, number: f"math::mul(math::div(Acc(1), {y}), {number})",
              takes=(2,), meaning=lambda x, number: Expr("div", (number, x))),
    pointwise("neg", operator.neg, aliases=(operator.neg, torch.negative, "negative"), reads=_none,
              slope=lambda emit, dy, *_: emit("neg", dy), meaning=lambda x: Expr("mul", (x, -1))),
    pointwise("addcmul", lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value),
              lambda x, a, b, value="Acc(1)": f"math::addcmul({x}, {a}, {b}, {value})",
              takes=(3, 4), saves_arguments=True, slope=_slope_of_addcmul,
              reads=lambda place, count: [i for i in range(1, count) if place and i != place],
              meaning=lambda x, a, b, by=1: Expr("add", (x, _scaled(Expr("mul", (a, b)), by)))),
    pointwise("addcdiv", lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value),
              lambda x, a, b, value="Acc(1)": f"math::addcdiv({x}, {a}, {b}, {value})",
              takes=(3, 4), saves_arguments=True,
              reads=lambda place, count: ((), range(2, count), range(1, count))[place]),
    # Its backward takes 1 - weight in the weight's own dtype.
    pointwise("lerp", takes=(3,), fixed=(2,), with_dimensions=((2, "weight"),),
              reads=lambda place, count: (0, 1) if place == 2 else (2,)),
    pointwise("sigmoid", aliases=(torch.special.expit,)),
    pointwise("silu", meaning=lambda x: Expr("mul", (x, Expr("sigmoid", (x,))))),
    *map(pointwise, ("tanh", "relu", "exp", "exp2", "expm1", "log", "log1p", "log2")),
    *map(pointwise, ("sqrt", "rsqrt")),
    pointwise("abs", aliases=(operator.abs, abs, torch.absolute, "absolute")),
    *map(pointwise, ("erf", "erfc", "sin", "cos", "reciprocal")),
    *map(pointwise, ("hardswish", "hardsigmoid", "mish", "logsigmoid")),
    pointwise("sign", reads=_none),
    pointwise("leaky_relu", attrs=("negative_slope",)),
    pointwise("elu", torch.ops.aten.elu, attrs=("alpha", "scale", "input_scale")),
    pointwise("threshold", attrs=("threshold", "value")),
    pointwise("hardshrink", attrs=("lambd",)),
    pointwise("softshrink", attrs=("lambd",)),
    pointwise("softplus", attrs=("beta", "threshold")),
    pointwise("minimum", takes=(2,), is_symmetric=True),
    pointwise("maximum", takes=(2,), is_symmetric=True),
    pointwise("clamp", cuda=_clamp_text, takes=(3,), fixed=(1, 2)),
    pointwise("hardtanh", F.hardtanh, _clamp_text, takes=(3,),
              meaning=lambda x, low, high: Expr("clamp", (x, low, high))),
    pointwise("where", lambda c, x, y: torch.where(c != 0, x, y), takes=(3,),
              reads=lambda place, count: (0,)),
    pointwise("cast", lambda x, dtype: x.to(dtype).to(x.dtype),
              lambda x, dtype: f"math::round_to<{CUDA_TYPES[dtype]}>({x})",
              attrs=("dtype",), reads=_none, returns_input=True,
              slope=lambda emit, dy, place, args, attrs: emit("cast", dy, attrs=attrs)),
    pointwise("pow", attrs=("exponent",),
              cuda=lambda x, exponent: _called("pow", x, _literal(exponent))),
    pointwise("gelu", attrs=("approximate",), cuda=lambda x, approximate: _called(
              "gelu_tanh" if approximate == "tanh" else "gelu", x)),
)  # fmt: skip
OPS = {op.name: op for op in _ENTRIES}
# An anchor's own z may also have an fma: torch's BatchNorm is one kernel, which nvcc contracts.
_FMA = pointwise("fma", lambda x, a, b: x * a + b)
ALL_OPS: Mapping[str, PointwiseOp] = collections.ChainMap(OPS, {_FMA.name: _FMA})
