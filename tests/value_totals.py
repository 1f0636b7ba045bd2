"""What a gradient of an anchor's operand must be, from dz: sums in float64, with all roundings that
partial sums may have in any order. For `value_oracle`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad
from value_programs import Program


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two are equal, NaN to NaN."""
    return (a == b) | (a.isnan() & b.isnan())


@dataclass
class Total:
    """A sum in float64. size: of the magnitudes; terms: how many; slack: what the terms are off by.

    open: where infinities or NaN are among what is summed, and nothing is asked. flushed: subnormal
    terms may be taken for zero.
    """

    value: Tensor
    size: Tensor
    slack: Tensor
    terms: int
    open: Tensor | None = None
    flushed: bool = False

    def bad(self, found: Tensor, acc: torch.dtype) -> Tensor:
        ends, own = torch.finfo(acc), torch.finfo(found.dtype)
        limit = min(ends.max, own.max) * 0.99
        # A product of fp16 halves drops the smallest of four, and is off where nothing is summed.
        roundings = self.terms + 8 if found.is_cuda else self.terms - 1
        allowed = self.slack + roundings * ends.eps * self.size
        allowed = allowed + 0.51 * own.eps * self.value.abs()
        allowed = allowed + (self.terms + 1) * own.tiny * own.eps
        if self.flushed:  # by oneDNN's convolutions
            allowed = allowed + 8 * self.terms * torch.finfo(torch.float32).tiny
        near = (found.double() - self.value).abs() <= allowed
        right = torch.where(self.value.isfinite(), near, same(found.double(), self.value))
        loose = (self.size > limit) & self.size.isfinite()  # a partial sum may overflow
        loose |= ~self.slack.isfinite()
        if self.open is not None:
            loose |= self.open
        return ~(right | loose)


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)


def spread_sum(gradient: Tensor, slack: Tensor, shape: Sequence[int]) -> Total:
    """Of an operand's gradient over what it was spread over."""
    count = max(gradient.numel() // max(int(torch.Size(shape).numel()), 1), 1)
    parts = (gradient.double(), _finite(gradient).abs().double(), slack)
    value, size, off = (p.sum_to_size(tuple(shape)) for p in parts)
    return Total(value, size, off, count)


def product_totals(p: Program, inputs: dict[str, Tensor], dz: Tensor, slack: Tensor) -> Any:
    """Of a linear or matmul: name → Total."""
    x, weight = inputs["x"].detach().double(), inputs["weight"].detach().double()
    rows = weight if p.pattern.kind == "linear" else weight.t()
    n, k = rows.shape
    flat, off = dz.double().reshape(-1, n), slack.reshape(-1, n)
    x = x.reshape(-1, k)
    narrow = dz.to(inputs["x"].dtype).double().reshape(-1, n)
    # A rounding more, if it is not of the same value; that of a large gradient may be infinite.
    off_narrow = off + torch.where(off > 0, torch.finfo(inputs["x"].dtype).eps * flat.abs(), 0.0)
    known = _finite
    totals = {}
    if "bias" in inputs:
        totals["bias"] = Total(flat.sum(0), known(flat).abs().sum(0), off.sum(0), len(flat))
    size_dx = known(narrow).abs() @ known(rows).abs()
    dx = Total(narrow @ rows, size_dx, off_narrow @ known(rows).abs(), n)
    totals["x"] = _shaped(dx, inputs["x"].shape)
    size_dw = known(narrow).abs().t() @ known(x).abs()
    dw = Total(narrow.t() @ x, size_dw, off_narrow.t() @ known(x).abs(), len(flat))
    totals["weight"] = dw if p.pattern.kind == "linear" else _shaped(dw, None)
    return totals


def _shaped(total: Total, shape: torch.Size | None) -> Total:
    """In another shape, or transposed."""
    parts = (total.value, total.size, total.slack)
    turned = [p.t() if shape is None else p.reshape(shape) for p in parts]
    return Total(turned[0], turned[1], turned[2], total.terms)


def convolution_totals(
    p: Program, inputs: dict[str, Tensor], dz: Tensor, size: Tensor, slack: Tensor
) -> dict[str, Total]:
    """size: of the terms that dz is the sum of."""
    x, weight = inputs["x"].detach().double(), inputs["weight"].detach().double()
    stride, padding = p.geometry
    narrow = dz.to(inputs["x"].dtype)
    wild = not bool(narrow.isfinite().all())
    eps = torch.finfo(inputs["x"].dtype).eps
    off = slack + torch.where(slack > 0, eps * size, 0.0)
    if narrow.is_cuda and narrow.dtype == torch.float32:
        # Fused, it is made of fp16 halves under one scale for many pixels (README, Accuracy): what
        # is lost is relative to the largest of them, and near the end of the range all may be.
        largest = float(_finite(narrow).abs().max()) if narrow.numel() else 0.0
        off = off + (2**-20 * largest if largest < 1e36 else torch.inf)
    wild |= not bool(off.isfinite().all())
    over_x = functools.partial(_input_gradient, x.shape, stride, padding)
    over_w = functools.partial(_weight_gradient, weight.shape, stride, padding)
    totals = {}
    if "bias" in inputs:
        flat, room = dz.double(), _finite(size).double()
        sums = [v.sum((0, 2, 3)) for v in (flat, room, slack)]
        totals["bias"] = Total(sums[0], sums[1], sums[2], dz.numel() // dz.shape[1])
    known, magnitude, off = _finite(narrow).double(), _finite(size).double(), _finite(off)
    totals["x"] = Total(
        over_x(weight, known),
        over_x(weight.abs(), magnitude),
        over_x(weight.abs(), off),
        weight[:, 0].numel(),
    )
    totals["weight"] = Total(
        over_w(x, known), over_w(x.abs(), magnitude), over_w(x.abs(), off), dz[:, 0].numel()
    )
    for name in ("x", "weight"):
        totals[name].flushed = True
        if wild:
            totals[name].open = torch.ones_like(totals[name].value, dtype=torch.bool)
    return totals


def _input_gradient(shape: Any, stride: int, padding: int, weight: Tensor, dz: Tensor) -> Tensor:
    made: Tensor = grad.conv2d_input(shape, weight, dz, stride, padding)
    return made


def _weight_gradient(shape: Any, stride: int, padding: int, x: Tensor, dz: Tensor) -> Tensor:
    made: Tensor = grad.conv2d_weight(x, shape, dz, stride, padding)
    return made


def norm_totals(
    p: Program, inputs: dict[str, Tensor], dz: Tensor, slack: Tensor
) -> dict[str, Total]:
    """Through a BatchNorm and its convolution; loosely, by 64 roundings of all that takes part."""
    wide = {n: v.detach().double().view(-1, 1, 1) for n, v in inputs.items() if v.ndim == 1}
    x, weight = inputs["x"].detach().double(), inputs["weight"].detach().double()
    c = F.conv2d(x, weight, None, *p.geometry)
    c = c + wide.get("bias", 0.0)
    mean, var = wide["running_mean"], wide["running_var"]
    if p.training_norm:
        mean, var = c.mean((0, 2, 3), True), c.var((0, 2, 3), correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    normal = (c - mean) * rstd
    reach = (c.abs() + mean.abs()) * rstd
    g, over = dz.double(), (0, 2, 3)
    count = g.numel() // g.shape[1]
    scale = rstd * wide["gamma"]
    dc, size = g * scale, g.abs() * scale.abs()
    if p.training_norm:
        both = (g * normal).sum(over, True)
        dc = (g - (g.sum(over, True) + normal * both) / count) * scale
        pull = g.abs().sum(over, True) + reach * (g.abs() * reach).sum(over, True)
        size = (g.abs() + pull / count) * scale.abs()
    eps = 64 * torch.finfo(torch.float32).eps
    totals = {
        "gamma": Total((g * normal).sum(over), (g.abs() * reach).sum(over), slack.sum(over), count),
        "beta": Total(g.sum(over), _finite(g).abs().sum(over), slack.sum(over), count),
        **convolution_totals(p, inputs, dc, size, slack + eps * size),
    }
    totals["gamma"].slack = totals["gamma"].size * eps
    wild = bool((g.abs() > 1e25).any()) or not bool(g.isfinite().all()) or bool(slack.any())
    wild |= bool((wide["gamma"].abs() > 1e25).any())  # times subnormals
    for name, total in totals.items():
        if wild and name != "beta":
            total.open = torch.ones_like(total.value, dtype=torch.bool)
    return totals
