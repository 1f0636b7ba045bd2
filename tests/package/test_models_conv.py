"""Convolutional networks as users write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import (
    CONV,
    assert_same_as_eager,
    error,
    fresh,  # noqa: F401
    fused_compile,
    images,
    sites,
)
from torch import Tensor, nn


class ConvNormScaleAdd(nn.Module):
    """timm MobileNetV4 hybrid: a per-channel layer scale, then the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.gamma = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn(self.conv(x))
        x = x * self.gamma.view(1, -1, 1, 1)
        return x + shortcut


class StochasticDepth(nn.Module):
    """torchvision's and timm's drop path, per sample, after the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        return out * keep.div(0.8).view(-1, 1, 1, 1) + x


class StochasticDepthInPlace(StochasticDepth):
    """torchvision makes the noise in place, after the norm."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        noise = torch.empty(len(x), 1, 1, 1).copy_(keep.view(-1, 1, 1, 1))
        noise.div_(0.8)
        return out * noise + x


class SqueezeExcite(nn.Module):
    """timm ResNet with SE: the normed value feeds its own gate, so it has two users."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn(self.conv(x))
        gate = self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)), inplace=True))
        x = x * gate.sigmoid()
        x += shortcut
        return F.relu(x, inplace=True)


class ExternalGate(nn.Module):
    """A gate [N, C, 1, 1] from elsewhere, multiplied in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc(x.mean((2, 3))).sigmoid()[:, :, None, None]
        out = self.bn(self.conv(x))
        out *= gate
        return out


class ConvBNSiLU(nn.Module):
    """ultralytics: an activation in place, no multiplication by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


CONVS = [
    (ConvNormScaleAdd, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5),)),
    (StochasticDepth, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5), torch.ones(3))),
    (StochasticDepthInPlace, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5), torch.ones(3))),
    (SqueezeExcite, {}, lambda: (torch.randn(3, 8, 5, 5),)),
    (ExternalGate, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5),)),
]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("module", "expected", "inputs"), CONVS, ids=[case[0].__name__ for case in CONVS]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conv_blocks(
    module: Any, expected: dict[str, int], inputs: Any, training: bool, layout: torch.memory_format
) -> None:
    first, *rest = inputs()
    tensors = (first.contiguous(memory_format=layout).requires_grad_(), *rest)
    model = module().to(memory_format=layout).train(training)
    # A bias in front of a training BatchNorm has gradient zero.
    zero = ("grad conv.bias",) if training and model.conv.bias is not None else ()
    assert_same_as_eager(model, tensors, expected, no_bound=zero)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_conv_bn_silu_stays_right(training: bool) -> None:
    """Whatever of it fuses: conv → bn → x·σ(x) is a scale only if the pattern says so."""
    model = ConvBNSiLU().train(training)
    assert_same_as_eager(model, (torch.randn(3, 8, 5, 5, requires_grad=True),), {})


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        BasicBlock(8, 8, 1),
        BasicBlock(8, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


def _assert_untouched(model: nn.Module, x: Tensor) -> None:
    """Bit for bit what stock torch.compile with the same inner compiler computes."""
    stock = copy.deepcopy(model)
    value = fused_compile(model)(x)
    expected = torch.compile(stock, backend="aot_eager")(x)
    assert sites() == {}
    assert torch.equal(value, expected)
    value.sum().backward()
    expected.sum().backward()
    for mine, its in zip(model.parameters(), stock.parameters()):
        assert torch.equal(mine.grad, its.grad)
    for mine, its in zip(model.buffers(), stock.buffers()):
        assert torch.equal(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize(
    "training", [pytest.param(True, marks=pytest.mark.slow), False], ids=["train", "eval"]
)
def test_a_resnet_has_no_site_and_is_unchanged(training: bool) -> None:
    _assert_untouched(_resnet().train(training), images())


@pytest.mark.slow
def test_torchvision_resnet18_is_unchanged() -> None:
    torchvision = pytest.importorskip("torchvision")
    _assert_untouched(torchvision.models.resnet18(), torch.randn(2, 3, 32, 32))


@pytest.mark.slow
def test_timm_resnet_is_unchanged() -> None:
    timm = pytest.importorskip("timm")
    _assert_untouched(timm.create_model("resnet10t", pretrained=False), torch.randn(2, 3, 32, 32))


@pytest.mark.slow
def test_torchvision_efficientnet_stays_right() -> None:
    """Stochastic depth in training: [N, 1, 1, 1] after the norm, with eager's random numbers.

    At 64 pixels: the last norms of 32 see two values a channel, whose difference is all rounding.
    """
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.efficientnet_b0().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    reference, exact_model = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(2, 3, 64, 64)

    def with_seed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return run(x)

    value, eager = with_seed(fused_compile(model), x), with_seed(reference, x)
    exact = with_seed(exact_model, x.double())
    assert sites()[CONV] > 0
    assert error(value, exact) < 2 * error(eager, exact)
    for mine, its in zip(model.buffers(), reference.buffers()):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)
