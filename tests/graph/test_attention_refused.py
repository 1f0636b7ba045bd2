"""What looks like attention but cannot be described is refused, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from describing import assert_described, traced
from torch import Tensor, nn

B, H, L, D = 2, 4, 4, 4  # all equal: nothing may be told apart by its size
Attend = Callable[..., Any]


def qkv() -> list[Tensor]:
    return [torch.randn(B, H, L, D, requires_grad=True) for _ in range(3)]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).softmax(-1)


def p_returned(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = weights(q, k)
    return p @ v, p


def p_read(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = weights(q, k)
    return p @ v + p.sum()


def p_used_twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = weights(q, k)
    return p @ v, p @ k


def added_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = weights(q, k).flatten(0, 1)
    return torch.baddbmm(q.flatten(0, 1), p, v.flatten(0, 1))


def s_returned(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def row_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ v


def cogview(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT) / 32
    return ((s - s.max(dim=-1, keepdim=True)[0]) * 32).softmax(-1) @ v


class TalkingHeads(nn.Module):
    """CaiT."""

    def __init__(self, before: bool, after: bool) -> None:
        super().__init__()
        self.l = nn.Linear(H, H) if before else None
        self.w = nn.Linear(H, H) if after else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1)
        if self.l is not None:
            s = self.l(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        p = s.softmax(dim=-1)
        if self.w is not None:
            p = self.w(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return p @ v


def mixed_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhij,hg->bgij", q @ k.mT, q[0, :, :, 0])
    return s.softmax(-1) @ v


def mixed_by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT).permute(0, 2, 3, 1) @ q[0, 0]
    return s.permute(0, 3, 1, 2).softmax(-1) @ v


def mixed_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", weights(q, k), q[0, :, :, 0]) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(1) @ v


def transposed_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k).mT @ v


def heads_for_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k).transpose(1, 3) @ v


def part_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax of each half of the keys."""
    p = (q @ k.mT).view(B, H, L, 2, 2).softmax(-1)
    return p.view(B, H, L, L) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-OSS."""
    s = q @ k.mT
    p = torch.cat([s, s.new_zeros(B, H, L, 1)], -1).softmax(-1)
    return p[..., :-1] @ v


def outlook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """VOLO: a Linear makes the scores."""
    return (F.linear(q, k[0, 0]) * 0.5).softmax(-1) @ v


def lambda_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.softmax(-1).mT @ v)


def unknown_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).relu().softmax(-1) @ v


def unknown_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k).nan_to_num() @ v


def banded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.gather(q @ k.mT, -1, torch.zeros(B, H, L, L, dtype=torch.int64))
    return s.softmax(-1) @ v


def in_place_seen(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    seen = s.view(B * H, L, L)
    s += torch.ones(L, L)
    return s.softmax(-1) @ v, seen


def in_place_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    s.view(B * H, L, L).add_(torch.ones(L, L).triu(1))
    return s.softmax(-1) @ v


def into_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Any:
    bias = k * 2
    seen = bias.view(-1)
    return bias.add_(q @ k.mT).softmax(-1) @ v, seen


def q_written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = q * 2
    s = w @ k.mT
    w.add_(1)
    return s.softmax(-1) @ v + w


def input_written_between(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    s = q @ k.mT
    x.add_(1)
    return s.softmax(-1) @ v


def bias_written_after(q: Tensor, k: Tensor, v: Tensor) -> Any:
    bias = q[0, 0] * 2
    o = (q @ k.mT + bias).softmax(-1) @ v
    return o, bias.add_(1)


def under_no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        p = weights(q, k)
    return p @ v


def autocast_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        s = q @ k.mT
    return s.float().softmax(-1) @ v


def scores_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return (s * s).softmax(-1) @ v


def nothing_reads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m = nn.functional.multi_head_attention_forward(
        q[0], k[0], v[0], D, 2, torch.ones(3 * D, D), None, None, None, False, 0.0,
        torch.ones(D, D), None,
    )[0]  # fmt: skip
    return m


REFUSED: dict[str, tuple[Attend, str]] = {
    "P returned": (p_returned, "softmax(-1)` is also returned"),
    "P read": (p_read, "softmax(-1)` is also used by sum"),
    "P used twice": (p_used_twice, "softmax(-1)` is also used by matmul"),
    "S returned": (s_returned, "`s` is also returned"),
    "the row's largest": (row_max, "the largest of each row of `s` is also used by amax"),
    "CogView": (cogview, "the largest of each row of `s` is also used by max"),
    "heads mixed before": (TalkingHeads(True, False), "mixes heads before the softmax"),
    "heads mixed after": (TalkingHeads(False, True), "mixes heads after the softmax"),
    "heads mixed before and after": (TalkingHeads(True, True), "mixes heads before the softmax"),
    "heads mixed by einsum": (mixed_by_einsum, "heads are mixed"),
    "heads mixed by matmul": (mixed_by_matmul, "heads are mixed"),
    "heads mixed after, by einsum": (mixed_after, "heads are mixed after the softmax"),
    "softmax over queries": (over_queries, "does not sum over the keys"),
    "softmax over heads": (over_heads, "its softmax is not over the keys"),
    "P transposed": (transposed_between, "does not sum over the keys"),
    "heads taken for keys": (heads_for_keys, "does not sum over the keys"),
    "a softmax of half of the keys": (part_of_keys, "does not sum over the keys"),
    "a sum with v": (added_to, "is not a plain product with v"),
    "a sink": (with_sink, "adds columns to its scores"),
    "no keys": (outlook, "makes its scores instead of q · kᵀ"),
    "no queries": (lambda_layer, "its scores are not a product of two tensors but `k`"),
    "an unknown step": (unknown_step, "relu"),
    "an unknown step after": (unknown_after, "nan_to_num"),
    "a gather": (banded, "gather"),
    "in place, seen before": (in_place_seen, "`s` is also used by view"),
    "in place, through a view": (in_place_through_a_view, "also used by view"),
    "scores added into a bias": (into_a_bias, "works in place on memory that"),
    "q written between": (q_written_between, "`w` may be changed in place"),
    "an input written between": (input_written_between, "changes the graph input `x`"),
    "a bias written after": (bias_written_after, "before the backward reads it"),
    "no_grad": (under_no_grad, "grad mode, autocast or another mode changes"),
    "autocast": (autocast_between, "grad mode, autocast or another mode changes"),
    "scores twice": (scores_twice, "takes scores twice"),
    "one torch call": (nothing_reads, "one torch call"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    run, reason = REFUSED[name]
    inputs = [*qkv(), torch.ones(3)] if run is input_written_between else qkv()
    one = traced(run, *inputs)
    assert not one.sites
    assert len(one.reasons) == 1
    assert reason in one.reasons[0]


def classes(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).softmax(-1)


def pointer(q: Tensor, k: Tensor) -> Tensor:
    return weights(q, k).log()


def test_a_softmax_that_no_product_follows_is_no_attention() -> None:
    q, k, _ = qkv()
    assert not traced(classes, q, k[0, 0]).found
    assert not traced(pointer, q, k).found


def p_dropped(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = weights(q, k)
    return p @ v, p.shape[0]


def test_weights_that_are_not_needed_hide_nothing() -> None:
    one = traced(p_dropped, *qkv())
    assert not one.reasons
    assert_described(one)


def changing(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


@pytest.mark.slow
def test_a_number_that_changes_from_call_to_call_is_refused() -> None:
    one = traced(changing, *qkv(), 0.5)
    assert one.sites and math.isclose(one.sites[0].tail[0].args[1], 0.5)  # type: ignore[arg-type]
    (reason,) = traced(changing, *qkv(), 0.5, dynamic=True).reasons
    assert "changes from call to call" in reason


def v_written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = v * 2
    p = weights(q, k)
    w.mul_(3)
    return p @ w


def test_a_value_written_before_it_is_read_is_the_value_that_is_read() -> None:
    assert_described(traced(v_written_between, *qkv()))


def untaken(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.baddbmm(b, q, k.mT, beta=0).softmax(-1) @ v


def test_an_addend_of_beta_0_has_a_gradient_of_zeros() -> None:
    b = torch.randn(B * H, L, L)
    assert traced(untaken, *qkv(), b).sites
    assert traced(untaken, *qkv(), b.requires_grad_()).reasons


def sums_of_sums(x: Tensor, v: Tensor) -> Tensor:
    for _ in range(30):
        x = x + x * 0.5
    return x.softmax(-1) @ v


def test_many_paths_that_lead_to_no_product_are_walked_once() -> None:
    (reason,) = traced(sums_of_sums, *qkv()[:2]).reasons
    assert "are not a product of two tensors" in reason or "is not supported" in reason
