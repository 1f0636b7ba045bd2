"""Checks of dropout in attention with a bias, forward and backward, against float64 with the same
weights dropped."""

from __future__ import annotations

import functools
import random

import torch
from attention_bias_backward_checks import NAMES, Four, to_sizes, weights_of
from attention_bias_checks import (
    DTYPES,
    MOST,
    Sizes,
    filled,
    heads,
    logits_of,
    operands,
    pitched,
    random_sizes,
    rounding,
)
from attention_checks import LAYOUTS
from attention_dropout_checks import SHARES, factors_of, seed_of
from checks import SENTINEL, agree_over_two_streams
from torch import Tensor

from benchmarks import attention_kernels
from fx_fuser.kernels.attention import bias as attention_bias

D = 64
FEW = 4096  # with fewer kept weights errors are random


def spec_for(q: Tensor, backward: bool = False):  # type: ignore[no-untyped-def]
    spec = attention_bias.spec_for(q.shape[-1], q.dtype, backward, 0.1)
    assert spec is not None
    return spec


def exact(
    tensors: Four, d_out: Tensor, scale: float, causal: bool, kept: Tensor, of_bias: torch.Size,
    rounds: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """out and NAMES in float64. kept: factors of the weights. rounds: a kernel's out; then with the
    roundings of any 16-bit kernel, torch's too: out, P and G, results."""
    q, k, v, bias = (t.double() for t in tensors)
    wide = d_out.double()
    weights = weights_of((q, k, v, bias), scale, causal)

    def narrow(t: Tensor) -> Tensor:
        return t if rounds is None else t.to(d_out.dtype).double()

    out = narrow(weights * kept) @ v
    delta = ((out if rounds is None else rounds.double()) * wide).sum(-1, keepdim=True)
    g = weights * (wide @ v.mT * kept - delta)
    of = to_sizes(g, of_bias)
    g = narrow(g)
    made = out, g @ k * scale, g.mT @ q * scale, narrow(weights * kept).mT @ wide, of
    return [narrow(t) for t in made]


def bounds(
    tensors: Four, d_out: Tensor, scale: float, causal: bool, kept: Tensor, of_bias: torch.Size
) -> list[Tensor]:
    """The error that each result's own arithmetic may have: half an ulp per term."""
    q, k, v, bias = (t.double() for t in tensors)
    weights = weights_of((q, k, v, bias), scale, causal)
    wide = d_out.double().abs()
    terms = wide @ v.abs().mT * kept
    g = weights * (terms + (weights * terms).sum(-1, keepdim=True))
    dropped = weights * kept
    sums = dropped @ v.abs(), g @ k.abs() * scale, g.mT @ q.abs() * scale, dropped.mT @ wide
    half = torch.finfo(d_out.dtype).eps / 2
    return [half * t for t in (*sums, to_sizes(g, of_bias))]


def made(
    tensors: Four, d_out: Tensor, scale: float, causal: bool, seed: Tensor, dropout: float,
    of_bias: torch.Size, layout: str = "bhld", alone: bool = False,
) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
    """out and NAMES by the kernels, the memory around each, and lse."""
    q, k, _, _ = tensors
    results = [heads(t.shape, q.dtype, layout, gap=1) for t in (q, q, k, k)]
    whole = torch.empty(*of_bias[:2], of_bias[2] + 1, of_bias[3] + 3, device=q.device).to(q.dtype)
    results.append((whole[:, :, : of_bias[2], : of_bias[3]], whole))
    for part, memory in results:
        memory.fill_(SENTINEL)
        part.fill_(torch.nan)
    out, *to = (part for part, _ in results)
    rows = -(-q.shape[2] // 32) * 32
    lse = torch.full((*q.shape[:2], rows), torch.nan, device=q.device)
    rest = scale, causal, alone, seed, dropout
    assert attention_kernels.attention_bias(spec_for(q), tensors, out, lse, *rest)
    given = tensors, out, lse, d_out, to
    assert attention_kernels.attention_bias_backward(spec_for(q, True), *given, *rest)
    return [out, *to], [memory for _, memory in results], lse


def judge(
    failures: list[str], what: str, tensors: Four, scale: float, causal: bool, seed: Tensor,
    dropout: float, layout: str = "bhld", whole_bias: bool = False, alone: bool = False,
) -> None:  # fmt: skip
    """Fails if an error exceeds MOST times rounding's, or if a kernel writes elsewhere."""
    q, k, _, bias = tensors
    d_out = filled(tuple(q.shape), q.dtype, layout)
    outer = [n if whole_bias or step else 1 for n, step in zip(bias.shape[:2], bias.stride())]
    sizes = torch.Size((*outer, *bias.shape[2:]))
    kept = factors_of(q, k, seed, dropout)
    found, memory, lse = made(tensors, d_out, scale, causal, seed, dropout, sizes, layout, alone)
    given = tensors, d_out, scale, causal, kept, sizes
    wanted, theirs, small = exact(*given), exact(*given, rounds=found[0]), bounds(*given)
    is_few = q.numel() * k.shape[2] * (1 - dropout) < FEW * D
    for name, value, right, other, bound in zip(("out", *NAMES), found, wanted, theirs, small):
        error, usual, norm = *((t - right).norm() for t in (value, other)), right.norm()
        most = torch.maximum(MOST * usual, rounding(q.dtype) * norm)
        if is_few or value.numel() < FEW or min(q.shape[2], k.shape[2]) < 8:
            most = torch.maximum(most, bound.norm())
        if not error <= most:
            failures.append(f"{what}: {name}'s error {error / norm:.2e}, bound {most / norm:.2e}")
    sums = logits_of(q.double(), k.double(), bias.double(), scale, causal).logsumexp(-1)
    same = lse[..., : q.shape[2]].double() == sums  # infinities
    off = torch.where(same, 0.0, (lse[..., : q.shape[2]] - sums).abs()).max()
    if not off <= 1e-5 * (1 + sums[sums.isfinite()].abs().amax().nan_to_num()):
        failures.append(f"{what}: lse is not that of all weights, but off by {off:.2e}")
    for name, part, whole in zip(("out", *NAMES), found, memory):
        part.fill_(SENTINEL)
        if not bool((whole == whole.new_tensor(SENTINEL)).all()):
            failures.append(f"{what}: wrote outside {name}")


def sweep(failures: list[str], cases: int, seed: int, most: int = 515) -> None:
    """Random sizes, strides, seeds and drop probabilities."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        sizes = random_sizes(choose, D, most)
        dtype, share = choose.choice(DTYPES), choose.choice(SHARES)
        tensors = operands(sizes, dtype, choose)
        scale, number = choose.choice((sizes.d**-0.5, 0.3)), choose.randrange(-(2**63), 2**63)
        what = f"case {case}: {sizes}, {dtype}, scale {scale:.3f}, seed {number}, share {share}"
        judge(failures, what, tensors, scale, sizes.causal, seed_of(number), share,
              choose.choice(LAYOUTS), choose.random() < 0.2, choose.random() < 0.3)  # fmt: skip


def which(failures: list[str]) -> None:
    """Tests each weight: with equal weights and one-hot values, out is the mask."""
    queries = keys = D
    for number, share in ((3, 0.5), (-3, 0.1)):
        q = torch.zeros(2, 2, queries, D).bfloat16().to(filled((1, 1, 1, 8), DTYPES[0]).device)
        eye = torch.eye(keys, device=q.device).to(q.dtype).expand(2, 2, -1, -1).contiguous()
        bias = q.new_zeros(1, 1, queries, keys).expand(2, 2, -1, -1)
        seed = seed_of(number)
        sizes = torch.Size((1, 1, queries, keys))
        (out, _, _, d_v, _), _, _ = made((q, q, eye, bias), eye, 1.0, False, seed, share, sizes)
        kept = factors_of(q, q, seed, share) / keys
        for name, found, right in (("out", out, kept), ("dv", d_v, kept.mT)):
            if not torch.equal(found, right.to(q.dtype)):
                failures.append(f"{name} of one-hot values is not the mask, share {share}")


def hidden(failures: list[str]) -> None:
    """Infinities of the bias, with rows that see nothing."""
    torch.manual_seed(5)
    q, k, v, bias = operands(Sizes(2, 2, 70, 197, D), torch.bfloat16)
    drawn = torch.rand(bias.shape[-2:], device=q.device)
    rows = torch.arange(70, device=q.device)[:, None]
    changed = bias.masked_fill((drawn < 1 / 3) | (rows % 3 == 1), -torch.inf)
    judge(failures, "hidden", (q, k, v, pitched(changed)), D**-0.5, False, seed_of(9), 0.1)


def refusals(failures: list[str]) -> None:
    """Drop probabilities that round to zero, or exceed the kernels' maximum."""
    tensors = operands(Sizes(1, 1, 16, 16, D), torch.bfloat16)
    q = tensors[0]
    lse = torch.zeros(1, 1, 32, device=q.device)
    for share in (1e-6, 0.98, 1.0, float("nan")):
        rest = 0.125, False, False, seed_of(0), share
        to = [torch.zeros_like(q) for _ in range(3)]
        if attention_kernels.attention_bias(spec_for(q), tensors, q.clone(), None, *rest):
            failures.append(f"a share of {share} was not refused")
        given = tensors, q, lse, q, to
        if attention_kernels.attention_bias_backward(spec_for(q, True), *given, *rest):
            failures.append(f"a share of {share} was not refused in backward")


def repeats(failures: list[str], times: int = 50) -> None:
    """Launches, over two streams too, agree bit for bit."""
    for causal in (False, True):
        tensors = operands(Sizes(4, 8, 700, 700, D), torch.bfloat16)
        d_out, of_bias = filled(tuple(tensors[0].shape), torch.bfloat16), tensors[3][:1].shape
        step = functools.partial(made, tensors, d_out, 0.125, causal, seed_of(11), 0.1, of_bias)
        if not agree_over_two_streams(lambda: step()[0], step()[0], times):  # noqa: B023
            failures.append("launches over two streams differ")
