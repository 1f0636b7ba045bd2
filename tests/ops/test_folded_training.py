"""Convolutions whose BatchNorm is frozen: it is folded into the weight in training, too."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import folded_nets
import pytest
import torch
from compare import fresh  # noqa: F401 a fixture
from folded_nets import frozen, net, random_norm, relative, step
from helpers import Program
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from fx_fuser import versions
from fx_fuser.graph.epilogue import parse
from fx_fuser.ops import folded, run
from fx_fuser.passes import folding

FORCED = {**folded_nets.FORCED, "auto": True, "inner": "aot_eager"}
HALF = 0.5
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, fresh: None) -> dict[str, float]:  # noqa: F811
    """How many sites were traced as a fused call with a backward."""
    seen = {"sites": 0.0}
    inner = folded._trained

    def watched(*args: Any) -> Tensor:
        seen["sites"] += HALF  # AOT autograd runs a graph for its metadata, then traces it
        return inner(*args)

    monkeypatch.setattr(folded, "_trained", watched)
    return seen


def image(*size: int) -> Tensor:
    return torch.randn(*size).to(memory_format=torch.channels_last)


def check(model: nn.Module, x: Tensor, needs_x: bool = True, **options: object) -> None:
    """Values and gradients are at most twice as far from float64 as eager's, in its strides."""
    compiled = torch.compile(model, backend="fx_fuser", options={**FORCED, **options})
    ours, eager = step(model, x, compiled, needs_x), step(model, x, None, needs_x)
    exact = step(copy.deepcopy(model).double(), x.double(), None, needs_x)
    assert ours[1].keys() == eager[1].keys()
    for (name, a), b, e in zip(
        {"y": ours[0], **ours[1]}.items(),
        (eager[0], *eager[1].values()),
        (exact[0], *exact[1].values()),
        strict=True,
    ):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride()), name
        assert relative(a, e) <= max(2 * relative(b, e), 6e-7), name


def test_a_net(traced: dict[str, float]) -> None:
    check(frozen(net()), image(2, 3, 25, 25))
    assert traced["sites"] == 8


@pytest.mark.slow
def test_a_net_by_inductor(traced: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose pass joins the folds of a graph and moves the shift of the branch."""
    seen: list[Counter[str]] = []
    inner = folding.Folding.__call__

    def watched(self: folding.Folding, graph: torch.fx.Graph) -> None:
        inner(self, graph)
        seen.append(Counter(str(run.called(n)[0]) for n in graph.nodes))

    monkeypatch.setattr(folding.Folding, "__call__", watched)
    with fresh_cache():  # on a hit no pass runs
        check(frozen(net()), image(2, 3, 25, 25), inner="inductor")
    ahead, back = seen
    assert (ahead["conv2d_folded"], back["conv2d_folded"]) == (8, 0)
    assert 1 <= ahead["fx_fuser.fold.default"] < 8
    assert traced["sites"] == 8


def layer(body: Callable[..., Tensor], bias: bool = False) -> nn.Module:
    conv = nn.Conv2d(4, 6, 3, 2, 1, bias=bias)
    return frozen(Program(body, conv=conv, norm=random_norm(6)))


def relu(m: nn.Module, x: Tensor) -> Tensor:
    return m.norm(m.conv(x)).relu()


def added(m: nn.Module, x: Tensor) -> Tensor:
    """The addend has a gradient."""
    return (m.norm(m.conv(x)) + x[:, :2].repeat(1, 3, 1, 1)[..., ::2, ::2]).relu()


def alone(m: nn.Module, x: Tensor) -> Tensor:
    return m.norm(m.conv(x))


@pytest.mark.parametrize("body", [relu, added])
def test_a_layer(body: Callable[..., Tensor], traced: dict[str, float]) -> None:
    check(layer(body), image(2, 4, 9, 8))
    assert traced["sites"] == 1


@pytest.mark.parametrize("needs_x", [False, True])
def test_one_of_the_gradients(needs_x: bool, traced: dict[str, float]) -> None:
    model = layer(lambda m, x: m.norm(m.conv(x)).relu())
    model.conv.weight.requires_grad_(not needs_x)
    check(model, image(2, 4, 9, 8), needs_x)
    assert traced["sites"] == 1


@pytest.mark.parametrize("body", [relu, added, alone])
@pytest.mark.parametrize("names", [("norm.bias",), ("conv.bias",), ("norm.bias", "conv.bias")])
def test_shifts(
    body: Callable[..., Tensor], names: tuple[str, ...], traced: dict[str, float]
) -> None:
    """beta, and the convolution's bias, are trained."""
    model = layer(body, bias=True)
    for name in names:
        model.get_parameter(name).requires_grad_(True)
    check(model, image(2, 4, 9, 8))
    assert traced["sites"] == 1


def test_only_a_shift_is_trained(traced: dict[str, float]) -> None:
    model = layer(relu)
    model.conv.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(True)
    check(model, image(2, 4, 9, 8), needs_x=False)
    assert traced["sites"] == 1


def test_live_weights(traced: dict[str, float]) -> None:
    """The folded weight is that of the step."""
    model = layer(lambda m, x: m.norm(m.conv(x)).relu())
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    x = image(2, 4, 9, 8)
    for _ in range(3):
        (y, ours), (z, eager) = step(model, x, compiled), step(model, x)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(ours, eager)
        with torch.no_grad():
            model.conv.weight -= ours["conv.weight"]
            model.norm.running_var += 1
    assert traced["sites"] == 1


def test_a_second_derivative_is_refused(traced: dict[str, float]) -> None:
    model = layer(lambda m, x: m.norm(m.conv(x)).relu())
    compiled = torch.compile(model, backend="fx_fuser", options={**FORCED, "inner": "eager"})
    x = image(2, 4, 9, 8).requires_grad_()
    (dx,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        dx.square().sum().backward()


def thawed(model: nn.Module) -> nn.Module:
    model.norm.weight.requires_grad_(True)
    return model


def trained(model: nn.Module) -> nn.Module:
    model.norm.train()
    return model


def in_rows(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("change", [thawed, trained, in_rows])
def test_what_is_left(change: Callable[[nn.Module], nn.Module], traced: dict[str, float]) -> None:
    model = change(layer(lambda m, x: m.norm(m.conv(x)).relu()))
    x = image(2, 4, 9, 8)
    if change is trained:
        torch.compile(model, backend="fx_fuser", options=FORCED)(x).sum().backward()
    else:
        check(model, x.contiguous() if change is in_rows else x)
    assert traced["sites"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_16_bits(dtype: torch.dtype) -> None:
    """Under autocast, with weights of fp32, and with weights of bf16."""
    model = layer(lambda m, x: m.norm(m.conv(x)).relu()).to(dtype)
    x, conv, norm = image(4, 4, 17, 16).to(dtype), model.conv, model.norm
    operands = {
        "x": None, "weight": conv.weight, "bias": None, "running_mean": norm.running_mean,
        "running_var": norm.running_var, "gamma": norm.weight, "beta": norm.bias,
    }  # fmt: skip
    config = {
        "stride": [2, 2],
        "padding": [1] * 4,
        "dilation": [1, 1],
        "groups": 1,
        "eps": norm.eps,
    }

    def fused(x: Tensor) -> Tensor:
        return folded.call({**operands, "x": x}, config, parse("v0 = relu(z)"), [], torch.bfloat16)

    def eager(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            return model(x)

    (y, ours), (z, theirs) = (step(model, x, call) for call in (fused, eager))
    exact, wide = step(copy.deepcopy(model).double(), x.double())
    assert (y.dtype, y.stride()) == (z.dtype, z.stride())
    assert relative(y, exact) <= 2 * relative(z, exact)
    assert ours.keys() == theirs.keys() == {"x", "conv.weight"}
    for name, found in ours.items():
        assert (found.dtype, found.stride()) == (theirs[name].dtype, theirs[name].stride())
        assert relative(found, wide[name]) <= 2 * relative(theirs[name], wide[name]), name


@pytest.mark.parametrize("options", [{"verify": "always"}, {"save": "memory"}, {"dynamic": True}])
def test_options(options: dict[str, Any], traced: dict[str, float]) -> None:
    model = layer(lambda m, x: m.norm(m.conv(x)).relu())
    dynamic = options.pop("dynamic", None)
    given = {**FORCED, **options}
    compiled = torch.compile(model, backend="fx_fuser", options=given, dynamic=dynamic)
    for batch in (2, 3):
        x = image(batch, 4, 9, 8)
        (y, ours), (z, eager) = step(model, x, compiled), step(model, x)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(ours, eager)
    # With dynamic sizes torch 2.11 does not know that x is in channels_last.
    is_unknown = dynamic and TORCH < versions.NEWEST_TESTED_TORCH
    assert traced["sites"] >= 1 or is_unknown
