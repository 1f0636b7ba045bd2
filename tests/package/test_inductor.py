"""One test of each pattern through Inductor, as users run it, and with the kernel ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, CONV, GROWTH, MUL, Program, check, conv_program, leaf
from torch import Tensor, nn


def _program(pattern: str) -> tuple[Program, tuple[Any, ...]]:
    if pattern == MUL:
        return Program(
            lambda m, x: F.silu(m.gate(x)) * m.up(x), gate=nn.Linear(8, 6), up=nn.Linear(8, 6)
        ), (leaf(4, 8),)
    if pattern == ADD:
        return Program(
            lambda m, x: (lambda z: z + 2.0 * torch.sigmoid(z))(m.lin(x)), lin=nn.Linear(8, 6)
        ), (leaf(4, 8),)

    def body(m: Any, x: Tensor) -> Tensor:
        return torch.relu(m.bn(m.conv(x)) * 2.0)

    return conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), (leaf(3, 4, 8, 9),)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "train, cpu_ops",
    [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("pattern", [MUL, pytest.param(ADD, marks=pytest.mark.slow), CONV])
def test_inductor(pattern: str, train: bool, cpu_ops: bool) -> None:
    model, inputs = _program(pattern)
    leaves = ("linear",) if pattern == MUL else ()
    settings: dict[str, Any] = {"train": train, "inner": "inductor", "cpu_ops": cpu_ops}
    check(model, *inputs, fuses={pattern: 1}, leaves=leaves, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_what_is_grown(train: bool) -> None:
    model = conv_program(lambda m, x: torch.relu(m.conv(x)), nn.Conv2d(4, 6, 3), nn.Identity())
    growth: dict[str, Any] = {**GROWTH, "inner": "inductor"}
    check(model, leaf(3, 4, 8, 9), fuses={"auto_conv2d": 1}, train=train, **growth)


@pytest.mark.parametrize("asked", [None, True])
def test_strides_are_padded_only_where_the_user_asks(asked: bool | None) -> None:
    """Beside ops of ours Inductor's padding makes wrong values (options.py, _WITH_OWN_OPS)."""
    seen: list[bool] = []
    own = {} if asked is None else {"comprehensive_padding": asked}
    options = {"cpu_ops": True, "strict": True, "inner": "inductor", **own}
    options["pre_grad_custom_pass"] = lambda graph: seen.append(
        torch._inductor.config.comprehensive_padding
    )
    model = nn.Sequential(nn.Linear(8, 6), nn.SiLU())
    torch.compile(model, backend="fx_fuser", options=options)(torch.randn(4, 8))
    assert seen == [asked is True]
    assert torch._inductor.config.comprehensive_padding
