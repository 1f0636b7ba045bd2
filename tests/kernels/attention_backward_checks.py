"""Checks of the split attention's backward; benchmarks/attention_backward.py times it."""

from __future__ import annotations

import functools
import random

import attention_bounds
import attention_special
import torch
from attention_checks import (
    FEW,
    LAYOUTS,
    MOST,
    exact,
    filled,
    heads,
    of_query_heads,
    random_sizes,
    usual,
)
from checks import SENTINEL, agree_over_two_streams
from torch import Tensor

from benchmarks import kernels
from benchmarks.attention_backward import FORWARD
from benchmarks.sm90 import CUDA, FLOOR
from fx_fuser.kernels import attention

SHAPES = tuple(range(len(attention.BACKWARD_SHAPES)))
NAMES = ("dq", "dk", "dv")


def gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, scale: float, causal: bool, wide: bool
) -> list[Tensor]:
    """torch's gradients, per query head. wide: in float64."""
    tensors = of_query_heads(q, k, v)
    leaves = [(t.double() if wide else t.clone()).detach().requires_grad_() for t in tensors]
    a, b, c = leaves
    out = exact(a, b, c, scale, causal)[0] if wide else usual(a, b, c, scale, causal)
    return list(torch.autograd.grad(out, leaves, d_out.to(out.dtype)))


def forward(
    shape: int, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, layout: str = "bhld"
) -> tuple[Tensor, Tensor]:
    """out and lse by our kernel: the error of its logits is in lse, too."""
    batches, count, queries, d = q.shape
    out = filled(heads(batches, count, queries, d, layout))
    lse = torch.empty(batches, count, queries, device=CUDA)
    spec = attention.spec_of(FORWARD[attention.BACKWARD_SHAPES[shape][0]])
    assert kernels.attention_split(spec, q, k, v, out, lse, scale, causal)
    return out, lse


def judge(
    failures: list[str],
    what: str,
    shape: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    causal: bool,
    scale: float,
    layout: str = "bhld",
    few: bool = False,
) -> None:
    """Runs the kernels. Fails if an error exceeds MOST times torch's, or on a stray write."""
    batches, count, queries, d = q.shape
    rows = (queries, k.shape[2], k.shape[2])
    made = [heads(batches, count, length, d, layout, gap=1) for length in rows]
    for part, whole in made:
        whole.fill_(SENTINEL)
        part.fill_(float("nan"))
    out, lse = forward(shape, q, k, v, scale, causal, layout)
    to, spec = [part for part, _ in made], attention.backward_spec_of(shape)
    if not kernels.attention_backward(spec, q, k, v, out, lse, d_out, to, scale, causal):
        failures.append(f"{what}: refused")
        return
    wanted = gradients(q, k, v, d_out, scale, causal, wide=True)
    theirs = gradients(q, k, v, d_out, scale, causal, wide=False)
    # A row's weights have the error of its lse, which is rounded once: half an ulp at most, 0.58 of
    # that on average. Other errors come on top.
    of_lse = 2**-24.5 * float(lse.abs().max())
    # If a head has few values of queries or keys, or only one of its rows counts.
    is_small = few or min(queries, k.shape[2]) * d < FEW
    bounds = attention_bounds.of_gradients(*of_query_heads(q, k, v), d_out, scale, causal)
    for name, value, right, other, bound in zip(NAMES, to, wanted, theirs, bounds):
        error, usual_error, norm = *((t - right).norm() for t in (value, other)), right.norm()
        # All terms of a gradient may cancel; then only errors are left.
        small = (
            bound.norm() if is_small or norm <= 1e-9 * other.norm() else max(FLOOR, of_lse) * norm
        )
        if not error <= max(MOST * usual_error, small):
            failures.append(
                f"{what}: {name}'s error {error / norm:.2e}, torch's {usual_error / norm:.2e}, "
                f"bound {small / norm:.2e}"
            )
    for name, (part, whole) in zip(NAMES, made):
        part.fill_(SENTINEL)
        if not bool((whole == SENTINEL).all()):
            failures.append(f"{what}: wrote outside {name}")


def sweep(failures: list[str], cases: int, seed: int, shape: int, most: int = 515) -> None:
    """Random sizes and strides."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        sizes = random_sizes(choose, attention.BACKWARD_SHAPES[shape][0], most)
        kv = sizes.heads // sizes.heads_of_key
        q, k, v, d_out = (
            filled(heads(sizes.batches, count, rows, sizes.d, choose.choice(LAYOUTS),
                         choose.choice((0, 1, 3))))
            for count, rows in (
                (sizes.heads, sizes.queries), (kv, sizes.keys), (kv, sizes.keys),
                (sizes.heads, sizes.queries),
            )
        )  # fmt: skip
        scale = choose.choice((sizes.d**-0.5, 0.3))
        judge(failures, f"case {case}: {sizes}, scale {scale:.3f}", shape, q, k, v, d_out,
              sizes.causal, scale, choose.choice(LAYOUTS))  # fmt: skip


def one(shape: int, queries: int, keys: int, count: int = 1) -> list[Tensor]:
    """q, k, v and dO."""
    d = attention.BACKWARD_SHAPES[shape][0]
    return [filled(heads(1, count, rows, d)) for rows in (queries, keys, keys, queries)]


def hard_values(failures: list[str], shape: int, keys: int = 197) -> None:
    """Data for which naive halves, or a naive sum, are wrong."""
    torch.manual_seed(5)
    q, k, v, d_out = one(shape, 66, keys)
    scale = q.shape[-1] ** -0.5
    last = (torch.arange(keys, device=CUDA) == keys - 1)[:, None]
    growing = 10 ** torch.linspace(-4, 4, 66, device=CUDA)[:, None]
    cases = {
        "a dominating key": (q, torch.where(last, q[:, :, :1] * 1.5, k), v, d_out),
        "logits to ±60": (q * 8, k * 2, v, d_out),
        "equal logits": (q * 0, k, v.abs() + 1, d_out),
        "equal values": (q, k, v * 0 + v[:, :, :1], d_out),
        "small dO": (q, k, v, d_out * 1e-20),
        "large dO": (q, k, v, d_out * 1e15),
        "large values": (q, k, v * 1e15, d_out),
        "large keys, small queries": (q * 1e-6, k * 1e6, v, d_out),
        "growing dO": (q, k, v, d_out * growing),
        "dO that ends": (q, k, v, d_out * (torch.arange(66, device=CUDA) < 20)[:, None]),
        "no dO": (q, k, v, d_out * 0),
    }
    for what, (a, b, c, d) in cases.items():
        few = what == "growing dO"  # only the last queries' counts
        judge(failures, f"{what}, shape {shape}", shape, a, b, c, d, False, scale, few=few)


def lengths(failures: list[str], shape: int) -> None:
    """Keys that no causal query sees have no gradient; a single key has only its value's."""
    torch.manual_seed(6)
    for queries, keys, causal in ((3, 130, True), (130, 3, True), (1, 1, False), (65, 129, True)):
        q, k, v, d_out = one(shape, queries, keys)
        what = f"{queries} queries, {keys} keys, shape {shape}"
        judge(failures, what, shape, q, k, v, d_out, causal, 0.125)
    # More units per block than its ring holds.
    q, k, v, d_out = one(shape, 9, 70, 20)
    v[:, ::3] *= 1e4
    d_out[:, ::2] *= 1e-5
    judge(failures, f"20 heads, shape {shape}", shape, q, k, v, d_out, False, 0.125)


def special_values(failures: list[str], shape: int) -> None:
    for what, operands in attention_special.cases(attention.BACKWARD_SHAPES[shape][0], CUDA):
        for causal in (False, True):
            told = f"{what}, causal {causal}, shape {shape}"
            found = made(shape, operands, causal, attention_special.SCALE)
            for name, gradient in zip(NAMES, found):
                attention_special.compare(failures, told, gradient, operands, causal, name)


def few_last_lines(failures: list[str], shape: int) -> None:
    """A last tile of few keys or queries: a small element must not make the accuracy test reject
    other columns of its gradient."""
    torch.manual_seed(8)
    lines = attention.BACKWARD_SHAPES[shape][2] + 1
    small = 3  # the column
    # Which of q, k, v and dO has it, and another that lacks the column, so that no logit changes.
    for name, of, other in (("dq", 1, 0), ("dk", 0, 1), ("dv", 3, 2)):
        tensors = one(shape, lines, lines)
        tensors[other][..., small] = 0
        found = []
        for value in (1.0, 1e-6):
            tensors[of][..., -1, small] = value
            found.append(made(shape, tensors, False)[NAMES.index(name)])
        changed = found[0] != found[1]
        changed[..., small] = False
        if bool(changed.any()):
            failures.append(f"{lines} lines, shape {shape}: all rows of {name} repaired")


def made(
    shape: int, tensors: list[Tensor], causal: bool, scale: float | None = None
) -> list[Tensor]:
    q, k, v, d_out = tensors
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = forward(shape, q, k, v, scale, causal)
    to = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    assert kernels.attention_backward(
        attention.backward_spec_of(shape), q, k, v, out, lse, d_out, to, scale, causal
    )
    return to


def rounding_of_lse(failures: list[str], shape: int) -> None:
    """Weights are exp(-lse). With lse log2(e) rounded to one float they would be off by 1.9e-7 of
    themselves (standard deviation); with two floats only by the error of exp2 and halves."""
    torch.manual_seed(10)
    queries = 64
    q, k, v, d_out = one(shape, queries, 64)
    q, v, out = q * 0, v * 0 + 1, q * 0 + 0.5
    d_out = torch.zeros_like(d_out)
    d_out[..., :queries] = torch.eye(queries, device=CUDA)
    lse = torch.linspace(5.6, 10.3, queries, device=CUDA)[None, None]
    to = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    assert kernels.attention_backward(
        attention.backward_spec_of(shape), q, k, v, out, lse, d_out, to, 1.0, False
    )
    weights = (-lse.double()).exp()[0, 0]
    of_values = to[2].double()[0, 0, 0, :queries] / weights
    # All keys of a query have the same weight, and the same dO v - delta.
    of_queries = to[0].double()[0, 0] @ k.double().sum(-2)[0, 0] / weights
    for name, ratio in (("dv", of_values), ("dq", of_queries)):
        off = float((ratio / ratio.mean()).std())
        if not off < 1.5e-7:
            failures.append(f"shape {shape}: of {name} weights are off by {off:.2e}")


def refusals(failures: list[str]) -> None:
    q, k, v, d_out = one(0, 9, 9)
    shifted = torch.zeros(1 + 9 * 64, device=CUDA)[1:].view(1, 1, 9, 64)
    lse = torch.zeros(1, 1, 9, device=CUDA)
    spec = attention.backward_spec_of(0)
    for what, queries, gradient, scale in (
        ("an address of dO that is not aligned", q, shifted, 1.0),
        ("elements that are not adjacent", q.mT.contiguous().mT, d_out, 1.0),
        ("a negative scale", q, d_out, -1.0),
    ):
        to = [torch.zeros(t.shape, device=CUDA) for t in (q, k, v)]
        if kernels.attention_backward(spec, queries, k, v, q, lse, gradient, to, scale):
            failures.append(f"{what} was not refused")


def many_keys(failures: list[str], shape: int) -> None:
    """The tensor core's truncation must not add up, over keys and over queries."""
    torch.manual_seed(9)
    for queries, keys in ((300, 8192), (8192, 300)):
        q, k, v, d_out = one(shape, queries, keys)
        what, scale = f"{queries} queries, {keys} keys", q.shape[-1] ** -0.5
        judge(failures, f"{what}, shape {shape}", shape, q, k, v, d_out, False, scale)
        judge(failures, f"{what}, positive, shape {shape}", shape, q, k, v.abs(), d_out.abs(),
              False, scale)  # fmt: skip


def repeats(failures: list[str], shape: int, times: int = 50) -> None:
    """Launches, over two streams too, agree bit for bit."""
    for causal in (False, True):
        step = functools.partial(made, shape, one(shape, 700, 700, 24), causal)
        if not agree_over_two_streams(step, step(), times):
            failures.append(f"shape {shape}: launches over two streams differ")
