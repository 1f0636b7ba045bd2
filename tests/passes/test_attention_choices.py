"""Additive masks chosen by what the graph makes ahead, as of transformers' T5: formed once for all
samples where the choice is always the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attending import BF16, Attend, B, D, H, S, by_formula, check, compiled, formed_masks, tensors
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Graph
from torch.nn.attention import SDPBackend, sdpa_kernel

sdpa = F.scaled_dot_product_attention
LOWEST = torch.finfo(BF16).min


def shown(first: int = 0) -> Tensor:
    """[B, 1, S, S]: of keys from the first on."""
    return (torch.arange(S) >= first).expand(B, 1, S, S)


def bias(m: Tensor) -> Tensor:
    return m.permute(2, 0, 1)[None]


def always_the_bias(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.where(shown(), bias(m), torch.tensor(LOWEST, dtype=BF16)))


def never_the_other(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.where(~shown(), bias(m.detach()).exp(), bias(m)))


def nothing_is_filled(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    filled = bias(m).expand(B, H, S, S).masked_fill(~shown(), LOWEST)
    return sdpa(q[..., :4], k[..., :4], v, filled)  # no kernel takes such heads with a mask


def in_two_layers(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    of = bias(m)
    lowest = torch.tensor(LOWEST, dtype=BF16)
    q = sdpa(q, k, v, torch.where(shown(), of, lowest))
    return sdpa(q, k, v, torch.where(shown(), of, lowest))


def one_key_is_hidden(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.where(shown(1), bias(m), torch.tensor(LOWEST, dtype=BF16)))


def by_an_input(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    some = (m[None, None, ..., 0] > -100).expand(B, 1, S, S)
    return sdpa(q, k, v, torch.where(some, bias(m), torch.tensor(LOWEST, dtype=BF16)))


def written_afterwards(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    of = (m * 2).permute(2, 0, 1)[None]
    chosen = torch.where(shown(), of, torch.tensor(LOWEST, dtype=BF16))
    of.mul_(0.0)
    return sdpa(q, k, v, chosen)


def chosen_anew(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    choice = torch.ones(B, 1, S, S, dtype=torch.bool)
    chosen = torch.where(choice, bias(m.detach()), bias(m.detach().exp()))
    choice.zero_()
    return sdpa(q, k, v, chosen)


def the_other_is_trained(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.where(shown(), bias(m.detach()), bias(m)))


def without_gradients(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    of = bias(m * 1.0)
    with torch.no_grad():
        chosen = torch.where(shown(), of, torch.tensor(LOWEST, dtype=BF16))
    return sdpa(q, k, v, chosen)


def layers_without_gradients(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.where(shown(), bias(m), torch.tensor(LOWEST, dtype=BF16))
        q = sdpa(q, k, v, mask)
        q = sdpa(q, k, v, mask)
    return q * v


def into_what_is_given(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    of = bias(m).detach()
    given = torch.empty(S, S, B, H, dtype=m.dtype).permute(2, 3, 0, 1)
    torch.where(shown(), of, of.exp(), out=given)
    return sdpa(q, k, v, given)


def wider_than_the_bias(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.where(shown(), bias(m), torch.full((1,), -1e30)).to(q.dtype))


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "attend, samples",
    [
        (always_the_bias, 1),
        (never_the_other, 1),
        (nothing_is_filled, 1),
        (in_two_layers, 1),
        (one_key_is_hidden, B),
        (by_an_input, B),
        (written_afterwards, B),
        (chosen_anew, B),
        (the_other_is_trained, B),
        (without_gradients, None),
        (layers_without_gradients, None),
        (into_what_is_given, B),
        (wider_than_the_bias, B),
    ],
)
def test_a_mask_of_one_choice(
    attend: Attend, samples: int | None, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = formed_masks(monkeypatch)
    with torch.set_grad_enabled(trains):
        inputs = tensors(*[(B, H, S, D)] * 3, (S, S, H))
        ours, eager = compiled(attend)(*inputs), attend(*inputs)
        assert ours.requires_grad == eager.requires_grad
        if trains:
            graded = (
                torch.autograd.grad(y.sum(), inputs, allow_unused=True) for y in (ours, eager)
            )
            assert [g is None for g in next(graded)] == [g is None for g in next(graded)]
        found.clear()
        check(
            by_formula(attend), tensors(*[(B, H, S, D)] * 3, (S, S, H)), compiled(attend), factor=4
        )
    assert len(found) == 1
    formed = found[0].meta["example_value"]
    if samples is not None:
        assert (1 if formed.stride(0) == 0 else B) == samples


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mask", ["removed", "formed"])
def test_a_result_that_is_written_to_keeps_its_attention(inner: str, mask: str) -> None:
    """torch's formula allows that in training, and a kernel, whose backward reads its result, does
    not."""

    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        y = sdpa(q, k, v, torch.ones(S, S, dtype=torch.bool) if mask == "removed" else bias(m))
        return y.mul_(2.0) * 1.0

    inputs = tensors(*[(B, H, S, D)] * 3, (S, S, H))
    with sdpa_kernel(SDPBackend.MATH):
        run = compiled(attend, inner=inner)
        check(by_formula(attend), inputs, run, factor=4)
    assert not counters["fx_fuser_masks"] or set(counters["fx_fuser_masks"]) == {"formula"}


def test_what_is_written_outside_is_told() -> None:
    """As autograd tells it of torch's own kernel."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, torch.ones(S, S, dtype=torch.bool))

    y = compiled(attend)(*tensors(*[(B, H, S, D)] * 3))
    assert counters["fx_fuser_masks"] == {"open": 1}
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().square().sum().backward()


@pytest.mark.slow
def test_layers_without_gradients_share_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    found = formed_masks(monkeypatch)
    compiled(layers_without_gradients)(*tensors(*[(B, H, S, D)] * 3, (S, S, H)))
    assert len(found) == 1 and found[0].meta["example_value"].stride(0) == 0


@pytest.mark.slow
def test_inductors_caches_know_our_sources_where_masks_alone_were_edited() -> None:
    tags: list[str] = []

    def note(graph: Graph) -> None:
        tags.append(torch.compiler.config.cache_key_tag)  # type: ignore[attr-defined]

    run = compiled(always_the_bias, inner="inductor", pre_grad_custom_pass=note)
    run(*tensors(*[(B, H, S, D)] * 3, (S, S, H)))
    assert counters["fx_fuser_masks"] == {"form": 1}
    assert tags and all("fx_fuser:" in tag for tag in tags)
