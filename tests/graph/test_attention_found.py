"""Attention written by hand: each form is found, and its description computes what eager does.

The tails and layouts are those of 110 programs of transformers, timm and diffusers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from describing import assert_described, traced
from helpers import slow_but
from torch import Tensor

B, H, L, K, D = 2, 3, 5, 7, 4
S = D**-0.5
LOWEST = torch.finfo(torch.float32).min
Attend = Callable[..., Any]
Form = tuple[Attend, tuple[Any, ...]]

QKV = ((B, H, L, D), (B, H, K, D), (B, H, K, D))
SELF = ((B, H, L, D),) * 3


def attend(tail: Attend, post: Attend = lambda p, v: p, dtype: torch.dtype | None = None) -> Attend:
    """With this tail, of scores and whatever else is given."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        p = F.softmax(tail(q @ k.transpose(-1, -2), *rest), dim=-1, dtype=dtype)
        return (post(p, v) @ v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    return run


def softcap(s: Tensor, m: Tensor) -> Tensor:
    return torch.tanh(s * S / 50.0) * 50.0 + m


def windows(s: Tensor, bias: Tensor, m: Tensor) -> Tensor:
    """Shifted windows: the batch is images times windows."""
    s = s * S + bias.unsqueeze(0)
    s = s.view(B, 2, H, L, L) + m.unsqueeze(1).unsqueeze(0)
    return s.view(-1, H, L, L)


TAILS: dict[str, Form] = {
    "none": (attend(lambda s: s), QKV),
    "q scaled": (lambda q, k, v: ((q * S) @ k.mT).softmax(-1) @ v, QKV),
    "scale": (attend(lambda s: s * S), QKV),
    "scale first": (attend(lambda s: S * s), QKV),
    "over a number": (attend(lambda s: s / math.sqrt(D)), QKV),
    "scale and constant": (attend(lambda s: s * S + torch.full((L, L), -1e4).triu(1)), SELF),
    "over in place and constant": (
        attend(lambda s: s.div_(2.0) + torch.full((L, K), -1e9).triu(1)), QKV),
    "scale and mask": (attend(lambda s, m: s * S + m), (*QKV, (B, 1, 1, K))),
    "mask, a difference": (attend(lambda s, m: s * S - m), (*QKV, (B, 1, 1, K))),
    "added twice its size": (
        attend(lambda s, m: torch.add(s * S, m, alpha=2)), (*QKV, (B, 1, 1, K))),
    "scale and bias": (attend(lambda s, b: s * S + b), (*QKV, (1, H, L, K))),
    "bias first": (attend(lambda s, b: b + s * S), (*QKV, (H, L, K))),
    "bias in place": (attend(lambda s, b: (s * S).add_(b)), (*QKV, (H, L, K))),
    "temperature of heads": (attend(lambda s, t: s * t), (*QKV, (H, 1, 1))),
    "temperature and bias": (
        attend(lambda s, t, b: s * t.clamp(max=4.6).exp() + b), (*QKV, (H, 1, 1), (1, H, L, K))),
    "windows": (attend(windows), (*[(2 * B, H, L, D)] * 3, (H, L, L), (2, L, L))),
    "bias, mask and constant": (
        attend(lambda s, b, m: s * S + b + m + torch.full((L, K), -1e4).triu(1)),
        (*QKV, (1, H, L, K), (B, 1, 1, K))),
    "mask added to a bias before": (
        attend(lambda s, b, m: s + (b + m)), (*QKV, (1, H, L, K), (B, 1, 1, K))),
    "scale and fill": (
        attend(lambda s, m: (s * S).masked_fill(m > 1.5, -math.inf)), (*QKV, (B, 1, L, K))),
    "scale and where": (
        attend(lambda s, m: torch.where(m < 1, s * S, LOWEST)), (*QKV, (B, 1, L, K))),
    "where of a tensor": (
        attend(lambda s, m: torch.where(m < 1, s * S, torch.tensor(LOWEST))), (*QKV, (1, 1, L, K))),
    "fill in place": (
        attend(lambda s, m: (s * S).masked_fill_(m > 1.5, -1e9)), (*QKV, (B, 1, 1, K))),
    "fill and constant": (
        attend(lambda s, m: torch.where(m < 1, s, LOWEST) + torch.zeros(L, K)),
        (*QKV, (1, 1, L, K))),
    "softcap": (attend(softcap), (*QKV, (L, K))),
    "ALiBi and fill in fp32": (
        attend(lambda s, a, m: (s.float() * S + a).masked_fill(m > 1.5, LOWEST),
               dtype=torch.float32),
        (*QKV, (H, 1, K), (B, 1, 1, K))),
    "constant, then over": (
        attend(lambda s: (s + torch.full((L, K), -1e4).triu(1)) / math.sqrt(D)), QKV),
    "ALiBi before scale": (
        attend(lambda s, a: (s.float() + a) * S + torch.zeros(L, K)), (*QKV, (B, H, 1, K))),
    "a scale without dimensions": (
        attend(lambda s: s / torch.sqrt(torch.tensor(float(D)))), QKV),
    "scale of one": (attend(lambda s: s * 1.0), QKV),
    "cast and type_as": (
        attend(lambda s: s.float(), lambda p, v: p.type_as(v)), QKV),
    "type_as of the scores": (
        lambda q, k, v: (s := q @ k.mT, (s.float() * S).softmax(-1).type_as(s) @ v)[1], QKV),
    "softmax in another dtype": (
        attend(lambda s: s * S, lambda p, v: p.to(v.dtype), torch.float32), QKV),
    "dropout of nothing": (
        attend(lambda s: s * S, lambda p, v: F.dropout(p, 0.0, training=True)), QKV),
    "dropout in eval mode": (
        attend(lambda s: s * S, lambda p, v: F.dropout(p, 0.1, training=False)), QKV),
    "dropout": (attend(lambda s: s * S, lambda p, v: F.dropout(p, 0.5)), QKV),
}  # fmt: skip


def packed(x: Tensor) -> Tensor:
    q, k, v = x.reshape(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * S) @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def chunked(x: Tensor) -> Tensor:
    q, k, v = (y.view(B, L, H, D).transpose(1, 2) for y in x.chunk(3, -1))
    o = torch.softmax(q @ k.transpose(2, 3) * S, 3) @ v
    return o.transpose(1, 2).contiguous().view(B, L, H * D)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of queries share one of keys."""
    k, v = (
        x[:, :, None].expand(B, H, 2, L, D).reshape(B, 2 * H, L, D) for x in (k, v)
    )  # fmt: skip
    s = torch.matmul(q, k.transpose(2, 3)) * S
    return torch.matmul(F.softmax(s, -1, dtype=torch.float32).to(q.dtype), v)


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def flat(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Three dimensions; the scores are seen as four for the mask."""
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2))
    s = s.view(B, H, L, K) + m
    s = s.view(B * H, L, K)
    o = torch.bmm(s.softmax(dim=-1), v)
    return o.view(B, H, L, D).transpose(1, 2).reshape(B, L, H * D)


def of_images(x: Tensor, y: Tensor) -> Tensor:
    """[B, H, D, L] in memory, as convolutions leave it."""
    q, k, v = x, y, y * 2
    s = q.transpose(-2, -1) @ k
    return v @ s.softmax(-1).transpose(-2, -1)


def channels(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """XCiT: S is D × D, and what is summed over are the tokens."""
    q, k, v = (F.normalize(x.transpose(-2, -1), dim=-1) for x in (q, k, v))
    p = (q @ k.transpose(-2, -1) * t).softmax(dim=-1)
    return (p @ v).permute(0, 3, 1, 2)


def rel_pos(q: Tensor, k: Tensor, v: Tensor, rh: Tensor, rw: Tensor) -> Tensor:
    """SAM: keys are rows and columns of an image, and a bias of each is made of q."""
    s = ((q * S) @ k.transpose(-2, -1)).view(B * H, 2, 3, 2, 3)
    image = q.reshape(B * H, 2, 3, D)
    s = s + torch.einsum("bhwc,hkc->bhwk", image, rh)[..., None]
    s = s + torch.einsum("bhwc,wkc->bhwk", image, rw)[..., None, :]
    return s.view(B * H, 6, 6).softmax(-1) @ v


def as_einsum(*equations: str) -> Attend:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.einsum(equations[0], q, k) / math.sqrt(D)
        return torch.einsum(equations[1], F.softmax(s, dim=-1), v)

    return run


def residual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * S) @ k.mT).softmax(-1) @ v + q


LAYOUTS: dict[str, Form] = {
    "packed": (packed, ((B, L, 3 * H * D),)),
    "chunked": (chunked, ((B, L, 3 * H * D),)),
    "keys of groups, expanded": (grouped, ((B, 2 * H, L, D), (B, H, L, D), (B, H, L, D))),
    "keys of groups, interleaved": (interleaved, ((B, 2 * H, L, D), (B, H, L, D), (B, H, L, D))),
    "keys of groups, repeated": (tiled, ((B, 2 * H, L, D), (B, H, L, D), (B, H, L, D))),
    "one head of keys": (attend(lambda s: s * S), ((B, H, L, D), (B, 1, K, D), (B, 1, K, D))),
    "keys of one batch": (attend(lambda s: s * S), ((B, H, L, D), (1, H, K, D), (1, H, K, D))),
    "values of more batches": (attend(lambda s: s), ((1, H, L, D), (1, H, K, D), (B, H, K, D))),
    "values of another size": (attend(lambda s: s), ((B, H, L, D), (B, H, K, D), (B, H, K, 6))),
    "kᵀ by permute": (lambda q, k, v: (q @ k.permute(0, 1, 3, 2)).softmax(3) @ v, QKV),
    "k of heads last": (
        lambda q, k, v: (q @ k.permute(0, 2, 3, 1)).softmax(-1) @ v,
        ((B, H, L, D), (B, K, H, D), (B, H, K, D))),
    "three dimensions": (flat, (*QKV, (B, 1, L, K))),
    "two dimensions": (lambda q, k, v: (q @ k.T * S).softmax(1) @ v, ((L, D), (K, D), (K, D))),
    "five dimensions": (
        lambda q, k, v: (q @ k.mT * S).softmax(-1) @ v, ((2, B, H, L, D),) * 3),
    "images": (of_images, ((B, H, D, L), (B, H, D, K))),
    "channels": (channels, (*SELF, (H, 1, 1))),
    "relative positions": (rel_pos, (*[(B * H, 6, D)] * 3, (2, 2, D), (3, 3, D))),
    "bqhd": (as_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
             ((B, L, H, D), (B, K, H, D), (B, K, H, D))),
    "bhid": (as_einsum("b h i d, b h j d -> b h i j", "b h i j, b h j d -> b h i d"), QKV),
    "dots": (as_einsum("...qc,...kc->...qk", "...qk,...kc->...qc"), QKV),
    "ibnd": (as_einsum("ibnd,jbnd->bnij", "bnij,jbnd->ibnd"),
             ((L, B, H, D), (K, B, H, D), (K, B, H, D))),
    "a head of keys for all": (as_einsum("bhqd,bkd->bhqk", "bhqk,bkd->bhqd"),
                               ((B, H, L, D), (B, K, D), (B, K, D))),
    "queries for all": (as_einsum("qd,bhkd->bhqk", "bhqk,bhkd->bhqd"),
                        ((L, D), (B, H, K, D), (B, H, K, D))),
    "keys before queries": (lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v, QKV),
    "v before P": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT, QKV),
    "baddbmm": (
        lambda q, k, v, b: torch.baddbmm(b, q, k.mT, alpha=S, beta=0.5).softmax(-1).bmm(v),
        ((6, L, D), (6, K, D), (6, K, D), (6, 1, K))),
    "baddbmm of nothing": (
        lambda q, k, v: torch.baddbmm(torch.empty(6, L, K), q, k.mT, alpha=S, beta=0)
        .softmax(-1).bmm(v),
        ((6, L, D), (6, K, D), (6, K, D))),
    "a residual behind": (residual, SELF),
    "one query": (attend(lambda s: s * S), ((B, H, 1, D), (B, H, K, D), (B, H, K, D))),
    "one key": (attend(lambda s: s * S), ((B, H, L, D), (B, H, 1, D), (B, H, 1, D))),
    "one head": (attend(lambda s: s * S), ((B, 1, L, D), (B, 1, K, D), (B, 1, K, D))),
    "one of all": (attend(lambda s: s * S), ((1, 1, 1, D),) * 3),
    "one batch, three dimensions": (
        lambda q, k, v: (
            q.reshape(H, L, D) @ k.reshape(H, K, D).mT
        ).view(1, H, L, K).softmax(-1).view(H, L, K) @ v.reshape(H, K, D),
        ((1, H, L, D), (1, H, K, D), (1, H, K, D))),
}  # fmt: skip


def made(shapes: tuple[Any, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


ALL = {
    **{f"tail: {n}": f for n, f in TAILS.items()},
    **{f"layout: {n}": f for n, f in LAYOUTS.items()},
}


@pytest.mark.parametrize("name", slow_but([*ALL][::2], ALL))
def test_it_is_found_and_computes_what_eager_does(name: str) -> None:
    run, shapes = ALL[name]
    one = traced(run, *made(shapes))
    assert not one.reasons
    assert len(one.sites) == 1
    assert_described(one)


@pytest.mark.parametrize("name", slow_but([*ALL][1::8], ALL))
def test_under_autocast(name: str) -> None:
    """Its casts are no nodes of the graph."""
    run, shapes = ALL[name]
    one = traced(run, *made(shapes), autocast=True)
    assert not one.reasons
    assert len(one.sites) == 1
    assert_described(one, autocast=True)
