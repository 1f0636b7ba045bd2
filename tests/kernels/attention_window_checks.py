"""Checks of attention of windows: benchmarks/attention_window.py times it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from attention_bias_checks import rounding
from torch import Tensor

from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels.attention import window
from fx_fuser.ops.attention_bias.window import BACKWARD, FORWARD

MOST = 1.5  # times the error of what rounds as the formula does in 16 bits
NAMES = "out", "dq", "dk", "dv", "dbias"
LENGTHS = (1, 2, 7, 16, 17, 31, 49, 63, 64)
Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Sizes:
    shares: int  # batches that share a bias
    period: int
    heads: int
    queries: int
    keys: int
    d: int
    scale: float = 0.2

    @property
    def batches(self) -> int:
        return self.shares * self.period


def operands(
    sizes: Sizes, dtype: torch.dtype, packed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, the bias and out's gradient; packed: q, k and v of one tensor, as a projection
    leaves them. NaN lies around them."""

    def heads(rows: int, count: int = 1) -> list[Tensor]:
        shape = sizes.batches, rows + 1, count, sizes.heads, sizes.d + 8
        whole = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
        parts = [one[:, :rows, :, : sizes.d].transpose(1, 2) for one in whole.unbind(2)]
        return [part.copy_(torch.randn(part.shape, device=CUDA)) for part in parts]

    if packed:
        q, k, v = heads(sizes.queries, 3)
    else:
        (q,), (k, v) = heads(sizes.queries), heads(sizes.keys, 2)
    shape = sizes.period, sizes.heads, sizes.queries, sizes.keys
    bias = torch.randn(shape[0], *shape[2:], shape[1], device=CUDA).permute(0, 3, 1, 2)
    return q, k, v, bias, heads(sizes.queries)[0]


def formula(
    tensors: Sequence[Tensor], scale: float, dtype: torch.dtype, rounds: bool, is_safe: bool = False
) -> list[Tensor]:
    """out and the gradients in float64. rounds: with what autocast rounds to 16 bits on the way."""

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype).double() if rounds else value

    q, k, v, bias, d_out = (t.double() for t in tensors)
    period = bias.shape[0]
    scores = (rounded(q @ k.mT * scale).unflatten(0, (-1, period)) + bias).flatten(0, 1)
    weights = scores.softmax(-1)
    if is_safe:
        weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    kept = rounded(weights)
    d_weights = rounded(d_out @ v.mT)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    d_bias = d_scores.unflatten(0, (-1, period)).sum(0)
    d_scores = rounded(d_scores)
    made = [kept @ v, d_scores @ k * scale, d_scores.mT @ q * scale, kept.mT @ d_out]
    return [*map(rounded, made), d_bias]


def results(
    call: Run, tensors: Sequence[Tensor], scale: float, is_safe: bool = False
) -> list[Tensor]:
    """By the kernels."""
    q, k = tensors[:2]
    lengths = q.shape[2], k.shape[2]
    specs = [window.spec_for(q.shape[3], q.dtype, lengths, one) for one in (False, True)]
    assert specs[0] is not None and specs[1] is not None
    *operands, d_out = tensors
    (out,) = call(FORWARD, *operands, specs[0].name, scale, is_safe)
    return [out, *call(BACKWARD, d_out, *operands, specs[1].name, scale, is_safe, True)]


def judge(
    failures: list[str], what: str, call: Run, tensors: Sequence[Tensor], scale: float,
    is_safe: bool = False,
) -> None:  # fmt: skip
    """Is each error at most MOST times that of the formula in 16 bits?"""
    dtype = tensors[0].dtype
    wanted, theirs = (formula(tensors, scale, dtype, one, is_safe) for one in (False, True))
    found = results(call, tensors, scale, is_safe)
    for name, made, exact, usual in zip(NAMES, found, wanted, theirs):
        error, bound = relative(made, exact), MOST * relative(usual, exact)
        least = rounding(dtype if name != "dbias" else torch.float32)
        # A sum of one key's weights has no gradient: what is left is rounding.
        if exact.norm() == 0:
            if not made.double().abs().max() < 1e-2:
                failures.append(f"{what}: {name} is not near zero")
        elif not error <= max(bound, least):
            failures.append(f"{what}: {name}: error {error:.2e}, bound {max(bound, least):.2e}")


def random_sizes(choose: random.Random, most_d: int, least_d: int) -> Sizes:
    return Sizes(
        choose.choice((1, 2, 5)), choose.choice((1, 2, 4)), choose.choice((1, 2, 3)),
        choose.choice(LENGTHS), choose.choice(LENGTHS),
        choose.randrange(least_d + 8, most_d + 1, 8),
        choose.choice((0.2, 1.0, -0.3)),
    )  # fmt: skip


def sweep(failures: list[str], call: Run, seed: int, count: int, shape: int) -> None:
    """Random sizes, periods and strides."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    least = window.SHAPES[shape - 1] if shape else 0
    for _ in range(count):
        dtype = choose.choice((torch.bfloat16, torch.float16))
        sizes = random_sizes(choose, window.SHAPES[shape], least)
        packed = sizes.queries == sizes.keys
        judge(failures, f"{sizes}, {dtype}", call, operands(sizes, dtype, packed), sizes.scale)


def hidden_keys(failures: list[str], call: Run, shape: int) -> None:
    """Masks of -inf, of -100 and of least numbers; rows that see one key."""
    torch.manual_seed(shape)
    sizes = Sizes(2, 2, 2, 49, 49, window.SHAPES[shape])
    for dtype in (torch.bfloat16, torch.float16):
        for number in (-torch.inf, -100.0, torch.finfo(torch.float32).min, -1e9):
            *tensors, bias, d_out = operands(sizes, dtype, packed=True)
            hides = torch.rand(2, 1, 49, 49, device=CUDA) < 0.5
            hides[:, :, 3] = True  # but for one key
            hides[:, :, :, 5] = False
            masked = torch.where(hides, torch.tensor(number, device=CUDA) + 0 * bias, bias)
            what = f"{number} of {dtype}"
            judge(failures, what, call, (*tensors, masked, d_out), sizes.scale)


def safe_rows(failures: list[str], call: Run, shape: int) -> None:
    """As torch's call: a row that sees nothing is 0, and adds nothing to gradients; a row that has
    a NaN is NaN, and one whose keys all have the least number sees them all."""
    torch.manual_seed(shape)
    sizes = Sizes(2, 2, 2, 49, 33, window.SHAPES[shape])
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v, bias, d_out = operands(sizes, dtype)
        bias[:, :, 2] = torch.finfo(torch.float32).min
        bias[0, 0, 4] = -torch.inf
        bias[1, :, 5:9, 1:] = -torch.inf
        tensors = q, k, v, bias, d_out
        judge(failures, f"{dtype}", call, tensors, sizes.scale, is_safe=True)
        out, *gradients = results(call, tensors, sizes.scale, is_safe=True)
        hidden = out.unflatten(0, (2, 2))[:, 0, 0, 4], gradients[-1][0, 0, 4]
        if any(one.any() for one in hidden):
            failures.append(f"{dtype}: a hidden row is not 0")
        q[1, 1, 7, 3] = torch.nan
        made, exact = (
            results(call, tensors, sizes.scale, is_safe=True),
            formula(tensors, sizes.scale, dtype, rounds=False, is_safe=True),
        )
        for name, mine, right in zip(NAMES, made, exact):
            if not torch.equal(mine.isnan(), right.isnan()):
                failures.append(f"{dtype}: NaN of {name}")


def not_numbers(failures: list[str], call: Run, shape: int) -> None:
    """A row that sees nothing, or has a NaN, is NaN, and no other row."""
    torch.manual_seed(shape)
    sizes = Sizes(2, 1, 2, 49, 33, window.SHAPES[shape])
    q, k, v, bias, d_out = operands(sizes, torch.bfloat16)
    bias[0, 0, 4] = -torch.inf
    q[1, 1, 7, 3] = torch.nan
    k[0, 1, 32, 0] = torch.inf
    tensors = q, k, v, bias, d_out
    out = results(call, tensors, sizes.scale)[0]
    wanted = formula(tensors, sizes.scale, q.dtype, rounds=False)[0]
    if not torch.equal(out.isnan(), wanted.isnan()):
        failures.append(f"NaN of {out.isnan().sum()} elements, not {wanted.isnan().sum()}")
    if not wanted.isnan().any() or wanted.isnan().all():
        failures.append("the check has lost its point")


def same_bits(failures: list[str], call: Run, shape: int) -> None:
    """Two calls give the same bits, though blocks add up the bias's gradient in parts."""
    torch.manual_seed(shape)
    sizes = Sizes(40, 1, 2, 49, 49, window.SHAPES[shape])
    tensors = operands(sizes, torch.bfloat16, packed=True)
    pairs = zip(NAMES, *(results(call, tensors, sizes.scale) for _ in range(2)))
    failures += [f"{name} differs" for name, a, b in pairs if not torch.equal(a, b)]


def without_gradient_of_bias(failures: list[str], call: Run) -> None:
    sizes = Sizes(3, 2, 1, 20, 24, 16)
    *tensors, d_out = operands(sizes, torch.bfloat16)
    spec = window.spec_for(16, torch.bfloat16, (20, 24), backward=True)
    assert spec is not None
    made = [call(BACKWARD, d_out, *tensors, spec.name, 0.2, False, one) for one in (True, False)]
    if [len(one) for one in made] != [4, 3]:
        failures.append(f"results: {[len(one) for one in made]}")
    failures += [f"{name} differs" for name, a, b in zip(NAMES[1:], *made) if not torch.equal(a, b)]
