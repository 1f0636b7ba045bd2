"""Additive masks chosen by what the graph makes ahead, as of transformers' T5: formed once for all
samples where the choice is always the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attending import BF16, Attend, B, D, H, S, by_formula, check, compiled, tensors
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_fuser.ops.attention import MASK
from fx_fuser.passes.masks import Reader

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


def into_what_is_given(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    of = bias(m).detach()
    given = torch.empty(S, S, B, H, dtype=m.dtype).permute(2, 3, 0, 1)
    torch.where(shown(), of, of.exp(), out=given)
    return sdpa(q, k, v, given)


def wider_than_the_bias(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, torch.where(shown(), bias(m), torch.full((1,), -1e30)).to(q.dtype))


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
        (into_what_is_given, B),
        (wider_than_the_bias, B),
    ],
)
def test_a_mask_of_one_choice(
    attend: Attend, samples: int, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, simplify = list[Node](), Reader.simplify

    def seen(self: Reader, module: GraphModule, graph: Graph, on_cpu: bool = False) -> Any:
        masks = simplify(self, module, graph, on_cpu)
        found.extend(n for n in graph.nodes if n.target is MASK)
        return masks

    monkeypatch.setattr(Reader, "simplify", seen)
    with torch.set_grad_enabled(trains):
        check(
            by_formula(attend), tensors(*[(B, H, S, D)] * 3, (S, S, H)), compiled(attend), factor=4
        )
    assert len(found) == 1
    formed = found[0].meta["example_value"]
    assert (1 if formed.stride(0) == 0 else B) == samples
