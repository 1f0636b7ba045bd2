"""Attention of 16-bit operands with a bias, as graphs call it: two functions of `fx_fuser::run`.

They compute what `aten._scaled_dot_product_efficient_attention` and its backward do with an
`attn_bias`, in the same layouts, and each reads what torch's other one has saved, like those of
`fx_fuser.ops.attention_split`. The bias is [B, H, queries, keys], with 1 for B or H if all share
it. Its gradient is NO_GRADIENT; or SUMMED over those that share it, without a tensor of all; or
WHOLE: for each batch and head. `seed` and `dropout` are as there.

On CUDA kernels_cu/host/attention.h runs the kernels. What these do not take runs in torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fx_fuser.ops import run
from fx_fuser.ops.attention_split import LSE_ROWS, factors, heads_like

FORWARD, BACKWARD = "attention_bias", "attention_bias_backward"
NO_GRADIENT, SUMMED, WHOLE = range(3)
_PITCH = 16  # the rows of a whole gradient are padded to a multiple of this, as in torch
_aten = torch.ops.aten


def _of_all(bias: Tensor, q: Tensor) -> Tensor:
    return bias.expand(*q.shape[:2], -1, -1)


def _weights(
    q: Tensor, k: Tensor, bias: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """In fp32, 0 in a row that sees nothing; and the log-sum-exp of the rows."""
    scores = q.float() @ k.float().mT * scale + bias.float()
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.where(lse[..., None] == -torch.inf, 0.0, scores.softmax(-1)), lse


def _forward_like(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: str, scale: float, causal: bool,
    save: bool, seed: Tensor | None = None, dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    out, queries = heads_like(q, q.shape[2]), q.shape[2]
    if not save:
        return [out]
    rows = -(-queries // LSE_ROWS) * LSE_ROWS
    return [out, q.new_empty((*q.shape[:2], rows), dtype=torch.float32)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kernel: str, scale: float, causal: bool,
    save: bool, seed: Tensor | None = None, dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    if q.is_cuda and dropout == 0:
        torchs = _aten._scaled_dot_product_efficient_attention.default
        found = torchs(q, k, v, _of_all(bias, q), save, 0.0, causal, scale=scale)
        return [*found[: 2 if save else 1]]
    made = _forward_like(q, k, v, bias, kernel, scale, causal, save)
    weights, sums = _weights(q, k, bias, scale, causal)
    made[0].copy_((weights * factors(q.float(), k, seed, dropout)) @ v.float())
    for lse in made[1:]:
        lse.fill_(torch.inf)[..., : q.shape[2]] = sums
    return made


def _backward_like(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    kernel: str, scale: float, causal: bool, of_bias: int, seed: Tensor | None = None,
    dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    made = [heads_like(q, rows) for rows in (q.shape[2], k.shape[2], k.shape[2])]
    if of_bias == SUMMED:
        made.append(q.new_empty(bias.shape))
    elif of_bias == WHOLE:
        keys = bias.shape[-1]
        rows = q.new_empty((*q.shape[:2], bias.shape[2], -(-keys // _PITCH) * _PITCH))
        made.append(rows[..., :keys])
    return made


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    kernel: str, scale: float, causal: bool, of_bias: int, seed: Tensor | None = None,
    dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    if q.is_cuda and dropout == 0:
        torchs = _aten._scaled_dot_product_efficient_attention_backward.default
        not_read = (q.new_empty((), dtype=torch.int64) for _ in range(2))  # seed, offset
        tensors = d_out, q, k, v, _of_all(bias, q), out, lse, *not_read
        asked = [True, True, True, of_bias != NO_GRADIENT]
        *made, d_bias = torchs(*tensors, 0.0, asked, causal, scale=scale)
        if of_bias == NO_GRADIENT:
            return made
        return [*made, d_bias.sum_to_size(bias.shape) if of_bias == SUMMED else d_bias]
    made = _backward_like(d_out, q, k, v, bias, out, lse, kernel, scale, causal, of_bias)
    weights, _ = _weights(q, k, bias, scale, causal)
    wide = d_out.float()
    delta = (out.float() * wide).sum(-1, keepdim=True)
    kept = factors(q.float(), k, seed, dropout)
    d_scores = weights * (wide @ v.float().mT * kept - delta)
    of_keys = d_scores.mT @ q.float() * scale, (weights * kept).mT @ wide
    of_heads = d_scores @ k.float() * scale, *of_keys
    d_bias = d_scores.sum_to_size(bias.shape) if of_bias == SUMMED else d_scores
    for to, value in zip(made, (*of_heads, d_bias)):
        to.copy_(value)
    return made


run.define(FORWARD, _forward, _forward_like)
run.define(BACKWARD, _backward, _backward_like)
