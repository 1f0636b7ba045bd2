"""Grad modes, and graphs with many sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, CONV, MUL, Program, check, compiled, conv_program, fused, leaf
from test_operands import _body, train_eval
from torch import Tensor, nn
from torch._dynamo.utils import counters

# ---- modes ----------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
def test_gradient_modes(pattern: str, mode: Any) -> None:
    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with mode():
                return f(*args)

        return call

    if pattern == CONV:
        model = conv_program(
            lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        )
        x = torch.randn(3, 4, 8, 9)
    else:
        model, x = Program(_body(pattern), lin=nn.Linear(8, 6)), torch.randn(4, 8)
    check(model, x, fuses={pattern: 1}, train=False, wrap=wrap)


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
def test_no_recompile_for_another_batch(pattern: str, train: bool) -> None:
    if pattern == CONV:
        model = conv_program(
            lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        )
        shapes: list[tuple[int, ...]] = [(3, 4, 8, 9), (5, 4, 8, 9), (2, 4, 7, 11)]
    else:
        model = Program(_body(pattern), lin=nn.Linear(8, 6))
        shapes = [(4, 8), (7, 8), (64, 8)]
    model.train(train)
    call = compiled(model, dynamic=True)
    with torch.set_grad_enabled(train):
        for shape in shapes:
            x = torch.randn(*shape, requires_grad=train)
            torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert fused() == {pattern: 1}


# ---- many sites -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.slow
@train_eval
def test_layers_share_their_code(train: bool) -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    check(model, leaf(4, 8), fuses={MUL: 4}, train=train, leaves=("linear",))


@pytest.mark.slow
@train_eval
def test_one_module_applied_twice(train: bool) -> None:
    block = Block()
    check(nn.Sequential(block, block), leaf(4, 8), fuses={MUL: 2}, train=train, leaves=("linear",))


@train_eval
def test_norm_applied_twice(train: bool) -> None:
    """Its running statistics are updated twice, in order: by the user's own ops in training."""
    model = Program(
        lambda m, x: m.bn(m.conv(m.bn(m.conv(x)) * 0.5)) * 2.0,
        conv=nn.Conv2d(4, 4, 3, padding=1),
        bn=nn.BatchNorm2d(4),
    )
    check(model, leaf(3, 4, 8, 9), fuses={} if train else {CONV: 2}, train=train)


def test_norm_shared_by_two_sites_in_evaluation() -> None:
    """The second one, between the first and its scale, reads the statistics and writes nothing."""

    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        u = m.bn(m.conv(x))
        v = m.bn(m.conv(x * 0.5))
        return v * 3.0, u * 2.0

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 2}, train=False, leaves=("mul",))


@train_eval
def test_one_linear_feeds_another(train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        for lin in (m.a, m.b):
            z = lin(x)
            x = z + 2.0 * torch.sigmoid(z)
        return x * torch.sigmoid(m.c(x)) * 0.5

    model = Program(body, a=nn.Linear(8, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 6))
    check(model, leaf(4, 8), fuses={ADD: 2, MUL: 1}, train=train)


@pytest.mark.slow
@train_eval
def test_two_sites_interleaved(train: bool) -> None:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        u, v = m.a(x), m.b(x)
        su, sv = torch.sigmoid(u), torch.sigmoid(v)
        pu, pv = su * u, sv * v
        return pu * 2.0, pv * 3.0

    model = Program(body, a=nn.Linear(8, 6), b=nn.Linear(8, 5))
    check(model, leaf(4, 8), fuses={MUL: 2}, train=train)


@train_eval
def test_one_site_is_the_others_operand(train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        u, v = m.a(x), m.b(x)
        gated = u * torch.sigmoid(u) * 2.0
        return torch.sigmoid(v) * gated + v

    model = Program(body, a=nn.Linear(8, 6), b=nn.Linear(8, 6))
    check(model, leaf(4, 8), fuses={MUL: 1, ADD: 1}, train=train)


@pytest.mark.slow
@train_eval
def test_all_three_in_one_model(train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        image = (m.bn(m.conv(x)) * 2.0).flatten(2).mean(2)
        z = m.a(image)
        z = z * torch.sigmoid(z) * 0.5
        u = m.b(z)
        return u + 2.0 * torch.sigmoid(u)

    model = Program(
        body, conv=nn.Conv2d(4, 8, 3), bn=nn.BatchNorm2d(8), a=nn.Linear(8, 6), b=nn.Linear(6, 5)
    )
    counter = ("add",)  # num_batches_tracked
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1, MUL: 1, ADD: 1}, train=train, leaves=counter)
