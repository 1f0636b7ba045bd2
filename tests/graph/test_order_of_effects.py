"""Writes that a function's name does not tell, names that only look like writes, and the order in
which gradients add up."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, CONV, MUL, Program, check, compiled, fused, leaf
from torch import Tensor, nn

import fx_fuser
from fx_fuser import PatternError, registry
from fx_fuser.graph.epilogue import MAX_STEPS, parse
from fx_fuser.graph.read import nodes
from fx_fuser.graph.read.canonical import _div, meaning


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_an_inverted_mask_is_another_mask(train: bool) -> None:
    """`operator.invert` begins with an i, as `iadd` does: every later `m` was read as `~m`."""

    def body(m: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        other = ~mask
        return F.silu(m.lin(x)) * mask, other

    model = Program(body, lin=nn.Linear(8, 6))
    check(model, leaf(4, 8), torch.rand(4, 6) > 0.5, fuses={MUL: 1}, train=train)


def by_a_dunder_method(x: Tensor, weight: Tensor) -> None:
    x.__iadd__(1.0)


def by_an_unbound_method(x: Tensor, weight: Tensor) -> None:
    torch.Tensor.__imul__(x, 3.0)


def by_an_embedding(x: Tensor, weight: Tensor) -> None:
    F.embedding(torch.tensor([0, 1]), weight, max_norm=0.1)


def by_an_embedding_bag(x: Tensor, weight: Tensor) -> None:
    F.embedding_bag(torch.tensor([[0, 1]]), weight, max_norm=0.1)


def by_a_batch_norm(x: Tensor, weight: Tensor) -> None:
    torch.native_batch_norm(x, None, None, weight[0], weight[1], True, 0.5, 1e-5)


@pytest.mark.parametrize(
    "write",
    [by_a_dunder_method, by_an_unbound_method, by_an_embedding, by_an_embedding_bag,
     by_a_batch_norm],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_write_that_no_name_tells(write: Callable[[Tensor, Tensor], None]) -> None:
    """The fused op stands where the site ends, and read what had been changed by then."""

    def body(m: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(x, weight)
        write(x, weight)
        return z * torch.sigmoid(z) * 2.0

    x, weight = torch.randn(4, 8), 3 * torch.randn(6, 8)
    check(Program(body), x, weight, fuses={}, train=False)


def test_verify_sees_what_is_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rivals all read the same operands: only the graph's own value tells that these differ."""
    monkeypatch.setattr(nodes, "_IN_PLACE_OPERATORS", {operator.invert})

    def body(x: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        other = ~mask
        return F.silu(F.linear(x, weight)) * mask, other

    inputs = torch.randn(4, 8), torch.randn(6, 8), torch.rand(4, 6) > 0.5
    run = torch.compile(body, backend="fx_fuser", options={"inner": "eager", "verify": "always"})
    with pytest.warns(UserWarning, match="give another result than in the graph"):
        found = run(*inputs)
    assert all(map(torch.equal, found, body(*inputs))) and fused() == {}


def test_gradients_add_up_in_eagers_order() -> None:
    """Of a tensor that the anchor and the epilogue read: in the other order the sum was inf."""

    def body(m: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x + x * torch.sigmoid(F.linear(x, weight, bias)) * -1.5

    def gradient(f: Callable[..., Tensor]) -> Tensor:
        x = torch.tensor([[1.0]], requires_grad=True)
        y = f(x, torch.tensor([[-3.8]]), torch.tensor([3.8]))
        return torch.autograd.grad(y, x, torch.full_like(y, 2e38))[0]

    model = Program(body)
    assert torch.equal(gradient(compiled(model)), gradient(model))
    assert fused() in ({MUL: 1}, {ADD: 1})


@pytest.mark.slow
def test_a_batch_norms_backward_stays_in_range() -> None:
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 0, 0] = 8
    dy = torch.zeros(1, 1, 8, 8)
    dy[0, 0, 0, 0] = 2e37
    model = Program(
        lambda m, x: m.bn(m.conv(x)) * 2.0,
        conv=nn.Conv2d(1, 1, 1, bias=False),
        bn=nn.BatchNorm2d(1),
    )
    nn.init.ones_(model.conv.weight)

    def gradient(f: Callable[..., Tensor]) -> Tensor:
        given = x.clone().requires_grad_()
        return torch.autograd.grad(f(given), given, dy)[0]

    found, expected = gradient(compiled(model)), gradient(model)
    assert fused() == {CONV: 1} and found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def test_a_number_over_a_tensor_is_torchs() -> None:
    """`2.0 / z` multiplies by the reciprocal; a 0-d tensor that is divided does not."""
    z = torch.fx.Graph().placeholder("z")
    assert str(_div(2.0, z)) == "rdiv(z, 2.0)" and str(meaning(_div(2.0, z))) == "div(2.0, z)"
    assert str(_div(z, 2.0)) == "div(z, 2.0)"
    assert parse("v0 = rdiv(z, s0)").text == "v0 = rdiv(z, s0)"


@pytest.mark.slow
def test_a_changing_number_over_a_tensor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))

    def over(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return a / torch.exp(F.linear(x, weight, bias))

    fx_fuser.register_pattern(over)
    lin, x = nn.Linear(8, 6), torch.randn(4, 8)
    run = compiled(lambda x, s: s / torch.exp(lin(x)))
    for s in (1.3, 2.7, 3.1):
        assert torch.equal(run(x, s), s / torch.exp(lin(x)))
    assert fused() == {"over": 1}  # the first, whose number is a constant


@pytest.mark.parametrize("n", [MAX_STEPS + 1, 400])
def test_a_pattern_beyond_a_kernel_is_an_error(n: int) -> None:
    def deep(x, weight):  # type: ignore[no-untyped-def]
        z = F.linear(x, weight)
        for _ in range(n):
            z = torch.sigmoid(z)
        return z

    with pytest.raises(PatternError, match=f"a kernel takes at most {MAX_STEPS}"):
        fx_fuser.register_pattern(deep)
