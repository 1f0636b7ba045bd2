"""A product whose factor is an operation after a transpose of an anchor's value.

    e = lin(y); relu(x @ (e.t() * 3))

The operation moves above the transpose, and the product reads the moved one as its weight.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import GROWTH, check, linear_program
from test_views_generated import agrees
from torch import Tensor

from fx_fuser.graph.read import view

Y = 6  # rows of y and features of the Linear: a factor seen the wrong way round would fit


def _clip(m: Any, x: Tensor, y: Tensor) -> Tensor:
    image = m.lin(y)
    image = image / image.norm(dim=-1, keepdim=True)
    return torch.matmul(x, image.t().to(x.device)) * 2.0


def _twice_seen(m: Any, x: Tensor, y: Tensor) -> Tensor:
    e = m.lin(y)
    return torch.relu(x @ (e.view(Y, 6).t() * 3.0)) + e.sum()


def _tail_of_the_first(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """What the product reads is fused; an operation that is not reads it too."""
    a = torch.sigmoid(m.lin(y).t())
    return torch.relu(x @ a) + torch.cumsum(a * 3.0, 0).sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "body",
    [
        _clip,
        _twice_seen,
        _tail_of_the_first,
        lambda m, x, y: torch.relu(x @ (m.lin(y).t() * 3.0)),
        lambda m, x, y: F.relu(x @ ((e := m.lin(y)).t() * 3.0)) + e.sum(),
        lambda m, x, y: torch.relu(x @ torch.exp(o := m.lin(y).t() * 3.0)) + o.cumsum(0).sum(),
    ],
    ids=["clip", "twice seen", "tail of the first", "scaled", "read again", "read between"],
)
@pytest.mark.parametrize("rows", [Y, 5], ids=["square", "not square"])
def test_the_factor_is_seen_the_right_way_round(body: Callable[..., Any], rows: int) -> None:
    if rows != Y and body is _twice_seen:
        pytest.skip("its view is of a square")
    x, y = torch.randn(3, 6, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
    check(
        linear_program(body),
        x,
        y,
        fuses={"auto_linear": 2},
        leaves=("matmul", "linear", "mul", "exp", "to", "truediv"),
        **GROWTH,
    )


def _program(seed: int) -> str:
    rng = random.Random(seed)
    lines = ["def body(m, x, y, s, t):", "    e = m.lin(y)"]
    lines.append(
        f"    e = {rng.choice(('e', 'e', 'e.relu()', 'e / e.norm(dim=-1, keepdim=True)'))}"
    )
    seen = ("e.t()", "e.T", "e.transpose(0, 1)", "e.view(6, 6).t()", "e.permute(1, 0)", "e")
    lines.append(f"    v = {rng.choice(seen)}")
    moved = ("v * 3.0", "v.to(v.dtype)", "torch.sigmoid(v)", "v + s", "v * t", "torch.tanh(v) * s")
    lines.append(f"    o = {rng.choice(moved)}")
    lines.append(
        f"    p = {rng.choice(('o', 'o', 'o * 0.5', 'o.t()', 'torch.exp(o) + t', 'o + v'))}"
    )
    lines.append(
        f"    r = {rng.choice(('x @ p', 'torch.mm(x, p)', 'x @ p.t()', 'F.linear(x, p)'))}"
    )
    lines.append(f"    r = {rng.choice(('torch.relu(r)', 'r * 2.0', 'torch.sigmoid(r) * 3'))}")
    others = ("0", "e.sum()", "o.cumsum(0)", "(v * s).cumsum(1)", "p.sum(0)", "(o.t() * t).mean(0)")
    lines.append(f"    return r, {rng.choice(others)} * s, {rng.choice(others)} * s")
    return "\n".join(lines)


def _agrees(seed: int) -> int:
    torch.manual_seed(seed)
    sizes = ((3, 6), (Y, 8), (6, 6), (6,))
    return agrees(_program(seed), [torch.randn(size) for size in sizes])


@pytest.mark.slow
def test_generated_programs() -> None:
    assert sum(map(_agrees, range(40))) >= 80


@pytest.mark.each_once
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 250))
def test_more_generated_programs(first: int) -> None:
    assert sum(map(_agrees, range(first, first + 250))) >= 500


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "write",
    [
        "v.t_(); return r(x @ v)",
        "v.transpose_(0, 1); return r(torch.addmm(y[0], x, v))",
        "w = v.t_(); return r(x @ w), v * 1.0",
        "w = v.t(); v.t_(); return r(x @ w)",
        "w = v.t(); torch.ops.aten.t_.default(v); return r(x @ w)",
        "w = v.t(); v.as_strided_((6, 6), (1, 6)); return r(x @ w)",
        "w = v.t(); v.set_(y * 1.0); return r(x @ w)",
        "w = v.to(v.dtype); t = v.t(); w.t_(); return r(x @ t)",
        "w = v.t(); v.unsqueeze_(0); return r(x @ w)",
        "v.t_(); z = x @ v; return z * torch.sigmoid(z) * 2.0",
    ],
)
def test_what_is_transposed_in_place_is_left(write: str) -> None:
    names: dict[str, Any] = {"torch": torch, "r": torch.relu}
    exec(f"def body(m, x, y):\n    v = y * 2; {write}", names)
    check(
        linear_program(names["body"]),
        torch.randn(3, 6),
        torch.randn(6, 6),
        fuses={},
        train=False,
        grad=False,
        **GROWTH,
    )


def test_every_operation_that_changes_a_view_in_place_is_known() -> None:
    every = torch._C._dispatch_get_all_op_names()
    names = {name[6:].partition(".")[0] for name in every if name.startswith("aten::")}
    packets = {name: getattr(torch.ops.aten, name) for name in names if name.endswith("_")}
    tagged = {
        name
        for name, packet in packets.items()
        if any(torch.Tag.inplace_view in getattr(packet, o).tags for o in packet.overloads())
    }
    assert {"t_", "squeeze_"} <= tagged
    assert tagged - {"detach_"} <= view._SEEN_OTHERWISE  # after which it is seen as before
