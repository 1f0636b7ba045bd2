"""What does this node say?  Node → canonical expression; the graph is read, never edited.

Dynamo records what the user typed: `operator.mul`, `torch.multiply`, `Tensor.mul_`,
`F.silu(inplace=True)`, `x @ w.t() + b`. There are two readings, each an `Expr` whose leaves are
nodes and numbers:

`View.written`  what is computed: the user's own op under one name. `F.silu(z)` is `silu(z)`,
                `torch.sub(x, y)` is `sub(x, y)`. `fx_fuser.bind` makes epilogues of these.
`View.spell`    what it means as sums and products, for matching alone: `silu(z)` is
                `mul(z, sigmoid(z))`, `sub(x, y)` is `add(x, mul(y, -1))`. Nothing is computed from
                it: floating point has no such algebra.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser import einsum
from fx_fuser.nodes import in_place_name, meta_tensor

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


class Unspellable(Exception):
    """The call has a form that has no canonical spelling; the node stays opaque."""


def is_number(value: object) -> bool:
    """A constant of the graph that is a float; SymInt and SymFloat change from call to call, and
    integers beyond 2^53 are no floats."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)


# ---- rules: how a call becomes an expression ------------------------------------------------


def _div(input: Any, other: Any, rounding_mode: Any = None) -> Expr:
    if rounding_mode is not None:
        raise Unspellable
    # Tensor.__rtruediv__ multiplies a number by the reciprocal.
    return Expr("rdiv", (other, input)) if is_number(input) else Expr("div", (input, other))


def _clamp(input: Any, min: Any = None, max: Any = None) -> Expr:
    if any(bound != bound for bound in (min, max)):
        raise Unspellable  # NaN: with one bound torch ignores it on CUDA, with two it does not
    return Expr("clamp", (input, min, max))


def _cast(x: Any, dtype: Any) -> Expr:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise Unspellable
    return Expr("cast", (x,), (("dtype", dtype),))


def _to(
    input: Any,
    target: Any = None,
    second: Any = None,
    third: Any = False,
    fourth: Any = False,
    *,
    dtype: Any = None,
    device: Any = None,
    other: Any = None,
    non_blocking: Any = False,
    copy: Any = False,
    memory_format: Any = None,
) -> Expr:
    """`to(dtype)`, `to(device, dtype)` and `to(other)` of a tensor that is on that device."""
    if copy or fourth or memory_format is not None:
        raise Unspellable
    if isinstance(target, (str, torch.device)):
        device, dtype = target, second if dtype is None else dtype
    elif third or isinstance(second, (str, torch.device, torch.dtype)):
        raise Unspellable  # to(dtype, non_blocking, copy)
    elif isinstance(target, torch.dtype):
        dtype = target
    elif target is not None:
        other = target
    if isinstance(other, Node):
        return _type_as(input, other)
    if device is not None:
        tensor = meta_tensor(input)
        if tensor is None or torch.device(device) != tensor.device:
            raise Unspellable
    return Expr("identity", (input,)) if dtype is None else _cast(input, dtype)


def _type_as(input: Any, other: Any) -> Expr:
    x, like = meta_tensor(input), meta_tensor(other)
    if x is None or like is None or x.device != like.device:
        raise Unspellable
    return _cast(input, like.dtype)


def _contiguous(input: Any, memory_format: Any = torch.contiguous_format) -> Expr:
    """Of what is contiguous, whatever its sizes are."""
    tensor = meta_tensor(input) if memory_format == torch.contiguous_format else None
    if tensor is None:
        raise Unspellable
    rows = torch.empty(tensor.shape, device="meta").stride()
    for size, a, b in zip(tensor.shape, tensor.stride(), rows):
        if not statically_known_true(size == 1) and not statically_known_true(a == b):
            raise Unspellable
    return Expr("identity", (input,))


def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Expr:
    """Where nothing is dropped, torch returns the input itself."""
    if training is not False and not (is_number(p) and p == 0):
        raise Unspellable
    return Expr("identity", (input,))


def _alpha_dropout(input: Any, p: Any = 0.5, training: Any = False, inplace: Any = False) -> Expr:
    return _dropout(input, p, training)


def _torch_dropout(input: Any, p: Any, train: Any) -> Expr:
    return _dropout(input, p, train)


def _linear(input: Any, weight: Any, bias: Any = None) -> Expr:
    return Expr("linear", (input, weight, bias))


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Expr:
    if beta != 1 or alpha != 1:
        raise Unspellable
    return Expr("add", (Expr("matmul", (mat1, mat2)), input))


def _einsum(equation: Any, *operands: Any) -> Expr:
    flat = (
        operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    )
    if (
        not isinstance(equation, str)
        or len(flat) != 2
        or not all(isinstance(o, Node) for o in flat)
    ):
        raise Unspellable
    left, right = map(meta_tensor, flat)  # None in a pattern's trace
    known = left is not None and right is not None
    found = einsum.classify(equation, *((left.ndim, right.ndim) if known else ()))  # type: ignore[union-attr]
    if found is None or found.op not in ("matmul", "linear"):
        raise Unspellable
    if known:
        i, j = found.contracted
        if not statically_known_true(left.shape[i] == right.shape[j]):  # type: ignore[union-attr]
            raise Unspellable  # a size of 1 is spread over the other
    return Expr(found.op, (*flat, None) if found.op == "linear" else tuple(flat))


def _transpose(input: Any, dim0: Any, dim1: Any) -> Expr:
    if {dim0, dim1} not in ({0, 1}, {-1, -2}, {0, -1}, {-2, 1}):
        raise Unspellable
    return Expr("t", (input,))


def _permute(input: Any, *dims: Any) -> Expr:
    flat = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if flat not in ((1, 0), (-1, 0), (-1, -2), (1, -2)):
        raise Unspellable
    return Expr("t", (input,))


def _getattr(input: Any, name: Any) -> Expr:
    if name not in ("T", "mT"):
        raise Unspellable
    return Expr("t", (input,))


def _conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Expr:
    attrs = ("stride", stride), ("padding", padding), ("dilation", dilation), ("groups", groups)
    return Expr("conv2d", (input, weight, bias), attrs)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Expr:
    attrs = ("training", training), ("momentum", momentum), ("eps", eps)
    return Expr("batch_norm", (input, running_mean, running_var, weight, bias), attrs)


def _torch_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    cudnn_enabled: Any = True,
) -> Expr:
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _unary(op: str) -> Callable[..., Expr]:
    def rule(input: Any, inplace: Any = False) -> Expr:
        return Expr(op, (input,))

    return rule


def _binary(op: str) -> Callable[..., Expr]:
    def rule(input: Any, other: Any) -> Expr:
        return Expr(op, (input, other))

    return rule


def _scaled_by(op: str, x: Any, y: Any, factor: Any) -> Expr:
    """x ± factor · y, where the factor is not one."""
    return Expr(op, (x, y, *_scale(factor)))


def _scale(factor: Any) -> tuple[float, ...]:
    if not is_number(factor):  # torch takes no tensor there
        raise Unspellable
    return () if factor == 1 else (factor,)


def _numbers(**named: Any) -> tuple[tuple[str, float], ...]:
    """Attributes that must be constants; floats, as an epilogue's text is read."""
    if not all(map(is_number, named.values())):
        raise Unspellable
    return tuple((name, float(value)) for name, value in named.items())


def _add(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("add", input, other, alpha)


def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("sub", input, other, alpha)


def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("rsub", input, other, alpha)


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Expr:
    return Expr("addcmul", (input, tensor1, tensor2, *_scale(value)))


def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: Any = False) -> Expr:
    if not is_number(min_val) or not is_number(max_val) or min_val != min_val or max_val != max_val:
        raise Unspellable
    return Expr("hardtanh", (input, min_val, max_val))


def _gelu(input: Any, approximate: Any = "none") -> Expr:
    if approximate not in ("none", "tanh"):
        raise Unspellable
    return Expr("gelu", (input,), (("approximate", approximate),))


def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Expr:
    return Expr("softplus", (input,), _numbers(beta=beta, threshold=threshold))


def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: Any = False) -> Expr:
    return Expr("leaky_relu", (input,), _numbers(negative_slope=negative_slope))


def _rrelu(
    input: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: Any = False,
    inplace: Any = False,
) -> Expr:
    """In eval mode; in training mode the slope is random."""
    if training is not False or not is_number(lower) or not is_number(upper):
        raise Unspellable
    return _leaky_relu(input, (lower + upper) / 2)


def _elu(input: Any, alpha: Any = 1.0, inplace: Any = False) -> Expr:
    return _aten_elu(input, alpha)


def _aten_elu(input: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Expr:
    return Expr("elu", (input,), _numbers(alpha=alpha, scale=scale, input_scale=input_scale))


def _selu(input: Any, inplace: Any = False) -> Expr:
    """As ATen calls elu."""
    return _aten_elu(input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _celu(input: Any, alpha: Any = 1.0, inplace: Any = False) -> Expr:
    """As ATen calls elu."""
    if not is_number(alpha) or not alpha:
        raise Unspellable
    return _aten_elu(input, alpha, 1.0, 1.0 / alpha)


def _threshold(input: Any, threshold: Any, value: Any, inplace: Any = False) -> Expr:
    return Expr("threshold", (input,), _numbers(threshold=threshold, value=value))


def _shrink(op: str) -> Callable[..., Expr]:
    def rule(input: Any, lambd: Any = 0.5) -> Expr:
        return Expr(op, (input,), _numbers(lambd=lambd))

    return rule


def _softsign(input: Any) -> Expr:
    """As torch writes it in Python; tanhshrink too."""
    return Expr("div", (input, Expr("add", (Expr("abs", (input,)), 1))))


def _tanhshrink(input: Any) -> Expr:
    return Expr("sub", (input, Expr("tanh", (input,))))


def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Expr:
    return Expr("addcdiv", (input, tensor1, tensor2, *_scale(value)))


def _lerp(input: Any, end: Any, weight: Any) -> Expr:
    return Expr("lerp", (input, end, weight))


def _masked_fill(input: Any, mask: Any, value: Any) -> Expr:
    if not is_number(value):  # a tensor's value is cast to the input's dtype
        raise Unspellable
    return Expr("where", (mask, value, input))


def _pow(input: Any, exponent: Any) -> Expr:
    return Expr("pow", (input,), _numbers(exponent=exponent))


def _where(condition: Any, input: Any, other: Any) -> Expr:
    return Expr("where", (condition, input, other))


def _method_where(input: Any, condition: Any, other: Any) -> Expr:
    return Expr("where", (condition, input, other))


# Method names are strings and stand for their in-place twins too ("mul" also for `mul_`).
_RULES: list[tuple[Callable[..., Expr], list[Any]]] = [
    (_binary("mul"), [operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply"]),
    (_add, [operator.add, operator.iadd, torch.add, "add"]),
    (_sub, [operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "subtract"]),
    (_rsub, [torch.rsub]),
    (_div, [operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide]),
    (_div, ["div", "divide", "true_divide"]),
    (_unary("neg"), [operator.neg, torch.neg, torch.negative, "neg", "negative"]),
    (_addcmul, [torch.addcmul, "addcmul"]),
    (_unary("sigmoid"), [torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid"]),
    (_unary("sigmoid"), [torch.sigmoid_]),
    (_unary("silu"), [F.silu, torch._C._nn.silu, torch._C._nn.silu_]),
    (_unary("tanh"), [torch.tanh, torch.tanh_, F.tanh, "tanh"]),
    (_unary("relu"), [torch.relu, torch.relu_, F.relu, F.relu_, "relu"]),
    (lambda input, inplace=False: _hardtanh(input, 0.0, 6.0), [F.relu6]),
    (_hardtanh, [F.hardtanh, F.hardtanh_]),
    (_clamp, [torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clip"]),
    (lambda input, min: _clamp(input, min), [torch.clamp_min, torch.clamp_min_, "clamp_min"]),
    (
        lambda input, max: _clamp(input, None, max),
        [torch.clamp_max, torch.clamp_max_, "clamp_max"],
    ),
    (_unary("exp"), [torch.exp, torch.exp_, "exp"]),
    (_unary("log"), [torch.log, torch.log_, "log"]),
    (_unary("sqrt"), [torch.sqrt, torch.sqrt_, "sqrt"]),
    (_unary("rsqrt"), [torch.rsqrt, torch.rsqrt_, "rsqrt"]),
    (_unary("abs"), [operator.abs, abs, torch.abs, torch.abs_, torch.absolute, "abs", "absolute"]),
    (_unary("erf"), [torch.erf, torch.erf_, torch.special.erf, "erf"]),
    (_unary("erfc"), [torch.erfc, torch.erfc_, torch.special.erfc, "erfc"]),
    (_unary("exp2"), [torch.exp2, torch.exp2_, torch.special.exp2, "exp2"]),
    (_unary("expm1"), [torch.expm1, torch.expm1_, torch.special.expm1, "expm1"]),
    (_unary("log1p"), [torch.log1p, torch.log1p_, torch.special.log1p, "log1p"]),
    (_unary("log2"), [torch.log2, torch.log2_, "log2"]),
    (_unary("sin"), [torch.sin, torch.sin_, "sin"]),
    (_unary("cos"), [torch.cos, torch.cos_, "cos"]),
    (_unary("sign"), [torch.sign, "sign"]),
    (_unary("reciprocal"), [torch.reciprocal, torch.reciprocal_, "reciprocal"]),
    (_unary("hardswish"), [F.hardswish, torch._C._nn.hardswish, torch._C._nn.hardswish_]),
    (_unary("hardsigmoid"), [F.hardsigmoid, torch._C._nn.hardsigmoid, torch._C._nn.hardsigmoid_]),
    (_unary("mish"), [F.mish, torch._C._nn.mish, torch._C._nn.mish_]),
    (_unary("logsigmoid"), [F.logsigmoid]),
    (_leaky_relu, [F.leaky_relu, F.leaky_relu_, torch._C._nn.leaky_relu]),
    (_rrelu, [F.rrelu, torch.rrelu, torch.rrelu_]),
    (_elu, [F.elu]),
    (_aten_elu, [torch._C._nn.elu, torch._C._nn.elu_]),
    (_selu, [F.selu, torch.selu, torch.selu_]),
    (_celu, [F.celu, torch.celu, torch.celu_]),
    (_threshold, [F.threshold, torch.threshold, torch.threshold_]),
    (_shrink("hardshrink"), [torch.hardshrink, "hardshrink"]),
    (_shrink("softshrink"), [F.softshrink]),
    (_softsign, [F.softsign]),
    (_tanhshrink, [F.tanhshrink]),
    (_addcdiv, [torch.addcdiv, "addcdiv"]),
    (_lerp, [torch.lerp, "lerp"]),
    (_masked_fill, [torch.masked_fill, "masked_fill"]),
    (_dropout, [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d]),
    (_alpha_dropout, [F.alpha_dropout, F.feature_alpha_dropout]),
    (_torch_dropout, [torch.dropout, torch.dropout_, torch.feature_dropout]),
    (_torch_dropout, [torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_]),
    (_torch_dropout, [torch.feature_alpha_dropout, torch.feature_alpha_dropout_]),
    (_gelu, [F.gelu]),
    (_softplus, [F.softplus]),
    (_pow, [operator.pow, operator.ipow, torch.pow, "pow"]),
    (lambda input: _pow(input, 2), [torch.square, torch.square_, "square"]),
    (_binary("minimum"), [torch.minimum, "minimum"]),
    (_binary("maximum"), [torch.maximum, "maximum"]),
    (_where, [torch.where]),
    (_method_where, ["where"]),
    (_to, ["to"]),
    (_cast, ["type"]),
    (_type_as, ["type_as"]),
    (_contiguous, ["contiguous"]),
    (lambda input: _cast(input, torch.float32), ["float"]),
    (lambda input: _cast(input, torch.float16), ["half"]),
    (lambda input: _cast(input, torch.bfloat16), ["bfloat16"]),
    (lambda input: _cast(input, torch.float64), ["double"]),
    (_linear, [F.linear]),
    (_binary("matmul"), [operator.matmul, torch.matmul, "matmul"]),
    (lambda input, mat2: Expr("matmul", (input, mat2)), [torch.mm, "mm"]),
    (_addmm, [torch.addmm, "addmm"]),
    (_einsum, [torch.einsum]),
    (_unary("t"), [torch.t, "t"]),
    (_transpose, [torch.transpose, torch.swapdims, "transpose", "swapdims"]),
    (lambda input, axis0, axis1: _transpose(input, axis0, axis1), [torch.swapaxes, "swapaxes"]),
    (_permute, [torch.permute, "permute"]),
    (_getattr, [getattr]),
    (_conv2d, [torch.conv2d]),
    (_batch_norm, [F.batch_norm]),
    (_torch_batch_norm, [torch.batch_norm]),
]
_RULE_OF: dict[Any, Callable[..., Expr]] = {t: rule for rule, ts in _RULES for t in ts}


# ---- meanings: an op as sums and products, for matching ---------------------------------------


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


_MEANINGS: dict[str, Callable[..., Expr]] = {
    "add": lambda x, y, alpha=1: Expr("add", (x, _scaled(y, alpha))),
    "sub": lambda x, y, alpha=1: Expr("add", (x, _scaled(_scaled(y, -1), alpha))),
    "rsub": lambda x, y, alpha=1: Expr("add", (y, _scaled(_scaled(x, -1), alpha))),
    "neg": lambda x: Expr("mul", (x, -1)),
    "div": _divided,
    "rdiv": lambda x, number: Expr("div", (number, x)),
    "addcmul": lambda x, a, b, value=1: Expr("add", (x, _scaled(Expr("mul", (a, b)), value))),
    "silu": lambda x: Expr("mul", (x, Expr("sigmoid", (x,)))),
    "hardtanh": lambda x, low, high: _clamp(x, low, high),
}


def meaning(written: Expr) -> Expr:
    """The op as sums and products of others, where it is one."""
    rule = _MEANINGS.get(written.op)
    return written if rule is None else rule(*written.args)


def rule_of(node: Node) -> Callable[..., Expr] | None:
    """What makes the node's expression from its arguments, or None if it has no canonical name."""
    if node.op == "call_method":
        name = str(node.target)
        return _RULE_OF.get(name[:-1] if in_place_name(name) else name)
    return _RULE_OF.get(node.target) if node.op == "call_function" else None
