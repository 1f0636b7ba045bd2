"""What a gradient of an anchor's operand may be, from what dz may be: sums in float64 over all of
their terms, with the roundings of partial sums in any order. For `value_oracle`."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from value_programs import Program
from value_sets import Linear, Possible


def spread_sum(gradient: Possible, shape: torch.Size, acc: torch.dtype) -> Possible:
    """Of an operand's gradient over what it was spread over."""
    count = max(gradient.lo.numel() // max(int(torch.Size(shape).numel()), 1), 1)
    if gradient.lo.shape == shape:
        return gradient
    cuda = 8 if gradient.lo.is_cuda else 0
    return gradient.total(lambda t: t.sum_to_size(tuple(shape)), acc, count - 1 + cuda)


def _roundings(terms: int, like: Tensor) -> int:
    """Of a sum of products. On CUDA fp16 halves are multiplied: of four products the smallest is
    dropped."""
    return terms + (8 if like.is_cuda else 1)


def product_totals(
    p: Program, inputs: dict[str, Tensor], dz: Possible, of_bias: Possible, sums: torch.dtype
) -> dict[str, Possible]:
    """Of a linear or matmul."""
    x, weight = inputs["x"].detach().double(), inputs["weight"].detach().double()
    rows = weight if p.pattern.kind == "linear" else weight.t()
    n, k = rows.shape
    x = x.reshape(-1, k)
    narrow = dz.rounded(inputs["x"].dtype).map(lambda t: t.reshape(-1, n, 1))
    count = len(x)
    totals = {}
    if "bias" in inputs:
        flat = of_bias.map(lambda t: t.reshape(-1, n))
        totals["bias"] = flat.total(lambda t: t.sum(0), sums, _roundings(count, x))
    dx = narrow.times(rows).total(lambda t: t.sum(1), sums, _roundings(n, x))
    totals["x"] = dx.map(lambda t: t.reshape(inputs["x"].shape))
    dw = narrow.times(x.unsqueeze(1)).total(lambda t: t.sum(0), sums, _roundings(count, x))
    totals["weight"] = dw if p.pattern.kind == "linear" else dw.map(lambda t: t.t())
    return totals


HALVES, TILES = 2**-38, 2**-20


def convolution_totals(
    p: Program, inputs: dict[str, Tensor], dz: Possible, of_bias: Possible, sums: torch.dtype,
    lost: float = HALVES
) -> dict[str, Possible]:  # fmt: skip
    """lost: of the largest dz, in fp32 on CUDA. Fused, dz is made of fp16 halves under one scale
    for many pixels, which lose 2^-22 of each or 2^-39 of the largest (kernels_cu/conv/NOTES.md);
    the library's algorithms that transform tiles lose `TILES` of the largest."""
    x, weight = inputs["x"].detach().double(), inputs["weight"].detach().double()
    stride, padding = p.geometry
    kernel = tuple(weight.shape[2:])
    windows = F.unfold(x, kernel, padding=padding, stride=stride)  # [N, K, L]
    taken = F.unfold(torch.ones_like(x), kernel, padding=padding, stride=stride) > 0
    out, window = len(weight), weight[0].numel()

    def to_pixels(t: Tensor) -> Tensor:  # [N, O, K, L]
        size = tuple(x.shape[2:])
        return F.fold(t.sum(1), size, kernel, padding=padding, stride=stride)

    def to_weights(t: Tensor) -> Tensor:
        return torch.where(taken.unsqueeze(1), t, 0.0).sum((0, 3)).view(weight.shape)

    narrow = dz.rounded(inputs["x"].dtype)
    if has_lost(p, inputs):
        # Near the end of the range all may be.
        largest = float(narrow.reach.max()) if narrow.lo.numel() else 0.0
        narrow = narrow.widened(2**-21 * narrow.reach)
        narrow = narrow.widened(lost * largest if largest < 1e36 else largest)
    flushed = 8 * torch.finfo(torch.float32).tiny  # by oneDNN's convolutions: subnormal terms
    none = 0.0  # below this, factors are zero, too
    dtype = inputs["x"].dtype
    of_shapes = (tuple(x.shape), tuple(weight.shape), p.geometry)
    if not narrow.lo.is_cuda and library_flushes(dtype, *of_shapes):
        none = torch.finfo(dtype).tiny
        small = narrow.number & (narrow.lo < none) & (narrow.hi > -none)
        narrow = narrow.joined(Possible.exactly(torch.zeros_like(narrow.lo)), small)

    def multiplied(factor: Tensor, *shared: int) -> Possible:
        whole = _beyond_the_range(dz, narrow, shared) if has_lost(p, inputs) else narrow
        flat = whole.map(lambda t: t.reshape(len(x), out, 1, -1))
        kept = torch.where(factor.abs() < none, 0.0, factor)
        return flat.times(factor).joined(flat.times(kept), kept != factor)

    totals = {}
    if "bias" in inputs:
        count = of_bias.lo.numel() // out
        totals["bias"] = _of_bias(of_bias, dz, sums, _roundings(count, x))
    of_pixels = multiplied(weight.view(1, out, window, 1), 1)
    count = out * kernel[0] * kernel[1]
    totals["x"] = of_pixels.total(to_pixels, sums, _roundings(count, x), flushed * count)
    of_weights = multiplied(windows.unsqueeze(1), 0, 2, 3)
    count = narrow.lo.numel() // out
    totals["weight"] = of_weights.total(to_weights, sums, _roundings(count, x), flushed * count)
    return totals


def _beyond_the_range(dz: Possible, narrow: Possible, shared: tuple[int, ...]) -> Possible:
    """What is infinite in x's dtype may be a number: our kernel multiplies dz by powers of two, and
    then by a factor, which may be 0. What shares its scale may then be lost.

    shared: the dimensions that share one, of dx's factors those of a pixel, of dweight's those of a
    channel (64 positions of it at a time: kernels_cu/conv/NOTES.md).
    """
    beyond = dz.number & ~narrow.number
    shares = beyond
    for dim in shared:
        shares = shares.any(dim, keepdim=True)
    lost = Possible.exactly(torch.zeros_like(narrow.lo))
    return narrow.joined(lost, shares & narrow.number).joined(dz, beyond)


@functools.cache
def library_flushes(
    dtype: torch.dtype, x: tuple[int, ...], weight: tuple[int, ...], geometry: tuple[int, int]
) -> bool:
    """Do gradients of such convolutions take subnormal factors for zero? oneDNN's do where the CPU
    multiplies bf16 (AMX, AVX512_BF16)."""
    ends = torch.finfo(dtype)
    images, kernels = (torch.full(s, ends.max / 1024, dtype=dtype) for s in (x, weight))
    dz = torch.full_like(F.conv2d(images, kernels, None, *geometry), ends.tiny / 4)
    made = (
        torch.nn.grad.conv2d_input(x, kernels, dz, *geometry),
        torch.nn.grad.conv2d_weight(images, weight, dz, *geometry),
    )
    return any(not v.any() for v in made)


def _of_bias(of_bias: Possible, dz: Possible, sums: torch.dtype, roundings: int) -> Possible:
    """Over all pixels. What is beyond sums' range in `of_bias` alone is summed up ahead of the last
    power of two: no partial sum overflows."""
    most = None if of_bias is dz else torch.finfo(torch.float64).max
    return of_bias.total(_over_pixels, sums, roundings, most=most)


def _over_pixels(t: Tensor) -> Tensor:
    return t.sum((0, 2, 3))


def has_lost(p: Program, inputs: dict[str, Tensor]) -> bool:
    """Is something lost of a convolution's dz that is relative to the largest of it?"""
    x = inputs["x"]
    return x.is_cuda and x.dtype == torch.float32 and p.pattern.kind.startswith("conv")


def norm_totals(
    p: Program, inputs: dict[str, Tensor], dz: Possible, of_bias: Possible, sums: torch.dtype,
    lost: float = HALVES
) -> dict[str, Possible]:  # fmt: skip
    """Through a BatchNorm and its convolution, within 64 roundings of all that takes part."""
    wide = {n: v.detach().double().view(-1, 1, 1) for n, v in inputs.items() if v.ndim == 1}
    x, weight = inputs["x"].detach().double(), inputs["weight"].detach().double()
    c = F.conv2d(x, weight, None, *p.geometry) + wide.get("bias", 0.0)
    reach = F.conv2d(x.abs(), weight.abs(), None, *p.geometry) + wide.get("bias", c * 0).abs()
    mean, var = wide["running_mean"], wide["running_var"]
    if p.training_norm:
        mean, var = c.mean((0, 2, 3), True), c.var((0, 2, 3), correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    far = reach.mean((0, 2, 3), True) if p.training_norm else 0.0  # mean is off by that of c
    normal, reach = (c - mean) * rstd, (reach + far + mean.abs()) * rstd
    eps = 64 * torch.finfo(sums).eps

    def over(t: Tensor) -> Tensor:
        return _over_pixels(t)

    totals = {"beta": _of_bias(of_bias, dz, sums, 64)}
    of_gamma = dz.times(normal).widened(dz.reach * reach * eps)
    totals["gamma"] = of_gamma.total(over, sums, 64)
    # Factors one after the other may be subnormal.
    step = (
        2 * torch.finfo(sums).tiny * torch.finfo(sums).eps * (1 + wide["gamma"].abs()) * (1 + rstd)
    )
    if p.training_norm:
        dc = _through_statistics(dz, normal, reach, rstd, wide["gamma"], over, eps)
    else:
        dc = _scaled(dz, rstd, wide["gamma"])
        dc = dc.widened(eps * dc.reach)
    dc = dc.widened(step)
    return {**totals, **convolution_totals(p, inputs, dc, dc, sums, lost)}


def _scaled(gradient: Possible, rstd: Tensor, gamma: Tensor) -> Possible:
    """Times both factors: of either first, or of their product. In float64, which has no wider
    type, one order may leave the range and another not."""
    after, before = gradient.times(gamma).times(rstd), gradient.times(rstd).times(gamma)
    scaled = gradient.times(rstd * gamma)
    odd = ~(scaled.number & (scaled.reach > 0))
    return scaled.joined(after, odd).joined(before, odd)


def _through_statistics(
    dz: Possible, normal: Tensor, reach: Tensor, rstd: Tensor, gamma: Tensor, over: Linear,
    eps: float
) -> Possible:  # fmt: skip
    """c's gradient where mean and variance are of c itself: sums over a channel, in each pixel."""

    def over_all(t: Tensor) -> Tensor:
        return over(t).view(-1, 1, 1)

    count = dz.lo.numel() // dz.lo.shape[1]

    def of(g: Tensor) -> Tensor:
        pull = over_all(g) + normal * over_all(g * normal)
        return g - pull / count

    certain = dz.number & ~(dz.pinf | dz.ninf | dz.nan)
    middle = dz.value
    exact = _scaled(Possible.exactly(of(middle)), rstd, gamma)
    slack = torch.where(dz.number, (dz.hi - dz.lo) / 2, 0.0)
    size, room = (
        (g + (over_all(g) + reach * over_all(g * reach)) / count) * rstd * gamma.abs()
        for g in (dz.reach, slack)
    )
    dc = exact.widened(eps * size + room)
    # Where a term of the channel may be an infinity as well as a number, so may any of its sums.
    either = over_all((~certain & dz.number).double()) > 0
    zeros = torch.zeros_like(dc.lo)
    numbers = Possible.exactly(zeros).widened(size)
    flags = torch.ones_like(either)
    anything = Possible(numbers.lo, numbers.hi, flags, flags, flags, zeros)
    return Possible(*(a.contiguous() for a in dc.joined(anything, either).parts()[:5]), size)
