"""Training: memory that is shared or written to, autocast, checkpoints."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import (
    ALL_THREE,
    MUL_ADD,
    MUL_MUL,
    ThreePatterns,
    assert_close_to_exact,
    assert_same_as_eager,
    copied,
    double,
    error,
    fresh,  # noqa: F401
    fused_compile,
    images,
    observe,
    sites,
)
from test_training import Swish
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# ---- memory: layouts, and tensors written to after the call -------------------------------------


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_the_layout_of_another_operand_wins(inner: str) -> None:
    def gate(x: Tensor, weight: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        y = a * torch.sigmoid(F.linear(x, weight)) * 2.0
        return y, y.t().view(-1) + 1.0  # raises unless y is column-major

    tensors = torch.randn(3, 6), torch.randn(5, 6), torch.randn(5, 3).t()
    value, flat = fused_compile(gate, inner=inner)(*tensors)
    expected, flat_expected = gate(*tensors)
    assert value.stride() == expected.stride() == (1, 3)
    assert torch.equal(value, expected) and torch.equal(flat, flat_expected)


def test_channels_last_times_contiguous() -> None:
    def block(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, a: Tensor) -> Tensor:
        return a * F.batch_norm(F.conv2d(x, weight), mean, var)

    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    tensors = x, torch.randn(6, 3, 3, 3), torch.zeros(6), torch.ones(6), torch.randn(2, 6, 4, 4)
    value, expected = fused_compile(block)(*tensors), block(*tensors)
    assert value.stride() == expected.stride()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("inputs", [0, 6], ids=["no inputs", "inputs"])
def test_gradients_of_a_linear_without_inputs(inputs: int, inner: str) -> None:
    x = torch.randn(3, inputs, requires_grad=True)
    model = Swish(6, 5)
    model.linear.weight = nn.Parameter(torch.randn(5, inputs))
    reference, other = copy.deepcopy(model), copied(x)
    fused_compile(model, inner=inner)(x).sum().backward()
    reference(other).sum().backward()
    assert sites() == {MUL_MUL: 1}
    for mine, its in zip((x, *model.parameters()), (other, *reference.parameters())):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_backward_does_not_read_may_be_written_to(inner: str) -> None:
    """As in eager mode: x if the weight is frozen, the weight if x needs no gradient, an addend."""

    def step(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        y = residual + 2.0 * torch.sigmoid(F.linear(x, weight, bias))
        x.mul_(0.5)
        weight.mul_(0.5)
        residual.mul_(0.5)
        return y

    def run(function: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        tensors = [torch.randn(*s) for s in ((3, 6), (5, 6), (5,), (3, 5))]
        tensors[2].requires_grad_()
        value = function(*tensors)
        value.square().sum().backward()
        return (value, tensors[2].grad, *tensors)

    for mine, its in zip(run(fused_compile(step, inner=inner)), run(step)):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
    assert sites() == {MUL_ADD: 1}


def test_a_copy_of_what_is_written_later_stays_a_copy() -> None:
    # Not through AOTAutograd: it recomputes q from the r that was written to, fused or not
    # (torch 2.13, aot_eager and Inductor alike).
    def step(x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        q = r * 0.5
        y = torch.sigmoid(F.linear(x, weight)) * q
        r.add_(1.0)
        return y, r

    weight, expected_weight = (torch.ones(5, 6, requires_grad=True) for _ in range(2))
    x, r = torch.randn(3, 6), torch.randn(3, 5)
    value, _ = fused_compile(step, inner="eager")(x, weight, r.clone())
    expected, _ = step(x, expected_weight, r.clone())
    value.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight.grad, expected_weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_result_changed_in_place_and_read_under_its_old_name(inner: str) -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(x, weight)
        y = z * torch.sigmoid(z) * 2.0
        F.relu_(y)
        return y

    x, weight = torch.randn(3, 6), torch.randn(5, 6)
    value = fused_compile(step, inner=inner)(x, weight)
    assert sites() == {MUL_MUL: 1}
    torch.testing.assert_close(value, step(x, weight), rtol=1e-6, atol=1e-6)


# ---- autocast -----------------------------------------------------------------------------------


class AutocastInside(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_autocast(inside: bool, training: bool) -> None:
    model = ThreePatterns(conv_bias=False).train(training)
    reference, exact, x = copy.deepcopy(model), double(model), images()
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    compiled = fused_compile(AutocastInside(model) if inside else model)

    def fused(x: Tensor) -> Tensor:
        with contextlib.nullcontext() if inside else around():
            return compiled(x)

    seen = observe(model, fused, (x.clone().requires_grad_(),), True)
    plain = AutocastInside(reference)
    expected = observe(reference, plain, (x.clone().requires_grad_(),), True)
    true = observe(exact, exact, (x.double().requires_grad_(),), True)
    assert sites() == ALL_THREE
    assert_close_to_exact(seen, expected, true, torch.bfloat16)


@pytest.mark.slow
def test_grad_scaler() -> None:
    """A scaled step, a step skipped because its gradient overflowed, another scaled step."""
    model = ThreePatterns(conv_bias=False)
    models = (model, copy.deepcopy(model))
    states = []
    for m, run in zip(models, (fused_compile(model), models[1])):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimiser = torch.optim.SGD(m.parameters(), lr=0.1)
        torch.manual_seed(2)
        scales = []
        for step in range(3):
            x = images()
            optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(x).float().square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [64.0, 32.0, 32.0]
        states.append(m.state_dict())
    for name, value in states[0].items():
        # two steps of gradients with 8 bits each
        torch.testing.assert_close(value, states[1][name], rtol=2**-6, atol=2**-8)
    assert sites() == ALL_THREE


# ---- checkpoints and nested regions -------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.body, self.how = ThreePatterns(conv_bias=False), how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.how)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_inside_the_model(reentrant: bool) -> None:
    # In eval: a checkpoint in training updates the running statistics twice, fused or not.
    model = Checkpointed(use_reentrant=reentrant).eval()
    x = images().requires_grad_()
    assert_same_as_eager(model, (x,), ALL_THREE)


@pytest.mark.slow
def test_a_checkpoint_inside_a_training_model() -> None:
    model = Checkpointed(use_reentrant=False)
    stock = copy.deepcopy(model)
    x = images().requires_grad_()
    seen = observe(model, fused_compile(model), (x,), True)
    expected = observe(
        stock, torch.compile(stock, backend="aot_eager"), (copied(x),), True
    )  # eager recomputes the statistics' update, torch.compile does not
    assert sites() == ALL_THREE
    for name, value in seen.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_around_the_compiled_model(reentrant: bool) -> None:
    model = ThreePatterns(conv_bias=False).eval()
    compiled = fused_compile(model)
    reference, exact, x = copy.deepcopy(model), double(model), images().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return checkpoint(compiled, x, use_reentrant=reentrant)

    others = copied(x), double(x)
    seen = observe(model, run, (x,), True)
    assert sites()[MUL_MUL] >= 1
    assert_close_to_exact(
        seen,
        observe(reference, reference, others[:1], True),
        observe(exact, exact, others[1:], True),
    )


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.slow
def test_a_selective_checkpoint_is_left_alone() -> None:
    """The policy names aten ops: fused ones would all be recomputed."""
    model = Checkpointed(use_reentrant=False, context_fn=_keep_products).eval()
    assert_same_as_eager(model, (images().requires_grad_(),), {})


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Swish(6, 6) for _ in range(2))
        self.body = torch.compiler.nested_compile_region(lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.body(layer, x)
        return x


@pytest.mark.slow
def test_a_nested_compile_region() -> None:
    model, x = Nested(), torch.randn(3, 6, requires_grad=True)
    exact = double(x), [layer.double() for layer in copy.deepcopy(model.layers)]
    seen = observe(model, fused_compile(model), (x,), True)
    assert sites()[MUL_MUL] >= 1
    value = exact[0]
    for layer in exact[1]:
        value = layer(value)
    assert error(seen["value"], value) < 4e-7
    weights = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).reshape(value.shape)
    (value * weights).sum().backward()
    assert error(x.grad, exact[0].grad) < 4e-7
    for mine, its in zip(model.layers, exact[1]):
        assert error(mine.linear.weight.grad, its.linear.weight.grad) < 4e-7
