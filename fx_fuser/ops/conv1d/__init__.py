"""The convolution along one dimension, in groups, as graphs call it: two functions of
`fx_fuser::run`.

Tensors are laid out as the kernels read them: x and z [batch, frame, channel], the weight in
*taps*, [group, tap, out channel of a group, in channel of a group]. The gradient of x is the same
function of the gradient of z, with the taps in reverse, channels exchanged, and padding
taps - 1 - padding.

On CUDA kernels_cu/host/conv1d.h runs the kernels. What these do not take runs by the library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels import conv1d
from fx_fuser.ops import run

FORWARD, OF_WEIGHT = "conv1d", "conv1d_weight"
_aten = torch.ops.aten


def _forward_like(
    x: Tensor, weight: Tensor, bias: Tensor | None, kernel: str, padding: int
) -> list[Tensor]:
    groups, taps, out, _ = weight.shape
    return [x.new_empty(x.shape[0], x.shape[1] + 2 * padding - taps + 1, groups * out)]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, kernel: str, padding: int
) -> list[Tensor]:
    laid = weight.permute(0, 2, 3, 1).flatten(0, 1)
    made = F.conv1d(x.mT, laid, bias, padding=padding, groups=weight.shape[0])
    return [made.mT.contiguous()]


def _of_weight_like(x: Tensor, dz: Tensor, kernel: str, groups: int, padding: int) -> list[Tensor]:
    taps = x.shape[1] + 2 * padding - dz.shape[1] + 1
    return [x.new_empty(groups, taps, dz.shape[2] // groups, x.shape[2] // groups)]


def _of_weight(x: Tensor, dz: Tensor, kernel: str, groups: int, padding: int) -> list[Tensor]:
    (like,) = _of_weight_like(x, dz, kernel, groups, padding)
    weight = like.permute(0, 2, 3, 1).flatten(0, 1)  # only its sizes are read
    numbers = [1], [padding], [1], False, [0], groups
    asked = [False, True, False]
    _, dw, _ = _aten.convolution_backward(dz.mT, x.mT, weight, None, *numbers, asked)
    return [dw.unflatten(0, (groups, -1)).permute(0, 3, 1, 2).contiguous()]


run.define(FORWARD, _forward, _forward_like)
run.define(OF_WEIGHT, _of_weight, _of_weight_like)

run.define_loader("load_conv1d", "a convolution", lambda: conv1d.offered())
