"""The anchor bmm on a CUDA device: through the backend and op by op, against float64 and eager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_bmm import Attention, batch, gated_batch, scores, summed_batch
from test_bmm_ops import TEXT, leads
from test_gpu import DTYPES, FLOOR, assert_as_exact_as_eager, relative_error
from torch import Tensor, nn

import fx_fuser
from fx_fuser import registry
from fx_fuser.kernels.split import SPLIT_GEMM
from fx_fuser.native import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def patterns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_patterns", [])
    for source in (gated_batch, scores, summed_batch, batch):
        fx_fuser.register_pattern(source)
    yield


class Causal(nn.Module):
    """Attention over x alone, large enough that the split product is taken."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.attention = Attention(512, heads=8)
        self.register_buffer("mask", torch.full((length, length), -1e4).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, self.mask)
        return y


class Added(nn.Module):
    """A baddbmm with a bias for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 72, 61) / 8)
        self.bias = nn.Parameter(torch.randn(6, 1, 61))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("length", [7, 384])
def test_attention(length: int, train: bool, dtype: torch.dtype, inner: str) -> None:
    torch.manual_seed(0)
    model = Causal(length).to("cuda", dtype)
    x = torch.randn(4, length, 512, device="cuda", dtype=dtype)
    assert_as_exact_as_eager(model, x, backward=train, fused=2, options={"inner": inner})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("rows", [5, 1024])
def test_baddbmm(rows: int, train: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, rows, 72, device="cuda", dtype=dtype)
    assert_as_exact_as_eager(Added().to("cuda", dtype), x, backward=train)


def _laid(tensor: Tensor, layout: str) -> Tensor:
    """The same values: in rows, in columns, as heads [B, S, H, D], or one matrix for all."""
    if layout == "columns":
        return tensor.mT.contiguous().mT
    if layout == "heads":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "expanded":
        lead = tensor.shape[:-2]
        return tensor[(0,) * len(lead)].expand(tensor.shape)
    return tensor


LAYOUTS = ("rows", "columns", "heads", "expanded")


@leads
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("sizes", [(33, 72, 61), (512, 256, 384), (1, 64, 7)], ids=str)
def test_the_split_product_of_any_strides(
    sizes: tuple[int, int, int], of_x: str, of_weight: str, lead: tuple[int, ...]
) -> None:
    """Forward, c and both gradients, by the op itself: within the accuracy contract."""
    m, k, n = sizes
    torch.manual_seed(0)
    load.prepare([SPLIT_GEMM], torch.device("cuda", torch.cuda.current_device()))
    x = _laid(torch.randn(*lead, m, k, device="cuda"), of_x).requires_grad_()
    w = _laid(torch.randn(*lead, k, n, device="cuda") * k**-0.5, of_weight).requires_grad_()
    r = torch.randn(*lead[:-1], 1, m, n, device="cuda").requires_grad_()
    dy = torch.randn(*lead, m, n, device="cuda")
    found: dict[str, list[Tensor]] = {}
    for name, on_kernels, dtype in (
        ("ours", True, torch.float32), ("eager", False, torch.float32),
        ("exact", False, torch.float64),
    ):  # fmt: skip
        tensors = [t.detach().to(dtype).requires_grad_() for t in (x, w, r)]
        config = ("split", "split", False) if on_kernels else ("library", "library", False)
        op = torch.ops.fx_fuser.bmm.default
        (y,) = op(*tensors[:2], *config, TEXT, tensors[2:], [0.75], dtype, dtype, on_kernels)
        found[name] = [y, *torch.autograd.grad(y, tensors, dy.to(dtype))]
    for ours, eager, exact in zip(found["ours"], found["eager"], found["exact"], strict=True):
        assert ours.shape == eager.shape and ours.is_contiguous()
        bound = max(1.5 * relative_error(eager, exact), FLOOR[torch.float32])
        assert relative_error(ours, exact) <= bound
