"""Folded convolutions of images whose layout Inductor changes."""

from __future__ import annotations

import pytest
import torch
from folded_nets import check, random_norm
from torch import Tensor, nn


@pytest.mark.parametrize("kernel, views", [(3, True), (1, True), (3, False)])
def test_an_image_that_inductor_makes_contiguous(kernel: int, views: bool) -> None:
    """Of a cat of one tensor with itself Inductor's decomposition is contiguous, eager's result in
    channels_last, and torch's convolution goes by a weight in channels_last."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 4, kernel, bias=False), random_norm(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(torch.cat([x, x], 1))).relu()
            return y.permute(0, 2, 3, 1).view(2, -1) if views else y

    torch._dynamo.reset()
    model = Model().eval().to(memory_format=torch.channels_last)
    check(model, torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last))
