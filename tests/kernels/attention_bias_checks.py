"""Checks of attention with a bias; benchmarks/attention_bias.py times it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention_checks import LAYOUTS
from checks import SENTINEL, agree_over_two_streams
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import attention_kernels
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels.attention import bias as attention_bias

SHAPES = attention_bias.PLAIN
DTYPES = attention_bias.DTYPES
MOST = 1.5  # times torch's error, if that is more than the result's rounding
LENGTHS = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 197, 256, 257, 384, 515)


@dataclass(frozen=True)
class Sizes:
    batches: int
    heads: int
    queries: int
    keys: int
    d: int
    causal: bool = False
    shared: tuple[int, ...] = (0,)  # dimensions in which the bias is expanded


def rounding(dtype: torch.dtype) -> float:
    """The error, relative to the norm, of exact results rounded to their dtype, with a margin."""
    return torch.finfo(dtype).eps / 4


def heads(
    sizes: Sequence[int], dtype: torch.dtype, layout: str = "bhld", gap: int = 0
) -> tuple[Tensor, Tensor]:
    """[B, H, L, D] with this memory order, amid NaN, with gaps of 8 · gap elements; and all of that
    memory."""
    *outer, d = sizes
    of = dict(zip("bhl", outer))
    lines = [of[name] for name in layout[:3]]
    whole = torch.full((*lines[:2], lines[2] + 1, d + 8 * gap), torch.nan, dtype=dtype, device=CUDA)
    part = whole[:, :, : lines[2], :d]
    return part.permute(*(layout.index(name) for name in "bhl"), 3), whole


def filled(*given: object) -> Tensor:
    part, _ = heads(*given)  # type: ignore[arg-type]
    return part.copy_(torch.randn(part.shape, device=CUDA))


def bias_of(sizes: Sizes, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A bias whose rows are a multiple of 8 elements apart, with NaN behind them."""
    outer = [1 if i in sizes.shared else n for i, n in enumerate((sizes.batches, sizes.heads))]
    pitch = -(-sizes.keys // 8) * 8 + 8 * gap
    whole = torch.full((*outer, sizes.queries, pitch), torch.nan, dtype=dtype, device=CUDA)
    part = whole[..., : sizes.keys]
    part.copy_(torch.randn(part.shape, device=CUDA))
    return part.expand(sizes.batches, sizes.heads, -1, -1)


def pitched(bias: Tensor) -> Tensor:
    """The same values with rows like `bias_of`'s."""
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 8), value=torch.nan)[..., :keys]


def operands(
    sizes: Sizes, dtype: torch.dtype, choose: random.Random | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def one(rows: int) -> Tensor:
        layout, gap = "bhld", 0
        if choose is not None:
            layout, gap = choose.choice(LAYOUTS), choose.choice((0, 1, 3))
        return filled((sizes.batches, sizes.heads, rows, sizes.d), dtype, layout, gap)

    q, k, v = one(sizes.queries), one(sizes.keys), one(sizes.keys)
    return q, k, v, bias_of(sizes, dtype, 0 if choose is None else choose.choice((0, 2)))


def hidden_by_causality(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, device=CUDA, dtype=torch.bool).triu(1)


def logits_of(q: Tensor, k: Tensor, bias: Tensor, scale: float, causal: bool) -> Tensor:
    logits = q @ k.mT * scale + bias
    if causal:
        logits = logits.masked_fill(hidden_by_causality(*logits.shape[-2:]), -torch.inf)
    return logits


def exact(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """out in float64, and the logarithm of each row's sum. A row that sees nothing has 0."""
    q, k, v, bias = (t.double() for t in (q, k, v, bias))
    logits = logits_of(q, k, bias, scale, causal)
    weights = logits.softmax(-1)
    weights = torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, weights)
    return weights @ v, logits.logsumexp(-1)


def usual(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, causal: bool) -> Tensor:
    """Torch's kernel."""
    if causal:
        bias = bias.masked_fill(hidden_by_causality(*bias.shape[-2:]), -torch.inf)
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # which supports a bias with a gradient
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)


def judge(
    failures: list[str],
    what: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    causal: bool = False,
    layout: str = "bhld",
    with_lse: bool = True,
) -> None:
    """Runs the kernel. Fails if its error exceeds MOST times torch's, or if it writes elsewhere."""
    q = tensors[0]
    batches, count, queries, _ = q.shape
    out, whole = heads(tuple(q.shape), q.dtype, layout, gap=1)
    whole.fill_(SENTINEL)
    out.fill_(torch.nan)
    rows = -(-queries // 32) * 32  # padded as torch's
    lse = torch.full((batches, count, rows), torch.nan, device=CUDA) if with_lse else None
    spec = attention_bias.spec_for(q.shape[-1], q.dtype)
    assert spec is not None
    if not attention_kernels.attention_bias(spec, tensors, out, lse, scale, causal):
        failures.append(f"{what}: refused")
        return
    wanted, sums = exact(*tensors, scale, causal)
    error = relative(out, wanted)
    seen = (sums > -torch.inf)[..., None]  # torch's kernels differ for the other rows
    theirs = relative(torch.where(seen, usual(*tensors, scale, causal), 0), wanted)
    bound = max(MOST * theirs, rounding(q.dtype))
    if not error <= bound:
        failures.append(f"{what}: error {error:.2e}, bound {bound:.2e}")
    if not bool((out.masked_select(~seen) == 0).all()):
        failures.append(f"{what}: a row that sees nothing is not 0")
    if lse is not None:
        same = lse[..., :queries].double() == sums  # infinities
        off = float(torch.where(same, 0.0, (lse[..., :queries] - sums).abs()).max())
        if not off <= 1e-5 * (1 + sums[sums.isfinite()].abs().amax().nan_to_num()):
            failures.append(f"{what}: lse is off by {off:.2e}")
        if not bool((lse[..., queries:] == torch.inf).all()):
            failures.append(f"{what}: lse is not infinite beyond the queries")
    out.fill_(SENTINEL)
    if not bool((whole == whole.new_tensor(SENTINEL)).all()):
        failures.append(f"{what}: wrote outside the result")


def random_sizes(choose: random.Random, most_d: int, most: int) -> Sizes:
    queries, keys = (choose.choice([n for n in LENGTHS if n <= most]) for _ in range(2))
    if choose.random() < 0.5:
        keys = queries
    d = choose.choice((most_d, most_d, most_d - 8, most_d // 2 + 8))
    shared = choose.choice(((0,), (0,), (1,), (0, 1), ()))
    return Sizes(choose.randint(1, 2), choose.randint(1, 3), queries, keys, d,
                 choose.random() < 0.3, shared)  # fmt: skip


def sweep(failures: list[str], cases: int, seed: int, shape: int, most: int = 515) -> None:
    """Random sizes and strides."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        sizes = random_sizes(choose, attention_bias.SHAPES[shape][0], most)
        dtype = choose.choice(DTYPES)
        tensors = operands(sizes, dtype, choose)
        scale = choose.choice((sizes.d**-0.5, 1.0, 0.3))
        judge(failures, f"case {case}: {sizes}, {dtype}, scale {scale:.3f}", tensors, scale,
              sizes.causal, choose.choice(LAYOUTS), choose.random() < 0.7)  # fmt: skip


def hard_biases(failures: list[str], shape: int, keys: int = 197) -> None:
    torch.manual_seed(5)
    d = attention_bias.SHAPES[shape][0]
    for dtype in DTYPES:
        q, k, v, bias = operands(Sizes(2, 2, 70, keys, d), dtype)
        drawn = torch.rand(bias.shape[-2:], device=CUDA)
        rows = torch.arange(70, device=CUDA)[:, None]
        columns = torch.arange(keys, device=CUDA)
        cases = {
            "a third hidden": bias.masked_fill(drawn < 1 / 3, -torch.inf),
            "rows hidden": bias.masked_fill((rows % 3 == 1) | (rows == 69), -torch.inf),
            "the first keys hidden": bias.masked_fill(columns < 150, -torch.inf),
            "the last keys hidden": bias.masked_fill(columns >= 3, -torch.inf),
            "the least number": bias.masked_fill(drawn < 0.5, torch.finfo(dtype).min),
            "large": bias * 40,
            "one key": bias + 60 * (columns == keys - 1),
        }
        for what, changed in cases.items():
            judge(failures, f"{what}, {dtype}, shape {shape}", (q, k, v, pitched(changed)), d**-0.5)


def far_below(failures: list[str], shape: int, keys: int = 197) -> None:
    """Masks of large negative numbers instead of -inf, for a tile of keys, for all but one key and
    for all: rows are right, and 0 if they see no key."""
    torch.manual_seed(5)
    d = attention_bias.SHAPES[shape][0]
    q, k, v, bias = operands(Sizes(1, 1, 70, keys, d), torch.bfloat16)
    spec = attention_bias.spec_for(d, q.dtype)
    assert spec is not None
    for least in (torch.finfo(q.dtype).min, -2.2e38, -1e9):
        masked, hidden = bias.clone(), bias.clone()
        for made, by in ((masked, least), (hidden, -torch.inf)):
            made[..., 5, :128] = by
            made[..., 6, :-1] = by
            made[..., 7, :] = by
        (out, lse), (right, logarithms) = (
            (torch.full_like(q, torch.nan), torch.zeros(1, 1, 70, device=CUDA)) for _ in range(2)
        )
        for to, of, given in ((out, lse, masked), (right, logarithms, hidden)):
            assert attention_kernels.attention_bias(spec, (q, k, v, pitched(given)), to, of)
        if not (torch.equal(out, right) and torch.equal(lse, logarithms)):
            failures.append(f"a mask of {least} differs from -inf, shape {shape}")


def not_numbers(failures: list[str], shape: int) -> None:
    """A row with NaN or infinity is NaN, and no other."""
    d = attention_bias.SHAPES[shape][0]
    q, k, v, bias = operands(Sizes(1, 1, 70, 197, d), torch.bfloat16)
    for value in (torch.nan, torch.inf):
        changed = pitched(bias)
        changed[..., 5, 190] = value
        out = made((q, k, v, changed))
        wrong = out.isnan().any(-1) != (torch.arange(70, device=CUDA) == 5)
        if bool(wrong.any()) or not bool(out[..., 5, :].isnan().all()):
            failures.append(f"a bias of {value}, shape {shape}: NaN in other rows than its own")


def refusals(failures: list[str]) -> None:
    q, k, v, bias = operands(Sizes(2, 1, 16, 16, 64), torch.bfloat16)
    odd = torch.zeros(2, 1, 16, 20, device=CUDA, dtype=q.dtype)[..., :16]
    shifted = torch.zeros(2 * 16 * 16 + 1, device=CUDA, dtype=q.dtype)[1:].view(2, 1, 16, 16)
    long = operands(Sizes(2, 1, 16, 16, 72), torch.bfloat16)
    short = operands(Sizes(2, 1, 16, 16, 12), torch.bfloat16)
    for what, tensors in (
        ("rows of a bias that are not aligned", (q, k, v, odd)),
        ("a bias whose address is not aligned", (q, k, v, shifted)),
        ("one row of bias for all queries", (q, k, v, bias[:, :, :1].expand_as(bias))),
        ("elements of a bias that are not adjacent", (q, k, v, bias.mT)),
        ("queries that batches share", (q[:1].expand_as(q), k, v, bias)),
        ("keys that batches share", (q, k[:1].expand_as(k), v, bias)),
        ("d too large", long),
        ("d not a multiple of 8", short),
    ):
        out = torch.zeros(tensors[0].shape, device=CUDA, dtype=q.dtype)
        spec = attention_bias.spec_of(0, q.dtype)
        if attention_kernels.attention_bias(spec, tensors, out):
            failures.append(f"{what} was not refused")


def made(tensors: tuple[Tensor, Tensor, Tensor, Tensor], causal: bool = False) -> Tensor:
    out = torch.full_like(tensors[0], torch.nan)
    spec = attention_bias.spec_for(out.shape[-1], out.dtype)
    assert spec is not None
    assert attention_kernels.attention_bias(spec, tensors, out, is_causal=causal)
    return out


def repeats(failures: list[str], shape: int, times: int = 100) -> None:
    """Launches, over two streams too, agree bit for bit."""
    d = attention_bias.SHAPES[shape][0]
    for causal in (False, True):
        tensors = operands(Sizes(2, 24, 700, 700, d), torch.bfloat16)
        step = functools.partial(made, tensors, causal)
        if not agree_over_two_streams(lambda: (step(),), (step(),), times):  # noqa: B023
            failures.append(f"shape {shape}: launches over two streams differ")
