"""fp32 attention with fp16 halves, as graphs call it: two functions of `fx_fuser::run`.

`attention` computes what `aten._scaled_dot_product_efficient_attention` does, `attention_backward`
what its backward does, in the same layouts. Each reads what torch's other one has saved: out, and
each row's log-sum-exp, whose rows are padded to a multiple of 32, with infinity after the queries.
A head of keys and values may serve several neighbouring heads of queries.

`dropout` is the share of weights that is dropped; `seed`, one int64 number, says which
(`fx_fuser.ops.attention_dropout`). torch's own operations would drop others.

On CUDA kernels_cu/host/attention.h runs the kernels. What these do not take runs in torch's, with
dropout by its formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fx_fuser.kernels import attention
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.kernels.attention import window as attention_window
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import attention_dropout, run

FORWARD, BACKWARD = "attention", "attention_backward"
NO_DROPOUT = None, 0.0  # seed and share
LSE_ROWS = 32  # the rows of torch's log-sum-exp are a multiple of this
_aten = torch.ops.aten


def heads_like(q: Tensor, rows: int) -> Tensor:
    """[batch, head, row, element] as torch's kernel lays its results out: rows before heads."""
    batch, heads, _, d = q.shape
    return q.new_empty((batch, rows, heads, d)).transpose(1, 2)


def of_each_head(q: Tensor, k: Tensor) -> Tensor:
    """k, or v, for each head of queries; not copied if each has its own."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k
    return k.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = q @ k.mT * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf)


def factors(q: Tensor, k: Tensor, seed: Tensor | None, dropout: float) -> Tensor | float:
    """What dropout multiplies each weight by."""
    if dropout == 0:
        return 1.0
    if seed is None:
        raise ValueError("dropout of attention has no seed")
    batch, heads, queries, _ = q.shape
    sizes = batch * heads, queries, k.shape[2]
    made = attention_dropout.factors(seed, *sizes, dropout, q.dtype)
    return made.unflatten(0, (batch, heads))


def _forward_like(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float, causal: bool, save: bool,
    seed: Tensor | None = None, dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    out, queries = heads_like(q, q.shape[2]), q.shape[2]
    if not save:
        return [out]
    return [out, q.new_empty((*q.shape[:2], -(-queries // LSE_ROWS) * LSE_ROWS))]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float, causal: bool, save: bool,
    seed: Tensor | None = None, dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    k, v = of_each_head(q, k), of_each_head(q, v)
    if q.is_cuda and dropout == 0:
        torchs = _aten._scaled_dot_product_efficient_attention.default
        found = torchs(q, k, v, None, save, 0.0, causal, scale=scale)
        return [*found[: 2 if save else 1]]
    made = _forward_like(q, k, v, kernel, scale, causal, save)
    scores = _scores(q, k, scale, causal)
    made[0].copy_((scores.softmax(-1) * factors(q, k, seed, dropout)) @ v)
    for lse in made[1:]:
        lse.fill_(torch.inf)[..., : q.shape[2]] = scores.logsumexp(-1)
    return made


def _backward_like(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    kernel: str, scale: float, causal: bool, seed: Tensor | None = None, dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    return [heads_like(q, rows) for rows in (q.shape[2], k.shape[2], k.shape[2])]


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    kernel: str, scale: float, causal: bool, seed: Tensor | None = None, dropout: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """dq, and dk and dv for each head of queries."""
    k, v = of_each_head(q, k), of_each_head(q, v)
    if q.is_cuda and dropout == 0:
        torchs = _aten._scaled_dot_product_efficient_attention_backward.default
        not_read = (q.new_empty((), dtype=torch.int64) for _ in range(2))  # seed, offset
        tensors = d_out, q, k, v, None, out, lse, *not_read
        return [*torchs(*tensors, 0.0, [True, True, True, False], causal, scale=scale)[:3]]
    weights = (_scores(q, k, scale, causal) - lse[..., : q.shape[2], None]).exp()
    delta = (out * d_out).sum(-1, keepdim=True)
    kept = factors(q, k, seed, dropout)
    d_scores = weights * (d_out @ v.mT * kept - delta) * scale
    made = _backward_like(d_out, q, k, v, out, lse, kernel, scale, causal)
    for to, value in zip(made, (d_scores @ k, d_scores.mT @ q, (weights * kept).mT @ d_out)):
        to.copy_(value)
    return made


run.define(FORWARD, _forward, _forward_like)
run.define(BACKWARD, _backward, _backward_like)


def _offered() -> Iterator[KernelSpec]:
    for kind in (attention, attention_bias, attention_window):
        yield from kind.offered()


run.define_loader("load_attention", "an attention", _offered)
