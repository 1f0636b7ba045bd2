"""Whole nets to train, as their users write them: a small ResNet with a learned scale behind each
BatchNorm, and a small Llama. And data for them, made on the fly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
WORDS = 256

Batch = tuple[Tensor, Tensor]


class ConvScale(nn.Module):
    """Conv2d, BatchNorm2d and a scale a channel."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.scale = nn.Parameter(torch.ones(outputs, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) * self.scale


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = ConvScale(inputs, outputs, stride)
        self.second = ConvScale(outputs, outputs)
        self.skip = ConvScale(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


class SmallResNet(nn.Module):
    """Images [N, 3, H, W] → scores [N, 10]."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.stem = ConvScale(3, width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


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
    sites: int  # that are to be fused
    rate: float  # of learning

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
            *("conv2d_batchnorm_mul", 10, 1e-3),
        ),
        Net(
            "llama",
            lambda: SmallLlama(256 // scale, length=128 // scale),
            lambda generator: sentences(generator, 32 // scale, 128 // scale),
            *("linear_sigmoid_mul_mul", 4, 1e-3),
        ),
    )
