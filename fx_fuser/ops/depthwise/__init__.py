"""The depthwise convolution in training, as graphs call it: three functions of `fx_fuser::run`.

Images are 16-bit and in channels_last, weights contiguous. padding: [down, across], alike on
both sides; window: its height and width. The gradient of x with stride 1 is the convolution of
the gradient of z, with the window reversed (`turned`) and padding window - 1 - padding.

On CUDA kernels_cu/host/depthwise_gradients.h runs the kernels. What these do not take runs by the
library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels.depthwise import training
from fx_fuser.ops import run

FORWARD, OF_INPUT, OF_WEIGHT = "depthwise", "depthwise_input", "depthwise_weight"
LOADER = "load_depthwise"
_LAST = torch.channels_last
Pair = Sequence[int]  # down, across


def last(like: Tensor, size: Sequence[int]) -> Tensor:
    """A new image in channels_last, whatever its size."""
    n, c, h, w = size
    return like.new_empty_strided((n, c, h, w), (c * h * w, 1, w * c, c))


def _as_last(image: Tensor) -> Tensor:
    return last(image, image.shape).copy_(image)


def _forward_like(
    x: Tensor, weight: Tensor, kernel: str, padding: Pair, stride: int, turned: bool
) -> list[Tensor]:
    spare = [n + 2 * p - k for n, p, k in zip(x.shape[2:], padding, weight.shape[2:])]
    return [last(x, (*x.shape[:2], *(n // stride + 1 for n in spare)))]


def _forward(
    x: Tensor, weight: Tensor, kernel: str, padding: Pair, stride: int, turned: bool
) -> list[Tensor]:
    weight = weight.flip((2, 3)) if turned else weight
    return [_as_last(F.conv2d(x, weight, None, stride, tuple(padding), 1, x.shape[1]))]


def _gradients(
    dz: Tensor, x: Tensor, weight: Tensor, padding: Pair, stride: int, asked: list[bool]
) -> list[Tensor]:
    numbers = [stride] * 2, [*padding], [1, 1], False, [0, 0], x.shape[1], asked
    made = torch.ops.aten.convolution_backward.default(dz, x, weight, None, *numbers)
    return [grad for grad in made if grad is not None]


def _of_input_like(
    dz: Tensor, weight: Tensor, kernel: str, padding: Pair, size: Pair
) -> list[Tensor]:
    return [last(dz, (*dz.shape[:2], *size))]


def _of_input(dz: Tensor, weight: Tensor, kernel: str, padding: Pair, size: Pair) -> list[Tensor]:
    (x,) = _of_input_like(dz, weight, kernel, padding, size)  # only its sizes are read
    return [*map(_as_last, _gradients(dz, x, weight, padding, 2, [True, False, False]))]


def _of_weight_like(
    x: Tensor, dz: Tensor, kernel: str, padding: Pair, window: Pair, stride: int
) -> list[Tensor]:
    return [x.new_empty(x.shape[1], 1, *window)]


def _of_weight(
    x: Tensor, dz: Tensor, kernel: str, padding: Pair, window: Pair, stride: int
) -> list[Tensor]:
    (weight,) = _of_weight_like(x, dz, kernel, padding, window, stride)
    (made,) = _gradients(dz, x, weight, padding, stride, [False, True, False])
    return [weight.copy_(made)]


run.define(FORWARD, _forward, _forward_like)
run.define(OF_INPUT, _of_input, _of_input_like)
run.define(OF_WEIGHT, _of_weight, _of_weight_like)
run.define_loader(LOADER, "a depthwise convolution", lambda: training.offered())
