"""Attention of windows, as graphs call it: one composite op, and two functions of `fx_fuser::run`.

    fx_fuser::attention_window(q, k, v, bias, …) = softmax(scale · q kᵀ + bias) v

q, k and v are [B, H, rows, D] of at most 64 rows. The bias, [P, H, queries, keys], has a period: B
is a multiple of P, and a batch's is that of its number modulo P. So windows that share a learned
bias, with a mask of their own or without one, need no bias of each batch; P is 1 where all share
one. Its gradient is fp32, summed over the batches that share it.

A row that sees nothing is NaN, as by the formula; if `is_safe`, 0, as in torch's fused attention.
Backward reads q, k, v and the bias alone, and makes weights anew.

On CUDA kernels_cu/host/attention.h runs the kernels. What these do not take runs by torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fx_fuser.kernels.attention import window
from fx_fuser.ops import run
from fx_fuser.ops.attention_split import heads_like
from fx_fuser.ops.once import differentiable_once

FORWARD, BACKWARD = "attention_window", "attention_window_backward"
_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


def _weights(q: Tensor, k: Tensor, bias: Tensor, scale: float, is_safe: bool) -> Tensor:
    """In fp32."""
    scores = q.float() @ k.float().mT * scale
    shared = scores.unflatten(0, (-1, bias.shape[0])) + bias.float()
    weights = shared.softmax(-1)
    if is_safe:
        weights = weights.masked_fill((shared == -torch.inf).all(-1, keepdim=True), 0.0)
    return weights.flatten(0, 1)


def _forward_like(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: str, scale: float, is_safe: bool
) -> list[Tensor]:
    return [heads_like(q, q.shape[2])]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: str, scale: float, is_safe: bool
) -> list[Tensor]:
    made = _forward_like(q, k, v, bias, kernel, scale, is_safe)
    made[0].copy_(_weights(q, k, bias, scale, is_safe) @ v.float())
    return made


def _backward_like(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: str, scale: float,
    is_safe: bool, of_bias: bool,
) -> list[Tensor]:  # fmt: skip
    made = [heads_like(q, rows) for rows in (q.shape[2], k.shape[2], k.shape[2])]
    return [*made, q.new_empty(bias.shape, dtype=torch.float32)] if of_bias else made


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: str, scale: float,
    is_safe: bool, of_bias: bool,
) -> list[Tensor]:  # fmt: skip
    made = _backward_like(d_out, q, k, v, bias, kernel, scale, is_safe, of_bias)
    weights, wide = _weights(q, k, bias, scale, is_safe), d_out.float()
    d_weights = wide @ v.float().mT
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    of_keys = d_scores.mT @ q.float() * scale, weights.mT @ wide
    d_bias = d_scores.unflatten(0, (-1, bias.shape[0])).sum(0)
    for to, value in zip(made, (d_scores @ k.float() * scale, *of_keys, d_bias)):
        to.copy_(value)
    return made


run.define(FORWARD, _forward, _forward_like)
run.define(BACKWARD, _backward, _backward_like)


def _kernel(q: Tensor, k: Tensor, backward: bool) -> str:
    spec = window.spec_for(q.shape[3], q.dtype, (q.shape[2], k.shape[2]), backward)
    assert spec is not None, "the op takes what has a kernel"
    return spec.name


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, is_safe: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.numbers = scale, is_safe
        return _called(q, k, v, bias, scale, is_safe)

    @staticmethod
    @differentiable_once(lambda _: FORWARD)
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, k, v, bias = ctx.saved_tensors
        of_bias = ctx.needs_input_grad[3]
        kernel = _kernel(q, k, backward=True)
        given = run.arguments(BACKWARD, (d_out, q, k, v, bias, kernel, *ctx.numbers, of_bias))
        made = run.MANY(*given)
        return *made, *[None] * (6 - len(made))


def _called(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, is_safe: bool) -> Tensor:
    kernel = _kernel(q, k, backward=False)
    made: Tensor = run.ONE(*run.arguments(FORWARD, (q, k, v, bias, kernel, scale, is_safe)))
    return made


def _composite(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, compute: torch.dtype,
    is_safe: bool = False,
) -> Tensor:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, bias = *(t.to(compute) for t in (q, k, v)), bias.float()
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, bias)):
            made: Tensor = _Window.apply(q, k, v, bias, scale, is_safe)
            return made
        return _called(q, k, v, bias, scale, is_safe)


# compute: of products and of the result. AOTAutograd sees through it.
_LIBRARY.define(
    "attention_window(Tensor q, Tensor k, Tensor v, Tensor bias, float scale, ScalarType compute, "
    "bool is_safe=False) -> Tensor"
)
_LIBRARY.impl("attention_window", _composite, "CompositeImplicitAutograd")
ATTENTION_WINDOW = torch.ops.fx_fuser.attention_window.default
