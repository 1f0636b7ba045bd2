"""The depthwise convolution in training on a GPU: kernels, and a whole model whose convolutions
they take."""

from __future__ import annotations

import uuid

import depthwise_gradient_checks
import pytest
import torch
import torch.nn.functional as F
from checks import passes
from depthwise_gradient_checks import Sizes
from sm90 import gpu_from_sm80
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.kernels.depthwise import training
from fx_fuser.passes import depthwise
from fx_fuser.passes.depthwise.site import DepthwiseSite

CUDA = torch.device("cuda")
LAST = torch.channels_last


@gpu_from_sm80
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes(seed: int) -> None:
    passes(depthwise_gradient_checks.sweep, 40, seed)


@gpu_from_sm80
@pytest.mark.parametrize("dtype", training.DTYPES)
def test_layers_of_nets(dtype: torch.dtype) -> None:
    """Of ConvNeXt-T, and the first of MobileNetV3-L and EfficientNet-B0."""
    failures: list[str] = []
    for channels, side, window, stride in (
        *((96, 56, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1)),
        *((16, 112, 3, 1), (96, 112, 3, 2), (144, 56, 5, 2), (1152, 7, 5, 1)),
    ):
        pair = window // 2, window // 2
        sizes = Sizes(9, channels, (side, side), (window, window), pair, stride)
        depthwise_gradient_checks.check(failures, sizes, dtype)
    assert not failures, "\n".join(failures)


@gpu_from_sm80
@pytest.mark.parametrize(
    "check",
    [
        depthwise_gradient_checks.not_numbers,
        depthwise_gradient_checks.refusals,
        depthwise_gradient_checks.repeats,
    ],
)
def test_checks(check) -> None:
    passes(check)


class Block(nn.Module):
    """As ConvNeXt has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(z))).permute(0, 3, 1, 2)


@gpu_from_sm80
def test_a_model_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step under autocast takes them; values are as eager's. Nothing is timed."""
    monkeypatch.setattr(DepthwiseSite, "gains", lambda site: True)
    torch.manual_seed(0)
    model = nn.Sequential(Block(384), Block(384)).to(CUDA, memory_format=LAST)
    x, dy = (torch.randn(64, 384, 14, 14, device=CUDA).to(memory_format=LAST) for _ in range(2))

    def step(f: nn.Module) -> list[Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = f(given)
        y.to(dy.dtype).backward(dy)
        assert given.grad is not None
        return [y.detach(), given.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    eager = [t.clone() for t in step(model)]
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        f = torch.compile(model, backend="fx_fuser", options={"strict": True})
        found = [t.clone() for t in step(f)]
    assert counters[depthwise.COUNTERS] == {"convolution": 2, "convolution_backward": 2}
    model.double()
    x, dy = x.double(), dy.double()
    given = x.clone().requires_grad_()
    y = model(given)
    y.backward(dy)
    exact = [y.detach(), given.grad, *(p.grad for p in model.parameters())]
    for ours, theirs, wanted in zip(found, eager, exact):
        error, usual = (float((t.double() - wanted).norm()) for t in (ours, theirs))
        assert error <= 1.5 * usual + 1e-6 * float(wanted.norm())
        assert ours.stride() == theirs.stride()
