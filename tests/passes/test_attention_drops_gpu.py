"""On a Hopper GPU: fp32 attention that drops weights, in a training step, is by our kernels if
faster, and drops the same in forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sm90 import CAPABILITY
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fx_fuser.kernels import attention
from fx_fuser.passes.attention_split import COUNTERS, dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_caches"),
    pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU"),
]
NAME = "_scaled_dot_product_efficient_attention"
BOTH = {NAME: 1, f"{NAME}_backward": 1}
P = 0.25


class Attending(nn.Module):
    """Where its values are rows of the identity, weights can be read, and what is dropped."""

    def __init__(self, checkpoints: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.checkpoints, self.causal = checkpoints, causal
        self.register_buffer("one", torch.eye(64))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(q @ self.one, k, v, None, P, self.causal)
        return made * 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.attend(q, k, v)
        made: Tensor = checkpoint(self.attend, q, k, v, use_reentrant=False)
        return made


def heads(*size: int) -> Tensor:
    batch, count, rows, d = size
    return torch.randn(batch, rows, count, d, device="cuda").transpose(1, 2)


def check(found: list[Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Tensor:
    """out and gradients, of causal attention with the same weights dropped; which ones."""
    rows = q.shape[2]
    hidden = torch.ones(rows, rows, device="cuda").triu(1).bool()
    dropped = (found[0][..., :rows] == 0) & ~hidden
    steps = attention.DROPOUT_STEPS
    share = steps / (steps - attention.steps_of(P))
    factors = torch.where(dropped, 0.0, share)
    made = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        scores = (leaves[0] @ leaves[1].mT * 0.125).masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) * factors.to(dtype)) @ leaves[2]
        grads = torch.autograd.grad(out, leaves, d_out.to(dtype))
        made.append([out.detach(), *grads])
    for ours, other, right in zip(found, *made, strict=True):
        error, theirs = (float((t - right).norm()) for t in (ours, other))
        assert error <= max(1.5 * theirs, 2e-6 * float(right.norm()))
    return dropped


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step(checkpoints: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_gains", lambda pair, strict: True)
    q, k = heads(2, 3, 40, 64), heads(2, 3, 40, 64)
    v = torch.eye(40, 64, device="cuda").repeat(2, 3, 1, 1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"strict": True, "mode": mode}
    model = torch.compile(Attending(checkpoints).cuda(), backend="fx_fuser", options=options)
    masks = []
    for _ in range(5):  # the first ones warm up, the others replay
        out = model(*leaves)
        d_out = torch.randn_like(out)
        out.backward(d_out)
        found = [out.detach().clone(), *(t.grad for t in leaves)]
        masks.append(check(found, q, k, v, d_out))
        for leaf in leaves:
            leaf.grad = None
    assert counters[COUNTERS] == BOTH
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))


@pytest.mark.parametrize("causal", [False, True])
def test_the_clock_prefers_it(causal: bool) -> None:
    """As of 2026-11-28 both took a quarter of torch's time."""
    model = torch.compile(
        Attending(causal=causal).cuda(), backend="fx_fuser", options={"strict": True}
    )
    leaves = [heads(4, 12, 1024, 64).requires_grad_() for _ in range(3)]
    model(*leaves).sum().backward()
    assert counters[COUNTERS] == BOTH
