"""A head and its loss by pieces of rows: how many, what they add up to, what memory they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, F16, IGNORED, K, V, autocast, check, labels, model, rows
from helpers import Program
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fx_fuser.graph.read.heads import PLAIN
from fx_fuser.ops import head_loss as op


def as_masked_models(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.loss(m.biased(x).view(-1, V), y.view(-1))


@pytest.mark.parametrize("count", [1, 128, 129, 300])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_pieces_of_rows(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients add as in one gemm."""
    monkeypatch.setattr(op, "_ROWS", 1)
    made = model(autocast(as_masked_models, dtype))
    assert op.pieces_of(count, made.biased.weight, dtype).rows == min(count, 128)
    check(made, rows(1, count), labels(1, count))


def test_pieces_of_rows_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_ROWS", 1)
    made = model(as_masked_models, BF16)
    assert op.pieces_of(300, made.biased.weight, BF16) == (128, torch.float32)
    check(made, rows(1, 300, dtype=BF16), labels(1, 300))


@pytest.mark.parametrize(
    "rows, k, dtype, height, is_narrow",
    [
        (0, 768, torch.float32, 1, False),
        (100, 768, torch.float32, 100, False),
        (100, 768, BF16, 100, True),
        (2048, 768, torch.float32, 2048, False),
        (2049, 768, torch.float32, 1152, False),  # two, of as many tiles
        (8192, 768, torch.float32, 2048, False),
        (8192, 768, BF16, 2048, False),  # two of 4096 rows would take more than a wide sum
        (4096, 2048, torch.float32, 2048, False),
        (4096, 2048, BF16, 2048, True),
        (8192, 2048, BF16, 4096, True),
        (10240, 2048, BF16, 2048, False),
        (16384, 8192, BF16, 8192, True),
        (4096, 2048, F16, 2048, False),  # whose gradient is kept in fp32
    ],
)
def test_sizes_of_pieces(
    rows: int, k: int, dtype: torch.dtype, height: int, is_narrow: bool
) -> None:
    weight = torch.empty(50257, k, dtype=dtype, device="meta")
    compute = BF16 if dtype is torch.float32 else dtype
    pieces = op.pieces_of(rows, weight, compute)
    assert pieces == (height, BF16 if is_narrow else torch.float32)
    assert op.pieces_of(rows, weight, compute, ["x"]).rows <= max(op._ROWS, 1)


def test_where_torchs_setting_keeps_sums_wide() -> None:
    """A gemm then rounds its sum once."""
    gemms, weight = torch.backends.cuda.matmul, torch.empty(50257, 2048, dtype=BF16, device="meta")
    before = gemms.allow_bf16_reduced_precision_reduction
    gemms.allow_bf16_reduced_precision_reduction = False
    try:
        assert op.pieces_of(4096, weight, BF16) == (4096, BF16)
        assert op.pieces_of(8192, weight, BF16) == (2048, torch.float32)
    finally:
        gemms.allow_bf16_reduced_precision_reduction = before


def weight_gradients(
    x: Tensor, weight: Tensor, y: Tensor, scale: float, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """By as many pieces as may add."""
    monkeypatch.setattr(op, "_ROWS", 1)
    monkeypatch.setattr(op, "TILE", 1)
    pieces = op.pieces_of(x.shape[0], weight, BF16)
    assert pieces.rows < x.shape[0] and pieces.sum is BF16
    leaf = weight.detach().requires_grad_()
    loss = op.HEAD_LOSS(x, leaf, None, y, BF16, torch.float32, IGNORED, "mean", PLAIN)
    (grad,) = torch.autograd.grad(loss * scale, leaf)
    return grad


@pytest.mark.parametrize("mean, size", [(0.0, 0.02), (1.0, 0.02), (1.0, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_pieces_that_add_in_bf16(
    mean: float, size: float, scale: float, is_sorted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1.5 times eager's error, as `_ADDED` works out: of rows of random signs and alike,
    of a head that has learnt nothing and of one that has, of labels in one piece or in all."""
    rows, columns, k = 1024, 300, 768
    x = (torch.randn(rows, k) + mean).to(BF16)
    weight = (torch.randn(columns, k) * size * (K / k) ** 0.5).to(BF16)
    y = torch.randint(0, columns, (rows,))
    y = y.sort()[0] if is_sorted else y

    def by_eager(x: Tensor, leaf: Tensor) -> Tensor:
        loss = F.cross_entropy((x @ leaf.t()).to(torch.promote_types(x.dtype, torch.float32)), y)
        (grad,) = torch.autograd.grad(loss * scale, leaf)
        return grad.double()

    exact = by_eager(x.double(), weight.double().requires_grad_())
    eager = by_eager(x, weight.clone().requires_grad_())
    ours = weight_gradients(x, weight, y, scale, monkeypatch)
    assert float((ours - exact).norm()) <= 1.5 * float((eager - exact).norm())


class Memory(TorchDispatchMode):
    """Bytes of what torch's operations make and see that exist at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.seen = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor):
                memory = one.untyped_storage()
                self.seen[StorageWeakRef(memory)] = memory.nbytes()
        self.seen = {ref: size for ref, size in self.seen.items() if not ref.expired()}
        self.most = max(self.most, sum(self.seen.values()))
        return made


@pytest.mark.parametrize(
    "rows, k, expected",
    [
        (4096, 2048, 2048 * 2 + 2048 * 2),  # a column's bytes: of a piece and of the gradient
        (16384, 1024, 2048 * 2 + 1024 * 4),  # of a piece and of the sum
        (20000, 4096, 4096 * 6),  # of the sum and of the result
        (512, 2048, 512 * 2 + 2048 * 2),
    ],
)
def test_memory_of_a_step(
    rows: int, k: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's operations, as on a GPU, of a head that multiplies nothing."""
    columns = 4096
    monkeypatch.setattr(op, "_linear", lambda *_: None)
    monkeypatch.setattr(op, "_rows", lambda *_: None)
    monkeypatch.setattr(op, "_multiply", lambda *_: None)
    x = torch.empty(rows, k, dtype=BF16)
    weight = torch.empty(columns, k, dtype=BF16)
    given = x, weight, None, torch.zeros(rows, dtype=torch.long), BF16, IGNORED, "mean", PLAIN
    with Memory() as seen:
        op._head_loss(*given, ["x", "weight"])
    most = expected * columns + 6 * rows * k  # x, and its gradient in fp32
    assert most <= seen.most <= most + 64 * rows  # losses, labels, what counts them
