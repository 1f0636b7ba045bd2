"""Heads in fp32 of operands that were cast up from 16 bits, on a GPU: values, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, F16, IGNORED, Body, check, found, widened
from helpers import Program
from torch import Tensor, nn

import fx_fuser
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.kernels.split import MIXED_GEMMS
from fx_fuser.native import load
from fx_fuser.ops import head_wide as op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs Hopper",
    ),
]
ON_GPU: dict[str, Any] = {"cpu_ops": False, "inner": "inductor"}
K, V = 256, 50257  # the last block of columns is padded


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of rows and of columns."""
    monkeypatch.setattr(op, "_BYTES", 64 << 20)


@pytest.fixture
def asks_for_tf32() -> Iterator[None]:
    gemms = torch.backends.cuda.matmul
    before, gemms.fp32_precision = gemms.fp32_precision, "tf32"
    yield
    gemms.fp32_precision = before


def on_gpu(body: Body, dtype: torch.dtype, columns: int = V) -> Program:
    return Program(body, head=nn.Linear(K, columns)).to("cuda", dtype)


def data(rows: int, dtype: torch.dtype, columns: int = V) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, rows, K, device="cuda").to(dtype).requires_grad_()
    labels = torch.randint(0, columns, (1, rows), device="cuda")
    labels[0, :4] = torch.tensor([0, columns - 1, IGNORED, columns // 2])
    return x, labels


def logits_of(m: Program, x: Tensor) -> Tensor:
    return F.linear(widened(x), widened(m.head.weight), widened(m.head.bias))


def likely_tokens(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = (widened(x) @ widened(m.head.weight).t()).log_softmax(-1)
    return likely.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def by_hand(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = logits_of(m, x) / 0.7
    return logits.logsumexp(-1) - logits.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)


def crossed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = logits_of(m, x)
    return F.cross_entropy(logits.flatten(0, 1), y.view(-1), label_smoothing=0.1)


def penalized(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = logits_of(m, x).flatten(0, 1)
    return F.cross_entropy(logits, y.view(-1)) + 1e-3 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("rows", [900, 4600])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", [likely_tokens, by_hand, crossed, penalized])
@pytest.mark.each_pair
@pytest.mark.usefixtures("small_pieces")
def test_by_the_contract(body: Body, dtype: torch.dtype, rows: int) -> None:
    check(on_gpu(body, dtype), *data(rows, dtype), **ON_GPU)


@pytest.mark.usefixtures("asks_for_tf32")
@pytest.mark.parametrize("body", [likely_tokens, crossed])
def test_where_torch_is_asked_for_tf32(body: Body) -> None:
    check(on_gpu(body, BF16), *data(900, BF16), **ON_GPU)


def test_replayed_graphs() -> None:
    check(on_gpu(likely_tokens, BF16), *data(900, BF16), mode="reduce-overhead", **ON_GPU)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("size", [0.3, 3.0], ids=["flat", "peaked"])
@pytest.mark.usefixtures("small_pieces")
def test_gradients_in_fp32(dtype: torch.dtype, size: float) -> None:
    """Before the casts round them, eager's error at most 1.5 times: of softmax that is flat, and of
    one whose columns' gradients spread over many powers of two."""
    rows, columns, k = 1500, 32003, 1024
    torch.manual_seed(0)
    x = torch.randn(rows, k, device="cuda").to(dtype)
    weight = (torch.randn(columns, k, device="cuda") * size * k**-0.5).to(dtype)
    y = torch.randint(0, columns, (rows,), device="cuda")
    y[::3] = IGNORED
    specs = [spec_of(torch.float32), EXACT_GEMMS[dtype], MIXED_GEMMS[dtype]]
    load.prepare(specs, "cuda")

    def grads_of(precision: torch.dtype, call: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [v.to(precision).requires_grad_() for v in (x, weight)]
        loss = call(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def as_written(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), y, reduction="sum")

    def as_one_op(x: Tensor, weight: Tensor) -> Tensor:
        how = dtype, False, torch.float32, IGNORED, "sum", [1.0, 0.0, 0.0]
        return op.HEAD_LOSS_WIDE(x, weight, None, y, *how)

    exact = grads_of(torch.float64, as_written)
    eager = grads_of(torch.float32, as_written)
    for i in range(3):  # guesses of scales fail at first, then a pass finds them
        ours = grads_of(torch.float32, as_one_op)
        for name, made, own, truth in zip(("loss", "x", "weight"), ours, eager, exact):
            error, bound = (float((v.double() - truth).norm() / truth.norm()) for v in (made, own))
            print(f"{dtype}, {size}, {name}, step {i}: {error:.2e}, eager {bound:.2e}")
            assert error <= max(1.5 * bound, 4e-7), name


def _peak(step: Callable[[], Any]) -> int:
    """Bytes above what was there before, of a second step."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_step_holds_no_logits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    made, (x, y) = on_gpu(likely_tokens, BF16), data(16384, BF16)
    fast = torch.compile(made, backend="fx_fuser", options={"strict": True})

    def step() -> None:
        made.zero_grad()
        fast(x, y).sum().backward()

    peak = _peak(step)
    assert found() == 1
    # A piece of logits is 256 MiB and all are 3141; products of a block have 4 bytes an element.
    assert peak < 768 << 20


def test_small_logits_stay() -> None:
    check(on_gpu(crossed, BF16), *data(300, BF16), heads=0, **ON_GPU)


def test_explain_says_what_is_saved() -> None:
    x, y = data(4096, BF16)
    (head,) = fx_fuser.explain(on_gpu(likely_tokens, BF16), x, y).heads
    logits = 4096 * V * 4
    assert not head.reason and head.bytes is not None and logits < head.bytes < 2 * logits
