"""The convolution along one dimension and its gradients on a GPU: kernels, and a whole model whose
convolution they take."""

from __future__ import annotations

import random
import uuid

import conv1d_checks
import pytest
import torch
import torch.nn.functional as F
from checks import passes
from conv1d_checks import Sizes
from sm90 import gpu_from_sm80
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.kernels.conv1d import DTYPES
from fx_fuser.passes import conv1d

CUDA = torch.device("cuda")


@gpu_from_sm80
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_and_strides(seed: int) -> None:
    passes(conv1d_checks.sweep, 40, seed, 600)


@gpu_from_sm80
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [48, 64])
def test_positional_convolutions(dtype: torch.dtype, channels: int) -> None:
    failures: list[str] = []
    for batch, length in ((8, 249), (1, 1499)):
        sizes = Sizes(batch, length, 16, (channels, channels), 128, 64)
        conv1d_checks.check_forward(failures, sizes, dtype, random.Random(0))
        conv1d_checks.check_weight(failures, sizes, dtype, random.Random(0))
        conv1d_checks.gradient_by_x(failures, sizes, dtype)
    assert not failures, "\n".join(failures)


@gpu_from_sm80
@pytest.mark.parametrize("taps", conv1d_checks.TAPS)
def test_taps(taps: int) -> None:
    failures: list[str] = []
    sizes = Sizes(2, 131, 2, (40, 24), taps, taps // 2)
    conv1d_checks.check_forward(failures, sizes, DTYPES[0], random.Random(0))
    conv1d_checks.check_weight(failures, sizes, DTYPES[0], random.Random(0))
    conv1d_checks.gradient_by_x(failures, sizes, DTYPES[0])
    assert not failures, "\n".join(failures)


@gpu_from_sm80
def test_infinities_and_nan() -> None:
    passes(conv1d_checks.not_numbers, Sizes(2, 300, 2, (48, 48), 128, 64), DTYPES[0])


@gpu_from_sm80
@pytest.mark.parametrize(
    "check", [conv1d_checks.empty, conv1d_checks.refusals, conv1d_checks.repeats]
)
def test_checks(check) -> None:
    passes(check)


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv1d(768, 768, 128, padding=64, groups=16)
        self.conv = nn.utils.parametrizations.weight_norm(conv, name="weight", dim=2)
        self.norm = nn.LayerNorm(768)

    def forward(self, x: Tensor) -> Tensor:
        z = F.gelu(self.conv(x.transpose(1, 2))[:, :, :-1])
        return self.norm(x + z.transpose(1, 2))


@gpu_from_sm80
def test_a_model_takes_the_kernels() -> None:
    """In a training step under autocast, in which they are faster by far; values as eager's."""
    torch.manual_seed(0)
    model = Positional().to(CUDA)
    x, dy = (torch.randn(8, 249, 768, device=CUDA) for _ in range(2))

    def step(f: nn.Module) -> list[Tensor]:
        model.zero_grad()
        given = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = f(given)
        y.float().backward(dy)
        assert given.grad is not None
        return [y.detach(), given.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    eager = [t.clone() for t in step(model)]
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        f = torch.compile(model, backend="fx_fuser", options={"strict": True})
        found = [t.clone() for t in step(f)]
    assert counters[conv1d.COUNTERS] == {"convolution": 1, "convolution_backward": 1}
    model.double()
    x, dy = x.double(), dy.double()
    with torch.autocast("cuda", enabled=False):
        given = x.clone().requires_grad_()
        y = model(given)
        y.backward(dy)
    exact = [y.detach(), given.grad, *(p.grad for p in model.parameters())]
    for ours, theirs, wanted in zip(found, eager, exact):
        error, usual = (float((t.double() - wanted).norm()) for t in (ours, theirs))
        assert error <= 1.5 * usual + 1e-6 * float(wanted.norm())
        assert ours.stride() == theirs.stride()
