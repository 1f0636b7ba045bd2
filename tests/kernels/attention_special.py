"""Data that halves cannot represent: infinities, NaN, numbers out of range. Attention's results are
then those of fp32 arithmetic that skips hidden keys and queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attention_bounds
import torch
from torch import Tensor

QUERIES, KEYS = 20, 70  # so that keys are two tiles, of which causal queries see one
SCALE = 0.125
Operands = list[Tensor]  # q, k, v and dO


def visible(queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
    seen = torch.ones(queries, keys, device=device, dtype=torch.bool)
    return seen.tril() if causal else seen


def _product(left: Tensor, right: Tensor, seen: Tensor) -> Tensor:
    """left · right over visible terms only: 0 times an infinity does not occur."""
    return torch.where(seen[..., None], left[..., None] * right[..., None, :, :], 0).sum(-2)


def reference(operands: Operands, causal: bool) -> dict[str, Tensor]:
    """out, dq, dk and dv of single heads, in the operands' type, with the kernels' formulas."""
    q, k, v, d_out = operands
    seen = visible(q.shape[-2], k.shape[-2], causal, q.device)
    logits = torch.where(seen, q @ k.mT * SCALE, float("-inf"))
    largest = logits.amax(-1, keepdim=True)
    largest = torch.where(largest.isneginf(), 0, largest)
    total = (logits - largest).exp().sum(-1, keepdim=True)
    weights = torch.where(seen, (logits - largest).exp() / total, 0)
    out = _product(weights, v, seen)
    score = weights * (d_out @ v.mT - (out * d_out).sum(-1, keepdim=True))
    return {
        "out": out,
        "dq": SCALE * _product(score, k, seen),
        "dk": SCALE * _product(score.mT, q, seen.mT),
        "dv": _product(weights.mT, d_out, seen.mT),
    }


def _replaced(which: int, at: tuple[int, int], value: float) -> Callable[[Operands], object]:
    def put(operands: Operands) -> None:
        operands[which][0, 0, at[0], at[1]] = value

    return put


def _times(
    which: int, factor: float, part: tuple[slice | int, ...] = ()
) -> Callable[[Operands], object]:
    def put(operands: Operands) -> None:
        operands[which][0, 0][part] *= factor

    return put


def _all(*puts: Callable[[Operands], object]) -> Callable[[Operands], object]:
    def put(operands: Operands) -> None:
        for one in puts:
            one(operands)

    return put


EVERY = slice(None)
_Q, _K, _V, _D = range(4)
_POSITIONS = {"q": (_Q, (3, 1)), "k": (_K, (5, 2)), "v": (_V, (5, 2)), "dO": (_D, (3, 1))}
CASES: dict[str, Callable[[Operands], object]] = {
    **{
        f"{value} in {name}": _replaced(which, at, value)
        for name, (which, at) in _POSITIONS.items()
        for value in (float("nan"), float("inf"), float("-inf"))
    },
    "a last key that is infinite": _times(_K, float("inf"), (KEYS - 1,)),
    "keys of minus infinity beside one of q's signs": _all(
        lambda operands: operands[_Q][0, 0, :, 0].abs_().add_(1),
        lambda operands: operands[_K][0, 0, 1::2, 0].fill_(float("-inf")),
    ),
    "nothing but keys of minus infinity": _all(
        lambda operands: operands[_Q][0, 0, :, 0].abs_().add_(1),
        lambda operands: operands[_K][0, 0, :, 0].fill_(float("-inf")),
    ),
    "logits that overflow": _all(_times(_Q, 1e25), _times(_K, 1e25)),
    "large queries, small keys": _all(_times(_Q, 1e25), _times(_K, 1e-25)),
    "v of 1e30": _times(_V, 1e30),
    "v that is subnormal": _times(_V, 1e-39),
    "q that is subnormal, k of 1e38": _all(_times(_Q, 1e-39), _times(_K, 1e37)),
    "a large key that q does not see": _all(_times(_Q, 0, (EVERY, 0)), _replaced(_K, (5, 0), 1e12)),
    "a large query that k does not see": _all(
        _times(_K, 0, (EVERY, 0)), _replaced(_Q, (3, 0), 1e12)
    ),
    "a small channel of v": _times(_V, 1e-9, (EVERY, 3)),
    "a small channel of v, to queries of zeros": _all(_times(_V, 1e-9, (EVERY, 3)), _times(_Q, 0)),
    "no values": _times(_V, 0),
    "no channel of v": _times(_V, 0, (EVERY, 3)),
    "small values ahead": _times(_V, 1e-9, (slice(0, 5),)),
    "large values of small weight": _all(
        _times(_Q, 0, (EVERY, 0)),
        lambda operands: operands[_Q][0, 0, :, 0].fill_(1),
        _replaced(_K, (5, 0), -200),
        _times(_V, 1e12, (5,)),
    ),
    "a small channel of k": _times(_K, 1e-9, (EVERY, 3)),
    "a large channel of dO, of which v has nothing": _all(
        _times(_V, 0, (EVERY, 0)),
        lambda operands: operands[_D][0, 0, :, 0].abs_().mul_(1e12),  # dv's do not cancel
    ),
    "small dO ahead": _times(_D, 1e-9, (slice(0, 5),)),
    "a small channel of dO": _times(_D, 1e-9, (EVERY, 3)),
    "no dO ahead": _times(_D, 0, (slice(0, 5),)),
    "dO of 1e-30": _times(_D, 1e-30),
    "dO and v of 1e-18": _all(_times(_D, 1e-18), _times(_V, 1e-18)),
}


def cases(d: int, device: torch.device) -> Iterator[tuple[str, Operands]]:
    for what, put in CASES.items():
        torch.manual_seed(7)
        rows = (QUERIES, KEYS, KEYS, QUERIES)
        operands = [torch.randn(1, 1, count, d, device=device) for count in rows]
        put(operands)
        yield what, operands


def _bounds(operands: Operands, causal: bool) -> dict[str, Tensor]:
    """Bounds of the errors of finite results."""
    # A key whose logit is -inf has no weight, nor does one with a large negative logit.
    q, k, v, d_out = (t.nan_to_num(0, 1e6, -1e6) for t in operands)
    found = [
        attention_bounds.of_result(q, k, v, SCALE, causal),
        *attention_bounds.of_gradients(q, k, v, d_out, SCALE, causal),
    ]
    # A weight below 2^-40 may become zero: a key to which no query attends.
    found[-1] = found[-1] + 2**-39 * d_out.double().abs().sum(-2, keepdim=True)
    bounds = (t.nan_to_num(0, 0, 0) for t in found)  # logits may overflow
    return dict(zip(("out", "dq", "dk", "dv"), bounds))


def compare(failures: list[str], what: str, ours: Tensor, operands: Operands, causal: bool,
            name: str) -> None:  # fmt: skip
    """Requires the infinities and NaN of fp32 arithmetic, and its accuracy per row and column."""
    usual = reference(operands, causal)[name]
    finite = usual.isfinite()
    found, wanted = (t.nan_to_num(0, 1, -1)[~finite] for t in (ours, usual))
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(found, wanted):
        where = (ours.isfinite() != finite).nonzero()[:3].tolist()
        failures.append(f"{what}: {name} has other infinities or NaN than fp32 arithmetic, {where}")
        return
    exact = reference([t.double() for t in operands], causal)[name]
    ours, usual, exact = (torch.where(finite, t.double(), 0) for t in (ours, usual, exact))
    bounds = torch.where(finite, _bounds(operands, causal)[name], 0)
    for dim, line in ((-1, "row"), (-2, "column")):
        norms = [t.norm(dim=dim) for t in (ours - exact, usual - exact, exact, bounds)]
        error, usual_error, norm, bound = norms
        allowed = torch.maximum(4 * usual_error, torch.maximum(2e-6 * norm, bound))
        if bool((error > allowed).any()):
            worst = float((error / norm)[error > allowed].max())
            failures.append(f"{what}: {name}'s worst {line} is off by {worst:.1e}")
