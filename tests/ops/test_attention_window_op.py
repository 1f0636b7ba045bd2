"""The op of attention of windows: gradients, fakes, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fx_fuser.ops import run
from fx_fuser.ops.attention_bias.window import ATTENTION_WINDOW, BACKWARD, FORWARD


def operands(period: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, rows, 3, 16).to(dtype).transpose(1, 2) for rows in (5, 7, 7))
    return [t.requires_grad_() for t in (q, k, v, torch.randn(period, 3, 5, 7))]


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    repeated = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
    return (q @ k.mT * scale + repeated).softmax(-1) @ v


@pytest.mark.parametrize("period", [1, 2, 3, 6])
def test_gradients(period: int) -> None:
    given = operands(period)
    out = ATTENTION_WINDOW(*given, 0.3, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = formula(*wide, 0.3)
    d_out = torch.randn(exact.shape)
    found = torch.autograd.grad(out, given, d_out.bfloat16())
    wanted = torch.autograd.grad(exact, wide, d_out.bfloat16().double())
    for mine, right, of in zip((out, *found), (exact, *wanted), (given[0], *given)):
        assert mine.dtype == of.dtype and mine.shape == right.shape
        error = (mine.double() - right).norm() / right.norm()
        assert error < (1e-5 if mine.dtype == torch.float32 else 4e-3)


def test_operands_are_cast_and_gradients_are_theirs() -> None:
    given = operands(dtype=torch.float32)
    out = ATTENTION_WINDOW(*given, 0.3, torch.float16)
    assert out.dtype == torch.float16
    out.float().sum().backward()
    assert {t.grad.dtype for t in given if t.grad is not None} == {torch.float32}


def test_a_bias_without_a_gradient_has_none() -> None:
    *given, bias = operands()
    ATTENTION_WINDOW(*given, bias.detach(), 0.3, torch.bfloat16).sum().backward()
    assert bias.grad is None and all(t.grad is not None for t in given)


def test_it_is_differentiable_once() -> None:
    given = operands()
    out = ATTENTION_WINDOW(*given, 0.3, torch.bfloat16)
    (grad,) = torch.autograd.grad(out.float().square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.float().sum().backward()


def test_fakes() -> None:
    q, k, v, bias = (t.detach() for t in operands())
    d_out = torch.randn(6, 5, 3, 16).bfloat16().transpose(1, 2)
    for call in (
        run.arguments(FORWARD, (q, k, v, bias, "", 0.3, False)),
        run.arguments(BACKWARD, (d_out, q, k, v, bias, "", 0.3, False, True)),
        run.arguments(BACKWARD, (d_out, q, k, v, bias, "", 0.3, True, False)),
    ):
        torch.library.opcheck(run.MANY, call)
