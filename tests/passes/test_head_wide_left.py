"""Heads in fp32 of operands that were cast up from 16 bits: which stay as written, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, F16, B, Body, K, T, V, labels, model, rows, widened
from helpers import Program
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fuser
from fx_fuser.native import load
from fx_fuser.passes.head_loss.parts import Stays
from fx_fuser.passes.head_loss.wide import Wide, kernels_of


def logits_of(m: Program, x: Tensor) -> Tensor:
    return F.linear(widened(x), widened(m.head.weight))


def crossed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(m, x).view(-1, V), y.view(-1))


def of_one_cast(m: Program, x: Tensor, y: Tensor) -> Tensor:
    weight = widened(m.head.weight) * 2
    return F.cross_entropy(F.linear(widened(x), weight).view(-1, V), y.view(-1))


def of_two_dtypes(m: Program, x: Tensor, y: Tensor) -> Tensor:
    weight = widened(m.head.weight.to(F16))
    return F.cross_entropy(F.linear(widened(x), weight).view(-1, V), y.view(-1))


def written_in_fp32(m: Program, x: Tensor, y: Tensor) -> Tensor:
    wide = widened(x)
    rows = wide.view(-1, K)
    wide.mul_(1.1)
    return F.cross_entropy(F.linear(rows, widened(m.head.weight)), y.view(-1))


def written_behind_the_cast(m: Program, x: Tensor, y: Tensor) -> Tensor:
    hidden = x * 1.0
    wide = widened(hidden)
    hidden.mul_(2)
    logits = F.linear(wide, widened(m.head.weight))
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) + hidden.square().mean()


def written_behind_the_loss(m: Program, x: Tensor, y: Tensor) -> Tensor:
    hidden = x.detach() * 1.0
    loss = F.cross_entropy(
        F.linear(widened(hidden), widened(m.head.weight)).view(-1, V), y.view(-1)
    )
    with torch.no_grad():
        hidden.zero_()
    return loss


def written_bias(m: Program, x: Tensor, y: Tensor) -> Tensor:
    bias = torch.ones(V) * x.detach().float().mean()
    logits = F.linear(widened(x), widened(m.head.weight), bias)
    loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    bias.zero_()
    return loss


def returned(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = logits_of(m, x)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits


def and_an_accuracy(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = logits_of(m, x).view(-1, V)
    return F.cross_entropy(logits, y.view(-1)), (logits.argmax(-1) == y.view(-1)).sum()


def rounded_again(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(m, x).to(BF16).view(-1, V), y.view(-1))


@torch.compiler.allow_in_graph
def contiguous(x: Tensor) -> Tensor:
    """The user's own, by a name of torch's."""
    return x.contiguous() * 1.1


def by_the_users_contiguous(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(contiguous(widened(x)), widened(m.head.weight))
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


LEFT = {
    of_one_cast: "its logits are torch.float32",
    of_two_dtypes: "its logits are torch.float32",
    written_in_fp32: "cast up from",
    written_behind_the_cast: "cast up from",
    written_behind_the_loss: "cast up from",
    written_bias: "written to its operands",
    returned: "others read its fp32 logits",
    and_an_accuracy: "others read its fp32 logits",
    rounded_again: "cast to torch.bfloat16",
    by_the_users_contiguous: "its logits are torch.float32",
}


@pytest.mark.parametrize("body", LEFT, ids=lambda body: body.__name__)
def test_a_loss_that_stays(body: Body) -> None:
    given = model(body, BF16), rows(B, T, dtype=BF16), labels(B, T)
    (head,) = fx_fuser.explain(*given, options={"cpu_ops": True, "strict": True}).heads
    assert LEFT[body] in head.reason


def reason_for(k: int, **options: Any) -> str:
    made = Program(crossed, head=torch.nn.Linear(k, V, bias=False)).to(BF16)
    x = torch.randn(B, T, k, dtype=BF16).requires_grad_()
    options = {"cpu_ops": True, "strict": True, **options}
    (head,) = fx_fuser.explain(made, x, labels(B, T), options=options).heads
    return str(head.reason)


@pytest.mark.parametrize("k, said", [(12, "not a multiple of 16 bytes"), (24, "")])
def test_rows_that_tma_does_not_copy_stay(k: int, said: str) -> None:
    reason = reason_for(k)
    assert said in reason and bool(reason) is bool(said)


def test_where_the_user_wants_ieee_products_it_stays() -> None:
    assert "option 'fp32'" in reason_for(K, fp32="ieee")


@pytest.mark.parametrize("by_library", [False, True])
def test_other_gpus_than_hopper(by_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no kernel for exact products."""
    with FakeTensorMode():
        x = torch.empty(B * T, K, dtype=BF16, device="cuda")
    node = torch.fx.Graph().placeholder("x")
    node.meta["example_value"] = x
    wide = Wide(BF16, node, node, (node, node), by_library)
    monkeypatch.setattr(load, "available", lambda _: None)
    monkeypatch.setattr(load, "runs_on", lambda spec, _: spec.family.arch is None)
    if by_library:
        assert kernels_of(wide) == []
    else:
        with pytest.raises(Stays, match="only Hopper"):
            kernels_of(wide)
