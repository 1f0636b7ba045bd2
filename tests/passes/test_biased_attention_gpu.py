"""On a Hopper GPU: 16-bit attention with a trained bias is put into compiled nets, and right."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sm90 import CAPABILITY
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.passes.attention_split import COUNTERS, biased

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_caches"),
    pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU"),
]
NAME = "_scaled_dot_product_efficient_attention"
BOTH = {f"{NAME} with a bias": 1, f"{NAME}_backward with a bias": 1}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes our kernels at every size, untimed."""
    monkeypatch.setattr(biased.Site, "is_small", lambda _: False)
    monkeypatch.setattr(biased.Site, "gains", lambda _: True)


class Biased(nn.Module):
    """As T5 writes it. per_item: a bias of each item as well."""

    def __init__(self, heads: int, d: int, length: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.d, self.causal = heads, d, causal
        self.parts = nn.ModuleList(nn.Linear(64, heads * d) for _ in range(3))
        self.out = nn.Linear(heads * d, 64)
        self.table = nn.Embedding(32, heads)
        steps = torch.arange(length)
        self.register_buffer("places", (steps[:, None] - steps).abs().clamp(max=31))

    def forward(self, x: Tensor, per_item: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, self.d)).transpose(1, 2) for p in self.parts)
        # Contiguous, as torch's kernel takes it: in eager mode too, which is the measure.
        bias = self.table(self.places).permute(2, 0, 1)[None].contiguous()
        if self.causal:
            bias = bias.masked_fill(
                self.places.new_ones(bias.shape[-2:]).triu(1).bool(), -torch.inf
            )
        if per_item is not None:
            bias = bias + per_item
        made = F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)
        projected: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return projected


def gradients(model: nn.Module, call: Any, inputs: tuple[Tensor, ...], amp: bool) -> list[Tensor]:
    within = torch.autocast("cuda", torch.bfloat16) if amp else contextlib.nullcontext()
    with within:
        y = call(*inputs)
    weight = torch.sin(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype)
    found = torch.autograd.grad(y, [*model.parameters()], weight)
    return [t.detach().clone() for t in (y, *found)]


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "T5": ({"heads": 4, "d": 64}, (3, 128)),
    "lengths that need padding": ({"heads": 4, "d": 64}, (3, 197)),
    "d of 128": ({"heads": 2, "d": 128}, (2, 256)),
    "d of 40, hidden by infinities": ({"heads": 3, "d": 40, "causal": True}, (2, 77)),
}


@pytest.mark.parametrize("per_item", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, per_item: bool, forced: None) -> None:
    """Each at most 1.5 times as far from float64's as eager's under autocast."""
    named, (items, length) = CASES[case]
    torch.manual_seed(0)
    model = Biased(**named, length=length).cuda()
    inputs = (torch.randn(items, length, 64, device="cuda"),)
    if per_item:
        inputs += (torch.randn(items, named["heads"], length, length, device="cuda"),)
    call = torch.compile(model, backend="fx_fuser", options={"strict": True})
    found = gradients(model, call, inputs, amp=True)
    assert counters[COUNTERS] == BOTH
    eager = gradients(model, model, inputs, amp=True)
    wide = copy.deepcopy(model).double()
    exact = gradients(wide, wide, tuple(t.double() for t in inputs), amp=False)
    for value, other, right in zip(found, eager, exact, strict=True):
        error, theirs = (float((t - right).norm()) for t in (value, other))
        assert error <= max(1.5 * theirs, 2e-3 * float(right.norm()))


def test_the_clock_prefers_it() -> None:
    """At T5's sizes."""
    model = Biased(12, 64, 512).cuda()
    x = torch.randn(16, 512, 64, device="cuda")
    call = torch.compile(model, backend="fx_fuser", options={"strict": True})
    gradients(model, call, (x,), amp=True)
    assert counters[COUNTERS] == BOTH
