"""An operand of a match that is written to later: backward must not read it.

    h = gelu(lin(x) + r); r += h

Eager mode saves the sum for backward, and a fused op would save r. So in training the match ends
where backward reads nothing that changes; in evaluation all of it is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    GROWTH,
    Program,
    check,
    compiled,
    conv_program,
    epilogues,
    leaf,
    linear_program,
    recorded,
)
from torch import Tensor, nn

LEAVES = ("gelu", "tanh", "sigmoid", "relu", "mul", "add", "linear", "imul", "iadd")


def _no_grad(write: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def run(r: Tensor) -> None:
        with torch.no_grad():
            write(r)

    return run


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda r: r.add_(1.0),
    "data": lambda r: r.data.add_(5.0),
    "foreach": lambda r: torch._foreach_add_([r], 5.0),
    "view": lambda r: r.view(-1).mul_(2.0),
    "index": lambda r: r.__setitem__(0, 3.0),
    "out": _no_grad(lambda r: torch.add(r, 1.0, out=r)),
    "no_grad": _no_grad(lambda r: r.copy_(torch.ones_like(r))),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("tail", [F.gelu, torch.tanh, lambda v: torch.sigmoid(v) * 2])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.each_once
def test_an_addend_is_written(
    write: Callable[[Tensor], Any], tail: Callable[[Tensor], Tensor], train: bool
) -> None:
    def body(m: Any, x: Tensor, r: Tensor) -> Tensor:
        r = r * 2
        h = tail(m.lin(x) + r)
        write(r)
        return h * r

    inputs = leaf(4, 8), torch.randn(4, 6)
    graphs = check(
        linear_program(body),
        *inputs,
        fuses={"auto_linear": 1},
        train=train,
        grad=train,
        leaves=LEAVES,
        **GROWTH,
    )
    (taken,) = epilogues(graphs)
    assert ("v1" in taken) != train, taken


def test_what_backward_does_not_read_may_be_written() -> None:
    def body(m: Any, x: Tensor, r: Tensor) -> Tensor:
        r = r * 2
        h = torch.relu(m.lin(x)) + r
        r += h
        return r

    graphs = check(
        linear_program(body),
        leaf(4, 8),
        torch.randn(4, 6),
        fuses={"auto_linear": 1},
        leaves=LEAVES,
        **GROWTH,
    )
    assert epilogues(graphs) == ["v0 = relu(z); v1 = add(v0, t0)"]


def test_an_input_of_which_eager_saves_a_copy() -> None:
    """A sequence seen with its batch first, as eager mode's Linear copies it."""

    def body(m: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) * 1.0
        x += F.gelu(m.lin(x))
        return x

    model = Program(body, lin=nn.Linear(8, 8))
    check(model, leaf(4, 6, 8), fuses={}, leaves=LEAVES, **GROWTH)


def test_a_state_that_the_module_keeps() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 6)
            self.register_buffer("state", torch.zeros(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.lin(x) + self.state)
            with torch.no_grad():
                self.state.copy_(h)
            return h

    check(Cell(), leaf(4, 8), fuses={"auto_linear": 1}, leaves=LEAVES, **GROWTH)


@pytest.mark.slow
def test_a_convolution() -> None:
    def body(m: Any, x: Tensor, r: Tensor) -> Tensor:
        r = r * 2
        h = F.gelu(m.bn(m.conv(x)) + r)
        r.mul_(3.0)
        return h * r

    check(
        conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)),
        torch.randn(2, 4, 8, 9),
        torch.randn(2, 6, 6, 7),
        fuses={"auto_conv2d_batchnorm": 1},
        leaves=(*LEAVES, "conv2d", "batch_norm"),
        **GROWTH,
    )


def test_where_c_is_computed_again_its_operands_stay() -> None:
    """With save="memory" backward reads the bias too, and this one is written to."""

    def body(m: Any, x: Tensor, b: Tensor) -> Tensor:
        b = b * 2
        y = F.gelu(F.linear(x, m.lin.weight, b)) * 2.0
        b.add_(1.0)
        return y * b

    inputs = leaf(4, 8), torch.randn(6)
    options = {**GROWTH, "save": "memory"}
    graphs = check(
        linear_program(body), *inputs, fuses={"auto_linear": 1}, leaves=LEAVES, **options
    )
    assert epilogues(graphs) == ["v0 = gelu(z, approximate=none); v1 = mul(v0, s0)"]


def test_what_eager_mode_saves_too_may_be_written() -> None:
    """Backward raises as eager mode's does; a forward pass alone may record gradients."""

    def body(m: Any, x: Tensor, t: Tensor) -> Tensor:
        h = torch.relu(m.lin(x)) * t
        x.add_(1.0)
        t.add_(1.0)
        return h

    model = linear_program(body)
    x, t = torch.randn(4, 8), torch.randn(4, 6)
    expected = model(x.clone(), t.clone())
    with recorded() as graphs:
        y = compiled(model, inner="eager", **GROWTH)(x, t)
    assert epilogues(graphs) == ["v0 = relu(z); v1 = mul(v0, t0)"]
    torch.testing.assert_close(y, expected)
    for result in (y, model(x, t)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
