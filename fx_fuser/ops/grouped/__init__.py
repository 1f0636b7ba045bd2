"""The grouped convolution and its gradients, as graphs call them: three functions of
`fx_fuser::run`.

Images are 16-bit and in channels_last, weights of any strides. stride, padding and dilation are
[down, across], padding is alike on both sides; window: its height and width.

On CUDA kernels_cu/host/grouped.h runs the kernels. What these do not take runs by the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels import grouped
from fx_fuser.ops import run
from fx_fuser.ops.depthwise import last

FORWARD, OF_INPUT, OF_WEIGHT = "grouped", "grouped_input", "grouped_weight"
LOADER = "load_grouped"
Pair = Sequence[int]  # down, across


def _as_last(image: Tensor) -> Tensor:
    return last(image, image.shape).copy_(image)


def _forward_like(
    x: Tensor, weight: Tensor, kernel: str, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> list[Tensor]:
    given = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in given]
    return [last(x, (x.shape[0], weight.shape[0], *size))]


def _forward(
    x: Tensor, weight: Tensor, kernel: str, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> list[Tensor]:
    numbers = tuple(stride), tuple(padding), tuple(dilation), groups
    return [_as_last(F.conv2d(x, weight, None, *numbers))]


def _gradients(
    dz: Tensor, x: Tensor, weight: Tensor, numbers: tuple[Pair, Pair, Pair, int], asked: list[bool]
) -> list[Tensor]:
    stride, padding, dilation, groups = numbers
    given = [*stride], [*padding], [*dilation], False, [0, 0], groups, asked
    made = torch.ops.aten.convolution_backward.default(dz, x, weight, None, *given)
    return [grad for grad in made if grad is not None]


def _of_input_like(
    dz: Tensor,
    weight: Tensor,
    kernel: str,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    size: Pair,
) -> list[Tensor]:
    return [last(dz, (dz.shape[0], weight.shape[1] * groups, *size))]


def _of_input(
    dz: Tensor,
    weight: Tensor,
    kernel: str,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    size: Pair,
) -> list[Tensor]:
    given = kernel, stride, padding, dilation, groups, size
    (x,) = _of_input_like(dz, weight, *given)  # only its sizes are read
    numbers = stride, padding, dilation, groups
    return [*map(_as_last, _gradients(dz, x, weight, numbers, [True, False, False]))]


def _of_weight_like(
    x: Tensor,
    dz: Tensor,
    kernel: str,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    window: Pair,
    is_last: bool,
) -> list[Tensor]:
    size = dz.shape[1], x.shape[1] // groups, *window
    return [last(x, size) if is_last else x.new_empty(size)]


def _of_weight(
    x: Tensor,
    dz: Tensor,
    kernel: str,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    window: Pair,
    is_last: bool,
) -> list[Tensor]:
    numbers = stride, padding, dilation, groups
    (weight,) = _of_weight_like(x, dz, kernel, *numbers, window, is_last)
    (made,) = _gradients(dz, x, weight, numbers, [False, True, False])
    return [weight.copy_(made)]


run.define(FORWARD, _forward, _forward_like)
run.define(OF_INPUT, _of_input, _of_input_like)
run.define(OF_WEIGHT, _of_weight, _of_weight_like)
run.define_loader(LOADER, "a grouped convolution", lambda: grouped.offered())
