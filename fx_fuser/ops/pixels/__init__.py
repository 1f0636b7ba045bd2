"""The 1 x 1 convolution with the statistics of its result, as graphs call it: a function of
`fx_fuser::run`.

    z, mean, variance = conv2d_moments(x, weight)

x [N, K, H, W] and z [N, C, H, W] are in channels_last, the weight is [C, K, 1, 1]. Mean and biased
variance are [1, C, 1, 1], in fp32, of z as it is stored.

On CUDA kernels_cu/host/pixels.h runs the kernel. What that does not take runs by the library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels import pixels
from fx_fuser.ops import run

MOMENTS = "conv2d_moments"


def _moments_like(x: Tensor, weight: Tensor, kernel: str, shape: int) -> list[Tensor]:
    batch, _, height, width = x.shape
    channels = weight.shape[0]
    z = x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    return [z, *(x.new_empty(1, channels, 1, 1, dtype=torch.float32) for _ in range(2))]


def _moments(x: Tensor, weight: Tensor, kernel: str, shape: int) -> list[Tensor]:
    z = F.conv2d(x, weight).contiguous(memory_format=torch.channels_last)
    variance, mean = torch.var_mean(z.float(), [0, 2, 3], correction=0, keepdim=True)
    return [z, *(one.reshape(1, -1, 1, 1).contiguous() for one in (mean, variance))]


run.define(MOMENTS, _moments, _moments_like)

run.define_loader("load_pixels", "a convolution", lambda: pixels.offered())
