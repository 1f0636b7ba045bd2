"""Checks of dropout in the split attention, forward and backward, against torch's formula with the
same weights dropped."""

from __future__ import annotations

import functools
import random

import attention_bounds
import torch
from attention_checks import FEW, LAYOUTS, MOST, exact, filled, heads, of_query_heads, random_sizes
from checks import SENTINEL, agree_over_two_streams
from torch import Tensor

from benchmarks import kernels
from benchmarks.sm90 import CUDA, FLOOR
from fx_fuser.kernels import attention
from fx_fuser.ops import attention_dropout

D = 64
SHARES = (0.1, 0.5, 0.9)
NAMES = ("out", "dq", "dk", "dv")
FORWARD, BACKWARD = attention.spec_of(0, True), attention.backward_spec_of(0, True)


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], device=CUDA)


def factors_of(q: Tensor, k: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """[batch, head, query, key] in float64."""
    batches, count, queries, _ = q.shape
    sizes = batches * count, queries, k.shape[2]
    made = attention_dropout.factors(seed, *sizes, dropout, torch.float64)
    return made.unflatten(0, (batches, count))


def expected(
    operands: list[Tensor], scale: float, causal: bool, factors: Tensor, wide: bool
) -> list[Tensor]:
    """NAMES per query head, by torch. wide: in float64."""
    *tensors, d_out = operands
    leaves = [
        (t.double() if wide else t.clone()).detach().requires_grad_()
        for t in of_query_heads(*tensors)
    ]
    q, k, v = leaves
    if wide:
        out = exact(q, k, v, scale, causal, factors)[0]
    else:
        logits = q @ k.mT * scale
        if causal:
            hidden = torch.ones(logits.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(hidden, float("-inf"))
        out = (logits.softmax(-1) * factors.float()) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def made(
    operands: list[Tensor], scale: float, causal: bool, seed: Tensor, dropout: float,
    layout: str = "bhld", gap: int = 0,
) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
    """NAMES by the kernels, the memory around each, and lse."""
    q, k, v, d_out = operands
    batches, count, queries, d = q.shape
    rows = (queries, queries, k.shape[2], k.shape[2])
    results = [heads(batches, count, length, d, layout, gap) for length in rows]
    for part, whole in results:
        whole.fill_(SENTINEL)
        part.fill_(float("nan"))
    out, *to = (part for part, _ in results)
    memory = [whole for _, whole in results]
    lse = torch.full((batches, count, queries), float("nan"), device=CUDA)
    given = scale, causal, seed, dropout
    assert kernels.attention_split(FORWARD, q, k, v, out, lse, *given)
    assert kernels.attention_backward(BACKWARD, q, k, v, out, lse, d_out, to, *given)
    return [out, *to], memory, lse


def judge(
    failures: list[str], what: str, operands: list[Tensor], causal: bool, scale: float,
    seed: Tensor, dropout: float, layout: str = "bhld",
) -> None:  # fmt: skip
    """Fails if an error exceeds MOST times torch's, or if a kernel writes elsewhere."""
    q, k, v, d_out = operands
    factors = factors_of(q, k, seed, dropout)
    found, memory, lse = made(operands, scale, causal, seed, dropout, layout, gap=1)
    wanted, usual = (expected(operands, scale, causal, factors, wide) for wide in (True, False))
    of_lse = 2**-24.5 * float(lse.abs().max())  # as in attention_backward_checks
    # With few kept values errors are random.
    is_small = min(q.shape[2], k.shape[2]) * q.shape[3] * (1 - dropout) < FEW
    tensors = of_query_heads(q, k, v)
    bounds = [
        attention_bounds.of_result(*tensors, scale, causal, factors),
        *attention_bounds.of_gradients(*tensors, d_out, scale, causal, factors),
    ]
    for name, value, right, other, bound in zip(NAMES, found, wanted, usual, bounds):
        error, usual_error, norm = *((t - right).norm() for t in (value, other)), right.norm()
        is_chance = is_small or norm <= 1e-9 * other.norm()
        small = bound.norm() if is_chance else max(FLOOR, of_lse) * norm
        if not error <= max(MOST * usual_error, small):
            failures.append(
                f"{what}: {name}'s error {error / norm:.2e}, torch's {usual_error / norm:.2e}, "
                f"bound {small / norm:.2e}"
            )
    sums = exact(q, k, v, scale, causal)[1]
    if not bool(((lse - sums).abs() <= 2e-6 * (1 + sums.abs().max())).all()):
        failures.append(f"{what}: lse is not that of all weights")
    for name, part, whole in zip(NAMES, found, memory):
        part.fill_(SENTINEL)
        if not bool((whole == SENTINEL).all()):
            failures.append(f"{what}: wrote outside {name}")


def sweep(failures: list[str], cases: int, seed: int, most: int = 515) -> None:
    """Random sizes, strides, seeds and drop probabilities."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        sizes = random_sizes(choose, D, most)
        kv = sizes.heads // sizes.heads_of_key
        operands = [
            filled(heads(sizes.batches, count, rows, sizes.d, choose.choice(LAYOUTS),
                         choose.choice((0, 1, 3))))
            for count, rows in (
                (sizes.heads, sizes.queries), (kv, sizes.keys), (kv, sizes.keys),
                (sizes.heads, sizes.queries),
            )
        ]  # fmt: skip
        scale, dropout = choose.choice((sizes.d**-0.5, 0.3)), choose.choice(SHARES)
        number = choose.randrange(-(2**63), 2**63)
        what = f"case {case}: {sizes}, scale {scale:.3f}, seed {number}, share {dropout}"
        judge(failures, what, operands, sizes.causal, scale, seed_of(number), dropout,
              choose.choice(LAYOUTS))  # fmt: skip


def one(queries: int, keys: int, count: int = 1) -> list[Tensor]:
    """q, k, v and dO."""
    return [filled(heads(1, count, rows, D)) for rows in (queries, keys, keys, queries)]


def lengths(failures: list[str]) -> None:
    """Queries whose keys are all dropped, keys that all queries drop or that no query sees."""
    torch.manual_seed(6)
    for queries, keys, causal in ((70, 1, False), (20, 20, True), (3, 130, True), (130, 3, False)):
        for share in SHARES:
            what = f"{queries} queries, {keys} keys, share {share}"
            judge(failures, what, one(queries, keys, 2), causal, 0.125, seed_of(queries), share)


def one_key(failures: list[str]) -> None:
    """With one key, out is its value times the factor, or zero."""
    operands, seed = one(70, 1), seed_of(3)
    (out, *_), _, _ = made(operands, 0.125, False, seed, 0.5)
    wanted = factors_of(operands[0], operands[1], seed, 0.5).float() * operands[2]
    if not torch.allclose(out, wanted, rtol=6e-7, atol=0):
        failures.append("one key: neither its value times the factor nor nothing")


def dropped_queries(failures: list[str]) -> None:
    """A query whose keys are all dropped does not cause others to be repaired in fp32: no bit of
    theirs changes."""
    torch.manual_seed(8)
    operands = one(20, 20)

    def first(of_first: bool) -> Tensor:
        """A seed with which the second causal query keeps both of its keys, each later one some of
        its keys, and the first one keeps its only key, or not."""
        for number in range(1000):
            seed = seed_of(number)
            kept = (factors_of(operands[0], operands[1], seed, 0.5)[0, 0] != 0).tril().sum(-1)
            if bool(kept[0]) == of_first and kept[1] == 2 and bool(kept[2:].all()):
                return seed
        raise AssertionError("no seed has it")

    dropping = first(False)
    found = made(operands, 0.125, True, dropping, 0.5)[0]
    other = made(operands, 0.125, True, first(True), 0.5)[0]
    if bool(found[0][..., 0, :].any()) or not torch.equal(
        *(t[0][..., 1, :] for t in (found, other))
    ):
        failures.append("out of the first query is not nothing, or changes bits of the second's")
    operands[3][..., 0, :] = 0
    without = made(operands, 0.125, True, dropping, 0.5)[0]
    for name, gradients in zip(NAMES, zip(found, without)):
        if not torch.equal(*gradients):
            failures.append(f"dO of a query all of whose keys are dropped changes {name}")


def repaired(failures: list[str]) -> None:
    """The fp32 repair drops the same weights: small channels are as accurate as others."""
    torch.manual_seed(5)
    q, k, v, d_out = one(66, 70)
    for t in (q, k, v, d_out):
        t[..., 3] *= 1e-9
    operands, seed = [q, k, v, d_out], seed_of(-1)
    for causal in (False, True):
        factors = factors_of(q, k, seed, 0.1)
        found, _, _ = made(operands, 0.125, causal, seed, 0.1)
        wanted, usual = (expected(operands, 0.125, causal, factors, w) for w in (True, False))
        for name, *values in zip(NAMES, found, wanted, usual):
            ours, right, other = (t[..., 3].double() for t in values)
            error, usual_error = ((t - right).norm() for t in (ours, other))
            if not error <= max(4 * usual_error, 2e-6 * right.norm()):
                failures.append(f"{name} of a small channel: {error / right.norm():.2e}")


def refusals(failures: list[str]) -> None:
    """Drop probabilities that round to zero, or exceed the kernels' maximum."""
    q, k, v, d_out = one(9, 9)
    lse, seed = torch.zeros(1, 1, 9, device=CUDA), seed_of(0)
    for share in (1e-6, 0.98, 1.0, float("nan")):
        given = 0.125, False, seed, share
        to = [torch.zeros_like(t) for t in (q, k, v)]
        if kernels.attention_split(FORWARD, q, k, v, q.clone(), None, *given):
            failures.append(f"a share of {share} was not refused")
        if kernels.attention_backward(BACKWARD, q, k, v, q, lse, d_out, to, *given):
            failures.append(f"a share of {share} was not refused in backward")


def repeats(failures: list[str], times: int = 50) -> None:
    """Launches, over two streams too, agree bit for bit."""
    for causal in (False, True):
        operands, seed = one(700, 700, 24), seed_of(11)
        step = functools.partial(made, operands, 0.125, causal, seed, 0.1)
        if not agree_over_two_streams(lambda: step()[0], step()[0], times):  # noqa: B023
            failures.append("launches over two streams differ")
