"""Patterns for the value fuzz: beside the built-in ones, every op of `graph.read.operations.OPS`.

A wildcard's name says what may stand for it: `cond…` a tensor of booleans, `t…` a tensor, `low` and
`high` two numbers or two tensors; all others a number, a tensor or the anchor's own value.
"""


# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

import fx_fuser
from fx_fuser import registry
from fx_fuser.graph.match.pattern import Pattern

_FOUND: list[Callable[..., Any]] = []


def _pattern(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = f"value{function.__name__}"
    _FOUND.append(function)
    return function


def _linear(name: str, tail: Callable[..., Any]) -> None:
    """Of an epilogue over z and one other operand, after a Linear."""

    def source(x, weight, bias, a):
        return tail(F.linear(x, weight, bias), a)

    source.__name__ = f"_{name}"
    _pattern(source)


# Anchors alone.
@_pattern
def _of_linear(x, weight, bias):
    return F.linear(x, weight, bias)


@_pattern
def _of_matmul(x, weight):
    return x @ weight


# Quotients, differences, sums.
_linear("div", lambda z, a: z / a)
_linear("reciprocal", lambda z, a: a / z)
_linear("rsub", lambda z, a: a - z)


@_pattern
def _logistic(x, weight, a, b):
    return a / (torch.exp(-(x @ weight)) + b)


@_pattern
def _cancel(x, weight, bias, a, b):
    return F.conv2d(x, weight, bias) + a - b


@_pattern
def _addcmul(x, weight, bias, a, b):
    return F.linear(x, weight, bias) * a + b


@_pattern
def _addcmul_bn(x, weight, bias, running_mean, running_var, gamma, beta, a, b):
    z = F.batch_norm(F.conv2d(x, weight, bias), running_mean, running_var, gamma, beta)
    return z * a + b


@_pattern
def _twice(x, weight, bias, a, b, c):
    z = F.linear(x, weight, bias)
    return z * a + z * b + c


@_pattern
def _sums(x, weight, a, b, c):
    z = x @ weight
    return (z * a + b) * (z + c)


# Activations.
_linear("gelu", lambda z, a: F.gelu(z) + a)
_linear("mish", lambda z, a: z * torch.tanh(F.softplus(z)) + a)
_linear("erf", lambda z, a: (torch.erf(z * a) + 1) * z)
_linear("slope", lambda z, a: torch.sigmoid(z) * (1 - torch.sigmoid(z)) * a)
_linear("damped", lambda z, a: torch.exp(-torch.abs(z)) * a)
_linear("log", lambda z, a: torch.log(torch.abs(z) + a))
_linear("sqrt", lambda z, a: torch.sqrt(z * z + a))
_linear("silu", lambda z, a: F.silu(z) + a)


@_pattern
def _gelu_tanh(x, weight, bias, a):
    return F.gelu(F.conv2d(x, weight, bias), approximate="tanh") * a


@_pattern
def _tanh(x, weight, bias, a):
    return torch.tanh(F.conv2d(x, weight, bias)) * a


@_pattern
def _relu(x, weight, a):
    return torch.relu(x @ weight - a)


@_pattern
def _relu_bn(x, weight, bias, running_mean, running_var, gamma, beta, a):
    z = F.batch_norm(F.conv2d(x, weight, bias), running_mean, running_var, gamma, beta)
    return torch.relu(z + a)


@_pattern
def _silu_bn(x, weight, bias, running_mean, running_var, gamma, beta):
    return F.silu(F.batch_norm(F.conv2d(x, weight, bias), running_mean, running_var, gamma, beta))


@_pattern
def _exp(x, weight, a, b):
    return torch.exp(x @ weight - a) * b


@_pattern
def _rsqrt(x, weight, bias, a):
    z = F.conv2d(x, weight, bias)
    return torch.rsqrt(torch.abs(z) + a) * z


@_pattern
def _softplus(x, weight, a):
    return F.softplus(x @ weight) * a


@_pattern
def _softplus_sharp(x, weight, bias, a):
    return F.softplus(F.conv2d(x, weight, bias), 2.0, 5.0) + a


_linear("hardswish", lambda z, a: F.hardswish(z) + a)
_linear("hardsigmoid", lambda z, a: F.hardsigmoid(z) * a)
_linear("leaky_relu", lambda z, a: F.leaky_relu(z, 0.2) + a)
_linear("elu", lambda z, a: F.elu(z) + a)
_linear("selu", lambda z, a: F.selu(z) * a)
_linear("celu", lambda z, a: F.celu(z, 0.5) + a)
_linear("own_mish", lambda z, a: F.mish(z) + a)
_linear("logsigmoid", lambda z, a: F.logsigmoid(z) * a)
_linear("threshold", lambda z, a: F.threshold(z, 0.5, 20.0) + a)
# Of no NaN: for its gradient the vectors of torch's own CPU kernel differ from its scalars.
_linear("hardshrink", lambda z, a: F.hardshrink(torch.sign(z)) * a)
_linear("softshrink", lambda z, a: F.softshrink(torch.sign(z)) + a)
_linear("exp2", lambda z, a: torch.exp2(z) * a)
_linear("expm1", lambda z, a: torch.expm1(z) * a)
_linear("log1p", lambda z, a: torch.log1p(torch.abs(z)) * a)
_linear("log2", lambda z, a: torch.log2(torch.abs(z) + a))
_linear("sin", lambda z, a: torch.sin(z) + a)
_linear("cos", lambda z, a: torch.cos(z * a))
_linear("erfc", lambda z, a: torch.erfc(z) * a)
_linear("sign", lambda z, a: torch.sign(z) * a)
_linear("inverse", lambda z, a: torch.reciprocal(z) + a)
_linear("identity", lambda z, a: F.dropout(z, 0.1, False) * a)


@_pattern
def _lerp(x, weight, bias, t, a):
    return torch.lerp(F.linear(x, weight, bias), t, 0.3) + a


@_pattern
def _lerp_by(x, weight, t):
    z = x @ weight
    return torch.lerp(t, z, torch.sigmoid(z))


@_pattern
def _addcdiv(x, weight, bias, t, t2):
    return torch.addcdiv(F.linear(x, weight, bias), t, t2)


# Limits and choices.
_linear("relu6", lambda z, a: torch.clamp(z + a, 0, 6))


@_pattern
def _clamp(x, weight, bias, a, low, high):
    return torch.clamp(F.conv2d(x, weight, bias), low, high) * a


@_pattern
def _clamp_low(x, weight, bias, low):
    return torch.clamp(F.linear(x, weight, bias), low)


@_pattern
def _clamp_high(x, weight, high):
    return torch.clamp(x @ weight, max=high)


@_pattern
def _extremes(x, weight, t, t2, a):
    return torch.minimum(torch.maximum(x @ weight, t), t2) * a


@_pattern
def _where(x, weight, bias, cond, a, t):
    return torch.where(cond, F.linear(x, weight, bias) * a, t)


@_pattern
def _where_conv(x, weight, bias, cond, t):
    return torch.where(cond, t, torch.tanh(F.conv2d(x, weight, bias)))


# Powers and casts.
def _power(e: float) -> Callable[..., Any]:
    return lambda z, a: z**e + a


for _i, _e in enumerate((2, 3, 0.5, -0.5, -1, -2, 1.7, 0, 1)):
    _linear(f"pow{_i}", _power(_e))

_linear("to_bf16", lambda z, a: torch.sigmoid(z).to(torch.bfloat16) * a)
_linear("double", lambda z, a: z.double() * a)


@_pattern
def _half(x, weight, bias, a, b):
    return (F.conv2d(x, weight, bias) * a).half() + b


@_pattern
def _float(x, weight, a):
    return torch.tanh((x @ weight).float()) * a


@contextmanager
def registered() -> Iterator[list[Pattern]]:
    """All patterns there are, these among them; afterwards none of these is registered."""
    before = list(registry._patterns)
    try:
        for function in _FOUND:
            fx_fuser.register_pattern(function)
        yield fx_fuser.registered_patterns()
    finally:
        registry._patterns[:] = before
