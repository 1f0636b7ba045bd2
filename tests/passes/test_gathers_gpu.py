"""On a GPU: DeBERTa's gathers run by fx_fuser's kernels in compiled nets, and right."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sm90 import gpu_from_sm80
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.sm90 import relative
from fx_fuser.passes.by_hand import clock
from fx_fuser.planning import contest

pytestmark = pytest.mark.usefixtures("own_caches")
MOST = 2  # times eager's error, the contract in 16 bits


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the kernels take is rewritten, at every size."""
    monkeypatch.setattr(clock, "_FEW_SCORES", 0)
    monkeypatch.setattr(contest, "gains", lambda ours, theirs: True)


def trained(net: nn.Module, call: Callable[..., Any], x: Tensor, amp: bool) -> list[Tensor]:
    net.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if amp else contextlib.nullcontext():
        y = call(x).last_hidden_state
    y.double().pow(3).mean().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@gpu_from_sm80
@pytest.mark.parametrize("buckets", [-1, 32])
def test_deberta(buckets: int) -> None:
    """With 200 tokens, more than it has positions; 32: those far away share one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=256,
        vocab_size=50, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=buckets, max_relative_positions=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    net = transformers.DebertaV2Model(config).cuda().train()
    x = torch.randint(50, (4, 200), device="cuda")
    counters.clear()
    compiled = torch.compile(net, backend="fx_fuser", options={"strict": True})
    mine = trained(net, compiled, x, amp=True)
    assert counters["fx_fuser_masks"]["gather"] == 4
    theirs = trained(net, net, x, amp=True)
    wide = copy.deepcopy(net).double()
    exact = trained(wide, wide, x, amp=False)
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert relative(a, c) <= MOST * max(relative(b, c), 1e-4)
