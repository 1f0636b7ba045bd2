"""What `explain` says where a convolution has no kernel, or none with a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fx_fuser


def _said(model: nn.Module, x: Tensor, **train: Any) -> str:
    torch._dynamo.reset()
    report = fx_fuser.explain(model, x, **train)
    assert not report.fused
    return " ".join(r.reason for r in (*report.refused, *report.left))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["grown", "named pattern"])
def test_a_kernel_for_inference_is_not_said_to_be_missing(on_gpu: Any, scale: float) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            return torch.tanh(y) if scale == 1.0 else y * scale

    model, x = First(), torch.randn(2, 3, 32, 32)
    for_inference = "fx_fuser's kernels for it are for inference: it needs "
    assert f"{for_inference}model.eval() and torch.no_grad()" in _said(model, x, train=True)
    with torch.no_grad():
        assert f"{for_inference}model.eval()" in _said(model, x)
    assert f"{for_inference}torch.no_grad()" in _said(model.eval(), x)
    torch._dynamo.reset()
    on_gpu(1.0, 0.5)
    assert len(fx_fuser.explain(model, x, train=False).fused) == 1


@pytest.mark.parametrize(
    ("channels", "groups", "kernel", "kind"),
    [
        ((96, 96), 96, 3, "depthwise convolutions"),
        ((96, 96), 6, 3, "grouped convolutions"),
        ((96, 96), 1, 1, "1 x 1 convolutions with the statistics of their result"),
        ((96, 96), 1, 3, ""),
        ((96, 96), 96, 4, ""),  # no kernel has such a window
        ((96, 320), 2, 3, ""),  # nor so many channels of a group: 48 and 160
        ((96, 100), 1, 1, ""),  # nor channels that are not multiples of 8
    ],
)
def test_what_a_later_pass_may_do_is_said(
    on_gpu: Any, channels: tuple[int, int], groups: int, kernel: int, kind: str
) -> None:
    """In training, in which no kernel of a site has gradients."""
    inputs, outputs = channels
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())
    x = torch.randn(2, inputs, 9, 9, dtype=torch.bfloat16)
    said = _said(model.bfloat16(), x, train=True)
    assert said.endswith(f"; a later pass times fx_fuser's kernels for {kind}") == bool(kind)
    assert ("a later pass" in said) == bool(kind)
    torch._dynamo.reset()
    report = fx_fuser.explain(model, x, train=True, options={"inner": "aot_eager"})
    assert "a later pass" not in " ".join(r.reason for r in report.left)


def test_a_frozen_batch_norm_that_is_not_frozen_enough(on_gpu: Any) -> None:
    """Its weight must need no gradient; the rest may be trained."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.conv(x)))

    model = Layer().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last)
    assert "has no gradient of a BatchNorm's weight: it needs requires_grad_(False)" in _said(
        model, x
    )
    model.norm.weight.requires_grad_(False)
    torch._dynamo.reset()
    on_gpu(1.0, 0.5)
    assert len(fx_fuser.explain(model, x).fused) == 1


def test_where_there_is_no_kernel_at_all_that_is_said(on_gpu: Any) -> None:
    model = nn.Sequential(nn.Conv2d(6, 12, 3, dilation=2, groups=3), nn.Tanh())
    assert "has no kernel for this convolution" in _said(model, torch.randn(2, 6, 9, 9))
