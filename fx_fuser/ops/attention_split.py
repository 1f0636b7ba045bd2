"""fp32 attention by fp16 halves, as graphs call it: two functions of `fx_fuser::run`.

`attention` makes what `aten._scaled_dot_product_efficient_attention` does, `attention_backward`
what its backward does, in the same layouts. Each reads what the other of torch's has saved: out,
and each row's logarithm of the sum of exponentials, which has rows to a multiple of 32, infinity
beyond the queries. Keys and values have the queries' heads, or one for all of these.

On CUDA kernels_cu/host/attention.h runs the kernels. What these do not take runs by torch's.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from fx_fuser.kernels import attention
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run

FORWARD, BACKWARD = "attention", "attention_backward"
LSE_ROWS = 32  # torch's logarithms have a multiple of so many
_aten = torch.ops.aten


def _heads_like(q: Tensor, rows: int) -> Tensor:
    """[batch, head, row, element] as torch's kernel lays its results out: rows before heads."""
    batch, heads, _, d = q.shape
    return q.new_empty((batch, rows, heads, d)).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = q @ k.mT * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf)


def _forward_like(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float, causal: bool, save: bool
) -> list[Tensor]:
    out, queries = _heads_like(q, q.shape[2]), q.shape[2]
    if not save:
        return [out]
    return [out, q.new_empty((*q.shape[:2], -(-queries // LSE_ROWS) * LSE_ROWS))]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float, causal: bool, save: bool
) -> list[Tensor]:
    k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    if q.is_cuda:
        torchs = _aten._scaled_dot_product_efficient_attention.default
        found = torchs(q, k, v, None, save, 0.0, causal, scale=scale)
        return [*found[: 2 if save else 1]]
    made = _forward_like(q, k, v, kernel, scale, causal, save)
    scores = _scores(q, k, scale, causal)
    made[0].copy_(scores.softmax(-1) @ v)
    for lse in made[1:]:
        lse.fill_(torch.inf)[..., : q.shape[2]] = scores.logsumexp(-1)
    return made


def _backward_like(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    kernel: str, scale: float, causal: bool,
) -> list[Tensor]:  # fmt: skip
    return [_heads_like(q, rows) for rows in (q.shape[2], k.shape[2], k.shape[2])]


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    kernel: str, scale: float, causal: bool,
) -> list[Tensor]:  # fmt: skip
    """dq, and dk and dv of each head of queries."""
    k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    if q.is_cuda:
        torchs = _aten._scaled_dot_product_efficient_attention_backward.default
        seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))  # not read
        tensors = d_out, q, k, v, None, out, lse, seed, offset
        return [*torchs(*tensors, 0.0, [True, True, True, False], causal, scale=scale)[:3]]
    weights = (_scores(q, k, scale, causal) - lse[..., : q.shape[2], None]).exp()
    delta = (out * d_out).sum(-1, keepdim=True)
    d_scores = weights * (d_out @ v.mT - delta) * scale
    made = _backward_like(d_out, q, k, v, out, lse, kernel, scale, causal)
    for to, value in zip(made, (d_scores @ k, d_scores.mT @ q, weights.mT @ d_out)):
        to.copy_(value)
    return made


run.define(FORWARD, _forward, _forward_like)
run.define(BACKWARD, _backward, _backward_like)

# What a function calls whose kernel nobody has loaded: if Inductor's cache has the graph, no pass
# has seen it. It returns nothing: if the kernel does not build, the function finds none again, and
# calls torch's from then on.
_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LIBRARY.define("load_attention(Tensor q, str kernel) -> ()")


@functools.cache
def _specs() -> dict[str, KernelSpec]:
    return {spec.name: spec for spec in attention.offered()}


def _load(q: Tensor, kernel: str) -> None:
    try:
        load.prepare([_specs()[kernel]], q.device)
    except Exception as error:
        warnings.warn(
            f"fx_fuser leaves an attention to torch: {type(error).__name__}: {error}; "
            "please report it",
            stacklevel=2,
        )


_LIBRARY.impl("load_attention", _load, "CompositeExplicitAutograd")
