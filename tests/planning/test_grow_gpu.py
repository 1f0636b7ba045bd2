"""On a GPU: grown tails and the products of Inductor's graph, by our kernels, are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sm90 import gpu
from test_gpu import assert_as_exact_as_eager
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.passes import products

ALWAYS = {"plan": "always", "auto": True}


class Block(nn.Module):
    """Of a transformer, with heads that the user takes apart."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.mish(self.gate(y)) * F.hardswish(self.up(y)))


class Tails(nn.Module):
    """What a tail may read: vectors, columns, whole tensors, numbers, z itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(200, 136), nn.Linear(136, 72)
        self.scale = nn.Parameter(torch.randn(136))

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        h = F.gelu(z) * self.scale + torch.tanh(z) * x[..., :1]
        return F.leaky_relu(self.second(h), 0.1).clamp(max=3.0) / 1.7


class Heads(nn.Module):
    """Gates of heads: what is pointwise stands behind views."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(200, 136), nn.Linear(200, 136)
        self.scale, self.shift = nn.Parameter(torch.randn(4, 1, 1)), nn.Parameter(torch.randn(34))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (f(x).unflatten(-1, (4, 34)).transpose(1, 2) for f in (self.value, self.gate))
        return torch.tanh(value) * torch.sigmoid(gate * self.scale) + self.shift


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.other = nn.Conv2d(3, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x))) + F.elu(self.other(x))


@gpu
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rows", [1, 37, 512])
def test_tails(rows: int, train: bool, inner: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, rows, 200, device="cuda")
    options = {**ALWAYS, "inner": inner}
    assert_as_exact_as_eager(Tails().cuda(), x, backward=train, fused=2, options=options)


@gpu
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_views_before_a_tail(train: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 37, 200, device="cuda")
    assert_as_exact_as_eager(Heads().cuda(), x, backward=train, fused=2, options=ALWAYS)


@gpu
@pytest.mark.parametrize("plan", ["always", "measure"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_transformers_block(train: bool, plan: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 384, 256, device="cuda")
    fused = {"always": 7, "measure": None}[plan]
    options = {"auto": True, "plan": plan}
    assert_as_exact_as_eager(Block().cuda(), x, backward=train, fused=fused, options=options)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_convolutions(train: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Images().to("cuda", dtype).train(train)
    x = torch.randn(8, 3, 64, 64, device="cuda", dtype=dtype)
    assert_as_exact_as_eager(model, x, backward=train, fused=2, options=ALWAYS)


@gpu
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_products_of_inductors_graph(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that Dynamo records as one call: all its products, ours whatever they take."""
    monkeypatch.setattr(products, "fastest", lambda *_: 0)
    torch.manual_seed(0)
    counters[products.COUNTERS].clear()
    model = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True).cuda()
    x = torch.randn(16, 384, 256, device="cuda", requires_grad=True)
    with torch.compiler.config.patch(cache_key_tag=f"all ours {train}"):
        options = {"auto": True, "plan": "measure"}
        assert_as_exact_as_eager(model.train(train), x, backward=train, fused=None, options=options)
    assert not train or sum(counters[products.COUNTERS].values()) >= 4


@gpu
def test_16_bits_and_tf32_are_left() -> None:
    """Nothing is gained there: no kernel is compiled, and the graph is Inductor's."""
    x = torch.randn(64, 200, device="cuda")
    model = Tails().cuda()
    with torch.no_grad():
        for half in (False, True):
            counters.clear()
            torch._dynamo.reset()
            before = torch.backends.cuda.matmul.fp32_precision
            torch.backends.cuda.matmul.fp32_precision = before if half else "tf32"
            try:
                run = torch.compile(model.half() if half else model, backend="fx_fuser")
                run(x.half() if half else x)
            finally:
                torch.backends.cuda.matmul.fp32_precision = before
            assert not counters["fx_fuser"] and not counters[products.COUNTERS]


@gpu
def test_batch_sizes_share_a_kernel() -> None:
    counters.clear()
    torch._dynamo.reset()
    model = Tails().cuda()
    run = torch.compile(model, backend="fx_fuser", dynamic=True, options=ALWAYS)
    with torch.no_grad():
        for rows in (3, 64, 700):
            x = torch.randn(4, rows, 200, device="cuda")
            exact = model.double()(x.double())
            eager = model.float()(x)
            error, bound = ((v - exact).norm() / exact.norm() for v in (run(x), eager))
            assert error <= max(2 * bound, 4e-7)
    assert counters["stats"]["unique_graphs"] == 1
