"""What the tests of folded convolutions share: nets, and the bound."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORCED = {"plan": "always", "strict": True, "cpu_ops": True}


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def random_norm(channels: int, decades: float = 0.0) -> nn.BatchNorm2d:
    """decades: over how many the scales are spread."""
    norm = nn.BatchNorm2d(channels).eval()
    spread = 10 ** ((torch.rand(channels) - 0.5) * decades)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels) * spread)
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.2, 2)
    return norm


class Block(nn.Module):
    """A bottleneck of ResNet: 1 × 1, k × k, 1 × 1, each with BatchNorm; relu; a residual."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1, **norm: Any):
        super().__init__()
        middle = outputs // 2
        self.first = nn.Sequential(
            nn.Conv2d(inputs, middle, 1, bias=False), random_norm(middle, **norm)
        )
        spatial = nn.Conv2d(middle, middle, 3, stride, 1, groups=groups)
        self.second = nn.Sequential(spatial, random_norm(middle, **norm))
        self.third = nn.Sequential(
            nn.Conv2d(middle, outputs, 1, bias=False), random_norm(outputs, **norm)
        )
        self.down: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.down = nn.Sequential(shortcut, random_norm(outputs, **norm))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        y = self.third(F.relu(self.second(y)))
        y += self.down(x)
        return self.relu(y)


def net(**norm: Any) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), random_norm(16, **norm), nn.ReLU(inplace=True))
    blocks = Block(16, 32, 2, **norm), Block(32, 32, groups=2, **norm)
    return nn.Sequential(stem, nn.MaxPool2d(3, 2, 1), *blocks).eval()


def check(model: nn.Module, *inputs: Tensor, dynamic: Any = None, **options: Any) -> Tensor:
    """The compiled model's result, whose error is at most twice eager's; it has eager's strides."""
    options = {**FORCED, **options}
    compiled = torch.compile(model, backend="fx_fuser", options=options, dynamic=dynamic)
    with torch.no_grad():
        found, eager = compiled(*inputs), model(*inputs)
        exact = copy.deepcopy(model).double()(*(x.double() for x in inputs))
    eps = torch.finfo(found.dtype).eps
    floor = {torch.float32: 4e-7, torch.float64: 1e-12}.get(found.dtype, eps / 4)
    assert relative(found, exact) <= max(2 * relative(eager, exact), floor)
    assert found.stride() == eager.stride()
    assert found.dtype == eager.dtype
    return found


# ---- training -----------------------------------------------------------------------------------


def frozen(model: nn.Module) -> nn.Module:
    """In channels_last; no BatchNorm is trained, and no convolution's bias."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            module.bias.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


Step = tuple[Tensor, dict[str, Tensor]]  # a result; gradients, by name


def step(model: nn.Module, x: Tensor, call: Any = None, needs_x: bool = True) -> Step:
    """A training step from a copy of x."""
    model.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(needs_x)
    y = (model if call is None else call)(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return y.detach(), grads if x.grad is None else {"x": x.grad, **grads}


# ---- frozen norms that are plain operations ------------------------------------------------------


class Frozen(nn.Module):
    """torchvision's, by its names and in its order; those of DETR and transformers are the same."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.reshape(1, -1, 1, 1)
        b = self.bias.reshape(1, -1, 1, 1)
        rv = self.running_var.reshape(1, -1, 1, 1)
        rm = self.running_mean.reshape(1, -1, 1, 1)
        scale = w * (rv + self.eps).rsqrt()
        bias = b - rm * scale
        return x * scale + bias


class Detectron2(Frozen):
    """With a gradient; without one it is F.batch_norm."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        scale, bias = scale.reshape(1, -1, 1, 1), bias.reshape(1, -1, 1, 1)
        return x * scale.to(x.dtype) + bias.to(x.dtype)


def replaced(model: nn.Module, kind: type[Frozen] = Frozen) -> nn.Module:
    """With these in place of BatchNorms; no bias of a convolution is trained."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, kind(child))
            elif isinstance(child, nn.Conv2d) and child.bias is not None:
                child.bias.requires_grad_(False)
    return model
