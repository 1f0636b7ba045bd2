"""On a Hopper GPU: fp32 attention written by hand runs by halves in compiled nets, and right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sm90 import CAPABILITY
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.kernels import attention
from fx_fuser.kernels.split import SPLIT_GEMM
from fx_fuser.native import load
from fx_fuser.passes import attention_split
from fx_fuser.passes.by_hand import rewrite
from fx_fuser.passes.by_hand.clock import Race
from fx_fuser.planning.bench_ops import form_of_value
from fx_fuser.testing import assert_equivalent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_caches"),
    pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU"),
]
FORWARD = {"_scaled_dot_product_efficient_attention": 1}
BACKWARD = {"_scaled_dot_product_efficient_attention_backward": 1}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the kernels take is rewritten and runs by ours, untimed, at every size."""
    monkeypatch.setattr(attention_split, "_is_small", lambda *_: False)
    monkeypatch.setattr(attention_split.Site, "gains", lambda _: True)
    monkeypatch.setattr(Race, "why_lost", lambda *_: "")


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    s = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return torch.matmul(F.softmax(s.masked_fill(hidden, -math.inf), dim=-1), v)


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    s = torch.baddbmm(
        q.new_empty(flat[0].shape[0], q.shape[2], k.shape[2]),
        flat[0],
        flat[1].mT,
        beta=0,
        alpha=0.125,
    )
    return torch.bmm(s.softmax(-1), flat[2]).view_as(q)


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attending(nn.Module):
    """of_keys: heads of keys, for several of queries each."""

    def __init__(self, attend: Attend, heads: int, d: int, of_keys: int = 0) -> None:
        super().__init__()
        self.attend, self.d = attend, d
        self.counts = heads, of_keys or heads, of_keys or heads
        self.parts = nn.ModuleList(nn.Linear(64, n * d) for n in self.counts)
        self.out = nn.Linear(heads * d, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (n, self.d)).transpose(1, 2)
            for part, n in zip(self.parts, self.counts)
        )
        if self.attend is not call and self.counts[1] < self.counts[0]:
            k, v = (t.repeat_interleave(self.counts[0] // t.shape[1], 1) for t in (k, v))
        projected: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return projected


class MultiHead(nn.Module):
    """Asks for weights that it drops. Not batch_first, of which eager mode has another layout in
    inference than Dynamo's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.MultiheadAttention(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.of(x, x, x)[0]
        return made


def randn(*size: int, **like: Any) -> Tensor:
    return torch.randn(*size, device="cuda", **like)


# By hand, and by torch's own call that it computes by the formula.
WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Attending(plain, 4, 64),
    "d of 128": lambda: Attending(plain, 2, 128),
    "d of 40": lambda: Attending(plain, 3, 40),
    "causal": lambda: Attending(causal, 4, 64),
    "einsums": lambda: Attending(einsums, 4, 64),
    "bmm": lambda: Attending(bmm, 4, 64),
    "grouped heads": lambda: Attending(causal, 4, 64, 2),
    "one head of keys": lambda: Attending(plain, 4, 64, 1),
}
CALLS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "grouped heads": (lambda: Attending(call, 4, 64, 2), 64),
    "multi-head": (MultiHead, 256),
}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", WRITTEN)
def test_by_hand(name: str, train: bool, forced: None) -> None:
    model = WRITTEN[name]().cuda()
    assert_equivalent(model, (randn(3, 130, 64, requires_grad=train),), train)
    assert counters[rewrite.COUNTER] == {"attention": 1}
    assert counters[attention_split.COUNTERS] == (FORWARD | BACKWARD if train else FORWARD)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CALLS)
def test_torchs_own(name: str, train: bool, forced: None) -> None:
    make, width = CALLS[name]
    assert_equivalent(make().cuda(), (randn(3, 130, width, requires_grad=train),), train)
    assert counters["fx_fuser_masks"] == {"form": 1} and not counters[rewrite.COUNTER]
    assert counters[attention_split.COUNTERS] == (FORWARD | BACKWARD if train else FORWARD)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("d", [64, 128])
def test_the_clock_prefers_it(d: int, train: bool) -> None:
    model = Attending(causal, 8, d).cuda()
    assert_equivalent(model, (randn(8, 1024, 64, requires_grad=train),), train)
    assert counters[rewrite.COUNTER] == {"attention": 1}


@pytest.mark.parametrize("trains", [False, True])
def test_what_is_timed_is_the_same_work(trains: bool) -> None:
    """With the kernels themselves: by the library, by split gemms, and fused without a scale."""
    q, k, v = (randn(2, 200, n, 64).transpose(1, 2) for n in (4, 2, 2))
    specs = [attention.spec_for(64, backward) for backward in (False, True)]
    load.prepare([*(spec for spec in specs if spec is not None), SPLIT_GEMM], q.device)
    forms = dict(zip(("query", "key", "value"), map(form_of_value, (q, k, v))))
    race = Race(forms, 1.0, False, trains)  # type: ignore[arg-type]
    *by_hand, fused = ([*candidate()] for candidate in race.candidates(True))  # type: ignore[call-overload]
    assert len(by_hand) == 4
    for one in by_hand:
        values = [t.unflatten(0, (2, 4)) for t in one]
        torch.testing.assert_close(values, [fused[0], *fused[2:]], rtol=1e-4, atol=1e-4)


def test_small_ones_stay() -> None:
    with torch.no_grad():
        torch.compile(Attending(plain, 2, 64).cuda(), backend="fx_fuser")(randn(1, 16, 64))
    assert not counters[rewrite.COUNTER] and not counters[attention_split.COUNTERS]
