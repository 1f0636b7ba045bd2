"""What explain says of anchors that no pattern is near to, and of products that are no anchor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import CONV, MUL_ADD, MUL_MUL, fresh, images  # noqa: F401
from helpers import conv_program, linear_program
from torch import Tensor, nn

import fx_fuser

Body = Callable[..., Any]

FAR: dict[str, tuple[Body, str]] = {  # and what follows
    "nothing": (lambda m, x, y: m.lin(x), "return"),
    "relu": (lambda m, x, y: torch.relu(m.lin(x)), "relu"),
    "gelu": (lambda m, x, y: F.gelu(m.lin(x)), "gelu"),
    "a residual after dropout": (lambda m, x, y: F.dropout(m.lin(x), 0.5) + y, "dropout"),
    "scaled": (lambda m, x, y: m.lin(x) * 2.0 + y, "mul"),
    "softmax": (lambda m, x, y: torch.softmax(m.lin(x), -1) * y, "softmax"),
    "two off": (lambda m, x, y: torch.relu(torch.tanh(m.lin(x))) * y * 2.0, "tanh"),
}


@pytest.mark.parametrize("body, follows", FAR.values(), ids=FAR.keys())
def test_far_is_in_the_summary(body: Body, follows: str) -> None:
    torch._dynamo.reset()
    report = fx_fuser.explain(linear_program(body), torch.randn(4, 8), torch.randn(4, 6))
    assert (report.fused, report.refused, report.others) == ([], [], {"Linear": 1})
    reason, line = report.leftovers.splitlines()
    assert report.summary == "0 sites fused; not fused: 1 Linear"
    assert f"\n\n{report.summary}\n\n{reason}\n  1 × Linear, then {follows}" in str(report)
    assert reason == "Not fused: on a CPU Inductor does as well by itself"
    assert line.startswith(f"  1 × Linear, then {follows}: ")
    assert "test_left.py:" in line and "m.lin(x)" in line
    assert type(report).from_json(report.to_json()) == report


def test_what_is_left_is_grouped() -> None:
    """Equal ones share a line, which has the place of the first."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU())))
    report = fx_fuser.explain(model, torch.randn(4, 8), options={"auto": False})
    # Of no line of the user's.
    assert report.leftovers == "Not fused: no pattern is near\n  3 × Linear, then gelu"


def test_no_advice_that_cannot_help() -> None:
    """Neither a gemm nor a view in between is an operation too many; no pattern has a cast."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        between = torch.sigmoid(m.bare(m.lin(x)[:, :1].expand(4, 8)))
        return between * y * 2.0, torch.sigmoid(m.lin(x).half()).float() * y

    torch._dynamo.reset()
    said = str(fx_fuser.explain(linear_program(body), torch.randn(4, 8), torch.randn(4, 6)))
    assert "  1 × Linear, then getitem" in said
    assert "would be" not in said and "pattern with" not in said


ON_CPU = "on a CPU Inductor does as well by itself"
NO_KERNEL = "fx_fuser has no kernel for it"
LEFT: dict[str, tuple[Body, str, str]] = {
    "bmm": (lambda m, x: torch.bmm(x, x.mT), "batched matmul, then return", ON_CPU),
    "einsum": (
        lambda m, x: torch.einsum("bij,bkj->bik", x, x).softmax(-1),
        "batched matmul, then softmax",
        ON_CPU,
    ),
    "chunk": (
        lambda m, x: torch.mul(*m.lin(x).chunk(2, -1)),
        "Linear, then chunk (a packed projection: docs/patterns.md)",
        ON_CPU,
    ),
    "glu": (
        lambda m, x: F.glu(m.lin(x)),
        "Linear, then glu (a packed projection: docs/patterns.md)",
        ON_CPU,
    ),
    "conv1d": (
        lambda m, x: F.conv1d(x, m.lin.weight[:, :3, None]).relu(),
        "conv1d, then relu",
        NO_KERNEL,
    ),
    "tensordot": (
        lambda m, x: torch.tensordot(x, x, ([1, 2], [1, 2])),
        "tensordot, then return",
        NO_KERNEL,
    ),
    "attention": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x) * 2,
        "scaled_dot_product_attention, then mul",
        "on a GPU a later pass may replace it (docs/attention.md)",
    ),
    "a vector": (
        lambda m, x: x @ m.lin.weight[0],
        "matmul, then return",
        NO_KERNEL,
    ),
}


@pytest.mark.parametrize("body, said, why", LEFT.values(), ids=LEFT.keys())
def test_every_product_that_is_left_has_a_line(body: Body, said: str, why: str) -> None:
    torch._dynamo.reset()
    report = fx_fuser.explain(linear_program(body), torch.randn(2, 3, 8))
    reason, line = report.leftovers.splitlines()
    assert reason == f"Not fused: {why}"
    assert line.startswith(f"  1 × {said}")
    assert sum(report.others.values()) == (why == ON_CPU)
    assert type(report).from_json(report.to_json()) == report


def test_without_grown_tails_only_the_patterns_kinds_are_left() -> None:
    options = {"auto": False}
    model = linear_program(LEFT["bmm"][0])
    assert fx_fuser.explain(model, torch.randn(2, 3, 8), options=options).left == []


@pytest.mark.parametrize("tail", [torch.relu, lambda z: z, lambda z: z + 1.0])
def test_a_batchnorm_without_a_product_is_in_the_summary(tail: Body) -> None:
    conv = nn.Conv2d(4, 6, 3)
    model = conv_program(lambda m, x: tail(m.bn(m.conv(x))), conv, nn.BatchNorm2d(6))
    torch._dynamo.reset()
    report = fx_fuser.explain(model, torch.randn(3, 4, 8, 9))
    assert (report.refused, report.others) == ([], {"Conv2d": 1})


def test_the_summary_counts_kinds() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(96, 3), nn.Linear(3, 3))
    report = fx_fuser.explain(model, images())
    assert report.summary == "0 sites fused; not fused: 1 Conv2d, 2 Linear"
