"""Attention as models write it, traps among it: what must be found, refused, and told apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from describing import Traced, assert_described, outcome, traced
from torch import Tensor

from fx_fuser.graph.attention.site import SCORE, AttentionSite, Operand

B, H, L, D = 2, 3, 6, 4
LOWEST = torch.finfo(torch.float32).min
sdpa = F.scaled_dot_product_attention


def qkv(*shape: int) -> list[Tensor]:
    return [torch.randn(shape or (B, H, L, D), requires_grad=True) for _ in range(3)]


def the_site(one: Traced) -> AttentionSite:
    assert not one.reasons
    (site,) = one.sites
    return site


def ops(site: AttentionSite) -> list[str]:
    return [step.op for step in site.tail]


def causal(length: int = L) -> Tensor:
    at = torch.arange(length)
    return torch.where(at[None, :] <= at[:, None], 0.0, LOWEST)[None, None]


# ---- models ------------------------------------------------------------------------------------


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * cos + half * sin


def llama(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    q = F.linear(x, wq).view(B, L, 4, D).transpose(1, 2)
    k, v = (F.linear(x, w).view(B, L, 2, D).transpose(1, 2) for w in (wk, wv))
    at = torch.arange(L)[:, None] * torch.ones(D)
    q, k = turned(q, at.cos(), at.sin()), turned(k, at.cos(), at.sin())
    k, v = (t[:, :, None, :, :].expand(B, 2, 2, L, D).reshape(B, 4, L, D) for t in (k, v))
    s = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    s = s + causal()
    p = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
    p = F.dropout(p, p=0.0, training=True)
    o = torch.matmul(p, v).transpose(1, 2).contiguous()
    return F.linear(o.reshape(B, L, -1).contiguous(), wo)


@pytest.mark.parametrize("autocast", [False, True])
def test_llama(autocast: bool) -> None:
    weights = [torch.randn(n, 8, requires_grad=True) for n in (4 * D, 2 * D, 2 * D)]
    wo = torch.randn(8, 4 * D, requires_grad=True)
    x = torch.randn(B, L, 8, requires_grad=True)
    one = traced(llama, x, *weights, wo, autocast=autocast)
    site = the_site(one)
    assert ops(site) == ["mul", "add"] and site.weights is torch.float32
    # Two heads of queries share one of keys: an axis of the batch that k and v lack.
    assert [site.sizes[a] for a in site.batch] == [B, 2, 2]
    assert sum(map(len, site.q.dims)) == 5 and sum(map(len, site.k.dims)) == 4
    assert sum(map(len, site.v.dims)) == 4 and site.v.node.meta["example_value"].ndim == 3
    assert len(site.views) == 4  # transpose, contiguous, reshape, contiguous
    mask = site.tail[1].args[1]
    assert isinstance(mask, Operand) and mask.dims == (site.rows, site.keys)
    assert_described(one, autocast)


def bert(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    mask = (1.0 - padding[:, None, None, :]) * LOWEST
    mask = mask.expand(B, 1, L, L)
    s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D) + mask
    return torch.matmul(F.dropout(F.softmax(s, dim=-1), 0.1, False), v).permute(0, 2, 1, 3)


@pytest.mark.parametrize("autocast", [False, True])
def test_bert_with_padding(autocast: bool) -> None:
    padding = torch.ones(B, L)
    padding[0, 4:] = 0
    one = traced(bert, *qkv(), padding, autocast=autocast)
    site = the_site(one)
    mask = site.tail[1].args[1]
    # The mask of keys, not what was expanded of it.
    assert isinstance(mask, Operand) and mask.node.meta["example_value"].numel() == B * L
    assert_described(one, autocast)


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor, padding: Tensor) -> Tensor:
    at = torch.arange(L)
    bias = F.embedding((at[:, None] - at[None, :]).abs(), table).permute(2, 0, 1).unsqueeze(0)
    bias = bias + (1.0 - padding[:, None, None, :]) * LOWEST
    s = torch.matmul(q, k.transpose(3, 2))
    s += bias
    p = F.softmax(s.float(), dim=-1).type_as(s)
    return torch.matmul(p, v).transpose(1, 2).contiguous().view(B, -1, H * D)


@pytest.mark.parametrize("autocast", [False, True])
def test_t5(autocast: bool) -> None:
    padding, table = torch.ones(B, L), torch.randn(L, H, requires_grad=True)
    padding[1, 5:] = 0
    one = traced(t5, *qkv(), table, padding, autocast=autocast)
    site = the_site(one)
    assert ops(site) == ["add", "cast"]
    assert_described(one, autocast)


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    unread = torch.empty(B * H, L, L).fill_(math.nan)
    s = torch.baddbmm(unread, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5)
    return torch.bmm(s.softmax(-1), v)


def test_baddbmm_does_not_read_what_it_takes_no_times() -> None:
    one = traced(baddbmm, *qkv())
    site = the_site(one)
    assert ops(site) == ["mul", "cast"]
    assert_described(one)
    assert not outcome(one, True)[0].isnan().any()


def einsums(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    s = torch.where(hidden, torch.finfo(s.dtype).min, s)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@pytest.mark.parametrize("autocast", [False, True])
def test_einsums(autocast: bool) -> None:
    hidden = torch.rand(L, L) < 0.3
    one = traced(einsums, *qkv(B, L, H, D), hidden, autocast=autocast)
    site = the_site(one)
    assert ops(site) == ["div", "where"]
    assert_described(one, autocast)


def gemma(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(2, 3)) * 0.25
    s = s / 50.0
    s = torch.tanh(s)
    s = s * 50.0
    s = s + mask
    return torch.matmul(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)


def test_gemma() -> None:
    at = torch.arange(L)
    window = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < 3)
    one = traced(gemma, *qkv(), torch.where(window, 0.0, LOWEST)[None, None])
    assert ops(the_site(one)) == ["mul", "div", "tanh", "mul", "add"]
    assert_described(one)


def falcon(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2)
    s = (s + alibi.view(B, H, 1, -1)) * D**-0.5
    return (F.softmax(s + causal(), dim=-1) @ v).view(B, H, L, D).permute(0, 2, 1, 3)


def test_a_bias_before_the_scale_is_scaled() -> None:
    alibi = torch.randn(B * H, 1, L) * 10
    one = traced(falcon, *qkv(), alibi)
    site = the_site(one)
    assert ops(site) == ["add", "mul", "add"]
    assert site.tail[0].args[0] is SCORE
    assert_described(one)


def hidden_by(value: float) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.mT * 0.5).masked_fill(hidden, value).softmax(-1) @ v

    return run


def by_torch(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return sdpa(q, k, v, ~hidden, scale=0.5)


def test_rows_that_hide_all_keys_have_three_answers() -> None:
    at = torch.arange(L)
    hidden = (at[None, :] > at[:, None])[None, None] | (at < 2)[None, None, None]
    runs = [hidden_by(-math.inf), hidden_by(LOWEST), by_torch]
    q, k, v = qkv()
    traces = [traced(run, q, k, v, hidden) for run in runs]
    nan, mean, zero = (outcome(one, True)[0][:, :, 0].detach() for one in traces)
    assert nan.isnan().all()
    torch.testing.assert_close(mean, v.mean(2).detach())
    assert not zero.any()
    for one in traces:
        assert_described(one)


def returns_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


def drops_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return returns_weights(q, k, v)[0]


def test_weights_that_are_returned_and_a_twin() -> None:
    assert traced(returns_weights, *qkv()).reasons
    one = traced(drops_weights, *qkv())
    the_site(one)
    assert_described(one)


def in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = q @ k.mT
    s += bias
    return s.softmax(-1) @ v


def in_place_and_read(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    s = q @ k.mT
    before = s.sum()
    s += bias
    return s.softmax(-1) @ v, before, s * 2


def test_a_wide_bias_added_in_place_to_narrow_scores() -> None:
    """The sum is rounded to the scores' bf16; out of place it would be fp32."""
    given = [t.detach().bfloat16().requires_grad_() for t in qkv()]
    bias = torch.randn(L, L, requires_grad=True)
    one = traced(in_place, *given, bias)
    site = the_site(one)
    assert site.tail[0].dtype is torch.bfloat16
    assert_described(one)
    wide = the_site(traced(lambda q, k, v, b: (q @ k.mT + b).softmax(-1) @ v.float(), *given, bias))
    assert wide.tail[0].dtype is torch.float32
    assert traced(in_place_and_read, *given, bias).reasons


def channels_and_transposed(x: Tensor) -> Tensor:
    """XCiT's S is channels × channels; then v · Pᵀ. All sizes are equal."""
    q, k, v = x.unbind(0)
    p = (q.mT @ k).softmax(-1)
    return v @ p.mT


def test_orientation_comes_from_views() -> None:
    one = traced(channels_and_transposed, torch.randn(3, 16, 16, 16, 16, requires_grad=True))
    site = the_site(one)
    (row,), (key,), (inner,) = site.rows, site.keys, site.inner
    assert (site.q.dims[-2:], site.k.dims[-2:]) == (((inner,), (row,)), ((inner,), (key,)))
    assert site.v.dims[-1] == (key,) and site.result.dims[-1] == (row,)
    assert_described(one)


# ---- torch's own attention ---------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "grouped", "broadcast"])
def test_torchs_attention_is_one_more_spelling(mask: str, autocast: bool) -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {}
    given = [q, k, v]
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "bool":
        given.append(torch.rand(B, 1, L, L) < 0.7)
    elif mask == "float":
        given.append(torch.randn(1, H, L, L, requires_grad=True))
    elif mask == "grouped":
        given[0], options["enable_gqa"] = torch.randn(B, 2 * H, L, D, requires_grad=True), True
    elif mask == "broadcast":
        given[1:] = [torch.randn(1, 1, L, D, requires_grad=True) for _ in range(2)]
    one = traced(lambda *t: sdpa(*t, **options), *given, autocast=autocast)
    biases = [a for step in the_site(one).tail for a in step.args if isinstance(a, Operand)]
    if mask == "float":  # which autocast rounds, as it does q, k and v
        assert [bias.dtype for bias in biases] == [torch.bfloat16 if autocast else None]
    assert_described(one, autocast)


def test_a_mask_seen_through_expand_is_one_of_keys() -> None:
    q, k, v = qkv()
    m = torch.rand(B, L) < 0.7
    one = traced(lambda q, k, v, m: sdpa(q, k, v, m[:, None, None].expand(B, H, L, L)), q, k, v, m)
    mask = the_site(one).tail[1].args[0]
    assert isinstance(mask, Operand) and mask.node.op == "placeholder"
    assert_described(one)


# ---- sizes that change from call to call -------------------------------------------------------


def dynamic(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    b, n = x.shape[0], x.shape[1]
    q, k, v = (t.view(b, -1, H, D).transpose(1, 2) for t in (x, y, y))
    k, v = (t[:, :, None].expand(b, H, 2, -1, D).reshape(b, 2 * H, -1, D) for t in (k, v))
    q = q.repeat_interleave(2, 1)
    s = q @ k.mT * D**-0.5
    s = (s.view(b, 2 * H, n, -1) + bias).softmax(-1)
    return (s @ v).transpose(1, 2).reshape(b, n, 2 * H * D)


@pytest.mark.slow
def test_symbolic_sizes_are_followed_without_a_guard() -> None:
    given = [torch.randn(B, n, H * D, requires_grad=True) for n in (5, 7)]
    bias = torch.randn(1, 1, 1, 1)
    plain = traced(dynamic, *given, bias)
    one = traced(dynamic, *given, bias, dynamic=True)
    for each in (plain, one):
        the_site(each)
    assert not all(isinstance(n, int) for n in the_site(one).sizes)


def test_a_scaled_sum_is_rounded_once() -> None:
    given = [torch.randn(B * H, L, D, dtype=torch.bfloat16) for _ in range(3)]
    bias = torch.randn(B * H, L, L, dtype=torch.bfloat16)
    one = traced(
        lambda q, k, v, b: torch.baddbmm(b, q, k.mT, alpha=0.3).softmax(-1) @ v, *given, bias
    )
    site = the_site(one)
    dtypes = [step.dtype for step in site.tail]
    assert site.scores is torch.float32
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]
    assert_described(one)


def viewed_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        w = k.transpose(-2, -1)
    return (q @ w).softmax(-1) @ v


def copied_and_written(q: Tensor, k: Tensor, v: Tensor) -> Any:
    w = k * 1
    c = w.transpose(-2, -1).contiguous()
    s = q @ c
    w.mul_(2)
    return s.softmax(-1) @ v, w


@pytest.mark.parametrize("run", [viewed_without_gradient, copied_and_written])
def test_what_a_view_is_of_is_not_always_read(run: Any) -> None:
    one = traced(run, *qkv())
    the_site(one)
    assert_described(one)
