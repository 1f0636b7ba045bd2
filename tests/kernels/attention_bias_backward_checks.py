"""Checks of the backward of attention with a bias: benchmarks/attention_bias.py times it."""

from __future__ import annotations

import functools
import random

import torch
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
from checks import SENTINEL, agree_over_two_streams
from torch import Tensor

from benchmarks import attention_kernels
from fx_fuser.kernels.attention import bias as attention_bias

Four = tuple[Tensor, Tensor, Tensor, Tensor]
NAMES = "dq", "dk", "dv", "dbias"
FEW = 4096  # with fewer results errors are random, and `bounds` decides


def spec_for(q: Tensor, backward: bool = False):  # type: ignore[no-untyped-def]
    spec = attention_bias.spec_for(q.shape[-1], q.dtype, backward)
    assert spec is not None
    return spec


def forward(tensors: Four, scale: float, causal: bool, layout: str = "bhld") -> tuple[Tensor, ...]:
    """out and lse, by our kernel."""
    q = tensors[0]
    out = filled(tuple(q.shape), q.dtype, layout)
    rows = -(-q.shape[2] // 32) * 32
    lse = torch.empty(*q.shape[:2], rows, device=q.device)
    assert attention_kernels.attention_bias(spec_for(q), tensors, out, lse, scale, causal)
    return out, lse


def to_sizes(tensor: Tensor, sizes: torch.Size) -> Tensor:
    """Summed over what is expanded."""
    return tensor.sum_to_size(sizes)


def weights_of(tensors: Four, scale: float, causal: bool) -> Tensor:
    """Softmax in the arguments' dtype; a row that sees nothing has 0."""
    q, k, _, bias = tensors
    logits = logits_of(q, k, bias, scale, causal)
    hidden = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, logits.softmax(-1))


def gradients(
    tensors: Four, d_out: Tensor, scale: float, causal: bool, of_bias: torch.Size
) -> list[Tensor]:
    """In float64."""
    q, k, v, bias = (t.double() for t in tensors)
    d_out = d_out.double()
    weights = weights_of((q, k, v, bias), scale, causal)
    d_weights = d_out @ v.mT
    g = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    return [g @ k * scale, g.mT @ q * scale, weights.mT @ d_out, to_sizes(g, of_bias)]


def rounded(
    tensors: Four, out: Tensor, d_out: Tensor, scale: float, causal: bool, of_bias: torch.Size
) -> list[Tensor]:
    """In float64, with the roundings of any 16-bit kernel, torch's too: out, P and G, results."""
    dtype = d_out.dtype
    q, k, v, bias = (t.double() for t in tensors)
    wide = d_out.double()
    weights = weights_of((q, k, v, bias), scale, causal)
    g = weights * (wide @ v.mT - (out.double() * wide).sum(-1, keepdim=True))
    of_bias_too = to_sizes(g, of_bias)
    g, weights = (t.to(dtype).double() for t in (g, weights))
    made = g @ k * scale, g.mT @ q * scale, weights.mT @ wide, of_bias_too
    return [t.to(dtype).double() for t in made]


def bounds(
    tensors: Four, d_out: Tensor, scale: float, causal: bool, of_bias: torch.Size
) -> list[Tensor]:
    """The error that each result's own arithmetic may have: half an ulp per term."""
    q, k, v, bias = (t.double() for t in tensors)
    weights = weights_of((q, k, v, bias), scale, causal)
    terms = d_out.double().abs() @ v.abs().mT
    g = weights * (terms + (weights * terms).sum(-1, keepdim=True))
    sums = g @ k.abs() * scale, g.mT @ q.abs() * scale, weights.mT @ d_out.double().abs()
    half = torch.finfo(d_out.dtype).eps / 2
    return [half * t for t in (*sums, to_sizes(g, of_bias))]


def judge(
    failures: list[str],
    what: str,
    tensors: Four,
    scale: float,
    causal: bool = False,
    layout: str = "bhld",
    of_bias: bool = True,
    whole_bias: bool = False,
    few: bool = False,
) -> None:
    """Runs the kernels. Fails if an error exceeds MOST times rounding's, or on a stray write.

    whole_bias: no sum over what is expanded.
    """
    q, k, _, bias = tensors
    d_out = filled(tuple(q.shape), q.dtype, layout)
    out, lse = forward(tensors, scale, causal, layout)
    made = [heads(t.shape, q.dtype, layout, gap=1) for t in (q, k, k)]
    outer = [n if whole_bias or step else 1 for n, step in zip(bias.shape[:2], bias.stride())]
    sizes = torch.Size((*outer, *bias.shape[2:]))
    if of_bias:
        odd = random.Random(what).choice((0, 1))
        whole = torch.empty(*sizes[:2], sizes[2] + 1, sizes[3] + 2 + odd, device=q.device)
        whole = whole.to(q.dtype)
        made.append((whole[:, :, : sizes[2], : sizes[3]], whole))
    for part, whole in made:
        whole.fill_(SENTINEL)
        part.fill_(torch.nan)
    to = [part for part, _ in made]
    spec = spec_for(q, backward=True)
    given = tensors, out, lse, d_out, to, scale, causal
    if not attention_kernels.attention_bias_backward(spec, *given):
        failures.append(f"{what}: refused")
        return
    wanted = gradients(tensors, d_out, scale, causal, sizes)
    theirs = rounded(tensors, out, d_out, scale, causal, sizes)
    small = bounds(tensors, d_out, scale, causal, sizes)
    for name, value, right, other, bound in zip(NAMES, to, wanted, theirs, small):
        error, usual, norm = *((t - right).norm() for t in (value, other)), right.norm()
        most = torch.maximum(MOST * usual, rounding(q.dtype) * norm)
        if few or value.numel() < FEW or min(q.shape[2], k.shape[2]) < 8:
            most = torch.maximum(most, bound.norm())
        if not error <= most:
            failures.append(f"{what}: {name}'s error {error / norm:.2e}, bound {most / norm:.2e}")
    for name, (part, whole) in zip(NAMES, made):
        part.fill_(SENTINEL)
        if not bool((whole == whole.new_tensor(SENTINEL)).all()):
            failures.append(f"{what}: wrote outside {name}")


def sweep(failures: list[str], cases: int, seed: int, shape: int, most: int = 515) -> None:
    """Random sizes and strides."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        sizes = random_sizes(choose, attention_bias.SHAPES[shape][0], most)
        dtype = choose.choice(DTYPES)
        tensors = operands(sizes, dtype, choose)
        scale = choose.choice((sizes.d**-0.5, 0.3))
        judge(failures, f"case {case}: {sizes}, {dtype}, scale {scale:.3f}", tensors, scale,
              sizes.causal, choose.choice(LAYOUTS), choose.random() < 0.9,
              choose.random() < 0.2)  # fmt: skip


def hidden(failures: list[str], shape: int, keys: int = 197) -> None:
    """Infinities of the bias: rows that see nothing have no gradient, and contribute none."""
    torch.manual_seed(5)
    d = attention_bias.SHAPES[shape][0]
    for dtype in DTYPES:
        q, k, v, bias = operands(Sizes(2, 2, 70, keys, d), dtype)
        drawn = torch.rand(bias.shape[-2:], device=q.device)
        rows = torch.arange(70, device=q.device)[:, None]
        cases = {
            "a third hidden": bias.masked_fill(drawn < 1 / 3, -torch.inf),
            "rows hidden": bias.masked_fill((rows % 3 == 1) | (rows == 69), -torch.inf),
            "the least number": bias.masked_fill(drawn < 0.5, torch.finfo(dtype).min),
        }
        for what, changed in cases.items():
            judge(failures, f"{what}, {dtype}, shape {shape}", (q, k, v, pitched(changed)),
                  d**-0.5)  # fmt: skip


def refusals(failures: list[str]) -> None:
    tensors = operands(Sizes(2, 1, 16, 16, 64), torch.bfloat16)
    q = tensors[0]
    out, lse = forward(tensors, 1.0, False)
    for what, to in (
        ("a gradient whose rows are not aligned", [q.new_zeros(2, 1, 16, 68)[..., :64]] * 3),
        ("a bias's gradient whose keys are not adjacent",
         [torch.zeros_like(q)] * 3 + [q.new_zeros(1, 1, 16, 16).mT]),
    ):  # fmt: skip
        spec, d_out = spec_for(q, backward=True), torch.zeros_like(q)
        if attention_kernels.attention_bias_backward(spec, tensors, out, lse, d_out, to):
            failures.append(f"{what} was not refused")


def repeats(failures: list[str], shape: int, times: int = 50) -> None:
    """Launches, over two streams too, agree bit for bit."""
    d = attention_bias.SHAPES[shape][0]
    for causal in (False, True):
        tensors = operands(Sizes(4, 8, 700, 700, d), torch.bfloat16)
        q, bias = tensors[0], tensors[3]
        out, lse = forward(tensors, d**-0.5, causal)
        d_out = filled(tuple(q.shape), q.dtype)
        step = functools.partial(made, tensors, out, lse, d_out, causal, bias[:1].shape)
        if not agree_over_two_streams(step, step(), times):
            failures.append(f"shape {shape}: launches over two streams differ")


def made(
    tensors: Four, out: Tensor, lse: Tensor, d_out: Tensor, causal: bool, of_bias: torch.Size
) -> tuple[Tensor, ...]:
    to = [torch.full_like(t, torch.nan) for t in tensors[:3]]
    to.append(out.new_full(of_bias, torch.nan))
    spec = spec_for(out, backward=True)
    given = tensors, out, lse, d_out, to, None, causal
    assert attention_kernels.attention_bias_backward(spec, *given)
    return tuple(to)
