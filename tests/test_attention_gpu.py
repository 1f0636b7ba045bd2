"""Attention by split products on a GPU: against float64 and ATen's, and through torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from sm90 import gpu
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks import attention_sm90
from benchmarks.attention_sm90 import FLOOR, Case
from benchmarks.linear_sm90 import relative
from fx_fuser import attention, native, products
from fx_fuser.anchors.linear import PRODUCT_ALONE

INF = float("inf")
_ops = torch.ops.fx_fuser


def mask_of(b: int, h: int, m: int, n: int) -> Tensor:
    """With hidden pairs, a row that sees nothing and a key that nobody sees."""
    mask = torch.randn(b, 1, m, n, device="cuda")
    mask[mask > 1] = -INF
    mask[..., n // 3] = -INF
    mask[0, :, m // 2] = -INF
    return mask.expand(b, h, m, n)


# name → B, H, M, N, D, Dv, causal, has a bias; ATen takes them all
CASES = {
    "full": ((2, 4, 256, 256, 64, 64), False, False),
    "causal": ((2, 3, 768, 768, 64, 64), True, False),
    "causal, long": ((1, 2, 1536, 1536, 128, 128), True, False),
    "causal, fewer keys": ((2, 2, 1024, 320, 64, 64), True, False),
    "causal, more keys": ((2, 2, 320, 1024, 64, 64), True, False),
    "odd": ((3, 5, 197, 197, 64, 64), False, False),
    "odd, causal": ((1, 3, 523, 601, 60, 36), True, False),
    "cross": ((2, 4, 128, 77, 40, 80), False, False),
    "one plane": ((1, 1, 640, 384, 32, 32), False, False),
    "one row": ((4, 8, 1, 512, 128, 128), False, False),
    "bias": ((2, 4, 256, 320, 64, 64), False, True),
    "bias, causal": ((2, 4, 576, 576, 64, 64), True, True),
    "a row for a block": ((1, 2, 128, 3001, 64, 64), False, False),
    "a row read three times": ((1, 1, 64, 9216, 64, 64), False, False),
    "many parts": ((5, 7, 1024, 1024, 32, 32), False, False),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    sizes, causal, with_bias = CASES[name]
    return Case.of(sizes, mask_of(*sizes[:4]) if with_bias else None, causal)


@pytest.fixture(autouse=True, scope="module")
def shim() -> None:
    """No more than a compiled graph's first call finds: the ops load their other kernels."""
    if torch.cuda.is_available():
        native.prepare([PRODUCT_ALONE], "cuda")


def poison() -> None:
    """What the allocator gives next is full of NaN."""
    torch.full((1 << 28,), float("nan"), device="cuda")
    for size in (1 << 10, 1 << 16, 1 << 19):
        _ = [torch.full((size,), float("nan"), device="cuda") for _ in range(16)]


@gpu
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_the_librarys(name: str) -> None:
    case = case_of(name)
    poison()
    out, lse = case.ours()
    poison()
    found = [out, *case.backward(out, lse)]
    beside = case.library()
    library = [beside[0], *case.library_backward(beside)]
    *exact, sums = case.exact()
    rows = case.q.shape[2]
    for what, one, other, truth in zip(
        ("out", "dq", "dk", "dv"), found, library, exact, strict=True
    ):
        assert (one.shape, one.stride()) == (other.shape, other.stride()), what
        bound = max(1.5 * relative(other, truth), FLOOR)
        assert relative(one, truth) <= bound, what
    assert lse.shape == beside[1].shape and lse.stride() == beside[1].stride()
    torch.testing.assert_close(lse[..., :rows].double(), sums, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(lse, beside[1], rtol=1e-5, atol=1e-5)
    assert (lse[..., rows:] == INF).all()


@gpu
@pytest.mark.parametrize("name", ["causal", "odd, causal", "bias", "many parts"])
def test_the_same_bits(name: str) -> None:
    case = case_of(name)
    first, lse = case.ours()
    gradients = case.backward(first, lse)
    for _ in range(3):
        poison()
        out, again = case.ours()
        assert torch.equal(out, first) and torch.equal(again, lse)
        for one, other in zip(case.backward(out, lse), gradients, strict=True):
            assert torch.equal(one, other)


@gpu
@pytest.mark.parametrize("layout", ["rows", "columns", "one for all", "unaligned"])
def test_any_strides(layout: str) -> None:
    case = case_of("causal")

    def laid(t: Tensor) -> Tensor:
        if layout == "columns":
            return t.mT.contiguous().mT
        if layout == "one for all":
            return t[:1, :1].expand(t.shape)
        if layout == "unaligned":
            wide = t.new_zeros(*t.shape[:3], t.shape[3] + 3)
            wide[..., 1:-2] = t
            return wide[..., 1:-2]
        return t.contiguous()

    case = Case(*map(laid, (case.q, case.k, case.v, case.dout)), None, True)
    out, lse = case.ours()
    *exact, sums = case.exact()
    for one, truth in zip((out, *case.backward(out, lse)), exact, strict=True):
        assert relative(one, truth) <= 2e-6
    torch.testing.assert_close(lse[..., : sums.shape[2]].double(), sums, rtol=1e-6, atol=2e-6)


@gpu
@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], []], ids=str)
def test_gradients_that_are_asked_for(wanted: list[int]) -> None:
    case = case_of("causal")
    out, lse = case.ours()
    every = case.backward(out, lse)
    found = case.backward(out, lse, wanted)
    for place, one in zip(wanted, found, strict=True):
        assert torch.equal(one, every[place])


@gpu
@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_what_is_not_finite(value: float) -> None:
    case = case_of("full")
    case.q[1, 2, 37, 5] = value
    out, lse = case.ours()
    other, lse_beside, *_ = case.library()
    row_of = torch.zeros_like(out, dtype=torch.bool)
    row_of[1, 2, 37] = True
    assert torch.equal(out.isnan(), row_of) and torch.equal(other.isnan(), row_of)
    assert torch.equal(lse.isnan(), lse_beside.isnan())
    torch.testing.assert_close(out[~row_of], other[~row_of], rtol=1e-4, atol=1e-5)


@gpu
def test_what_our_kernels_leave() -> None:
    """No keys at all; and the op that takes over, beside ours."""
    q, k, v = (torch.randn(2, 3, n, 8, device="cuda") for n in (5, 0, 0))
    names = [spec.name for spec in attention.forward_specs(False)]
    out, lse = _ops.attention(q, k, v, None, False, 0.3, True, names)
    assert (out == 0).all() and (lse[..., :5] == 0).all() and (lse[..., 5:] == INF).all()
    case = case_of("causal")
    mine, sums = case.ours()
    rest = (case.causal, case.scale, True, case.names(False))
    out, lse = _ops.attention_in_torch.default(*case.front, *rest)
    assert relative(out, mine.double()) <= 1e-5
    assert relative(lse[..., :700], sums[..., :700].double()) <= 1e-5
    back = (mine, sums, case.causal, case.scale, [0, 2], case.names(True))
    found = _ops.attention_backward_in_torch.default(case.dout, *case.front, *back)
    for one, other in zip(found, case.backward(mine, sums, [0, 2]), strict=True):
        assert relative(one, other.double()) <= 1e-5


@gpu
def test_in_a_cuda_graph() -> None:
    case = case_of("causal")
    case.backward(*case.ours())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.ours()
        gradients = case.backward(out, lse)
    case.q.mul_(0.5)
    graph.replay()
    mine, sums = case.ours()
    assert torch.equal(out, mine) and torch.equal(lse, sums)
    for one, other in zip(gradients, case.backward(mine, sums), strict=True):
        assert torch.equal(one, other)


@gpu
def test_random_cases() -> None:
    failures: list[str] = []
    attention_sm90.sweep(30, 1, failures)
    assert not failures, failures


# ---- through torch.compile ----------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = (p.unflatten(-1, (self.heads, -1)) for p in self.qkv(x).chunk(3, -1))
        q, k, v = (p.transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def ours_and_eagers(
    model: nn.Module, x: Tensor, mask: Tensor | None, train: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Results and gradients: compiled, eager and in float64."""
    compiled = copy.deepcopy(model)
    call = torch.compile(compiled, backend="fx_fuser", options={"strict": True})
    exact = copy.deepcopy(model).double()
    found = []
    single, double = torch.float32, torch.float64
    runs = ((compiled, call, single), (model, model, single), (exact, exact, double))
    for one, body, dtype in runs:
        given = x.detach().to(dtype).requires_grad_(train)
        with torch.set_grad_enabled(train):
            y = body(given, None if mask is None else mask.to(dtype))
            results = [y.detach()]
            if train:
                y.backward(torch.ones_like(y) / y.numel() ** 0.5 * (1 + y.detach()))
                results += [given.grad, *(p.grad for p in one.parameters())]
        found.append(results)
    return list(zip(*found, strict=True))


@gpu
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("form", ["causal", "mask"])
def test_through_the_backend(form: str, train: bool) -> None:
    counters.clear()
    model = Attention(1024, 8, form == "causal").cuda()
    x = torch.randn(4, 1024, 1024, device="cuda")
    mask = None
    if form == "mask":
        mask = torch.full((1, 1, 1024, 1024), -INF, device="cuda").triu(1)
    triples = ours_and_eagers(model, x, mask, train)
    for ours, eager, exact in triples:
        assert relative(ours, exact) <= max(2 * relative(eager, exact), 1e-6)
    found = counters[products.COUNTERS]
    assert found["attention"] == 1
    assert found["attention_backward"] == int(train)


@gpu
def test_small_ones_are_left() -> None:
    counters.clear()
    model = Attention(64, 4, True).cuda()
    for ours, eager, _ in ours_and_eagers(model, torch.randn(2, 16, 64, device="cuda"), None, True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    found = counters[products.COUNTERS]
    assert not found["attention"] and not found["attention_backward"]


@gpu
def test_sizes_that_change() -> None:
    model = Attention(1024, 8, True).cuda()
    stock = torch.compile(copy.deepcopy(model), dynamic=True)
    ours = torch.compile(model, backend="fx_fuser", dynamic=True, options={"strict": True})
    graphs = []
    for compiled in (stock, ours):
        counters.clear()
        with torch.no_grad():
            for length in (1024, 1000, 333, 17):
                x = torch.randn(4, length, 1024, device="cuda")
                assert relative(compiled(x), copy.deepcopy(model).double()(x.double())) <= 2e-6
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
