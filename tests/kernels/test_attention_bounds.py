"""The bound of attention's errors for few results, the only one they have, catches mistakes."""

from __future__ import annotations

from collections.abc import Callable

import attention_bounds
import pytest
import torch
from attention_checks import exact
from torch import Tensor

from fx_fuser.ops import attention_dropout

SIZES = ((5, 5, 64), (17, 17, 128), (9, 3, 64))  # queries, keys, d
SCALE = 0.1


def made(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, causal: bool, factors: Tensor | None = None
) -> list[Tensor]:
    """out, dq, dk and dv, in float64."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = exact(*leaves, SCALE, causal, factors)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.double())]


def halves(values: Tensor) -> Tensor:
    return values.half().to(values.dtype)


Mistake = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]
MISTAKES: dict[str, Mistake] = {
    "a factor": lambda *case: [t * (1 + 1e-5) for t in made(*case, True)],
    "q without its lo": lambda q, k, v, d_out: made(halves(q), k, v, d_out, True),
    "v without its lo": lambda q, k, v, d_out: made(q, k, halves(v), d_out, True),
    "no mask": lambda *case: made(*case, False),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mistake_is_above_the_bound(sizes: tuple[int, int, int], mistake: str) -> None:
    torch.manual_seed(1)
    queries, keys, d = sizes
    q, k, v, d_out = (torch.randn(1, 2, rows, d) for rows in (queries, keys, keys, queries))
    wanted = made(q, k, v, d_out, True)
    bounds = [
        attention_bounds.of_result(q, k, v, SCALE, True),
        *attention_bounds.of_gradients(q, k, v, d_out, SCALE, True),
    ]
    found = MISTAKES[mistake](q, k, v, d_out)
    errors = [float((a - b).norm()) for a, b in zip(found, wanted)]
    if mistake == "v without its lo":  # dv does not depend on it
        assert errors.pop() == 0
    for error, bound in zip(errors, bounds):
        assert error > float(bound.norm())


def factors_of(sizes: tuple[int, int, int], seed: int) -> Tensor:
    queries, keys, _ = sizes
    made = attention_dropout.factors(torch.tensor([seed]), 2, queries, keys, 0.5, torch.float64)
    return made[None]


DROPOUT_MISTAKES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "no dropout": lambda factors: None,
    "its factor": lambda factors: factors * (1 + 1e-5),
    "another mask of one key": lambda factors: factors.index_fill(-1, torch.tensor([0]), 2),
}


@pytest.mark.parametrize("mistake", DROPOUT_MISTAKES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mistake_of_dropout_is_above_the_bound(sizes: tuple[int, int, int], mistake: str) -> None:
    torch.manual_seed(1)
    queries, keys, d = sizes
    q, k, v, d_out = (torch.randn(1, 2, rows, d) for rows in (queries, keys, keys, queries))
    factors = factors_of(sizes, 0)
    wanted = made(q, k, v, d_out, True, factors)
    bounds = [
        attention_bounds.of_result(q, k, v, SCALE, True, factors),
        *attention_bounds.of_gradients(q, k, v, d_out, SCALE, True, factors),
    ]
    found = made(q, k, v, d_out, True, DROPOUT_MISTAKES[mistake](factors))
    for value, right, bound in zip(found, wanted, bounds):
        assert float((value - right).norm()) > float(bound.norm())
