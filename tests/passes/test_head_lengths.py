"""Heads of rows whose number changes from call to call, or depends on data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, K, V, autocast, found, labels, model
from helpers import Program, compiled
from torch import Tensor
from torch._dynamo.utils import counters


def with_a_penalty(logits: Tensor, y: Tensor) -> Tensor:
    lse = logits.logsumexp(-1)
    return F.cross_entropy(logits, y) + 0.1 * lse.square().mean()


def check_step(fast: torch.nn.Module, eager: Program, *given: object) -> None:
    """Values and the weight's gradient are near eager's, but for roundings to bf16."""
    made = [call(*given) for call in (fast, eager)]
    for one, right in zip(
        *([m.detach(), *torch.autograd.grad(m, [eager.head.weight])] for m in made)
    ):
        assert float((one - right).norm()) <= 2.0**-6 * float(right.norm())


@pytest.mark.parametrize("is_whole", [True, False])
def test_of_some_tokens(is_whole: bool) -> None:
    """How many they are the data say: of all logits, and of all but the first."""

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        at = (x[:, 0] > 0).nonzero().squeeze(-1)
        torch._check(at.shape[0] > 3)
        first = 0 if is_whole else 1
        return with_a_penalty(m.head(x[at])[first:], y[at][first:])

    made = model(autocast(body))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_step(compiled(made, auto=True), made, torch.randn(40, K), labels(40))
    assert found() == 1


def test_some_rows_that_once_are_all() -> None:
    def body(m: Program, x: Tensor, y: Tensor, rows: int) -> Tensor:
        return with_a_penalty(F.linear(x, m.head.weight)[:rows], y[:rows])

    made = model(body, BF16)
    fast = compiled(made, auto=True)
    for rows in (14, 13, 9, 5):
        x, y = torch.randn(14, K, dtype=BF16), torch.randint(0, V, (14,))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
        check_step(fast, made, x, y, rows)
    assert found() == 2  # the second one is for any number of rows
    assert counters["stats"]["unique_graphs"] == 2
