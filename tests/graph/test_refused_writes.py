"""What is written in between or in place is not fused: no site, the same results, a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    CONV,
    MUL,
    Body,
    cases,
    check,
    compiled,
    conv_program,
    fused,
    leaf,
    linear_program,
    refused,
)
from torch import Tensor, nn


@torch.library.custom_op("fx_fuser_tests::bump", mutates_args={"t"})
def bump(t: Tensor) -> None:
    t.add_(1)


@torch.library.custom_op("fx_fuser_tests::twice", mutates_args=())
def twice(t: Tensor) -> Tensor:
    return t * 2


@twice.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)


# ---- in-place operations --------------------------------------------------------------------


def _z_overwritten_with_view(m: Any, x: Tensor, y: Tensor) -> Any:
    base = m.lin(x)
    seen = base.view(-1)
    s = torch.sigmoid(base)
    base.mul_(s)
    return base * 2.0, seen


def _r_overwritten_with_view(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    r = z * torch.sigmoid(z)
    seen = r[0]
    r.mul_(2.0)
    return r, seen


def _operand_lives_on(m: Any, x: Tensor, y: Tensor) -> Any:
    r = y * 1.0
    r.add_(2.0 * torch.sigmoid(m.lin(x)))
    return r


def _operand_lives_on_in_view(m: Any, x: Tensor, y: Tensor) -> Any:
    r = y * 1.0
    row = r[0]
    out = r.add_(2.0 * torch.sigmoid(m.lin(x)))
    return out, row


def _input_lives_on(m: Any, x: Tensor, y: Tensor) -> Any:
    y += 2.0 * torch.sigmoid(m.lin(x))
    return y


def _input_multiplied(m: Any, x: Tensor, y: Tensor) -> Any:
    return y.mul_(torch.sigmoid(m.lin(x))) * 2.0


def _buffer_accumulates(m: Any, x: Tensor, y: Tensor) -> Any:
    m.total.add_(2.0 * torch.sigmoid(m.lin(x)))
    return m.total * 1.0


IN_PLACE: dict[str, tuple[Body, str]] = {
    "z with a live view": (_z_overwritten_with_view, "is also used by"),
    "product with a live view": (_r_overwritten_with_view, "is also used by"),
    "an operand": (_operand_lives_on, "works in place on memory that"),
    "an operand with a view": (_operand_lives_on_in_view, "works in place on memory that"),
    "an input, +=": (_input_lives_on, "works in place on memory that"),
    "an input, mul_": (_input_multiplied, "works in place on memory that"),
    "a buffer": (_buffer_accumulates, "works in place on memory that"),
}


def _view_after(m: Any, x: Tensor) -> Any:
    r = m.lin(x).sigmoid() * 2.0
    r.mul_(m.p)
    return r[:2], r.view(-1)


def _written_after(m: Any, x: Tensor) -> Any:
    z = m.lin(x)
    z += 2.0 * torch.sigmoid(z)
    z.view(-1).add_(1)
    z[0] = 3.0
    return z * 1.0


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("body", [_view_after, _written_after])
def test_in_place_result_may_be_viewed_and_written(body: Body, train: bool) -> None:
    """What comes after the last matched node sees the result and no inner value."""
    pattern = MUL if body is _view_after else ADD
    check(linear_program(body), leaf(4, 8), fuses={pattern: 1}, train=train, leaves=("add", "mul"))


def _inner_viewed_after(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    s = z.sigmoid_()
    return s * y * 2.0, z.view(-1)


@pytest.mark.slow
def test_in_place_inner_value_viewed_after() -> None:
    model = linear_program(_inner_viewed_after)
    refused(model, leaf(4, 8), leaf(4, 6), reason="the inner value")


@cases(IN_PLACE)
def test_in_place(body: Body, reason: str) -> None:
    model = linear_program(body)
    model.register_buffer("total", torch.zeros(4, 6))
    refused(model, torch.randn(4, 8), torch.randn(4, 6), reason=reason, train=False)


@pytest.mark.slow
def test_in_place_on_an_operand_in_training() -> None:
    refused(
        linear_program(_operand_lives_on), leaf(4, 8), leaf(4, 6), reason="works in place on memory"
    )


# ---- hazard E: something writes an operand in between ---------------------------------------


def _write_add_(x: Tensor) -> None:
    x.add_(1)


def _write_iadd(x: Tensor) -> None:
    x += 1


def _write_through_view(x: Tensor) -> None:
    x.view(-1).add_(1)


def _write_through_row(x: Tensor) -> None:
    row = x[0]
    row.zero_()


def _write_setitem(x: Tensor) -> None:
    x[0] = 1.0


def _write_setitem_slice(x: Tensor) -> None:
    x[1:3, ::2] = 0.5


def _write_out(x: Tensor) -> None:
    torch.add(x, 1, out=x)


def _write_copy_(x: Tensor) -> None:
    x.copy_(torch.ones_like(x))


def _write_custom_op(x: Tensor) -> None:
    bump(x)


def _write_custom_op_view(x: Tensor) -> None:
    bump(x[1])


def _write_relu_(x: Tensor) -> None:
    F.relu(x, inplace=True)


def _write_torch_function(x: Tensor) -> None:
    torch.relu_(x)


def _write_clamp_(x: Tensor) -> None:
    torch.clamp_(x, min=0.5)


def _write_index_put(x: Tensor) -> None:
    x.index_put_((torch.tensor([0]),), torch.ones_like(x[:1]))


def _write_dropout(x: Tensor) -> None:
    F.threshold(x, 0.1, 3.0, True)


WRITES = {
    f.__name__[7:]: f
    for f in (
        _write_add_,
        _write_iadd,
        _write_through_view,
        _write_through_row,
        _write_setitem,
        _write_setitem_slice,
        _write_out,
        _write_copy_,
        _write_custom_op,
        _write_custom_op_view,
        _write_relu_,
        _write_torch_function,
        _write_clamp_,
        _write_index_put,
        _write_dropout,
    )
}


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

    refused(linear_program(body), torch.randn(4, 8), reason="before the fused op", train=False)


def _write_after_sigmoid(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    s = torch.sigmoid(z)
    x.mul_(3.0)
    return z * s * 2.0


def _write_multiplier(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    r = torch.sigmoid(z) * y
    y.add_(1)
    return r * z


def _write_addend(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    r = torch.sigmoid(z) * y
    y.add_(1)
    return r + 2.0


def _write_bias(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    m.lin.bias.add_(1)
    return z * torch.sigmoid(z) * 2.0


def _write_weight(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    m.lin.weight.data.mul_(2.0)
    return z + torch.sigmoid(z) * 2.0


def _write_other_input(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    y.add_(1)
    return z * torch.sigmoid(z) * 2.0


OPERAND_WRITES: dict[str, tuple[Body, str]] = {
    "after the sigmoid": (_write_after_sigmoid, "before the fused op"),
    "a multiplier": (_write_multiplier, "before the fused op"),
    "a multiplier, then add": (_write_addend, "before the fused op"),
    "the bias": (_write_bias, "before the fused op"),
    "the weight": (_write_weight, "before the fused op"),
    "another input": (_write_other_input, "may share memory with an operand"),
}


@cases(OPERAND_WRITES)
def test_operand_written_in_between(body: Body, reason: str) -> None:
    model = linear_program(body).requires_grad_(False)
    refused(model, torch.randn(4, 8), torch.randn(4, 6), reason=reason, train=False)


def test_x_written_in_between_with_frozen_weight() -> None:
    """In training: nothing saves x, so eager allows it."""

    def body(m: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        z = m.lin(x)
        x.add_(1)
        return z * torch.sigmoid(z) * 2.0

    model = linear_program(body)
    model.lin.weight.requires_grad_(False)
    refused(model, leaf(4, 8), reason="before the fused op", train=True)


def test_operand_written_by_unknown_function() -> None:
    @torch.compiler.allow_in_graph
    def unknown(t: Tensor) -> Tensor:
        return t.add_(1)

    def body(m: Any, x: Tensor) -> Any:
        x = x * 1.0
        z = m.lin(x)
        unknown(x)
        return z * torch.sigmoid(z) * 2.0

    refused(linear_program(body), torch.randn(4, 8), reason="before the fused op", train=False)


@pytest.mark.slow
def test_operand_given_to_higher_order_op() -> None:
    """A body of its own might write; what it does is not looked at."""

    def body(m: Any, x: Tensor) -> Any:
        z = m.lin(x)
        other = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
        return z * torch.sigmoid(z) * 2.0, other

    refused(linear_program(body), torch.randn(4, 8), reason="before the fused op", train=False)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_alias_only_the_caller_knows(inner: str) -> None:
    """Compiled for two tensors, called with two views of one."""

    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = m.lin(x)
        y.add_(1)
        return z * torch.sigmoid(z) * 2.0

    model = linear_program(body).eval()
    run = compiled(model, inner=inner)
    with torch.no_grad():
        for same in (False, True):
            x, expected_x = torch.ones(4, 8), torch.ones(4, 8)
            y, expected_y = (x[:2], expected_x[:2]) if same else (torch.ones(2, 8),) * 2
            expected = model(expected_x, expected_y)
            torch.testing.assert_close(run(x, y.clone() if not same else y), expected)
            torch.testing.assert_close(x, expected_x)
    assert fused() == {}


# Not hazards: the same positions, and nothing is wrong with them.


def test_harmless_nodes_in_between_fuse() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = m.lin(x)
        unrelated = y.cos()
        unrelated.add_(1)
        unrelated[0] = 2.0
        other = twice(y)
        return z * torch.sigmoid(z) * 2.0, unrelated, other

    check(
        linear_program(body), torch.randn(4, 8), torch.randn(4, 6), fuses={MUL: 1}, train=False,
        leaves=("add",),
    )  # fmt: skip


def test_integer_counter_in_between_fuses() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.lin(x)
        m.count.add_(1)
        return z * torch.sigmoid(z) * 2.0

    model = linear_program(body)
    model.register_buffer("count", torch.tensor(0))
    check(model, leaf(4, 8), fuses={MUL: 1}, leaves=("add",))


# ---- hazard F: running statistics -----------------------------------------------------------


def _read_mean(m: Any, z: Tensor) -> Tensor:
    return m.bn.running_mean.clone()


def _read_var_view(m: Any, z: Tensor) -> Tensor:
    return m.bn.running_var[1:] + 0.0


def _write_mean(m: Any, z: Tensor) -> Tensor:
    return m.bn.running_mean.add_(1) * 1.0


def _write_var(m: Any, z: Tensor) -> Tensor:
    m.bn.running_var.fill_(2.0)
    return m.bn.running_var + 0.0


def _read_both(m: Any, z: Tensor) -> Tensor:
    return torch.stack([m.bn.running_mean, m.bn.running_var])


STATISTICS = {
    f.__name__[1:]: f for f in (_read_mean, _read_var_view, _write_mean, _write_var, _read_both)
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("look", STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics_in_between(look: Callable[..., Tensor]) -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        seen = look(m, z)
        return z * 2.0, seen

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).train()
    # Without backward: BatchNorm saves the statistics, so eager refuses the ones that write.
    reason = "before the fused op" if "write" in look.__name__ else "running statistics"
    refused(model, leaf(3, 4, 8, 9), reason=reason, train=True, grad=False)


def test_statistics_read_in_eval_fuse() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        seen = m.bn.running_mean.clone()
        return z * 2.0, seen

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, torch.randn(3, 4, 8, 9), fuses={CONV: 1}, train=False)


def test_statistics_written_in_eval() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        m.bn.running_mean.add_(1)
        return z * 2.0

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval()
    refused(model, torch.randn(3, 4, 8, 9), reason="before the fused op", train=False)
