"""fp32 attention written by hand, in all its forms, becomes torch's fused one: values, gradients
and strides beside eager mode. What stays: test_by_hand_stays.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand_graphs import B, D, H, L, check, qkv
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOWEST = torch.finfo(torch.float32).min
INF = math.inf
sdpa = F.scaled_dot_product_attention


def lower() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).tril()


def upper(value: float = -INF) -> Tensor:
    return torch.full((L, L), value).triu(1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * D**-0.5


# ---- forms, of [B, H, L, D] where nothing else is said ------------------------------------------


def no_tail(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(scores(q, k).softmax(dim=3), v)


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
    return torch.matmul(nn.functional.softmax(s, dim=-1), v).permute(0, 2, 1, 3).flatten(2)


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q * D**-0.25) @ (k * D**-0.25).transpose(3, 2)
    return (torch.softmax(s, -1) @ v).transpose(1, 2).reshape(B, L, H * D)


def transposed_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = k.permute(0, 1, 3, 2)
    return (0.3 * (q @ keys)).softmax(-1) @ v


def transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(2, 3)) * 0.25
    p = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
    p = F.dropout(p, p=0.0, training=True)
    return torch.matmul(p, v).transpose(1, 2).contiguous().reshape(B, L, -1).contiguous()


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(lower() == 0, -INF).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    value = torch.full([], LOWEST, dtype=torch.float32)
    return torch.where(lower()[None, None], scores(q, k), value).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = upper(LOWEST)[None, None].expand(B, 1, L, L)
    return (scores(q, k) + mask[:, :, :, :L]).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s /= 3
    s += upper()
    s.masked_fill_(~lower(), -INF)
    return s.softmax(-1) @ v


def shown_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(L)
    mask = torch.zeros(L, L).masked_fill(at[None, :] < 0, LOWEST)
    return (scores(q, k) + mask).softmax(-1) @ v


def added_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = upper().to(q.dtype).expand(B * H, L, L)
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    s = torch.baddbmm(mask, q, k.transpose(1, 2), beta=1, alpha=D**-0.5)
    return torch.bmm(s.softmax(-1), v).view(B, H, L, D)


def unread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, L, D) for t in (q, k, v))
    empty = torch.full((B * H, L, L), math.nan, dtype=q.dtype)
    s = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(s.softmax(-1), v)


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [B, L, H, D]."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    s = torch.where(lower(), s, LOWEST)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


def einsums_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [L, B, H, D]."""
    s = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.3
    return torch.einsum("bnij,jbnd->ibnd", s.softmax(-1), v)


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [B, L, H * D]."""
    q, k, v = (t.view(B, L, H, D).transpose(1, 2).reshape(B * H, L, D) for t in (q, k, v))
    p = torch.bmm(q * 0.3, k.transpose(1, 2)).view(B, H, L, L).softmax(-1)
    o = torch.bmm(p.view(B * H, L, L), v)
    return o.view(B, H, L, D).transpose(1, 2).reshape(B, L, H * D)


def packed(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).reshape(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return scaled(q, k, v).transpose(1, 2).reshape(B, L, H * D)


def of_itself(x: Tensor) -> Tensor:
    return scaled(x, x, x)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t[:, :, None].expand(B, 2, 2, L, D).reshape(B, 4, L, D) for t in (k, v))
    return scaled(q, k, v)


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return filled(q, k, v)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divided(q, k, v)


def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, D, L], as CoAtNet has it."""
    return v.mT @ scores(q, k).softmax(-1).mT


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of five dimensions."""
    return scores(q, k).softmax(-1) @ v


def used_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o = scaled(q, k, v)
    return o.transpose(1, 2), o + q


def one_behind_the_other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = scaled(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)
    return filled(o, k, v)


def written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.clone()
    k[:, :, :2] = 1.0
    return scaled(q, k, v)


def within_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return checkpoint(filled, q, k, v, use_reentrant=False)


Inputs = Callable[[bool], list[Tensor]]


def of(*shape: int, keys: tuple[int, ...] = ()) -> Inputs:
    return lambda trains: qkv(*shape, keys=keys, trains=trains)


def projected(trains: bool) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, L, 16, requires_grad=trains), torch.randn(16, 3 * H * D)]


def rows_first(trains: bool, gap: int = 0) -> list[Tensor]:
    """[B, H, L, D], as a projection or, with gaps, a slice of one leaves them."""
    torch.manual_seed(0)
    wide = [torch.randn(B, L, H, D + gap) for _ in range(3)]
    return [t[..., :D].transpose(1, 2).detach().requires_grad_(trains) for t in wide]


FORMS: dict[str, tuple[Callable[..., Any], Inputs, bool]] = {  # and is it causal?
    "no tail": (no_tail, of(), False),
    "scaled": (scaled, of(), False),
    "divided": (divided, of(), False),
    "q and k scaled before": (scaled_before, of(), False),
    "k transposed before": (transposed_before, of(), False),
    "as transformers": (transformers, of(), False),
    "keys filled": (filled, of(), True),
    "chosen by where": (chosen, of(), True),
    "a mask added": (added, of(), True),
    "in place": (in_place, of(), True),
    "a mask that shows all": (shown_to_all, of(), False),
    "baddbmm with a mask": (added_before, of(), True),
    "baddbmm that reads nothing": (unread, of(), False),
    "einsums": (einsums, of(B, L, H, D), True),
    "einsums of rows": (einsums_of_rows, of(L, B, H, D), False),
    "bmm of views": (batched, of(B, L, H * D), False),
    "packed": (packed, projected, False),
    "q is k is v": (of_itself, lambda trains: qkv(trains=trains)[:1], False),
    "heads of keys expanded": (grouped, of(B, 4, L, D, keys=(B, 2, L, D)), False),
    "heads of keys repeated": (interleaved, of(B, 4, L, D, keys=(B, 2, L, D)), True),
    "one head of keys": (one_head, of(keys=(B, 1, L, D)), False),
    "one sample of keys": (scaled, of(keys=(1, H, L, D)), False),
    "values first": (values_first, of(), False),
    "five dimensions": (windows, of(B, 2, H, L, D), False),
    "three dimensions": (windows, of(B, L, D), False),
    "two dimensions": (windows, of(L, D), False),
    "fewer queries": (scaled, of(B, H, 5, D, keys=(B, H, L, D)), False),
    "one query": (scaled, of(B, H, 1, D, keys=(B, H, L, D)), False),
    "one sample of one head": (scaled, of(1, 1, L, D), False),
    "rows first": (scaled, rows_first, False),
    "rows with gaps": (scaled, lambda trains: rows_first(trains, 4), False),
    "result used twice": (used_twice, of(), False),
    "keys written before": (written_before, of(), False),
    "within a checkpoint": (within_a_checkpoint, of(), True),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form(name: str) -> None:
    attend, inputs, causal = FORMS[name]
    seen = check(attend, inputs(True))
    (call,) = seen.calls
    assert not seen.softmaxes and call.kwargs["is_causal"] is causal


@pytest.mark.parametrize("name", ["no tail", "in place", "heads of keys repeated"])
def test_a_form_in_inference(name: str) -> None:
    attend, inputs, _ = FORMS[name]
    seen = check(attend, inputs(False))
    assert len(seen.calls) == 1 and not seen.softmaxes


def test_one_behind_the_other() -> None:
    """Where the second reads what lay within the first, it stays."""
    seen = check(one_behind_the_other, qkv(trains=True))
    assert len(seen.calls) == len(seen.softmaxes) == 1
    assert seen.reasons == ["a part of it belongs to another attention"]


def test_what_only_it_read_is_gone() -> None:
    """A view of a Linear's result, left beside, would keep a tail from it."""
    (graph,) = check(grouped, FORMS["heads of keys expanded"][1](False)).graphs
    dead = [n for n in graph.nodes if n.op.startswith("call") and not n.users]
    assert not dead and not graph.find_nodes(op="call_method", target="reshape")


def test_a_mask_that_layers_share() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = upper()
        for _ in range(3):
            q = (scores(q, k) + mask).softmax(-1) @ v
        return q

    seen = check(layers, qkv(trains=True))
    assert len(seen.calls) == 3 and not seen.softmaxes
    assert not seen.graphs[0].find_nodes(op="call_function", target=torch.full)


def test_a_head_of_keys_is_read_as_one() -> None:
    """`passes.attention_split` reads k and v as they were before they are repeated for heads."""
    seen = check(interleaved, FORMS["heads of keys repeated"][1](False))
    (call,) = seen.calls
    for operand in call.args[1:]:
        repeated = operand.args[0]
        assert (repeated.target, repeated.args[0].target) == ("expand", "unsqueeze")
        assert operand.target == "flatten" and repeated.args[0].args[1] == 2


def test_strides_that_show_are_restored() -> None:
    """The fused call's are those of q, which a projection leaves with rows before heads."""
    seen = check(scaled, rows_first(True))
    (call,) = seen.calls
    assert not call.meta["example_value"].is_contiguous()
    assert [reader.target for reader in call.users] == ["contiguous"]
    seen = check(divided, rows_first(True))  # where nobody sees them
    assert not seen.graphs[0].find_nodes(op="call_method", target="contiguous")


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(0,), (0, 1)])
def test_dynamic_sizes(dims: tuple[int, ...]) -> None:
    """Of [B, L, H * D]: the batch alone, or the length too."""

    def attend(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q, k, v = (t.view(batch, rows, H, D).transpose(1, 2) for t in (x, y, z))
        return scaled(q, k, v).transpose(1, 2).reshape(batch, rows, H * D)

    inputs = qkv(B, L, H * D)
    for tensor in inputs:
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)
    seen = check(attend, inputs)
    (call,) = seen.calls
    value = call.args[0].meta["example_value"]
    assert not isinstance(value.shape[0], int) and not seen.softmaxes


# ---- calls of torch's that it computes by the formula --------------------------------------------


def grouped_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def masked_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=lower(), scale=0.3, enable_gqa=True)


CALLS: dict[str, tuple[Callable[..., Any], Inputs, bool]] = {
    "grouped heads": (grouped_call, of(B, 4, L, D, keys=(B, 2, L, D)), True),
    "grouped heads and a mask": (masked_call, of(B, 4, L, D, keys=(B, 2, L, D)), True),
    "three dimensions": (sdpa, of(B, L, D), False),
    "five dimensions": (sdpa, of(B, 2, H, L, D), False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_torch_computes_by_the_formula(name: str) -> None:
    attend, inputs, causal = CALLS[name]
    seen = check(attend, inputs(True))
    ((mask,),) = [found.of_torch for found in seen.found]
    assert mask.is_edit and mask.done == "form"
    (call,) = seen.calls
    query, key, value = (n.meta["example_value"] for n in call.args)
    assert query.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    assert call.kwargs["is_causal"] is causal and "enable_gqa" not in call.kwargs


def test_a_call_that_a_kernel_takes_is_not_looked_at() -> None:
    seen = check(sdpa, qkv())
    assert not seen.found[0].of_torch and not seen.found[0].by_hand
    assert len(seen.calls[0].args) == 3 and not seen.calls[0].kwargs


MASKS: dict[str, Callable[[], Tensor] | None] = {
    "none": None,
    "causal": upper,
    "causal, of bool": lambda: ~lower(),
    "all shown": lambda: upper(0.0),
}
OTHER_MASKS: dict[str, Callable[[], Tensor]] = {"window": lambda: upper().tril(3)}


def multi_head(kind: str, weights_read: bool = False, **given: Any) -> Callable[..., Any]:
    make = {**MASKS, **OTHER_MASKS}[kind]

    def attend(x: Tensor, w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> Any:
        mask = None if make is None else make()
        mask = mask if mask is None or mask.dtype is torch.bool else mask.to(x.dtype)
        made = F.multi_head_attention_forward(
            x, x, x, 16, 2, w, b, None, None, False, given.pop("dropout_p", 0.0), w_out, b_out,
            attn_mask=mask, **given,
        )  # fmt: skip
        return made if weights_read else made[0]

    return attend


def of_multi_head(trains: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (L, B, 16), (48, 16), (48,), (16, 16), (16,)
    return [torch.randn(shape, requires_grad=trains) for shape in shapes]


@pytest.mark.parametrize("kind", MASKS)
def test_multi_head_attention_whose_weights_nobody_reads(kind: str) -> None:
    seen = check(multi_head(kind), of_multi_head())
    (node,) = seen.graphs[0].find_nodes(op="call_function", target=F.multi_head_attention_forward)
    assert node.kwargs["need_weights"] is False
    assert node.kwargs["is_causal"] is kind.startswith("causal")
    (mask,) = seen.found[0].of_torch
    assert mask.is_edit and mask.reason == "it returns weights that nothing reads"
