"""On a Hopper GPU: fp32 attention by fp16 halves in compiled nets is put there, and right."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sm90 import CAPABILITY
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.kernels import attention
from fx_fuser.native import load
from fx_fuser.ops import attention_split as ops
from fx_fuser.ops import run
from fx_fuser.passes import attention_split
from fx_fuser.passes.attention_split import COUNTERS
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
    """The pass takes our kernels at every size, untimed."""
    monkeypatch.setattr(attention_split.Site, "is_small", lambda _: False)
    monkeypatch.setattr(attention_split.Site, "gains", lambda _: True)


class Attending(nn.Module):
    """As models write it. of_keys: heads of keys; if one, it is expanded, else repeated."""

    def __init__(self, heads: int, d: int, of_keys: int = 0, causal: bool = False) -> None:
        super().__init__()
        self.d, self.counts, self.causal = d, (heads, of_keys or heads, of_keys or heads), causal
        self.parts = nn.ModuleList(nn.Linear(64, n * d) for n in self.counts)
        self.out = nn.Linear(heads * d, 64)

    def forward(self, x: Tensor, y: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        given = x, x if y is None else y, x if y is None else y
        q, k, v = (
            part(t).unflatten(-1, (n, self.d)).transpose(1, 2)
            for part, t, n in zip(self.parts, given, self.counts)
        )
        if self.counts[1] == 1:
            k, v = (t.expand(-1, self.counts[0], -1, -1) for t in (k, v))
        elif self.counts[1] < self.counts[0]:
            times = self.counts[0] // self.counts[1]
            k, v = (t.repeat_interleave(times, 1) for t in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        projected: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return projected


class MultiHead(nn.Module):
    """torch's own, as one call."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.MultiheadAttention(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        of = self.of
        made, _ = F.multi_head_attention_forward(
            x, x, x, 256, 4, of.in_proj_weight, of.in_proj_bias, None, None, False, 0.0,
            of.out_proj.weight, of.out_proj.bias, self.training, need_weights=False,
        )  # fmt: skip
        return made


def randn(*size: int, **like: Any) -> Tensor:
    return torch.randn(*size, device="cuda", **like)


CASES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "causal, as in GPT-2": (lambda: Attending(4, 64, causal=True), ((2, 300, 64),)),
    "197 tokens, as in a ViT": (lambda: Attending(4, 64), ((3, 197, 64),)),
    "d of 128": (lambda: Attending(2, 128, causal=True), ((2, 200, 64),)),
    "d of 40": (lambda: Attending(3, 40), ((2, 77, 64),)),
    "d of 96": (lambda: Attending(2, 96), ((2, 77, 64),)),
    "one head of keys": (lambda: Attending(4, 64, of_keys=1), ((2, 130, 64),)),
    "keys for two heads each": (lambda: Attending(4, 128, of_keys=2, causal=True), ((2, 130, 64),)),
    "fewer queries": (lambda: Attending(2, 64, causal=True), ((2, 50, 64), (2, 129, 64))),
    "fewer keys": (lambda: Attending(2, 64, causal=True), ((2, 129, 64), (2, 50, 64))),
    "multi-head": (MultiHead, ((100, 2, 256),)),
}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, train: bool, forced: None) -> None:
    make, sizes = CASES[case]
    inputs = tuple(randn(*size, requires_grad=train) for size in sizes)
    assert_equivalent(make().cuda(), inputs, train)
    assert counters[COUNTERS] == (FORWARD | BACKWARD if train else FORWARD)


@pytest.mark.parametrize("length", [128, 197])
@pytest.mark.parametrize("ours", [attention_split.FORWARD, attention_split.BACKWARD])
def test_forward_and_backward_apart(
    ours: str, length: int, forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's backward reads what our forward saved, and ours what torch's did."""
    monkeypatch.setattr(attention_split.Site, "gains", lambda site: site.function == ours)
    model = Attending(4, 64, causal=True).cuda()
    assert_equivalent(model, (randn(2, length, 64, requires_grad=True),), True)
    assert counters[COUNTERS] == (FORWARD if ours == attention_split.FORWARD else BACKWARD)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("d", [64, 128])
def test_the_clock_prefers_it(d: int, train: bool) -> None:
    """As of 2026-11-28 it takes a third of torch's time at such sizes, in training too."""
    model = Attending(8, d, causal=True).cuda()
    assert_equivalent(model, (randn(8, 1024, 64, requires_grad=train),), train)
    assert counters[COUNTERS] == (FORWARD | BACKWARD if train else FORWARD)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fx_fuser", options={"strict": True, **options})


def step(model: nn.Module, call: Any, x: Tensor, train: bool) -> list[Tensor]:
    """The result and, in training, the gradients, from a random one."""
    with torch.set_grad_enabled(train):
        y = call(x)
        if not train:
            return [y.clone()]
        gradient = torch.sin(torch.arange(y.numel(), device=y.device)).view_as(y).to(y.dtype)
        found = torch.autograd.grad(y, [*model.parameters()], gradient)
        return [t.clone() for t in (y.detach(), *found)]


def check_steps(model: nn.Module, call: Any, inputs: list[Tensor], train: bool) -> None:
    """Each value at most twice as far from float64's as eager's."""
    wide = copy.deepcopy(model).double()
    for x in inputs:
        found, eager = step(model, call, x, train), step(model, model, x.clone(), train)
        exact = step(wide, wide, x.double(), train)
        for value, other, right in zip(found, eager, exact, strict=True):
            error, theirs = (float((t - right).norm()) for t in (value, other))
            assert error <= max(2 * theirs, 4e-7 * float(right.norm()))


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_sizes_that_change_share_a_graph(train: bool, forced: None) -> None:
    model = Attending(4, 64, causal=True).cuda()
    inputs = [randn(batch, rows, 64) for batch, rows in ((2, 100), (3, 197), (5, 64))]
    for x in inputs:
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
    check_steps(model, compiled(model), inputs, train)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters[COUNTERS] == (FORWARD | BACKWARD if train else FORWARD)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_cuda_graphs(train: bool, forced: None) -> None:
    """The first two calls warm up and record."""
    model = Attending(4, 64).cuda()
    call = compiled(model, mode="reduce-overhead")
    check_steps(model, call, [randn(2, 197, 64) for _ in range(5)], train)
    assert counters[COUNTERS] == (FORWARD | BACKWARD if train else FORWARD)


def test_what_is_left(forced: None) -> None:
    model = Attending(4, 64).cuda()
    x = randn(2, 100, 64, requires_grad=True)
    with torch.no_grad():
        compiled(model)(x, dropout=0.1)
    torch._dynamo.reset()
    compiled(model, fp32="ieee")(x).sum().backward()
    torch._dynamo.reset()
    compiled(Attending(4, 64).cuda().bfloat16())(x.bfloat16()).sum().backward()
    torch._dynamo.reset()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        compiled(model)(x).sum().backward()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert not counters[COUNTERS]


def test_small_ones_are_left() -> None:
    with torch.no_grad():
        compiled(Attending(2, 64).cuda())(randn(1, 16, 64))
    assert not counters[COUNTERS]


def test_a_kernel_that_nobody_loaded_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Inductor's cache had the graph, no pass has run."""
    load.load_shim()
    q, k, v, d_out = (randn(2, 3, 70, 64) for _ in range(4))
    specs = [attention.spec_for(64, backward) for backward in (False, True)]
    forward, backward = (dataclasses.replace(s, use="a test") for s in specs if s is not None)
    known = {spec.name: spec for spec in (forward, backward)}
    monkeypatch.setattr(ops, "_specs", lambda: known)
    no_dropout = None, 0.0
    given = q, k, v, forward.name, 0.125, True, True, *no_dropout
    out, lse = run.MANY(*run.arguments(ops.FORWARD, given))
    theirs = run.IN_TORCH(*run.arguments(ops.FORWARD, given))
    torch.testing.assert_close([out, lse], theirs, rtol=1e-5, atol=1e-5)
    given = d_out, q, k, v, out, lse, backward.name, 0.125, True, *no_dropout  # type: ignore[assignment]
    found = run.MANY(*run.arguments(ops.BACKWARD, given))
    theirs = run.IN_TORCH(*run.arguments(ops.BACKWARD, given))
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0], theirs[0])  # it was not torch's


def test_what_the_kernel_does_not_take_is_torchs() -> None:
    q = randn(2, 3, 70, 64)
    spec = attention.spec_for(64)
    assert spec is not None
    load.prepare([spec], q.device)
    scale = -0.125  # which the kernel does not take
    given = run.arguments(ops.FORWARD, (q, q, q, spec.name, scale, False, True, None, 0.0))
    for found, theirs in zip(run.MANY(*given), run.IN_TORCH(*given)):
        assert torch.equal(found, theirs)
