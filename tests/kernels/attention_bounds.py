"""Bounds of the split attention's errors, from a case's own operands, in float64.

Over many results an error is an average, and 1.5 times torch's is a bound. Over few results both
ours and torch's are random; then the bound follows from the arithmetic. A product of halves has 22
bits of each factor, and the tensor core truncates a sum at every step of 16 of its depth. Such
errors are assumed to be independent, so their squares add up. They propagate through the
derivatives from logits, and from dO vᵀ - delta, where most may cancel, to the results. `factors`:
dropout's, per weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

BIT = 2**-24  # half an ulp of 1
STEP = 16  # of a product's depth, per instruction
TILE = 128  # the most keys or queries between two sums in fp32
MOST = 2  # the norm of few errors may be this many times the expected one


def _of_sums(squares: Tensor, sums: Tensor, depth: int) -> Tensor:
    """The deviation of sums of products. squares: those of the products' squares.

    A step loses half an ulp on average, of a sum that is half done on average.
    """
    steps = -(-depth // STEP)
    root = squares.sqrt()
    return BIT * (root + steps / 2 * torch.maximum(root, sums.abs()))


class _Case:
    """Operands in float64; k and v per query head. `lost`: deviations, or their squares."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, factors: Tensor | None
    ) -> None:
        self.q, self.k, self.v = (t.double() for t in (q, k, v))
        products = self.q @ self.k.mT
        squares = self.q.square() @ self.k.square().mT
        logits = products * scale
        if causal:
            hidden = torch.ones(logits.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(hidden, float("-inf"))
        self.weights = logits.softmax(-1)
        self.factors = torch.ones_like(self.weights) if factors is None else factors.double()
        self.kept = self.weights * self.factors
        self.out = self.kept @ self.v
        # exp2 and its argument are rounded, too.
        rounded = BIT * (1 + logits.masked_fill(logits.isinf(), 0).abs())
        self.lost_logits = scale * _of_sums(squares, products, q.shape[-1]) + rounded
        self.lost_lse = (self.weights * self.lost_logits).square().sum(-1, keepdim=True)
        self.lost_lse += (BIT * logits.logsumexp(-1, keepdim=True)).square()

    def lost_out(self) -> Tensor:
        """Squared deviations of each element."""
        off = (self.weights * self.lost_logits).square()
        # From a logit's error: weight * (factor * v - out).
        spread = (off * self.factors.square()) @ self.v.square()
        spread -= 2 * ((off * self.factors) @ self.v) * self.out
        spread += off.sum(-1, keepdim=True) * self.out.square()
        own = _of_sums(self.kept.square() @ self.v.square(), self.out, min(self.v.shape[-2], TILE))
        return spread.clamp_min(0) + own.square() + (2 * BIT * self.out).square()


def of_result(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, factors: Tensor | None = None
) -> Tensor:
    """The deviation of each element of out. A norm's deviation is the norm of these."""
    return MOST * _Case(q, k, v, scale, causal, factors).lost_out().sqrt()


def of_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, scale: float, causal: bool,
    factors: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The deviation of each element of dq, dk and dv, likewise."""
    case, d_out = _Case(q, k, v, scale, causal, factors), d_out.double()
    weights = case.weights
    inner = d_out @ case.v.mT
    terms = case.out * d_out
    score = weights * (case.factors * inner - terms.sum(-1, keepdim=True))
    lost_inner = _of_sums(d_out.square() @ case.v.square().mT, inner, q.shape[-1]) * case.factors
    lost_delta = (case.lost_out() * d_out.square() + (2 * BIT * terms).square()).sum(-1, True)
    own = (score * case.lost_logits).square() + (weights * lost_inner).square()
    # The errors of lse and delta are the same for all keys of a query.
    of_lse, of_delta = score.square() * case.lost_lse, weights.square() * lost_delta

    def product(left: Tensor, right: Tensor) -> Tensor:
        depth = min(right.shape[-2], TILE)
        return _of_sums(left.square() @ right.square(), left @ right, depth).square()

    dq = own @ case.k.square() + product(score, case.k)
    dq += case.lost_lse * (score @ case.k).square() + lost_delta * (weights @ case.k).square()
    dk = (own + of_lse + of_delta).mT @ case.q.square() + product(score.mT, case.q)
    of_weights = case.kept.square() * (case.lost_logits.square() + case.lost_lse)
    dv = of_weights.mT @ d_out.square() + product(case.kept.mT, d_out)
    return [scale * MOST * dq.sqrt(), scale * MOST * dk.sqrt(), MOST * dv.sqrt()]
