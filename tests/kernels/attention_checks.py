"""Checks of the split attention; benchmarks/attention.py times it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import attention_bounds
import attention_special
import torch
import torch.nn.functional as F
from checks import SENTINEL, agree_over_two_streams
from torch import Tensor

from benchmarks import kernels
from benchmarks.sm90 import CUDA, FLOOR, relative
from fx_fuser.kernels import attention

SHAPES = tuple(range(len(attention.SHAPES)))
MOST = 1.5  # times torch's error, if that is above FLOOR
FEW = 4096  # with fewer results errors are random, and attention_bounds decides
LAYOUTS = ("bhld", "blhd", "hbld")  # the order of memory, d last


@dataclass(frozen=True)
class Sizes:
    batches: int
    heads: int
    heads_of_key: int  # query heads that share one
    queries: int
    keys: int
    d: int
    causal: bool = False


def heads(
    batches: int, count: int, rows: int, d: int, layout: str = "bhld", gap: int = 0
) -> tuple[Tensor, Tensor]:
    """[B, H, L, D] with this memory order, amid NaN, with gaps of 4 · gap elements; and all of that
    memory."""
    sizes = {"b": batches, "h": count, "l": rows}
    lines = [sizes[name] for name in layout[:3]]
    whole = torch.full((*lines[:2], lines[2] + 1, d + 4 * gap), float("nan"), device=CUDA)
    part = whole[:, :, : lines[2], :d]
    return part.permute(*(layout.index(name) for name in "bhl"), 3), whole


def filled(made: tuple[Tensor, Tensor], values: Tensor | None = None) -> Tensor:
    part, _ = made
    return part.copy_(torch.randn(part.shape, device=CUDA) if values is None else values)


def of_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values, repeated for each query head."""
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def exact(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out in float64, and the logarithm of each row's sum. factors: dropout's, per weight."""
    q, k, v = (t.double() for t in of_query_heads(q, k, v))
    logits = q @ k.mT * scale
    if causal:
        hidden = torch.ones(logits.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    weights = logits.softmax(-1)
    return (weights if factors is None else weights * factors) @ v, logits.logsumexp(-1)


def usual(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Torch's."""
    return F.scaled_dot_product_attention(*of_query_heads(q, k, v), is_causal=causal, scale=scale)


def judge(
    failures: list[str],
    what: str,
    shape: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    layout: str = "bhld",
    with_lse: bool = True,
) -> None:
    """Runs the kernel. Fails if its error exceeds MOST times torch's, or if it writes elsewhere."""
    batches, count, queries, d = q.shape
    out, whole = heads(batches, count, queries, d, layout, gap=1)
    whole.fill_(SENTINEL)
    out.fill_(float("nan"))
    rows = -(-queries // 32) * 32  # padded as torch's
    lse = torch.full((batches, count, rows), float("nan"), device=CUDA) if with_lse else None
    if not kernels.attention_split(attention.spec_of(shape), q, k, v, out, lse, scale, causal):
        failures.append(f"{what}: refused")
        return
    wanted, sums = exact(q, k, v, scale, causal)
    error = relative(out, wanted)
    small = FLOOR
    if out.numel() < FEW:
        bounds = attention_bounds.of_result(*of_query_heads(q, k, v), scale, causal)
        small = float(bounds.norm() / wanted.norm())
    bound = max(MOST * relative(usual(q, k, v, scale, causal), wanted), small)
    if not error <= bound:
        failures.append(f"{what}: error {error:.2e}, bound {bound:.2e}")
    if lse is not None:
        off = float((lse[..., :queries] - sums).abs().max())
        if not off <= 2e-6 * (1 + sums.abs().max()):
            failures.append(f"{what}: lse is off by {off:.2e}")
        if not bool((lse[..., queries:] == float("inf")).all()):
            failures.append(f"{what}: lse is not infinite beyond the queries")
    out.fill_(SENTINEL)
    if not bool((whole == SENTINEL).all()):
        failures.append(f"{what}: wrote outside the result")


def random_sizes(choose: random.Random, most_d: int, most: int) -> Sizes:
    lengths = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 197, 256, 257, 384, 515)
    queries, keys = (choose.choice([n for n in lengths if n <= most]) for _ in range(2))
    if choose.random() < 0.5:
        keys = queries
    group = choose.choice((1, 1, 2, 3))
    d = choose.choice((most_d, most_d, most_d - 8, most_d // 2 + 8))
    causal = choose.random() < 0.5
    batches, kv = choose.randint(1, 2), choose.randint(1, 2)
    return Sizes(batches, group * kv, group, queries, keys, d, causal)


def sweep(failures: list[str], cases: int, seed: int, shape: int, most: int = 515) -> None:
    """Random sizes and strides."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        sizes = random_sizes(choose, attention.SHAPES[shape][0], most)
        kv = sizes.heads // sizes.heads_of_key
        q, k, v = (
            filled(heads(sizes.batches, count, rows, sizes.d, choose.choice(LAYOUTS),
                         choose.choice((0, 1, 3))))
            for count, rows in (
                (sizes.heads, sizes.queries), (kv, sizes.keys), (kv, sizes.keys)
            )
        )  # fmt: skip
        scale = choose.choice((sizes.d**-0.5, 1.0, 0.3))
        judge(failures, f"case {case}: {sizes}, scale {scale:.3f}", shape, q, k, v, sizes.causal,
              scale, choose.choice(LAYOUTS), choose.random() < 0.7)  # fmt: skip


def one(shape: int, queries: int, keys: int, count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    d = attention.SHAPES[shape][0]
    return tuple(filled(heads(1, count, rows, d)) for rows in (queries, keys, keys))  # type: ignore[return-value]


def hard_values(failures: list[str], shape: int, keys: int = 197) -> None:
    """Data for which a naive softmax, or naive halves, are wrong."""
    torch.manual_seed(5)
    d = attention.SHAPES[shape][0]
    q, k, v = one(shape, 66, keys)
    cases: dict[str, tuple[Tensor, Tensor, Tensor, float]] = {
        "a dominating key": (q, k.clone().index_fill_(2, torch.tensor([keys - 1], device=CUDA), 0)
                             + 40 * q[:, :, :1] * (torch.arange(keys, device=CUDA) == keys - 1)
                             [:, None], v, d**-0.5),
        "logits to ±60": (q * 8, k * 2, v, d**-0.5),
        "equal logits": (q * 0, k, v.abs() + 1, d**-0.5),
        "tiny values": (q, k, v * 1e-20, d**-0.5),
        "large values": (q, k, v * 1e20, d**-0.5),
        "large keys, small queries": (q * 1e-6, k * 1e6, v, d**-0.5),
        "beyond fp16": (q * 1e-9, k * 1e5, v * 1e6, 1e4),
        "growing values": (q, k, v * 10 ** torch.linspace(-6, 6, keys, device=CUDA)[:, None],
                           d**-0.5),
        "growing keys": (q, k * torch.linspace(0.01, 30, keys, device=CUDA)[:, None], v, d**-0.5),
        "zeros ahead": (q, k, v * (torch.arange(keys, device=CUDA) > 150)[:, None], d**-0.5),
        "no keys but zeros": (q, k * 0, v * 0 + 3, d**-0.5),
    }  # fmt: skip
    for what, (a, b, c, scale) in cases.items():
        judge(failures, f"{what}, shape {shape}", shape, a, b, c, False, scale)


def one_key(failures: list[str], shape: int) -> None:
    """Softmax over one key is 1: out is the value, as accurate as its halves."""
    q, k, v = one(shape, 5, 1)
    for causal in (False, True):
        out = made(shape, q, k, v, causal)
        if not torch.allclose(out, v.expand_as(out), rtol=6e-7, atol=0):
            failures.append(f"one key, shape {shape}: not its value")


def special_values(failures: list[str], shape: int) -> None:
    for what, operands in attention_special.cases(attention.SHAPES[shape][0], CUDA):
        for causal in (False, True):
            q, k, v, _ = operands
            out = made(shape, q, k, v, causal, attention_special.SCALE)
            told = f"{what}, causal {causal}, shape {shape}"
            attention_special.compare(failures, told, out, operands, causal, "out")


def few_last_keys(failures: list[str], shape: int) -> None:
    """A small element in a last tile of few keys does not send other columns to the fp32 repair.
    Columns that halves lose are still repaired."""
    torch.manual_seed(8)
    _, _, tile = attention.SHAPES[shape]
    small, large = 3, 5  # columns

    def put(ahead: float, last: float, beside: float | None = None) -> Callable[[Tensor], None]:
        def change(v: Tensor) -> None:
            v[..., :tile, small] *= ahead
            v[..., tile:, small] = last
            if beside is not None:
                v[..., -1, large] = beside

        return change

    lost = {
        "a small column": put(1e-9, 1e-9),
        "a column of nothing but small last values": put(0, 1e-9),
        "a small value beside a large one": put(1, 1e-3, 1e6),
    }
    for more in (1, 2):
        q, k, v = one(shape, 5, tile + more)
        before = made(shape, q, k, v, False, attention_special.SCALE)
        put(1, 1e-6)(v)
        changed = made(shape, q, k, v, False, attention_special.SCALE) != before
        changed[..., small] = False
        if bool(changed.any()):
            failures.append(f"{more} keys in the last tile, shape {shape}: all rows repaired")
        for what, change in lost.items():
            q, k, v = one(shape, 5, tile + more)
            change(v)
            out = made(shape, q, k, v, False, attention_special.SCALE)
            told = f"{what}, {more} keys in the last tile, shape {shape}"
            operands = [q, k, v, torch.randn_like(q)]
            attention_special.compare(failures, told, out, operands, False, "out")


def refusals(failures: list[str]) -> None:
    q, k, v = one(0, 9, 9)
    padded = torch.zeros(1, 1, 9, 65, device=CUDA)[..., :64]
    short = torch.zeros(1, 1, 9, 12, device=CUDA)
    long = torch.zeros(1, 1, 9, 72, device=CUDA)
    shifted = torch.zeros(1 + 9 * 64, device=CUDA)[1:].view(1, 1, 9, 64)
    for what, tensors, scale in (
        ("rows that are not aligned", (q, padded, v), 1.0),
        ("an address that is not aligned", (q, k, shifted), 1.0),
        ("elements that are not adjacent", (q.mT.contiguous().mT, k, v), 1.0),
        ("shared memory of rows", (q, k[:, :, :1].expand_as(k), v), 1.0),
        ("d not a multiple of 8", (short, short, short), 1.0),
        ("d too large", (long, long, long), 1.0),
        ("no keys", (q, k[:, :, :0], v[:, :, :0]), 1.0),
        ("a negative scale", (q, k, v), -1.0),
    ):
        out = torch.zeros(tensors[0].shape, device=CUDA)
        if kernels.attention_split(attention.spec_of(0), *tensors, out, None, scale):
            failures.append(f"{what} was not refused")


def many_keys(failures: list[str], shape: int) -> None:
    """The tensor core's truncation must not add up: random values, and values of one sign."""
    torch.manual_seed(9)
    for keys in (4096, 16384):
        q, k, v = one(shape, 300, keys)
        scale = q.shape[-1] ** -0.5
        judge(failures, f"{keys} keys, shape {shape}", shape, q, k, v, False, scale)
        judge(failures, f"{keys} keys, positive, shape {shape}", shape, q, k, v.abs(), False, scale)


def made(
    shape: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None
) -> Tensor:
    out = torch.full_like(q, float("nan"))
    spec = attention.spec_of(shape)
    assert kernels.attention_split(spec, q, k, v, out, scale=scale, is_causal=causal)
    return out


def repeats(failures: list[str], shape: int, times: int = 100) -> None:
    """Launches, over two streams too, agree bit for bit."""
    d = attention.SHAPES[shape][0]
    for causal in (False, True):
        q, k, v = (filled(heads(2, 24, 700, d)) for _ in range(3))

        step = functools.partial(made, shape, q, k, v, causal)
        if not agree_over_two_streams(lambda: (step(),), (step(),), times):  # noqa: B023
            failures.append(f"shape {shape}: launches over two streams differ")
