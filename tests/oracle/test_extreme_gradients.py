"""Values of 1e±37 beside ordinary ones: no intermediate of ours leaves the range where eager's do
not, so that no gradient is NaN, infinite or 0 where eager mode has a number near the exact one.

A dead unit's slope of 0 makes a NaN of any infinity that it meets.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import fused_compile, sites
from torch import Tensor, nn
from torch._dynamo.utils import counters

OUTPUTS, POSITIONS = 4, (6, 6)
NORM, BATCH_NORM = "conv2d_batchnorm", "conv2d_batchnorm in training"
X_LARGE = "running_var, dy, x"
ANCHORS = ("linear", "matmul", "bmm", "conv2d", NORM, BATCH_NORM)
TAILS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda z, t: torch.relu(z),
    "relu6": lambda z, t: F.relu6(z),
    "hardswish": lambda z, t: F.hardswish(z),
    "hardsigmoid": lambda z, t: F.hardsigmoid(z),
    "elu": lambda z, t: F.elu(z),
    "gelu": lambda z, t: F.gelu(z),
    "silu": lambda z, t: F.silu(z),
    "sigmoid": lambda z, t: torch.sigmoid(z),
    "tanh": lambda z, t: torch.tanh(z),
    "softplus": lambda z, t: F.softplus(z),
    "mish": lambda z, t: F.mish(z),
    "leaky_relu": lambda z, t: F.leaky_relu(z),
    "clamp": lambda z, t: z.clamp(-1.0, 1.0),
    "where": lambda z, t: torch.where(t > 0, z, t),
    "numbers": lambda z, t: z * 1e30 * 1e-30,
    "a tensor": lambda z, t: torch.relu(z * t) * 1e-20,
    "a tensor behind": lambda z, t: torch.relu(z) * t,
}


class Site(nn.Module):
    """An anchor and its tail. The convolution is of one tap, its weight near the identity, so that
    an extreme pixel is an extreme value of one channel.
    """

    def __init__(self, anchor: str, tail: str) -> None:
        super().__init__()
        self.anchor, self.tail = anchor, TAILS[tail]
        shape = (OUTPUTS, OUTPUTS, 1, 1) if "conv" in anchor else (OUTPUTS, OUTPUTS)
        self.weight = nn.Parameter((torch.eye(OUTPUTS) * 1.5).view(shape))
        images = (OUTPUTS, 1, 1) if "conv" in anchor else (OUTPUTS,)
        self.t = nn.Parameter(torch.linspace(0.5, 2.0, OUTPUTS).view(images))
        if "batchnorm" in anchor:
            self.norm = nn.BatchNorm2d(OUTPUTS).train(anchor == BATCH_NORM)
            with torch.no_grad():
                self.norm.weight.copy_(torch.linspace(0.5, 1.5, OUTPUTS))
                self.norm.bias.fill_(0.25)
        # A test loads its own values, and the next one gets the same compiled model.
        self.begun = copy.deepcopy(self.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        if self.anchor == "linear":
            z = F.linear(x, self.weight)
        elif self.anchor == "matmul":
            z = x @ self.weight
        elif self.anchor == "bmm":
            z = torch.bmm(x, self.weight.expand(len(x), -1, -1))
        else:
            z = F.conv2d(x, self.weight)
        return self.tail(self.norm(z) if hasattr(self, "norm") else z, self.t)


Inputs = dict[str, Tensor]


def _of_small_variance(values: Inputs) -> None:
    """dy is as large as can be where its sums are still in the range."""
    values["norm.running_var"].fill_(1e-6)
    values["x"].mul_(1e-3)
    values["dy"].mul_(1e36)


# What is extreme, put into a site's values; those of a channel are at the last of the tensor's
# sizes, or behind the first of an image's. Of dy the first place is a dead unit's where x's is.
PLACES: dict[str, Callable[[Inputs], Any]] = {
    "x, dead": lambda v: v["x"].view(-1)[:1].fill_(-1e37),
    "x, alive": lambda v: v["x"].view(-1)[:1].fill_(1e37),
    "x, tiny": lambda v: v["x"].mul_(1e-37),
    "dy": lambda v: v["dy"].view(-1)[1:2].fill_(1e37),
    "dy, tiny": lambda v: v["dy"].mul_(1e-37),
    "weight": lambda v: v["weight"].view(-1)[:1].fill_(-1e37),
    "weight, tiny": lambda v: v["weight"].mul_(1e-30),
    "t": lambda v: v["t"].view(-1)[:1].fill_(1e37),
    "t, zero": lambda v: (v["t"].view(-1)[:1].fill_(0.0), v["dy"].view(-1)[:3].fill_(1e37)),
}
OF_NORM: dict[str, Callable[[Inputs], Any]] = {
    "gamma": lambda v: v["norm.weight"][:1].fill_(1e30),
    # 1 / √variance times dy is then beyond the range, and gamma brings it back.
    "gamma 0, dy": lambda v: (_of_small_variance(v), v["norm.weight"].fill_(0.0)),
    "gamma tiny, dy": lambda v: (_of_small_variance(v), v["norm.weight"].mul_(1e-37)),
    # Or gamma / √variance is, of a channel that is dead, or below it, and dy brings it back.
    "gamma, x dead": lambda v: (
        v["norm.weight"][:1].fill_(1e37), v["norm.running_var"].fill_(1e-4), v["x"][:, :1].neg_()
    ),
    "gamma and running_var, dy": lambda v: (
        v["norm.weight"].mul_(1e-28), v["norm.running_var"].fill_(1e37), v["dy"].mul_(1e36)
    ),
    "running_mean": lambda v: v["norm.running_mean"][:1].fill_(1e37),
    "running_var": lambda v: v["norm.running_var"][:1].fill_(1e37),
    "running_var, tiny": lambda v: v["norm.running_var"].fill_(1e-37),
    "running_var tiny, x": lambda v: (
        v["norm.running_var"].fill_(1e-4), v["x"].view(-1)[:1].fill_(-1e37)
    ),
    X_LARGE: lambda v: (
        v["norm.running_var"].fill_(1e30), v["dy"].mul_(1e25), v["x"].mul_(1e20)
    ),
    "running_var, dy, x tiny": lambda v: (
        v["norm.running_var"].fill_(1e37), v["dy"].mul_(1e35), v["x"].mul_(1e-30)
    ),
}  # fmt: skip
# At these eager's backward itself overflows, some of it on a CPU alone, and the exact value is
# asked for; not where the tail itself makes no number of the exact z, and so do we.
ASKED_OF_US = ("gamma 0, dy", "gamma tiny, dy", "gamma, x dead", X_LARGE)
CASES = [
    (anchor, tail, place)
    for anchor in ANCHORS
    for tail in TAILS
    for place in (*PLACES, *(OF_NORM if "batchnorm" in anchor else ()))
    # Whose variance is beyond float's range; eager's is in double on a CPU, and only there.
    if not (anchor == BATCH_NORM and place in ("x, dead", "x, alive", "weight", X_LARGE))
]
# Of all CASES, those which failed, and some of each anchor.
QUICK = [
    *((NORM, tail, "running_var tiny, x") for tail in ("relu", "relu6", "hardswish", "a tensor")),
    *((NORM, "relu", place) for place in ("gamma 0, dy", "gamma tiny, dy", X_LARGE)),
    *((NORM, "relu", place) for place in ("running_var, dy, x tiny", "x, dead", "dy")),
    *((NORM, "relu", place) for place in ("gamma, x dead", "gamma and running_var, dy")),
    (BATCH_NORM, "relu", "gamma 0, dy"),
    (BATCH_NORM, "silu", "gamma tiny, dy"),
    ("linear", "numbers", "x, dead"),
    ("bmm", "relu", "weight"),
    ("conv2d", "a tensor", "t, zero"),
]


def _values(model: Site) -> Inputs:
    """Ordinary values, none of which cancel: x is of one sign but for its dead units."""
    torch.manual_seed(0)
    shape = (2, OUTPUTS, *POSITIONS) if "conv" in model.anchor else (6, OUTPUTS)
    shape = (3, *shape) if model.anchor == "bmm" else shape
    x = torch.rand(shape) + 0.5
    dy = torch.rand(shape) + 0.5
    return {"x": x, "dy": dy, **{n: v.clone() for n, v in model.begun.items()}}


@functools.lru_cache(maxsize=1)
def _compiled(anchor: str, tail: str) -> tuple[Site, Any]:
    torch._dynamo.reset()
    model = Site(anchor, tail)
    return model, fused_compile(model, dynamic=False, auto=True, plan="always")


def _seen(model: Site, run: Any, values: Inputs, dtype: torch.dtype) -> Inputs:
    held = {n: v.clone().to(dtype if v.is_floating_point() else v.dtype) for n, v in values.items()}
    x, dy = held.pop("x").requires_grad_(), held.pop("dy")
    model.load_state_dict(held)
    model.zero_grad()
    y = run(x)
    y.backward(dy)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    state = {n: v.clone() for n, v in model.named_buffers()}
    return {"y": y.detach(), "x": x.grad, **grads, **state}  # type: ignore[dict-item]


def _bounds(model: Site, values: Inputs) -> Inputs:
    """About how far rounding alone may take a gradient through a batch's statistics from the exact.

    There the terms cancel: dz less its mean, less its part along z. n terms summed in any order
    are off by n times the unit roundoff of their magnitudes' sum at most (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2); the n here are a channel's positions, and the eight
    operations that make a term. The roundings of the means, and of the statistics themselves, are
    left out: eager's own error reaches a seventh of it.
    """
    held = {n: v.double() for n, v in values.items()}
    gamma, beta = (held[f"norm.{n}"].view(-1, 1, 1) for n in ("weight", "bias"))
    c = F.conv2d(held["x"], held["weight"])
    var, mean = torch.var_mean(c, (0, 2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(var + model.norm.eps)
    normed = (c - mean) * rstd
    z = (normed * gamma + beta).requires_grad_()
    (dz,) = torch.autograd.grad(model.tail(z, held["t"]), z, held["dy"])
    means = [v.abs().mean((0, 2, 3), keepdim=True) for v in (dz, dz * normed)]
    dc = (gamma * rstd).abs() * (dz.abs() + means[0] + normed.abs() * means[1])
    x, weight = (held[n].abs().requires_grad_() for n in ("x", "weight"))
    magnitudes = torch.autograd.grad(F.conv2d(x, weight), (x, weight), dc)
    terms = c.numel() // c.shape[1] + 8
    unit = torch.finfo(torch.float32).eps / 2
    return {n: m * terms * unit for n, m in zip(("x", "weight"), magnitudes)}


def wrong(found: Tensor, guide: Tensor, exact: Tensor, bound: Tensor | float = 0.0) -> Tensor:
    """Where the guide, eager's, is finite and near the exact value, and this is not: neither by a
    hundredth nor within `bound`.
    """
    exact, guide, found = exact.double(), guide.double(), found.double()
    is_guide = guide.isfinite() & ((guide - exact).abs() <= 1e-3 * exact.abs())
    off = (found - exact).abs()
    return is_guide & ~((off <= 1e-2 * exact.abs()) | (off <= bound))


@pytest.mark.one_in(2)
@pytest.mark.each_once
@pytest.mark.parametrize(
    ("anchor", "tail", "place"),
    [
        pytest.param(
            *case,
            id="-".join(case),
            marks=() if case in QUICK else (pytest.mark.slow, pytest.mark.combination),
        )
        for case in CASES
    ],
)
def test_gradients_are_numbers_where_eagers_are(anchor: str, tail: str, place: str) -> None:
    counters.clear()
    model, run = _compiled(anchor, tail)
    values = _values(model)
    {**PLACES, **OF_NORM}[place](values)
    eager_model, exact_model = copy.deepcopy(model), copy.deepcopy(model).double()
    fused = _seen(model, run, values, torch.float32)
    eager = _seen(eager_model, eager_model, values, torch.float32)
    made: list[Tensor] = []
    if hasattr(model, "norm"):
        exact_model.norm.register_forward_hook(lambda module, inputs, z: made.append(z.detach()))
    exact = _seen(exact_model, exact_model, values, torch.float64)
    assert fused.keys() == eager.keys()
    is_beyond = any(z.abs().max() > torch.finfo(torch.float32).max for z in made)
    # Is the user's own tail a number, in float32 on the exact z?
    is_number = all(bool(model.tail(z.float(), values["t"]).isfinite().all()) for z in made)
    asked = place in ASKED_OF_US and (is_number or bool(fused["y"].isfinite().all()))
    bounds = _bounds(exact_model, values) if anchor == BATCH_NORM else {}
    for name, value in fused.items():
        # The gradient of t alone is a sum of z, which may be beyond the range where x is dead.
        guide = exact[name].float() if asked and not (name == "t" and is_beyond) else eager[name]
        bad = wrong(value, guide, exact[name], bounds.get(name, 0.0))
        assert not bad.any(), (name, value[bad], eager[name][bad])


def test_a_running_variance_near_the_largest_number() -> None:
    """The batch's is 1e37; times its 72 positions it is infinite, as eager's is on a CPU."""
    model, run = _compiled(BATCH_NORM, "relu")
    values = _values(model)
    values["x"].mul_(7e18)
    exact_model = copy.deepcopy(model).double()
    fused = _seen(model, run, values, torch.float32)
    exact = _seen(exact_model, exact_model, values, torch.float64)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(fused[name].double(), exact[name], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_the_sites_are_fused() -> None:
    for anchor in ANCHORS:
        counters.clear()
        _compiled.cache_clear()
        model, run = _compiled(anchor, "relu")
        _seen(model, run, _values(model), torch.float32)
        assert sum(sites().values()) == 1, anchor
