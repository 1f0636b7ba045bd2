"""16-bit convolutions along one dimension of Inductor's graphs: what is replaced and what is left,
and values and strides stay right. On a CPU our functions run in torch (`cpu_ops`); the kernels
themselves: tests/kernels/conv1d_checks.py."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import ASKED, BF16, OPTIONS, Convolutions, fresh_graphs, near
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import fx_fuser
from fx_fuser.passes.conv1d import COUNTERS, Conv1d
from fx_fuser.passes.conv1d.site import Conv1dSite

CHANNELS, GROUPS, TAPS = 32, 2, 19
PASS = Convolutions(Conv1d, Conv1dSite, COUNTERS, 1, CHANNELS, GROUPS, 9)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_graphs():
        yield


def x_of(length: int = 40, last: bool = True, dtype: torch.dtype = BF16) -> Tensor:
    """last: are channels adjacent in memory?"""
    rows = torch.randn(2, length, CHANNELS, dtype=dtype)
    return rows.mT if last else rows.mT.contiguous()


def weight_of(taps: int = TAPS, dtype: torch.dtype = BF16, into: int = 16) -> Tensor:
    return (torch.randn(CHANNELS, into, taps) * (into * taps) ** -0.5).to(dtype)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("taps, padding", [(19, 9), (16, 0), (16, 8), (35, 34)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_forward(dtype: torch.dtype, taps: int, padding: int, biased: bool, last: bool) -> None:
    x, weight = x_of(last=last, dtype=dtype), weight_of(taps, dtype)
    bias = [torch.randn(CHANNELS, dtype=dtype)] if biased else []
    # Of x a copy where channels are not adjacent; and one of the weight, and of the result.
    found = PASS.check_result(x, weight, *bias, copies=2 if last else 3, padding=padding)
    assert found.is_contiguous()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("taps, padding", [(19, 9), (16, 0), (16, 8), (35, 34)])
@pytest.mark.parametrize("last", [True, False])
def test_backward(last: bool, taps: int, padding: int, asked: tuple[bool, ...]) -> None:
    x, weight = x_of(last=last), weight_of(taps)
    dz = torch.randn(F.conv1d(x, weight, padding=padding, groups=GROUPS).shape).to(BF16)
    for found in PASS.check_gradients(asked, dz, x, weight, has_strides=False, padding=padding):
        assert found.is_contiguous()


def test_a_gradient_that_is_one_number_everywhere() -> None:
    x, weight = x_of(), weight_of()
    dz = torch.ones((), dtype=BF16).expand(2, CHANNELS, 40)
    PASS.check_gradients((True, True, True), dz, x, weight, has_strides=False)


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    PASS.left("stride is [2]", x, weight, stride=[2])
    PASS.left("dilation is [2]", x, weight, dilation=[2], padding=[18])
    PASS.left("one group", x_of()[:, :16], weight, groups=1)
    PASS.left("15 taps", x, weight_of(15))
    PASS.left("padding is 19", x, weight, padding=[19])
    PASS.left("groups have 4 and 4 channels", x[:, :32], weight_of(into=4), groups=8)
    PASS.left("one 16-bit dtype", x.float(), weight.float())
    PASS.left("not on cuda", x, weight, device="cuda")
    PASS.left("empty", x[:0], weight)
    PASS.left("weight is not contiguous", x, weight.mT.contiguous().mT)
    images = torch.randn(2, CHANNELS, 20, 20, dtype=BF16)
    kernel = torch.randn(CHANNELS, 16, 3, 3, dtype=BF16)
    PASS.left("dimensions", images, kernel, stride=[1, 1], padding=[1, 1], dilation=[1, 1])
    assert not counters[COUNTERS]


def test_transposed_convolutions_are_left() -> None:
    weight = torch.randn(CHANNELS, 16, TAPS, dtype=BF16)
    PASS.left("transposed", x_of(), weight, transposed=True)
    assert not counters[COUNTERS]


@pytest.mark.parametrize("ours, is_taken", [(1.0, True), (1.99, False), (3.0, False)])
def test_the_clock_decides(ours: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [
        PASS.forward(x_of(), weight_of()),
        PASS.backward(x_of(), x_of(), weight_of(), asked=(True, True, True)),
    ]
    PASS.check_the_clock_decides(ours, is_taken, graphs, monkeypatch)


def test_a_kernel_that_does_not_build_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    PASS.check_that_no_kernel_builds(PASS.forward(x_of(), weight_of()), monkeypatch)


def test_a_failure_leaves_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    PASS.check_a_failure(PASS.forward(x_of(), weight_of()), monkeypatch)


# ---- whole models --------------------------------------------------------------------------------


class Positional(nn.Module):
    """As Wav2Vec2 has it: SamePad cuts the last frame where taps are even."""

    def __init__(self, taps: int = 16, bias: bool = True) -> None:
        super().__init__()
        conv = nn.Conv1d(CHANNELS, CHANNELS, taps, padding=taps // 2, groups=GROUPS, bias=bias)
        self.conv = nn.utils.parametrizations.weight_norm(conv, name="weight", dim=2)
        self.cut = 1 - taps % 2

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x.transpose(1, 2))
        z = F.gelu(z[:, :, : -self.cut] if self.cut else z)
        return x + z.transpose(1, 2)


ODD = pytest.param(17, False, marks=pytest.mark.slow)


@pytest.mark.parametrize("taps, bias", [(16, True), ODD])
def test_a_positional_convolution_in_training(taps: int, bias: bool) -> None:
    PASS.check_two_steps(Positional(taps, bias), torch.randn(2, 40, CHANNELS))


@pytest.mark.slow
def test_gradients_of_the_weight_alone() -> None:
    PASS.check_gradients_of_weights_alone(Positional(), torch.randn(2, 40, CHANNELS))


@pytest.mark.slow
def test_inference_in_16_bits_with_other_batches() -> None:
    model = Positional().to(BF16).eval()
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS, dynamic=True)
    for batch, length in ((2, 40), (3, 40), (5, 57)):
        x = torch.randn(batch, length, CHANNELS, dtype=BF16)
        with torch.no_grad():
            near(f(x), model(x))
    assert counters[COUNTERS]["convolution"] >= 1


class _Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, graph: Graph) -> None:
        self.ran += 1

    def uuid(self) -> Any:
        return str(uuid.uuid4())


@pytest.mark.slow
def test_a_pass_of_the_users_runs_first() -> None:
    counting = _Counting()
    options = {**OPTIONS, "post_grad_custom_post_pass": counting}
    model = Positional().to(BF16).eval()
    f = torch.compile(model, backend="fx_fuser", options=options)
    with torch.no_grad():
        f(torch.randn(2, 40, CHANNELS, dtype=BF16))
    assert counting.ran and counters[COUNTERS] == {"convolution": 1}


@pytest.mark.slow
def test_inside_plain_torch_compile() -> None:
    model = Positional().to(BF16).eval()
    x = torch.randn(2, 40, CHANNELS, dtype=BF16)
    with fx_fuser.installed(OPTIONS), torch.no_grad():
        near(torch.compile(model)(x), model(x))
    assert counters[COUNTERS] == {"convolution": 1}
