"""What a training step keeps: of z no more than the derivative reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import check, compiled, fused, leaf, linear_program
from torch import Tensor

import fx_fuser
from fx_fuser import registry

Z_BYTES = 4 * 6 * 4  # of z [4, 6] in fp32; x [4, 8] has more


def plus(x, weight, bias, a):  # type: ignore[no-untyped-def]
    return F.linear(x, weight, bias) + a


def minus(x, weight, bias, a):  # type: ignore[no-untyped-def]
    return F.linear(x, weight, bias) - a


def alone(x, weight, bias):  # type: ignore[no-untyped-def]
    return F.linear(x, weight, bias)


def times(x, weight, bias, a):  # type: ignore[no-untyped-def]
    return F.linear(x, weight, bias) * a


def tanh(x, weight, bias):  # type: ignore[no-untyped-def]
    return torch.tanh(F.linear(x, weight, bias))


@pytest.fixture(autouse=True)
def patterns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_patterns", [])
    for source in (plus, minus, alone, times, tanh):
        fx_fuser.register_pattern(source)
    yield


def _kept(body: Callable[..., Tensor], *operands: Tensor) -> tuple[set[str], list[int]]:
    """What the only site keeps, as reported, and the sizes in memory of what autograd saved."""
    model, x = linear_program(body), torch.randn(4, 8)
    options = {"cpu_ops": True}
    report = fx_fuser.explain(model, x, *operands, train=True, options=options)
    (site,) = report.fused
    reported = set(site.kept)
    torch._dynamo.reset()
    y = compiled(model, inner="eager")(x, *operands)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own = [t for t in saved if t.untyped_storage().data_ptr() not in parameters]
    return reported, sorted(t.untyped_storage().nbytes() for t in own)


X = 4 * 8 * 4
CASES: dict[str, tuple[Callable[..., Tensor], bool, set[str], set[int]]] = {
    # body, does r ask for a gradient, what is kept (z is the node `linear`), sizes beyond one value
    "z + r": (lambda m, x, r: m.lin(x) + r, True, {"l_inputs_0_"}, {X}),
    "r + z": (lambda m, x, r: r + m.lin(x), False, {"l_inputs_0_"}, {X}),
    "z - r": (lambda m, x, r: m.lin(x) - r, True, {"l_inputs_0_"}, {X}),
    "z": (lambda m, x, r: m.lin(x), False, {"l_inputs_0_"}, {X}),
    "z * 2": (lambda m, x, r: m.lin(x) * 2.0, False, {"l_inputs_0_"}, {X}),
    "z * r": (lambda m, x, r: m.lin(x) * r, False, {"l_inputs_0_", "l_inputs_1_"}, {X, Z_BYTES}),
    "z * learned r": (
        lambda m, x, r: m.lin(x) * r, True,
        {"l_inputs_0_", "l_inputs_1_", "linear"}, {X, Z_BYTES},
    ),
    "tanh(z)": (lambda m, x, r: torch.tanh(m.lin(x)), False, {"l_inputs_0_", "linear"},
                {X, Z_BYTES}),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept(case: str) -> None:
    body, learns, reported, sizes = CASES[case]
    found, saved = _kept(body, torch.randn(4, 6, requires_grad=learns))
    assert found == reported
    assert {n for n in saved if n > 4} == sizes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_right(case: str) -> None:
    body, learns, *_ = CASES[case]
    r = torch.randn(4, 6, requires_grad=learns)
    counts = {"z + r": "plus", "r + z": "plus", "z - r": "minus", "z": "alone", "tanh(z)": "tanh"}
    name = counts.get(case, "times")
    check(linear_program(body), leaf(4, 8), r, fuses={name: 1}, leaves=("mul", "add", "sub"))


def test_what_is_not_kept_may_be_written_to() -> None:
    """As in eager mode: of a summand the backward reads the shape alone."""
    model = linear_program(lambda m, x, r: m.lin(x) + r)
    x, r = torch.randn(4, 8), torch.randn(4, 6)
    y = compiled(model, inner="eager")(x, r)
    assert fused() == {"plus": 1}
    r.zero_()
    y.sum().backward()
    torch.testing.assert_close(model.lin.weight.grad, x.sum(0).expand(6, 8))


def test_only_a_factor_learns() -> None:
    """Then z is kept, and neither x nor the weight."""
    model = linear_program(lambda m, x, r: m.lin(x) * r).requires_grad_(False)
    r = torch.randn(4, 6, requires_grad=True)
    x = torch.randn(4, 8)
    y = compiled(model, inner="eager")(x, r)
    assert fused() == {"times": 1}
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    large = [t for t in saved if t.untyped_storage().nbytes() > 4]
    assert [tuple(t.shape) for t in large] == [(4, 6)]
    y.sum().backward()
    torch.testing.assert_close(r.grad, model.lin(x))
