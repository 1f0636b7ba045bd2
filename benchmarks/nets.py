"""Whole nets as their users write them. To train: a small ResNet with a learned scale after each
BatchNorm and a small Llama, with data made on the fly. To time: ResNet-18 and MobileNetV2, also
with such a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
WORDS = 256

Batch = tuple[Tensor, Tensor]


class ConvScale(nn.Module):
    """Conv2d, BatchNorm2d and a scale per channel."""

    def __init__(
        self, inputs: int, outputs: int, stride: int = 1, kernel: int = 3, groups: int = 1
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False
        )
        self.bn = nn.BatchNorm2d(outputs)
        self.scale = nn.Parameter(torch.ones(outputs, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) * self.scale


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.first = ConvScale(inputs, outputs, stride)
        self.second = ConvScale(outputs, outputs)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else ConvScale(inputs, outputs, stride, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


class SmallResNet(nn.Module):
    """Images [N, 3, H, W] → scores [N, 10]."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.stem = ConvScale(3, width)
        self.blocks = nn.Sequential(
            Block(width, width), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class ResNet18(nn.Module):
    """Images [N, 3, H, W] → scores [N, 1000] (He et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 64, 128, 256, 512)
        self.stem = nn.Sequential(
            ConvScale(3, 64, stride=2, kernel=7), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential()
        for inputs, outputs in pairwise(widths):
            stride = 1 if inputs == outputs else 2
            self.blocks.extend([Block(inputs, outputs, stride), Block(outputs, outputs)])
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        hidden = inputs * expansion
        self.body = nn.Sequential(
            *([ConvScale(inputs, hidden, kernel=1), nn.ReLU6()] if expansion > 1 else []),
            ConvScale(hidden, hidden, stride, groups=hidden),
            nn.ReLU6(),
            ConvScale(hidden, outputs, kernel=1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNetV2(nn.Module):
    """Images [N, 3, H, W] → scores [N, 1000] (Sandler et al., 2018, table 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvScale(3, 32, stride=2)
        self.blocks = nn.Sequential()
        inputs = 32
        for expansion, outputs, count, stride in (
            *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
            *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
        ):
            for i in range(count):
                self.blocks.append(InvertedResidual(inputs, outputs, 1 if i else stride, expansion))
                inputs = outputs
        self.last = ConvScale(320, 1280, kernel=1)
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu6(self.stem(x)))
        return self.head(F.relu6(self.last(y)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.mlp = SwiGLU(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class SmallLlama(nn.Module):
    """Words [N, T] → scores of the next ones [N, T, 256]."""

    def __init__(self, width: int = 256, heads: int = 4, layers: int = 4, length: int = 128):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places[: words.shape[1]]
        return self.head(self.norm(self.layers(x)))


def images(generator: torch.Generator, count: int, side: int) -> Batch:
    """A wave whose direction says the class, in noise."""
    device = generator.device
    label = torch.randint(CLASSES, (count,), generator=generator, device=device)
    angle = label * (torch.pi / CLASSES)
    along = torch.arange(side, device=device)
    phase = torch.rand(count, generator=generator, device=device) * 2 * torch.pi
    rows = torch.sin(angle)[:, None, None] * along[:, None]
    columns = torch.cos(angle)[:, None, None] * along
    wave = torch.sin(0.7 * (rows + columns) + phase[:, None, None])
    noise = torch.randn(count, 3, side, side, generator=generator, device=device)
    return wave[:, None] + 2 * noise, label


def sentences(generator: torch.Generator, count: int, length: int) -> Batch:
    """Each word follows from the two before it or, one time in five, from nothing."""
    device = generator.device
    words = torch.randint(WORDS, (count, length + 1), generator=generator, device=device)
    free = torch.rand(count, length + 1, generator=generator, device=device) < 0.2
    for t in range(2, length + 1):
        implied = (5 * words[:, t - 1] + 3 * words[:, t - 2] + 7) % WORDS
        words[:, t] = torch.where(free[:, t], words[:, t], implied)
    return words[:, :-1], words[:, 1:]


@dataclass(frozen=True)
class Net:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    pattern: str
    sites: int  # that must be fused
    rate: float  # learning rate

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        x, wanted = batch
        return F.cross_entropy(model(x).flatten(0, -2), wanted.flatten())


def small_nets(scale: int = 1) -> tuple[Net, Net]:
    """What trains in seconds; `scale` divides widths and batches, for a CPU."""
    return (
        Net(
            "resnet",
            lambda: SmallResNet(32 // scale),
            lambda generator: images(generator, 64 // scale, 32 // scale),
            *("conv2d_batchnorm_mul", 9, 1e-3),
        ),
        Net(
            "llama",
            lambda: SmallLlama(256 // scale, length=128 // scale),
            lambda generator: sentences(generator, 32 // scale, 128 // scale),
            *("linear_sigmoid_mul_mul", 4, 1e-3),
        ),
    )
