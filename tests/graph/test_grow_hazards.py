"""What would go wrong with a grown tail does not: a smaller region is taken, or nothing.

The programs are those of `test_hazards` and `test_refused_writes`, with no named pattern. What is
fused there is given as the epilogues' texts: "" is z alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    GROWTH,
    Body,
    check,
    compiled,
    conv_program,
    epilogues,
    fused,
    leaf,
    linear_program,
    recorded,
)
from test_hazards import TRAPS, attempt, forward_ad_closed  # noqa: F401
from test_refused_writes import IN_PLACE, OPERAND_WRITES, STATISTICS, WRITES, bump
from torch import Tensor, nn

from fx_fuser import reading
from fx_fuser.graph.match.pattern import Fault
from fx_fuser.ops import checks

NOTHING: list[str] = []
ALONE = [""]
GATE = "v0 = sigmoid(z); v1 = mul(v0, z)"
SCALED = "v0 = sigmoid(z); v1 = mul(v0, s0)"
TIMES = "v0 = sigmoid(z); v1 = mul(v0, t0)"

TAKEN_OF_TRAPS: dict[str, list[str]] = {
    "a size as the scale": [GATE],
    "no_grad inside": ALONE,
    "inside vmap": NOTHING,
    "inside jvp": NOTHING,
    "z is returned too": ALONE,
    "the conv is used too": NOTHING,  # BatchNorm's, and no anchor of its own
    "the addend is written": [SCALED],
    "x is written": ALONE,
    "x is written through a view": ALONE,
    "a multiplier is written": ALONE,
    "a multiplier made on the way is written": ALONE,
    "running_mean is read": ALONE,
    "running_var is viewed": ALONE,
    "the norm is used twice": NOTHING,
    "mean and variance are one tensor": NOTHING,
    "the operand's layout wins": ["v0 = sigmoid(z)"],
    "a weight is transposed in place": NOTHING,
    "a factor's source is written": [TIMES],  # which reads the factor, not what that is made of
    "a complex operand": [SCALED],
    "no batch dimension": NOTHING,
    "a weight vector": NOTHING,
    "the result is larger": ALONE,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str) -> None:
    with recorded() as graphs:
        attempt(TRAPS[name], **GROWTH)
    assert epilogues(graphs) == TAKEN_OF_TRAPS[name]
    assert sum(fused().values()) == len(TAKEN_OF_TRAPS[name])


# Traps that a check alone keeps right, at grown matches too; in the others growth does not reach
# what the check is for, or a further check refuses the same.
LOAD_BEARING = [
    "no_grad inside", "inside jvp", "inside vmap", "the addend is written", "x is written",
    "x is written through a view", "a multiplier is written",
    "a multiplier made on the way is written", "running_mean is read", "running_var is viewed",
    "the operand's layout wins", "no batch dimension", "a weight vector",
    "the result is larger", "a complex operand", "the conv is used too",
]  # fmt: skip


@pytest.mark.usefixtures("forward_ad_closed")
@pytest.mark.parametrize("name", LOAD_BEARING)
def test_the_checks_are_load_bearing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = TRAPS[name]
    kept = tuple(c for c in checks.CHECKS if c.__name__ != trap.check)
    monkeypatch.setattr(checks, "CHECKS", kept)
    with pytest.raises(Exception) as failure:
        attempt(trap, **GROWTH)
    assert fused() or not isinstance(failure.value, AssertionError)


# ---- writes ----------------------------------------------------------------------------------


def _check(body: Body, *inputs: Tensor, takes: list[str], leaves: tuple[str, ...] = ()) -> None:
    model = linear_program(body).requires_grad_(False)
    model.register_buffer("total", torch.zeros(4, 6))
    counts = {"auto_linear": len(takes)} if takes else {}
    graphs = check(model, *inputs, fuses=counts, train=False, leaves=leaves, **GROWTH)
    assert epilogues(graphs) == takes


TAKEN_IN_PLACE: dict[str, list[str]] = {
    "z with a live view": ALONE,
    "product with a live view": [GATE],
    "an operand": [SCALED],
    "an operand with a view": [SCALED],
    "an input, +=": [SCALED],
    "an input, mul_": ["v0 = sigmoid(z)"],
    "a buffer": [SCALED],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    body, _ = IN_PLACE[name]
    _check(body, torch.randn(4, 8), torch.randn(4, 6), takes=TAKEN_IN_PLACE[name])


def test_in_place_on_an_operand_in_training() -> None:
    body, _ = IN_PLACE["an operand"]
    graphs = check(linear_program(body), leaf(4, 8), leaf(4, 6), fuses={"auto_linear": 1}, **GROWTH)
    assert epilogues(graphs) == [SCALED]


@pytest.mark.one_in(2)
@pytest.mark.each_once
@pytest.mark.parametrize("is_input", [False, True], ids=["intermediate", "input"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_x_written_in_between(write: Callable[[Tensor], None], is_input: bool) -> None:
    def body(m: Any, x: Tensor) -> Any:
        x = x if is_input else x * 1.0
        z = m.lin(x)
        write(x)
        return z * torch.sigmoid(z) * 2.0, x * 1.0

    _check(body, torch.randn(4, 8), takes=ALONE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_x_written_within_the_tail(write: Callable[[Tensor], None]) -> None:
    """What comes before the write is taken."""

    def body(m: Any, x: Tensor) -> Any:
        x = x * 1.0
        z = torch.tanh(m.lin(x) * 0.5)
        write(x)
        return torch.exp(z) * 2.0, x * 1.0

    _check(body, torch.randn(4, 8), takes=["v0 = mul(z, s0); v1 = tanh(v0)"])


TAKEN_WITH_WRITES = {**dict.fromkeys(OPERAND_WRITES, ALONE), "a multiplier, then add": [TIMES]}


@pytest.mark.parametrize("name", OPERAND_WRITES)
def test_operand_written_in_between(name: str) -> None:
    body, _ = OPERAND_WRITES[name]
    _check(body, torch.randn(4, 8), torch.randn(4, 6), takes=TAKEN_WITH_WRITES[name])


def test_x_written_in_between_with_frozen_weight() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        z = m.lin(x)
        x.add_(1)
        return z * torch.sigmoid(z) * 2.0

    model = linear_program(body)
    model.lin.weight.requires_grad_(False)
    assert epilogues(check(model, leaf(4, 8), fuses={"auto_linear": 1}, **GROWTH)) == ALONE


@torch.compiler.allow_in_graph
def _unknown(t: Tensor) -> Tensor:
    return t.add_(1)


def _opaque(t: Tensor) -> Tensor:
    return torch.cond(t.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (t,))


@pytest.mark.parametrize("call", [_unknown, _opaque, bump], ids=["unknown", "cond", "custom op"])
def test_an_operand_given_to_what_may_write(call: Callable[[Tensor], Any]) -> None:
    def body(m: Any, x: Tensor) -> Any:
        x = x * 1.0
        z = m.lin(x)
        call(x)
        return z * torch.sigmoid(z) * 2.0

    _check(body, torch.randn(4, 8), takes=ALONE)


def test_z_given_to_what_may_write() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = torch.tanh(m.lin(x))
        _unknown(z)
        return z * 2.0

    _check(body, torch.randn(4, 8), takes=["v0 = tanh(z)"])


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_alias_only_the_caller_knows(inner: str) -> None:
    """Compiled for two tensors, called with two views of one."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = torch.tanh(m.lin(x))
        y.add_(1)
        return z * torch.sigmoid(z) * 2.0

    model = linear_program(body).eval()
    with recorded() as graphs, torch.no_grad():
        run = compiled(model, inner=inner, **GROWTH)
        for same in (False, True):
            x, expected_x = torch.ones(4, 8), torch.ones(4, 8)
            y, expected_y = (x[:2], expected_x[:2]) if same else (torch.ones(2, 8),) * 2
            expected = model(expected_x, expected_y)
            torch.testing.assert_close(run(x, y.clone() if not same else y), expected)
            torch.testing.assert_close(x, expected_x)
    assert set(epilogues(graphs)) == {"v0 = tanh(z)"}


def test_what_is_viewed_after_an_in_place_end() -> None:
    def body(m: Any, x: Tensor) -> Any:
        r = torch.tanh(m.lin(x)) * 2.0
        r.mul_(m.s)
        return r[:2], r.view(-1)

    _check(body, torch.randn(4, 8), takes=["v0 = tanh(z); v1 = mul(v0, s0); v2 = mul(v1, t0)"])


def test_an_inner_value_in_place_viewed_after() -> None:
    """The view is taken of what the in-place operation left, and so ends the growth."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = m.lin(x)
        s = z.sigmoid_()
        return s * y * 2.0, z.view(-1)

    _check(body, torch.randn(4, 8), torch.randn(4, 6), takes=["v0 = sigmoid(z)"])


# ---- running statistics ----------------------------------------------------------------------


@pytest.mark.parametrize("look", STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics_in_between(look: Callable[..., Tensor]) -> None:
    """z alone ends before they are looked at."""

    def body(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        seen = look(m, z)
        return z * 2.0, seen

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).train()
    count = {"auto_conv2d_batchnorm": 1}
    graphs = check(model, leaf(3, 4, 8, 9), fuses=count, train=True, grad=False, **GROWTH)
    assert epilogues(graphs) == ALONE


def test_statistics_read_in_eval_are_in_the_way_of_nothing() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        seen = m.bn.running_mean.clone()
        return F.gelu(z) * 2.0, seen

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    count = {"auto_conv2d_batchnorm": 1}
    graphs = check(model, torch.randn(3, 4, 8, 9), fuses=count, train=False, **GROWTH)
    assert epilogues(graphs) == ["v0 = gelu(z, approximate=none); v1 = mul(v0, s0)"]


# ---- the next smaller region -----------------------------------------------------------------


def test_each_refused_region_is_followed_by_the_next_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, seen = reading._fault_of, []

    def fault_of(match: Any, taken: Any) -> Fault | None:
        seen.append(match.root.name)
        large = len(match.nodes) > 2
        return Fault(match.root, "it is too large") if large else right(match, taken)

    monkeypatch.setattr(reading, "_fault_of", fault_of)
    _check(
        lambda m, x: torch.exp(torch.tanh(torch.sigmoid(m.lin(x)))),
        torch.randn(4, 8),
        takes=["v0 = sigmoid(z)"],
    )
    assert [name.partition("_")[0] for name in seen[-3:]] == ["exp", "tanh", "sigmoid"]
