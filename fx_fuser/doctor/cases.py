"""Small models that reach one main loop each: for the self-test, and larger ones for its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Tensor]


class GatedLinear(nn.Module):
    """silu(x·Wᵀ + b) · a"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)
        self.a = nn.Parameter(torch.rand(outputs) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.lin(x)) * self.a


class SwishLinear(GatedLinear):
    """The named pattern: z · σ(z) · 2"""

    def forward(self, x: Tensor) -> Tensor:
        z = self.lin(x)
        return z * torch.sigmoid(z) * 2.0


class CastUp(nn.Module):
    """An fp32 gemm of 16-bit tensors; in float64 they are not cast."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        is_wide = x.dtype == torch.float64
        wide = torch.float64 if is_wide else torch.float32
        return F.linear(x.to(wide), self.weight.to(wide))


class Scores(nn.Module):
    """x xᵀ, as it is returned."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


class Convolution(nn.Module):
    """act(BN(conv(x)))"""

    def __init__(
        self,
        channels: int,
        outputs: int,
        window: int,
        act: Callable[[Tensor], Tensor],
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        sizes = (channels, outputs, window, stride, window // 2)
        self.conv = nn.Conv2d(*sizes, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        nn.init.uniform_(self.bn.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        nn.init.normal_(self.bn.running_mean)  # type: ignore[arg-type]
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


@dataclass(frozen=True)
class Case:
    """loop: the name in `loops` of the main loop that is to run. make: of a size, 1 for the test.
    train: forward and backward. is_chosen: whether the loop runs depends on a measurement, since no
    option forces it. options: of the backend."""

    title: str
    loop: str
    make: Callable[[int], Made]
    train: bool = False
    is_chosen: bool = False
    options: Mapping[str, Any] | None = None


def _linear(kind: Callable[[int, int], nn.Module], scale: int, dtype: torch.dtype) -> Made:
    x = torch.randn(512 * scale, 256 * scale)
    return kind(256 * scale, 384 * scale).to(dtype), x.to(dtype)


def _images(
    scale: int, channels: int, size: int, dtype: torch.dtype, model: nn.Module, last: bool = True
) -> Made:
    format = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(4 * scale**2, channels, size, size).to(dtype, memory_format=format)
    return model.to(dtype).to(memory_format=format), x


F32, BF16 = torch.float32, torch.bfloat16
CASES = (
    Case(
        "fp32 Linear + SiLU + mul",
        "split",
        lambda scale: _linear(GatedLinear, scale, F32),
        train=True,
        options={"fp32": "split"},
    ),
    Case(
        "bf16 Linear, named pattern",
        "dense",
        lambda scale: _linear(SwishLinear, scale, BF16),
    ),
    Case(
        "fp32 gemm of bf16 tensors",
        "exact",
        lambda scale: _linear(CastUp, 2 + 2 * scale, BF16),
        is_chosen=True,
        options={"plan": "measure", "fp32": "split"},
    ),
    Case(
        "bf16 batch of 49 × 49 matrices",
        "unaligned",
        lambda scale: (Scores().to(BF16), torch.randn(512 * scale, 49, 32).to(BF16)),
        is_chosen=True,
        options={"plan": "measure"},
    ),
    Case(
        "fp32 conv of 4 channels + BN + ReLU",
        "direct",
        lambda scale: _images(scale, 4, 64, F32, Convolution(4, 16, 3, F.relu), last=False),
        train=True,
    ),
    Case(
        "bf16 first conv, stride 2, + BN + ReLU",
        "stem",
        lambda scale: _images(scale, 3, 64, BF16, Convolution(3, 64, 7, F.relu, stride=2)),
    ),
    Case(
        "fp32 depthwise conv + BN + SiLU",
        "depthwise",
        lambda scale: _images(scale, 64, 28, F32, Convolution(64, 64, 3, F.silu, groups=64)),
    ),
    Case(
        "bf16 conv 1 × 1 + BN + SiLU",
        "implicit",
        lambda scale: _images(scale, 64, 28, BF16, Convolution(64, 64, 1, F.silu)),
    ),
    Case(
        "bf16 conv 3 × 3 in groups + BN + ReLU",
        "grouped",
        lambda scale: _images(scale, 96, 28, BF16, Convolution(96, 96, 3, F.relu, groups=4)),
    ),
    Case(
        "bf16 conv 3 × 3 + BN + ReLU",
        "folded",
        lambda scale: _images(scale, 256, 14, BF16, Convolution(256, 256, 3, F.relu)),
    ),
    Case(
        "fp32 Linear by the library, named pattern",
        "library",
        lambda scale: _linear(SwishLinear, scale, F32),
        train=True,
        options={"fp32": "ieee"},
    ),
)
