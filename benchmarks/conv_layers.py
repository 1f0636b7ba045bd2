"""Convolutions of ResNet-50, EfficientNet-B0 and MobileNetV3-L, as torchvision has them, without
first layers, depthwise ones and those of squeeze-and-excitation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SAMPLES = 128  # images of 224 x 224


@dataclass(frozen=True)
class Layer:
    """A square convolution, padded as usual. side: of its input. tail: what follows BatchNorm."""

    channels: int
    outputs: int
    side: int
    kernel: int
    stride: int
    tail: str


def resnet50() -> Iterator[Layer]:
    channels, side = 64, 56
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            step = stride if i == 0 else 1
            yield Layer(channels, width, side, 1, 1, "relu")
            yield Layer(width, width, side, 3, step, "relu")
            if i == 0:
                yield Layer(channels, 4 * width, side, 1, step, "")
            side //= step
            yield Layer(width, 4 * width, side, 1, 1, "add, relu")
            channels = 4 * width


# Expansion, stride, outputs, count of blocks; and inner channels, stride, outputs, activation.
_EFFICIENT = (
    *((1, 1, 16, 1), (6, 2, 24, 2), (6, 2, 40, 2), (6, 2, 80, 3), (6, 1, 112, 3), (6, 2, 192, 4)),
    (6, 1, 320, 1),
)
_MOBILE = (
    *((16, 1, 16, "relu"), (64, 2, 24, "relu"), (72, 1, 24, "relu"), (72, 2, 40, "relu")),
    *((120, 1, 40, "relu"), (120, 1, 40, "relu"), (240, 2, 80, "hardswish")),
    *((200, 1, 80, "hardswish"), (184, 1, 80, "hardswish"), (184, 1, 80, "hardswish")),
    *((480, 1, 112, "hardswish"), (672, 1, 112, "hardswish"), (672, 2, 160, "hardswish")),
    *((960, 1, 160, "hardswish"), (960, 1, 160, "hardswish")),
)


def _inverted(
    blocks: Iterator[tuple[int, int, int, str]], channels: int, side: int
) -> Iterator[Layer]:
    """The 1 × 1 layers of blocks whose middle is depthwise, from their inner channels."""
    for inner, stride, outputs, activation in blocks:
        if inner != channels:
            yield Layer(channels, inner, side, 1, 1, activation)
        side //= stride
        is_added = stride == 1 and outputs == channels
        yield Layer(inner, outputs, side, 1, 1, "add" if is_added else "")
        channels = outputs


def efficientnet_b0() -> Iterator[Layer]:
    def blocks() -> Iterator[tuple[int, int, int, str]]:
        channels = 32
        for expansion, stride, outputs, count in _EFFICIENT:
            for i in range(count):
                yield channels * expansion, stride if i == 0 else 1, outputs, "silu"
                channels = outputs

    yield from _inverted(blocks(), 32, 112)
    yield Layer(320, 1280, 7, 1, 1, "silu")


def mobilenet_v3() -> Iterator[Layer]:
    yield from _inverted(iter(_MOBILE), 16, 112)
    yield Layer(160, 960, 7, 1, 1, "hardswish")


NETS = {
    "ResNet-50": resnet50,
    "EfficientNet-B0": efficientnet_b0,
    "MobileNetV3-L": mobilenet_v3,
}
