"""The 1 x 1 convolution with the statistics of its result on a GPU: the kernel as graphs call it,
its statistics beside torch's own, and a whole block of ResNet-50 in training."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import pixels_checks
import pytest
import torch
from checks import passes
from pixels_checks import LAUNCHES, Sizes, on_gpu
from sm90 import gpu
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.kernels import pixels as of_kernels
from fx_fuser.ops.pixels import MOMENTS
from fx_fuser.passes import pixels

CUDA = torch.device("cuda")
LAST = torch.channels_last


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(seed: int) -> None:
    passes(pixels_checks.sweep, on_gpu, 12, seed, 60_000, 600)


@gpu
def test_families() -> None:
    passes(pixels_checks.families, on_gpu, range(len(of_kernels.SHAPES)), 3000, 136)


@gpu
def test_refusals() -> None:
    passes(pixels_checks.refusals, on_gpu)


@gpu
@pytest.mark.parametrize("k, channels, side", [(64, 256, 56), (1024, 256, 14), (512, 2048, 7)])
def test_layers_of_resnet50(k: int, channels: int, side: int) -> None:
    failures: list[str] = []
    sizes = Sizes(32, side, side, k, channels)
    x, weight = pixels_checks.operands(sizes, torch.bfloat16)
    for shape in range(len(of_kernels.SHAPES)):
        pixels_checks.check(failures, on_gpu, sizes, x, weight, shape)
    assert not failures, "\n".join(failures)


@gpu
@pytest.mark.parametrize("mean", [0.0, 30.0, 1000.0])
def test_statistics_are_as_exact_as_torchs(mean: float) -> None:
    """Beside float64 of what each reads; fp16, in which means of 1000 deviations can be told."""
    torch.manual_seed(0)
    sizes = Sizes(32, 28, 28, 64, 256)
    x, weight = pixels_checks.operands(sizes, torch.float16)
    x[:, 0], weight[:, 0] = 1.0, mean
    for shape in range(len(of_kernels.SHAPES)):
        (z, *found), launches = on_gpu(MOMENTS, x, weight, of_kernels.spec_of(x.dtype).name, shape)
        assert launches == LAUNCHES
        rows = z.permute(0, 2, 3, 1).reshape(-1, sizes.channels)
        variance, of_rows = torch.var_mean(rows.double(), 0, correction=0)
        theirs = torch.batch_norm_stats(z, 0.0)  # mean and 1 / deviation
        usual = theirs[0], theirs[1].double() ** -2
        for ours, torchs, exact in zip(found, usual, (of_rows, variance)):
            off, their_off = (
                float((one.flatten().double() - exact).norm()) for one in (ours, torchs)
            )
            assert off <= 1.5 * their_off + 2.0**-22 * float(exact.norm())


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4 * width, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + x)


def step(model: nn.Module, x: Tensor, f: Any, in_16_bits: bool = True) -> dict[str, Tensor]:
    model.zero_grad()
    given = x.detach().clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=in_16_bits):
        y = f(given)
    y.double().square().mean().backward()
    assert given.grad is not None
    found = {"y": y.detach(), "x": given.grad}
    found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {n: b.detach().clone() for n, b in model.named_buffers()}


@gpu
def test_a_block_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step under autocast, where timing decides: at least one convolution; then
    all of them. Values, gradients and running statistics as Inductor's and eager mode's."""
    torch.manual_seed(0)
    model = Bottleneck(64).to(CUDA, memory_format=LAST)
    models = {who: copy.deepcopy(model) for who in ("exact", "eager", "inductor", "ours")}
    models["exact"].double()
    options = {"strict": True}
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        calls = {
            **models,
            "inductor": torch.compile(models["inductor"]),
            "ours": torch.compile(models["ours"], backend="fx_fuser", options=options),
        }
        for _ in range(2):
            x = torch.randn(64, 256, 56, 56, device=CUDA).contiguous(memory_format=LAST)
            found = {
                who: step(models[who], x.double() if who == "exact" else x, call, who != "exact")
                for who, call in calls.items()
            }
            for name, wanted in found["exact"].items():
                off = {who: float((v[name].double() - wanted).norm()) for who, v in found.items()}
                usual = max(off["eager"], off["inductor"])
                assert off["ours"] <= 1.5 * usual + 1e-6 * float(wanted.double().norm()), name
    assert counters[pixels.COUNTERS]["convolution"] >= 1
