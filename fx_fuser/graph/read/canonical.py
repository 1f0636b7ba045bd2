"""Node → canonical expression. The graph is read, never edited.

Dynamo records what the user typed: `operator.mul`, `torch.multiply`, `Tensor.mul_`,
`F.silu(inplace=True)`, `x @ w.t() + b`. A node has two readings, each an `Expr` whose leaves are
nodes and numbers:

`View.written`  what is computed: the user's own op under one name. `F.silu(z)` is `silu(z)`,
                `torch.sub(x, y)` is `sub(x, y)`. `graph.match.bind` makes epilogues of these.
`View.canonical`    what it means as sums and products, for matching alone: `silu(z)` is
                `mul(z, sigmoid(z))`, `sub(x, y)` is `add(x, mul(y, -1))`. Nothing is computed from
                it: floating point has no such algebra.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.read import aten, einsum
from fx_fuser.graph.read.expr import Arg, Expr, Operand, Unsupported, is_number
from fx_fuser.graph.read.functions import FUNCTIONS, numbers, unary
from fx_fuser.graph.read.nodes import in_place_name, meta_tensor
from fx_fuser.graph.read.operations import OPS

__all__ = ["Arg", "Expr", "Operand", "Unsupported", "is_number", "meaning", "rule_of"]

# ---- rules: how a call becomes an expression ------------------------------------------------


def _div(input: Any, other: Any, rounding_mode: Any = None) -> Expr:
    if rounding_mode is not None:
        raise Unsupported
    # Tensor.__rtruediv__ multiplies a number by the reciprocal.
    return Expr("rdiv", (other, input)) if is_number(input) else Expr("div", (input, other))


def _aten_div(input: Any, other: Any, rounding_mode: Any = None) -> Expr:
    if is_number(input):
        raise Unsupported  # it divides, unlike Tensor.__rtruediv__
    return _div(input, other, rounding_mode)


def _clamp(input: Any, min: Any = None, max: Any = None) -> Expr:
    if any(bound != bound for bound in (min, max)):
        raise Unsupported  # NaN: with one bound torch ignores it on CUDA, with two it does not
    return Expr("clamp", (input, min, max))


def _cast(x: Any, dtype: Any) -> Expr:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise Unsupported
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
        raise Unsupported
    if isinstance(target, (str, torch.device)):
        device, dtype = target, second if dtype is None else dtype
    elif third or isinstance(second, (str, torch.device, torch.dtype)):
        raise Unsupported  # to(dtype, non_blocking, copy)
    elif isinstance(target, torch.dtype):
        dtype = target
    elif target is not None:
        other = target
    if other is not None:
        return _type_as(input, other)
    if device is not None:
        tensor = meta_tensor(input)
        if tensor is None or torch.device(device) != tensor.device:
            raise Unsupported
    return Expr("identity", (input,)) if dtype is None else _cast(input, dtype)


def _aten_to(input: Any, layout: Any = None, pin_memory: Any = None, **named: Any) -> Expr:
    if layout not in (None, torch.strided) or pin_memory:
        raise Unsupported
    return _to(input, **named)


def _type_as(input: Any, other: Any) -> Expr:
    if not isinstance(other, Node):
        raise Unsupported
    x, like = meta_tensor(input), meta_tensor(other)
    if x is None or like is None or x.device != like.device:
        raise Unsupported
    return _cast(input, like.dtype)


def _contiguous(input: Any, memory_format: Any = torch.contiguous_format) -> Expr:
    """Only for a tensor that is contiguous at any size: then it returns its input."""
    tensor = meta_tensor(input) if memory_format == torch.contiguous_format else None
    if tensor is None or tensor.layout != torch.strided or tensor.is_nested:
        raise Unsupported
    rows = torch.empty(tensor.shape, device="meta").stride()
    for size, a, b in zip(tensor.shape, tensor.stride(), rows):
        if not statically_known_true(size == 1) and not statically_known_true(a == b):
            raise Unsupported
    return Expr("identity", (input,))


def _linear(input: Any, weight: Any, bias: Any = None) -> Expr:
    return Expr("linear", (input, weight, bias))


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Expr:
    if beta != 1 or alpha != 1:
        raise Unsupported
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
        raise Unsupported
    left, right = map(meta_tensor, flat)  # None in a pattern's trace
    known = left is not None and right is not None
    found = einsum.classify(equation, *((left.ndim, right.ndim) if known else ()))  # type: ignore[union-attr]
    if found is None or found.op not in ("matmul", "linear"):
        raise Unsupported
    if known:
        i, j = found.contracted
        if not statically_known_true(left.shape[i] == right.shape[j]):  # type: ignore[union-attr]
            raise Unsupported  # einsum broadcasts a size of 1
    return Expr(found.op, (*flat, None) if found.op == "linear" else tuple(flat))


def _transpose(input: Any, dim0: Any, dim1: Any) -> Expr:
    if {dim0, dim1} not in ({0, 1}, {-1, -2}, {0, -1}, {-2, 1}):
        raise Unsupported
    return Expr("t", (input,))


def _permute(input: Any, *dims: Any) -> Expr:
    flat = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if flat not in ((1, 0), (-1, 0), (-1, -2), (1, -2)):
        raise Unsupported
    return Expr("t", (input,))


def _getattr(input: Any, name: Any) -> Expr:
    if name not in ("T", "mT"):
        raise Unsupported
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


def _binary(op: str) -> Callable[..., Expr]:
    def rule(input: Any, other: Any) -> Expr:
        return Expr(op, (input, other))

    return rule


def _extreme(op: str) -> Callable[..., Expr]:
    """torch.min and max of two tensors; with a dimension they reduce."""

    def rule(input: Any, other: Any) -> Expr:
        if not isinstance(other, Node) or isinstance(other.meta.get("example_value"), torch.SymInt):
            raise Unsupported
        return Expr(op, (input, other))

    return rule


def _scaled_by(op: str, x: Any, y: Any, factor: Any) -> Expr:
    """x ± factor · y, without the factor where it is one."""
    return Expr(op, (x, y, *_scale(factor)))


def _scale(factor: Any) -> tuple[float, ...]:
    if not is_number(factor):  # torch does not accept a tensor there
        raise Unsupported
    return () if factor == 1 else (factor,)


def _add(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("add", input, other, alpha)


def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("sub", input, other, alpha)


def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("rsub", input, other, alpha)


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Expr:
    return Expr("addcmul", (input, tensor1, tensor2, *_scale(value)))


def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Expr:
    return Expr("addcdiv", (input, tensor1, tensor2, *_scale(value)))


def _lerp(input: Any, end: Any, weight: Any) -> Expr:
    return Expr("lerp", (input, end, weight))


def _masked_fill(input: Any, mask: Any, value: Any) -> Expr:
    if not is_number(value):  # a tensor's value is cast to the input's dtype
        raise Unsupported
    return Expr("where", (mask, value, input))


def _pow(input: Any, exponent: Any) -> Expr:
    return Expr("pow", (input,), numbers(exponent=exponent))


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
    (_addcmul, [torch.addcmul, "addcmul"]),
    (_clamp, [torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clip"]),
    (lambda input, min: _clamp(input, min), [torch.clamp_min, torch.clamp_min_, "clamp_min"]),
    (
        lambda input, max: _clamp(input, None, max),
        [torch.clamp_max, torch.clamp_max_, "clamp_max"],
    ),
    (_addcdiv, [torch.addcdiv, "addcdiv"]),
    (_lerp, [torch.lerp, "lerp"]),
    (_masked_fill, [torch.masked_fill, "masked_fill"]),
    (_pow, [operator.pow, operator.ipow, torch.pow, "pow"]),
    (lambda input: _pow(input, 2), [torch.square, torch.square_, "square"]),
    (_binary("minimum"), [torch.minimum, "minimum"]),
    (_extreme("minimum"), [torch.min, "min"]),
    (_extreme("maximum"), [torch.max, "max"]),
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
    (lambda input, mat2: Expr("bmm", (input, mat2)), [torch.bmm, "bmm"]),
    (_addmm, [torch.addmm, "addmm"]),
    (_einsum, [torch.einsum]),
    (unary("t"), [torch.t, "t"]),
    (_transpose, [torch.transpose, torch.swapdims, "transpose", "swapdims"]),
    (lambda input, axis0, axis1: _transpose(input, axis0, axis1), [torch.swapaxes, "swapaxes"]),
    (_permute, [torch.permute, "permute"]),
    (_getattr, [getattr]),
    (unary("t"), [torch.ops.aten.numpy_T, torch.ops.aten.mT]),  # x.T and x.mT, since torch 2.15
    (_conv2d, [torch.conv2d]),
    (_batch_norm, [F.batch_norm]),
    (_torch_batch_norm, [torch.batch_norm]),
    (_aten_div, [torch.ops.aten.div, torch.ops.aten.divide, torch.ops.aten.true_divide]),
    (_aten_to, [torch.ops.aten.to, torch.ops.aten._to_copy]),
    *aten.RULES,
    *FUNCTIONS,
]
_RULE_OF: dict[Any, Callable[..., Expr]] = {t: rule for rule, ts in _RULES for t in ts}


@functools.cache
def _rule_of_overload(overload: torch._ops.OpOverload) -> Callable[..., Expr] | None:
    rule = aten.lookup(overload, _RULE_OF)
    return None if rule is None else aten.by_name(rule, overload)


def meaning(written: Expr) -> Expr:
    """The op as sums and products of others, if it has such a meaning; else the op itself."""
    op = OPS.get(written.op)
    return written if op is None or op.meaning is None else op.meaning(*written.args)


def rule_of(node: Node) -> Callable[..., Expr] | None:
    """The function from the node's arguments to its expression; None without a canonical name."""
    if node.op == "call_method":
        name = str(node.target)
        if name.endswith("__"):  # `z.__abs__()`; up to torch 2.11 `abs(z)`, too
            return _RULE_OF.get(getattr(operator, name, name))
        return _RULE_OF.get(name[:-1] if in_place_name(name) else name)
    if isinstance(node.target, torch._ops.OpOverload):
        return _rule_of_overload(node.target)
    return _RULE_OF.get(node.target) if node.op == "call_function" else None
