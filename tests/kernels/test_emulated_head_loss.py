"""The kernel of a head's loss on the CPU emulator, by the checks that it passes on a GPU."""

from __future__ import annotations

from typing import Any

import emulator
import head_loss_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from torch import Tensor

from fx_fuser.graph.read.heads import Tail
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.ops import head_kept, head_wide
from fx_fuser.ops import head_loss as op

TAIL = Tail(0.5, 3.0, 0.1)
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 80), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (head_loss_checks,))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_random_sizes_and_labels(gpu: EmulatedGpu) -> None:
    passes(head_loss_checks.sweep, 25, gpu.capability, (4, 3000))


@pytest.mark.slow
def test_rows_of_several_rounds() -> None:
    passes(head_loss_checks.sweep, 4, 1, (2, 20000))


@pytest.mark.slow
def test_special_values() -> None:
    passes(head_loss_checks.special_values, 51)


def test_refusals() -> None:
    passes(head_loss_checks.refusals)


@pytest.mark.parametrize("label", [-1, 24])
def test_a_label_that_is_no_column_stops_the_kernel(label: int) -> None:
    logits = torch.zeros(1, 24, dtype=torch.bfloat16)
    labels, losses = torch.tensor([label]), torch.zeros(1)
    with pytest.raises(RuntimeError, match="__trap"):
        launch.head_loss(spec_of(torch.bfloat16), logits, labels, losses, None, 24, -100)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_op_with_the_kernel_is_the_op_without(
    dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of rows, with fp32 weights: the gemms around the kernel are the same."""
    torch.manual_seed(0)
    labels = torch.randint(0, 51, (140,))
    labels[:3] = torch.tensor([0, 50, -100])
    given = [torch.randn(*shape, requires_grad=True) for shape in ((140, 16), (51, 16), (51,))]

    def by_kernel(logits: Tensor, labels: Tensor, *rest: Any) -> None:
        launch.head_loss(spec_of(dtype, TAIL), logits, labels.contiguous(), *rest)

    def made() -> list[Tensor]:
        loss = op.HEAD_LOSS(*given, labels, dtype, torch.float32, -100, reduction, TAIL)
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    monkeypatch.setattr(op, "_ROWS", 1)
    expected = made()
    monkeypatch.setattr(op, "_rows", by_kernel)
    # A gradient near the middle between two numbers of 16 bits may be rounded to either.
    for ours, plain in zip(made(), expected):
        assert float((ours - plain).norm()) < torch.finfo(dtype).eps / 4 * float(plain.norm())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_op_of_kept_logits_with_the_kernels_is_the_op_without(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 51, (140,))
    labels[:3] = torch.tensor([0, 50, -100])
    given = [torch.randn(*shape, requires_grad=True) for shape in ((140, 16), (51, 16), (51,))]
    x, weight, bias = (v.detach().to(dtype) for v in given)
    logits = x @ weight.t() + bias

    def made() -> list[Tensor]:
        loss = head_kept.HEAD_LOSS_KEPT(*given, logits, labels, torch.float32, -100, "mean", TAIL)
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    monkeypatch.setattr(op, "_ROWS", 1)
    expected = made()
    monkeypatch.setattr(head_kept, "_runs_kernels", lambda _: True)
    for ours, plain in zip(made(), expected):
        assert float((ours - plain).norm()) < torch.finfo(dtype).eps / 4 * float(plain.norm())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_op_of_fp32_logits_with_the_kernels_is_the_op_without(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By blocks of columns, of which each has a share of the smoothing."""
    torch.manual_seed(0)
    labels = torch.randint(0, 51, (40,))
    labels[:3] = torch.tensor([0, 50, -100])
    shapes = (40, 16), (51, 16), (51,)
    given = [torch.randn(*shape).to(dtype).float().requires_grad_() for shape in shapes]
    how = dtype, False, -100, TAIL

    def made() -> list[Tensor]:
        losses, lse, picked = head_wide.HEAD_LOSS_WIDE_PARTS(*given, labels, *how)
        total = (losses.sin() + lse.cos() * picked).sum()
        return [total.detach(), *torch.autograd.grad(total, given)]

    monkeypatch.setattr(head_wide, "height_of", lambda count, most: min(count, 13))
    expected = made()
    monkeypatch.setattr(head_kept, "_runs_kernels", lambda _: True)
    for ours, plain in zip(made(), expected):
        assert float((ours - plain).norm()) < 1e-6 * float(plain.norm())
