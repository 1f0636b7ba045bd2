"""How a call of an activation or an elementary function becomes an expression: `FUNCTIONS`.

For `fx_fuser.graph.read.canonical`, whose table they are part of. A function that has the name of
an operation and no more arguments needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fx_fuser.graph.read.expr import Expr, Unsupported, is_number
from fx_fuser.graph.read.operations import OPS, PointwiseOp

Rule = tuple[Callable[..., Expr], list[Any]]


def unary(op: str) -> Callable[..., Expr]:
    def rule(input: Any, inplace: Any = False) -> Expr:
        return Expr(op, (input,))

    return rule


def numbers(**named: Any) -> tuple[tuple[str, float], ...]:
    """Attributes that must be constants; as floats, which is how an epilogue's text is parsed."""
    if not all(map(is_number, named.values())):
        raise Unsupported
    return tuple((name, float(value)) for name, value in named.items())


def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: Any = False) -> Expr:
    if not is_number(min_val) or not is_number(max_val) or min_val != min_val or max_val != max_val:
        raise Unsupported
    return Expr("hardtanh", (input, min_val, max_val))


def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: Any = False) -> Expr:
    return Expr("leaky_relu", (input,), numbers(negative_slope=negative_slope))


def _rrelu(
    input: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: Any = False,
    inplace: Any = False,
) -> Expr:
    """In eval mode; in training mode the slope is random."""
    if training is not False or not is_number(lower) or not is_number(upper):
        raise Unsupported
    return _leaky_relu(input, (lower + upper) / 2)


def _elu(input: Any, alpha: Any = 1.0, inplace: Any = False) -> Expr:
    return _aten_elu(input, alpha)


def _aten_elu(input: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Expr:
    return Expr("elu", (input,), numbers(alpha=alpha, scale=scale, input_scale=input_scale))


def _selu(input: Any, inplace: Any = False) -> Expr:
    """ATen computes it by elu with these constants."""
    return _aten_elu(input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _celu(input: Any, alpha: Any = 1.0, inplace: Any = False) -> Expr:
    """ATen computes it by elu with these constants."""
    if not is_number(alpha) or not alpha:
        raise Unsupported
    return _aten_elu(input, alpha, 1.0, 1.0 / alpha)


def _threshold(input: Any, threshold: Any, value: Any, inplace: Any = False) -> Expr:
    return Expr("threshold", (input,), numbers(threshold=threshold, value=value))


def _shrink(op: str) -> Callable[..., Expr]:
    def rule(input: Any, lambd: Any = 0.5) -> Expr:
        return Expr(op, (input,), numbers(lambd=lambd))

    return rule


def _softsign(input: Any) -> Expr:
    """As torch writes it in Python; tanhshrink too."""
    return Expr("div", (input, Expr("add", (Expr("abs", (input,)), 1))))


def _tanhshrink(input: Any) -> Expr:
    return Expr("sub", (input, Expr("tanh", (input,))))


def _gelu(input: Any, approximate: Any = "none") -> Expr:
    if approximate not in ("none", "tanh"):
        raise Unsupported
    return Expr("gelu", (input,), (("approximate", approximate),))


def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Expr:
    return Expr("softplus", (input,), numbers(beta=beta, threshold=threshold))


def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Expr:
    """Where nothing is dropped, torch returns the input itself."""
    if training is not False and not (is_number(p) and p == 0):
        raise Unsupported
    return Expr("identity", (input,))


def _alpha_dropout(input: Any, p: Any = 0.5, training: Any = False, inplace: Any = False) -> Expr:
    return _dropout(input, p, training)


def _torch_dropout(input: Any, p: Any, train: Any) -> Expr:
    return _dropout(input, p, train)


def _callers(op: PointwiseOp) -> list[Any]:
    """What is called by the operation's name: torch's functions, in place too, and a method."""
    modules = (torch, F, torch.special, torch._C._nn)
    found = [getattr(m, name, None) for m in modules for name in (op.name, f"{op.name}_")]
    method = op.name if hasattr(torch.Tensor, op.name) else None
    return [c for c in dict.fromkeys((*found, method, *op.aliases)) if c is not None]


def rules_by_name() -> list[Rule]:
    """Rules of the operations that have one argument and no attributes."""
    ops = (op for op in OPS.values() if op.takes == (1,) and not op.attrs)
    return [(unary(op.name), _callers(op)) for op in ops]


# Method names are strings and stand for their in-place twins too.
_ACTIVATIONS: list[Rule] = [
    *rules_by_name(),
    (lambda input, inplace=False: _hardtanh(input, 0.0, 6.0), [F.relu6]),
    (_hardtanh, [F.hardtanh, F.hardtanh_]),
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
    (_gelu, [F.gelu]),
    (_softplus, [F.softplus]),
]
FUNCTIONS: list[Rule] = [
    *_ACTIVATIONS,
    (_dropout, [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d]),
    (_alpha_dropout, [F.alpha_dropout, F.feature_alpha_dropout]),
    (_torch_dropout, [torch.dropout, torch.dropout_, torch.feature_dropout]),
    (_torch_dropout, [torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_]),
    (_torch_dropout, [torch.feature_alpha_dropout, torch.feature_alpha_dropout_]),
]
# Their names, without the underscore of an in-place one.
ACTIVATIONS = frozenset(
    str(getattr(caller, "__name__", caller)).rstrip("_")
    for _, callers in _ACTIVATIONS
    for caller in callers
)
