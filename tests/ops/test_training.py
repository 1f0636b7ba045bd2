"""Life with a fused model: optimisers, changing weights, modes, autocast, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import (
    ALL_THREE,
    CONV,
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
from torch import Tensor, nn

import fx_fuser

CHECKOUT = Path(__file__).resolve().parents[2]


class Swish(nn.Module):
    def __init__(self, inputs: int = 6, outputs: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z * torch.sigmoid(z) * 2.0


# ---- optimisers ---------------------------------------------------------------------------------


def _train(model: nn.Module, run: Any, make: Callable[..., Any], steps: int) -> dict[str, Any]:
    optimiser = make(model.parameters())
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x = images().to(model.gate.weight.dtype)
        optimiser.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **copy.deepcopy(model.state_dict())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)],
    ids=["sgd", "adamw"],
)
def test_optimiser_steps_equal_eager(make: Callable[..., Any]) -> None:
    # A bias in front of a training BatchNorm has gradient zero but for rounding, and AdamW would
    # make whole steps of that rounding.
    model = ThreePatterns(conv_bias=False)
    models = model, copy.deepcopy(model), double(model)
    fused, eager, exact = (
        _train(m, run, make, steps=6)
        for m, run in zip(models, (fused_compile(models[0]), *models[1:]))
    )
    assert sites() == ALL_THREE  # one graph for all steps
    for name, value in fused.items():
        # Six steps in which every rounding is fed back: within four times eager's own drift.
        drift = max(4 * error(eager[name], exact[name]), 4e-6)
        assert error(value, exact[name]) <= drift, name
    assert torch.equal(fused["bn.num_batches_tracked"], torch.tensor(6))


@pytest.mark.slow
def test_gradients_accumulate_over_two_backwards() -> None:
    model = ThreePatterns(conv_bias=False).eval()
    reference, exact = copy.deepcopy(model), double(model)
    compiled = fused_compile(model)
    for x in (images(), images()):
        compiled(x).square().sum().backward()
        reference(x).square().sum().backward()
        exact(x.double()).square().sum().backward()
    assert_close_to_exact(
        *({n: p.grad for n, p in m.named_parameters()} for m in (model, reference, exact))
    )


@pytest.mark.slow
def test_the_graph_retained_gives_the_same_gradients_twice() -> None:
    model = ThreePatterns(conv_bias=False)
    loss = fused_compile(model)(images()).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, first in zip(model.parameters(), once):
        torch.testing.assert_close(parameter.grad, 2 * first, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_double_backward_is_refused_with_a_reason(inner: str) -> None:
    x = torch.randn(3, 6, requires_grad=True)
    value = fused_compile(Swish(), inner=inner)(x)
    (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    # A gradient penalty: eagerly right, and never silently a constant.
    with pytest.raises(RuntimeError, match="double backward"):
        (value.sum() + gradient.square().sum()).backward()


def test_create_graph_alone_is_no_double_backward() -> None:
    """Some libraries always pass create_graph=True."""
    model, x = Swish(), torch.randn(3, 6, requires_grad=True)
    reference, other = copy.deepcopy(model), copied(x)
    fused_compile(model, inner="eager")(x).sum().backward(create_graph=True)
    reference(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-6, atol=1e-6)
    for mine, its in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.each_once
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "around",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
    ],
    ids=["save_on_cpu", "saved_tensors_hooks"],
)
def test_saved_tensor_hooks(inner: str, around: Callable[[], Any]) -> None:
    """torch.func.vjp raises under them; our pointwise backward must not use it."""
    model, x = Swish(), torch.randn(3, 6, requires_grad=True)
    reference, other = copy.deepcopy(model), copied(x)
    with around():
        fused_compile(model, inner=inner)(x).sum().backward()
    assert sites() == {MUL_MUL: 1}
    reference(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-6, atol=1e-6)


# ---- weights change -----------------------------------------------------------------------------


def _load_state_dict(model: Swish, new: Swish) -> None:
    model.load_state_dict(new.state_dict())


def _edit_data(model: Swish, new: Swish) -> None:
    model.linear.weight.data = new.linear.weight.data.clone()
    model.linear.bias.data[:] = new.linear.bias.data


def _copy(model: Swish, new: Swish) -> None:
    with torch.no_grad():
        model.linear.weight.copy_(new.linear.weight)
        model.linear.bias.copy_(new.linear.bias)


def _swap_parameters(model: Swish, new: Swish) -> None:
    model.linear.weight = nn.Parameter(new.linear.weight.detach().clone())
    model.linear.bias = nn.Parameter(new.linear.bias.detach().clone())


def _swap_module(model: Swish, new: Swish) -> None:
    model.linear = copy.deepcopy(new.linear)


@pytest.mark.each_once
@pytest.mark.parametrize(
    "change", [_load_state_dict, _edit_data, _copy, _swap_parameters, _swap_module]
)
@pytest.mark.parametrize("grad", [True, False])
def test_changed_weights_are_used(change: Callable[[Swish, Swish], None], grad: bool) -> None:
    model, new, x = Swish(), Swish(), torch.randn(3, 6)
    compiled = fused_compile(model)
    with torch.set_grad_enabled(grad):
        old = compiled(x)
        change(model, new)
        changed = compiled(x)
    torch.testing.assert_close(changed, new(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(changed, old)
    if grad:
        changed.sum().backward()
        new(x).sum().backward()
        for mine, its in zip(model.parameters(), new.parameters()):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=1e-6)


# ---- frozen parameters --------------------------------------------------------------------------

_PARAMETERS = [n for n, _ in ThreePatterns().named_parameters()]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "trainable",
    [
        *(pytest.param([n], marks=pytest.mark.slow) for n in _PARAMETERS[1:]),
        *(
            pytest.param([n for n in _PARAMETERS if n != frozen], marks=pytest.mark.slow)
            for frozen in _PARAMETERS[1:]
        ),
        _PARAMETERS[:1],
        _PARAMETERS[1:],
        ["conv.weight", "down.weight"],
        ["bn.weight", "bn.bias"],
        [],
    ],
    ids=",".join,
)
@pytest.mark.parametrize(
    "training", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["train", "eval"]
)
def test_frozen_parameters_get_no_gradient(trainable: list[str], training: bool) -> None:
    model = ThreePatterns().train(training)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    x = images().requires_grad_(not trainable)
    zero = ("grad conv.bias",) if training and "conv.bias" in trainable else ()
    assert_same_as_eager(model, (x,), ALL_THREE, no_bound=zero)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in trainable), name
    assert (x.grad is not None) == (not trainable)


def test_nothing_requires_grad() -> None:
    model = ThreePatterns().requires_grad_(False)
    value = fused_compile(model)(images())
    assert sites() == ALL_THREE
    assert not value.requires_grad and value.grad_fn is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    model, x = ThreePatterns(), images()
    reference = copy.deepcopy(model)
    compiled = fused_compile(model)
    with mode():
        value, expected = compiled(x), reference(x)
    assert sites() == ALL_THREE
    assert value.is_inference() == expected.is_inference()
    assert not value.requires_grad
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    for mine, its in zip(model.buffers(), reference.buffers()):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)
    compiled(x).sum().backward()  # and with gradients afterwards
    assert all(p.grad is not None for p in model.parameters())


# ---- BatchNorm's life ---------------------------------------------------------------------------


class ScaledNorm(nn.Module):
    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.bn = nn.BatchNorm2d(6, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) * 2.0


@pytest.mark.slow
def test_train_eval_train() -> None:
    model = ScaledNorm()
    reference = copy.deepcopy(model)
    compiled = fused_compile(model)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for training in (True, False, True, True, False):
        x = torch.randn(4, 3, 6, 6)
        values = []
        for m, run, optimiser in zip((model, reference), (compiled, reference), optimisers):
            m.train(training)
            values.append(run(x))
            if training:
                optimiser.zero_grad()
                values[-1].square().mean().backward()
                optimiser.step()
        torch.testing.assert_close(*values, rtol=2e-6, atol=2e-6)
        for mine, its in zip(model.buffers(), reference.buffers()):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
    assert model.bn.num_batches_tracked == 3
    assert sites() == {CONV: 2}  # one graph in training, one in evaluation


@pytest.mark.each_once
@pytest.mark.parametrize(
    "norm",
    [
        {"momentum": 0.7},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_every_kind_of_batchnorm(norm: dict[str, Any], training: bool, inner: str) -> None:
    model = ScaledNorm(**norm).train(training)
    if model.bn.running_mean is not None:
        model.bn.running_mean.uniform_(-1, 1)
        model.bn.running_var.uniform_(0.5, 2)
    batch = training or model.bn.running_mean is None
    x = torch.randn(4, 3, 6, 6, requires_grad=True)
    zero = ("grad conv.bias",) if batch else ()
    assert_same_as_eager(model, (x,), {CONV: 1}, no_bound=zero, inner=inner)


def test_a_cumulative_average_is_right() -> None:
    model = ScaledNorm(momentum=None)
    reference, x = copy.deepcopy(model), torch.randn(4, 3, 6, 6)
    compiled = fused_compile(model)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), reference(x), rtol=1e-6, atol=1e-6)
    for mine, its in zip(model.buffers(), reference.buffers()):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_momentum_may_change() -> None:
    model = ScaledNorm()
    reference, x = copy.deepcopy(model), torch.randn(4, 3, 6, 6)
    compiled = fused_compile(model)
    for momentum in (0.1, 0.5, 0.9):
        model.bn.momentum = reference.bn.momentum = momentum
        torch.testing.assert_close(compiled(x), reference(x), rtol=1e-6, atol=1e-6)
        for mine, its in zip(model.buffers(), reference.buffers()):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)


class SharedNorm(nn.Module):
    """One BatchNorm2d on two paths; `scaled` of the results are multiplied."""

    def __init__(self, scaled: int) -> None:
        super().__init__()
        self.conv, self.bn, self.scaled = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), scaled

    def forward(self, x: Tensor) -> Tensor:
        first = self.bn(self.conv(x))
        second = self.bn(self.conv(torch.relu(first) if self.scaled == 1 else first * 2.0))
        return second * 3.0


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("scaled", [1, 2])
def test_a_batchnorm_called_twice(scaled: int, inner: str) -> None:
    """The unfused call saves the statistics; our update of them made its backward raise."""
    x = torch.randn(4, 3, 6, 6, requires_grad=True)
    zero = ("grad conv.bias",)
    assert_same_as_eager(SharedNorm(scaled), (x,), {}, no_bound=zero, inner=inner)


@pytest.mark.parametrize("shared", ["gamma", "running_mean", "the multiplier"])
def test_statistics_that_are_operands_too_are_refused(shared: str) -> None:
    def norm(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, gamma: Tensor) -> Tensor:
        gamma = var if shared == "gamma" else gamma
        mean = var if shared == "running_mean" else mean
        y = F.batch_norm(F.conv2d(x, weight), mean, var, gamma, None, True)
        return y * (var[:, None, None] if shared == "the multiplier" else 2.0)

    vectors = torch.zeros(6), torch.ones(6), torch.ones(6)
    report = fx_fuser.explain(norm, torch.randn(2, 3, 6, 6), torch.randn(6, 3, 3, 3), *vectors)
    (site,) = report.refused
    assert report.fused == [] and "running" in site.reason


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_an_empty_batch(training: bool, inner: str) -> None:
    model = ScaledNorm().train(training)
    kept = copy.deepcopy(model.state_dict())
    x = torch.randn(0, 3, 6, 6, requires_grad=True)
    value = fused_compile(model, inner=inner)(x)
    value.sum().backward()
    assert value.shape == (0, 6, 4, 4) and x.grad.shape == x.shape
    for name, buffer in model.named_buffers():
        if name != "bn.num_batches_tracked":
            assert torch.equal(buffer, kept[name]), name
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_model_in_bfloat16(training: bool, inner: str) -> None:
    """All of it, BatchNorm's vectors too: ATen's backward wants them in one dtype."""
    model = ScaledNorm().bfloat16().train(training)
    x = torch.randn(4, 3, 6, 6).bfloat16().requires_grad_()
    reference, exact, others = copy.deepcopy(model), double(model), (copied(x), double(x))
    seen = observe(model, fused_compile(model, inner=inner), (x,), True)
    expected = observe(reference, reference, others[:1], True)
    true = observe(exact, exact, others[1:], True)
    assert sites() == {CONV: 1}
    if training:
        for values in (seen, expected, true):
            values.pop("grad conv.bias")  # truly zero
    assert_close_to_exact(seen, expected, true, torch.bfloat16)
