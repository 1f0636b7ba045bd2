"""Attention written by hand that stays as it is written, and why. What is rewritten:
test_by_hand.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand_graphs import B, D, H, L, check, qkv, run
from test_by_hand import INF, LOWEST, lower, multi_head, of_multi_head, rows_first, scores, upper
from torch import Tensor

Attend = Callable[..., Any]
FP16 = torch.finfo(torch.float16).min


def masked(make: Callable[[], Tensor]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores(q, k) + make()).softmax(-1) @ v

    return attend


def hiding(make: Callable[[], Tensor], value: float = -INF) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(make(), value).softmax(-1) @ v

    return attend


def one_more() -> Tensor:
    hidden = ~lower()
    hidden[3, 4] = False
    return hidden


def one_fewer() -> Tensor:
    hidden = ~lower()
    hidden[L - 1, 0] = True
    return hidden


def whole_rows() -> Tensor:
    """The first query sees no key: NaN."""
    return ~lower().tril(-1)


def window() -> Tensor:
    return ~(lower() & lower().T.tril(3))


def by_sample() -> Tensor:
    return torch.stack([~lower(), torch.zeros(L, L, dtype=torch.bool)])[:, None]


def by_head() -> Tensor:
    return torch.stack([~lower(), ~lower(), ~lower().tril(-1)])


MASKS: dict[str, tuple[Attend, str]] = {
    "one key more": (hiding(one_more), "not causal"),
    "one key fewer": (hiding(one_fewer), "not causal"),
    "without the diagonal": (hiding(whole_rows), "not causal"),
    "a window": (hiding(window), "not causal"),
    "the other half": (hiding(lambda: ~lower().T), "not causal"),
    "shown where it should be hidden": (hiding(lower), "not causal"),
    "by sample": (hiding(by_sample), "not causal"),
    "by head": (hiding(by_head), "not causal"),
    "-1e9": (hiding(lambda: ~lower(), -1e9), "have a score of -1e+09"),
    "-1e4 is added": (masked(lambda: upper(-1e4)), "other values than zero and the lowest"),
    "ALiBi": (masked(lambda: torch.arange(L) * 0.5), "other values than zero and the lowest"),
    "fp16's least": (masked(lambda: upper(FP16).half()), "other values than zero and the lowest"),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_not_surely_causal_or_open(name: str) -> None:
    stays(MASKS[name][0], qkv(), MASKS[name][1])


def stays(attend: Attend, inputs: Sequence[Any], why: str, **compile: Any) -> None:
    """One attention; the graph is as the user wrote it."""
    seen, _ = run(attend, *inputs, **compile)
    (reason,) = seen.reasons
    assert why in reason
    assert seen.is_as_written and not seen.calls


# ---- masks and tails -----------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) + mask).softmax(-1) @ v


def filled_by_what_is_given(q: Tensor, k: Tensor, v: Tensor, value: Tensor) -> Tensor:
    return torch.where(lower(), scores(q, k), value).softmax(-1) @ v


def filled_by_less(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(lower(), scores(q, k), torch.full([], -1e9)).softmax(-1) @ v


def scaled_behind_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + upper(LOWEST)) / 8).softmax(-1) @ v


def from_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As with a cache: the last query sees all keys."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(
        1 + k.shape[-2] - q.shape[-2]
    )
    return scores(q, k).masked_fill(hidden, -INF).softmax(-1) @ v


def by_a_tensor(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


def by(scale: float) -> Attend:
    return lambda q, k, v: (q @ k.mT * scale).softmax(-1) @ v


def divided_by(scale: float) -> Attend:
    return lambda q, k, v: (q @ k.mT / scale).softmax(-1) @ v


def a_number_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (8.0 / (q @ k.mT)).softmax(-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(scores(q, k) / 30) * 30).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + 1.0).softmax(-1) @ v


def subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) - upper(0.0)).softmax(-1) @ v


def times_beta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.baddbmm(upper().expand(B, L, L), q, k.mT, beta=2.0).softmax(-1) @ v


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), 0.1) @ v


OF_THREE = qkv(B, L, D)
TAILS: dict[str, tuple[Attend, Sequence[Any], str]] = {
    "a mask that is given": (given, [*qkv(), upper()], "its mask depends on"),
    "a bias": (given, [*qkv(), torch.zeros(H, L, L)], "its mask depends on"),
    "filled by what is given": (
        filled_by_what_is_given, [*qkv(), torch.tensor(-INF)], "a score of `value`, not known"
    ),
    "filled by less than all": (filled_by_less, qkv(), "not known to be lowest"),
    "a scale behind the mask": (scaled_behind_the_mask, qkv(), "scaled after its mask"),
    "causal from the last key": (
        from_the_last_key, qkv(B, H, 5, D, keys=(B, H, L, D)), "5 queries and 12 keys"
    ),
    "a scale that is a tensor": (by_a_tensor, [*qkv(), torch.tensor(0.3)], "mul of its scores"),
    "a scale for each head": (by_a_tensor, [*qkv(), torch.ones(H, 1, 1)], "mul of its scores"),
    "a negative scale": (by(-0.3), qkv(), "its scale is -0.3"),
    "a scale of 0": (by(0.0), qkv(), "its scale is 0"),
    "a scale that fp32 does not hold": (by(1e-45), qkv(), "its scale is 1e-45"),
    "an infinite scale": (by(INF), qkv(), "its scale is inf"),
    "divided by 0": (divided_by(0.0), qkv(), "its scale is inf"),
    "a number divided by scores": (a_number_divided, qkv(), "is not supported between q"),
    "soft-capped": (soft_capped, qkv(), "tanh is applied to its scores"),
    "a number added": (biased, qkv(), "add of its scores takes something other than one mask"),
    "subtracted": (subtracted, qkv(), "sub is applied to its scores"),
    "beta": (times_beta, OF_THREE, "add of its scores takes something other than one mask"),
    "dropout": (dropping, qkv(), "it has dropout"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_a_tail(name: str) -> None:
    stays(*TAILS[name])


# ---- readers, writers and what is not an attention of its own ------------------------------------


def weights_read(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = scores(q, k).softmax(-1)
    return p @ v, p


def scores_read(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.amax(-1)


def largest_subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-2) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(1) @ v


def heads_mixed(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return F.linear(p.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2) @ v


def keys_added(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = torch.cat([scores(q, k), sink.expand(B, H, L, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1.0
    s = scores(q, k)
    k.mul_(2)
    return s.softmax(-1) @ k


def scores_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    first = s[0]
    s += upper()
    return s.softmax(-1) @ v + first.sum()


def under_no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        p = scores(q, k).softmax(-1)
    return p @ v


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(plain)(q, k, v)


ALONE: dict[str, tuple[Attend, Sequence[Any], str]] = {
    "weights are read": (weights_read, qkv(), "is also returned"),
    "scores are read": (scores_read, qkv(), "is also used by amax"),
    "the largest is subtracted": (largest_subtracted, qkv(), "amax"),
    "softmax over queries": (over_queries, qkv(), "not sum over the keys"),
    "softmax over heads": (over_heads, qkv(), "not over the keys"),
    "heads are mixed": (heads_mixed, [*qkv(), torch.eye(H)], "mixes heads after the softmax"),
    "keys are added": (keys_added, [*qkv(), torch.zeros(1)], "adds columns to its scores"),
    "k is written to": (written_between, qkv(), "may be changed in place"),
    "scores are written to": (scores_written, qkv(), "also"),
    "under no_grad": (under_no_grad, qkv(trains=True), "grad mode"),
    "vmap": (mapped, qkv(), "functorch"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_does_not_stand_alone(name: str) -> None:
    stays(*ALONE[name])


def written_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = plain(q, k, v)
    o.mul_(2)
    return o


def test_a_result_that_is_written_to() -> None:
    """A kernel's backward reads the result. In inference there is none."""
    stays(written_afterwards, qkv(trains=True), "its result is written to")
    assert len(check(written_afterwards, qkv()).calls) == 1


def fully_hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hiding(whole_rows)(q, k, v)


def test_a_row_that_sees_no_key_stays_nan() -> None:
    seen = check(fully_hidden, qkv())
    assert not seen.calls and plain(*qkv()).isfinite().all()
    assert fully_hidden(*qkv())[:, :, 0].isnan().all()


# ---- dtypes and layouts --------------------------------------------------------------------------


def softmax_in_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scores(q, k), -1, dtype=torch.float64).float() @ v


def cast_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).float().softmax(-1).to(q.dtype)) @ v


def of_dtype(dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in qkv()]


def last_apart() -> list[Tensor]:
    q, k, v = qkv()
    return [q, k.mT.contiguous().mT, v]


def other_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of keys come in turns: 0, 1, 0, 1."""
    return plain(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def shared_across() -> list[Tensor]:
    """A head of keys is for two of queries, one of values for two others."""
    return [torch.randn(B, H, *groups, L, D) for groups in ((2, 2), (1, 2), (2, 1))]


SIZES = "no kernel supports sizes of"
LAYOUT = "does not have rows of whole 16-byte vectors"
KINDS: dict[str, tuple[Attend, Sequence[Any], str]] = {
    "float64": (plain, of_dtype(torch.float64), "is torch.float64"),
    "bf16": (plain, of_dtype(torch.bfloat16), "is torch.bfloat16"),
    "a softmax in fp32 of bf16": (cast_up, of_dtype(torch.bfloat16), "is torch.bfloat16"),
    "a softmax in float64": (softmax_in_double, qkv(), "is torch.float64"),
    "heads of 136": (plain, qkv(B, H, L, 136), SIZES),
    "heads of 12": (plain, qkv(B, H, L, 12), SIZES),
    "values of other sizes": (plain, [*qkv()[:2], torch.randn(B, H, L, 16)], SIZES),
    "rows apart by no vector": (plain, rows_first(False, 1), LAYOUT),
    "elements that are not adjacent": (plain, last_apart(), LAYOUT),
    "one sample of queries for all": (plain, [qkv(1, H, L, D)[0], *qkv()[1:]], "repeated"),
    "heads shared across": (plain, shared_across(), "not shared by neighbouring query heads"),
    "more heads than a grid has": (plain, qkv(2, 2**16, 2, 8), "more than torch's kernel accepts"),
    "heads that come in turns": (other_heads, qkv(B, 4, L, D, keys=(B, 2, L, D)), "needs a copy"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_and_layouts(name: str) -> None:
    stays(*KINDS[name])


def test_autocast() -> None:
    """In 16 bits torch's own is another one."""
    with torch.autocast("cpu", torch.bfloat16):
        stays(plain, qkv(), "is torch.bfloat16")


def test_heads_whose_number_is_dynamic() -> None:
    stays(plain, qkv(), "its number of heads is dynamic", dynamic=True)


def test_heads_of_a_dynamic_size() -> None:
    inputs = qkv()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 3)
    stays(plain, inputs, "of constant sizes")


def test_a_mask_of_a_dynamic_length() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return scores(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v

    inputs = qkv()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)
    stays(attend, inputs, "dynamic")


MULTI_HEAD: dict[str, tuple[Attend, str]] = {
    "dropout": (multi_head("none", dropout_p=0.1), "it has dropout"),
    "a mask of keys": (
        multi_head("none", key_padding_mask=torch.zeros(B, L, dtype=torch.bool)), "key padding mask"
    ),
    "a mask that is no such": (multi_head("window"), "not causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_multi_head_attention(name: str) -> None:
    attend, why = MULTI_HEAD[name]
    seen, _ = run(attend, *of_multi_head())
    (mask,) = seen.found[0].of_torch
    assert why in mask.reason and mask.done == "formula" and seen.is_as_written


@pytest.mark.parametrize("weights_read", [True, False])
def test_multi_head_attention_that_is_not_looked_at(weights_read: bool) -> None:
    """Its weights are read, or it makes none."""
    attend = multi_head("causal", weights_read, need_weights=weights_read)
    seen, _ = run(attend, *of_multi_head())
    assert not seen.found[0].of_torch and seen.is_as_written
