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

from fx_fuser.kernels import attention as fp32
from fx_fuser.passes.attention_split import COUNTERS, biased
from fx_fuser.passes.attention_split import dropout as drops

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


# ---- dropout, in a net wholly in 16 bits --------------------------------------------------------

P, ROWS, D = 0.25, 64, 64


class Dropping(nn.Module):
    """Where its values are rows of the identity, weights can be read, and what is dropped."""

    def __init__(self, batches: int, heads: int) -> None:
        super().__init__()
        self.batches = batches
        self.bias = nn.Parameter(torch.randn(1, heads, ROWS, ROWS))
        self.register_buffer("one", torch.eye(D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(q @ self.one, k, v, self.bias, P, scale=0.125)
        return made * 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_and_backward_drop_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drops, "_gains", lambda *_: True)
    torch.manual_seed(0)
    model = Dropping(3, 4).cuda().to(dtype)
    q, k, d_out = (
        torch.randn(3, ROWS, 4, D, device="cuda").to(dtype).transpose(1, 2) for _ in range(3)
    )
    v = torch.eye(ROWS, device="cuda").to(dtype).repeat(3, 4, 1, 1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    call = torch.compile(model, backend="fx_fuser", options={"strict": True})
    out = call(*leaves)
    found = [out, *torch.autograd.grad(out, [*leaves, model.bias], d_out)]
    assert counters[COUNTERS] == BOTH
    steps = fp32.steps_of(P)
    share = fp32.DROPOUT_STEPS / (fp32.DROPOUT_STEPS - steps)
    kept = torch.where(out.detach() == 0, 0.0, share).double()
    dropped = float((kept == 0).double().mean())
    assert abs(dropped - P) < 0.02  # ten deviations
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, model.bias)]
    a, b, c, bias = wide
    exact = ((a @ b.mT * 0.125 + bias).softmax(-1) * kept) @ c
    wanted = [exact, *torch.autograd.grad(exact, wide, d_out.double())]
    for value, right in zip(found, wanted, strict=True):
        assert float((value - right).norm()) <= 0.01 * float(right.norm())


def test_dropout_by_the_clock() -> None:
    """At T5's sizes."""
    torch.manual_seed(0)
    bias = torch.randn(1, 12, 512, 512, device="cuda").bfloat16().requires_grad_()
    one = torch.eye(D, device="cuda").bfloat16()

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        q = q @ one
        return F.scaled_dot_product_attention(q, q, q, bias, 0.1)

    q = torch.randn(16, 512, 12, D, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
    call = torch.compile(attend, backend="fx_fuser", options={"strict": True})
    call(q, bias).sum().backward()
    assert counters[COUNTERS] == BOTH


def test_inference_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients torch has cuDNN's kernel or the same; which gains is not told here."""
    compared: list[tuple[float, float]] = []
    times = biased.Site.times

    def noted(site: biased.Site) -> tuple[float, float] | None:
        found = times(site)
        assert found is not None
        compared.append(found)
        return 2.0, 1.0

    monkeypatch.setattr(biased.Site, "times", noted)
    torch.manual_seed(0)
    model = Biased(12, 64, 512).cuda().bfloat16().eval()
    x = torch.randn(16, 512, 64, device="cuda").bfloat16()
    call = torch.compile(model, backend="fx_fuser", options={"strict": True})
    with torch.no_grad():
        found, eager, exact = call(x), model(x), copy.deepcopy(model).double()(x.double())
    assert sum(counters[COUNTERS].values()) == 1
    print("torch's and ours:", counters[COUNTERS], compared)
    error, theirs = (float((t - exact).norm()) for t in (found, eager))
    assert error <= 1.5 * theirs
