"""Across a change of grad mode or autocast nothing fuses, however it is spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    MUL,
    Body,
    cases,
    check,
    conv_program,
    gate,
    leaf,
    linear_program,
    refused,
)
from test_spellings import (
    LINEARS,
    ONLY_INFERENCE,
    PRODUCTS,
    SUMS,
)
from test_spellings_conv import FUNCTIONAL_CONVOLUTIONS, FUNCTIONAL_NORMS, SCALES
from torch import Tensor, nn

# ---- every spelling, where it must not fuse --------------------------------------------------

Tail = Callable[[Any, Tensor, Tensor], Tensor]


def _gate_of(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return z * torch.sigmoid(z) * 2.0


SPELLED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Tail]] = {
    **{f"product {n}": (lambda m, x: m.lin(x), tail) for n, tail in PRODUCTS.items()},
    **{f"sum {n}": (lambda m, x: m.lin(x), tail) for n, tail in SUMS.items()},
    **{f"linear {n}": (linear, _gate_of) for n, linear in LINEARS.items()},
}
ONLY_INFERRED = {n: (lambda m, x: m.lin(x), tail) for n, tail in ONLY_INFERENCE.items()}
SPELLED_CONV: dict[str, tuple[Callable[[Any, Tensor], Tensor], Tail]] = {
    **{f"scale {n}": (lambda m, x: m.bn(m.conv(x)), tail) for n, tail in SCALES.items()},
    **{
        f"conv {n}": ((lambda m, x, conv=conv: m.bn(conv(m, x))), lambda m, z: z * 2.0)
        for n, conv in FUNCTIONAL_CONVOLUTIONS.items()
    },
    **{
        f"norm {n}": ((lambda m, x, norm=norm: norm(m, m.conv(x))), lambda m, z: z * 2.0)
        for n, norm in FUNCTIONAL_NORMS.items()
    },
}


COMBINATION = [pytest.mark.slow, pytest.mark.combination]


def some_of(table: dict[str, Any], begin: int = 0) -> Any:
    """The anchors and tails of the table: one in six; the others are slow combinations."""
    return pytest.mark.parametrize(
        "anchor, tail",
        [
            pytest.param(*spelled, id=name, marks=COMBINATION if i % 6 != begin else [])
            for i, (name, spelled) in enumerate(table.items())
        ],
    )


static_dynamic = pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=COMBINATION)], ids=["static", "dynamic"]
)


@static_dynamic
@pytest.mark.one_in(2)
@some_of(SPELLED)
def test_spelled_across_no_grad(anchor: Body, tail: Tail, dynamic: bool) -> None:
    """The anchor's parameters must get no gradient, however the pattern is spelt."""

    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = anchor(m, x)
        return tail(m, z, y)

    check(linear_program(body), leaf(4, 8), leaf(4, 6), fuses={}, dynamic=dynamic)


@static_dynamic
@pytest.mark.one_in(2)
@some_of(SPELLED | ONLY_INFERRED, begin=3)
def test_spelled_around_a_write(anchor: Body, tail: Tail, dynamic: bool) -> None:
    """x as it was before the write counts, however the pattern is spelt."""

    def body(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1.0
        z = anchor(m, x)
        x.add_(1)
        return tail(m, z, y), x

    model = linear_program(body)
    check(model, torch.randn(4, 8), torch.randn(4, 6), fuses={}, train=False, dynamic=dynamic)


@static_dynamic
@some_of(SPELLED_CONV)
def test_conv_spelled_across_no_grad(anchor: Body, tail: Body, dynamic: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = anchor(m, x)
        return tail(m, z)

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={}, dynamic=dynamic)


@static_dynamic
@some_of(SPELLED_CONV, begin=3)
def test_conv_spelled_around_a_write(anchor: Body, tail: Body, dynamic: bool) -> None:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1.0
        z = anchor(m, x)
        x.zero_()
        return tail(m, z), x

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, torch.randn(3, 4, 8, 9), fuses={}, train=False, dynamic=dynamic)


# ---- hazard C: regions ----------------------------------------------------------------------


def no_grad_sigmoid(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    with torch.no_grad():
        s = torch.sigmoid(z)
    return z * s * 2.0


def _no_grad_linear(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.lin(x)
    return z * torch.sigmoid(z) * m.p


def _no_grad_product(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    s = torch.sigmoid(z)
    with torch.no_grad():
        r = s * 2.0
    return r + z


def _enable_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = m.lin(x)
        with torch.enable_grad():
            r = torch.sigmoid(z) * m.p
    return r + x.sum()


def _autocast_linear(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0


def _autocast_tail(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    with torch.autocast("cpu", torch.bfloat16):
        return z * torch.sigmoid(z) * 2.0


def _autocast_off_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = m.lin(x)
        with torch.autocast("cpu", enabled=False):
            s = torch.sigmoid(z)
        return s * 2.0 + z


REGIONS: dict[str, tuple[Body, str]] = {
    f.__name__.lstrip("_"): (f, "grad mode, autocast or another mode changes")
    for f in (
        no_grad_sigmoid,
        _no_grad_linear,
        _no_grad_product,
        _enable_grad,
        _autocast_linear,
        _autocast_tail,
        _autocast_off_inside,
    )
}


@cases(REGIONS)
def test_regions(body: Body, reason: str) -> None:
    refused(linear_program(body), leaf(4, 8), reason=reason)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["no_grad", "autocast"])
def test_region_between_conv_and_mul(context: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if context == "no_grad":
            with torch.no_grad():
                z = m.bn(m.conv(x))
        else:
            with torch.autocast("cpu", torch.bfloat16):
                z = m.bn(m.conv(x))
        return z * m.p

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    refused(model, leaf(3, 4, 8, 9), reason="grad mode, autocast or another mode changes")


FUNCTORCH: dict[str, Body] = {
    "vmap": lambda m, x: torch.func.vmap(lambda v: gate(m, v))(x),
    "vmap of vmap": lambda m, x: torch.func.vmap(torch.func.vmap(lambda v: gate(m, v)))(x[None]),
    "grad": lambda m, x: torch.func.grad(lambda v: gate(m, v).sum())(x),
    "vjp": lambda m, x: torch.func.vjp(lambda v: gate(m, v), x)[1](torch.ones(4, 6))[0],
    "jvp": lambda m, x: torch.func.jvp(lambda v: gate(m, v), (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda m, x: torch.func.jacrev(lambda v: gate(m, v))(x[0]),
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=name, marks=[pytest.mark.slow] if name == "vmap of vmap" else [])
        for name, body in FUNCTORCH.items()
    ],
)
def test_functorch(body: Body) -> None:
    model = linear_program(body).eval()
    refused(model, torch.randn(4, 8), reason="inside a functorch transform", train=False)


def test_functorch_beside_a_site_that_fuses() -> None:
    def body(m: Any, x: Tensor) -> Any:
        return gate(m, x), torch.func.vmap(lambda v: v.sin())(x), gate(m, x)

    check(linear_program(body), torch.randn(4, 8), fuses={MUL: 2}, train=False)
