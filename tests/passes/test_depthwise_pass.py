"""16-bit depthwise convolutions of Inductor's graphs: what is replaced and what is left, and values
and strides stay right. On a CPU our functions run in torch (`cpu_ops`); the kernels themselves:
tests/kernels/depthwise_gradient_checks.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import ASKED, BF16, LAST, Convolutions, fresh_graphs, targets
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.ops.depthwise import FORWARD, OF_WEIGHT
from fx_fuser.passes import convolution
from fx_fuser.passes.convolution.site import CONVOLUTION
from fx_fuser.passes.depthwise import COUNTERS, Depthwise
from fx_fuser.passes.depthwise.site import DepthwiseSite

CHANNELS = 12
PASS = Convolutions(
    Depthwise, DepthwiseSite, COUNTERS, 2, CHANNELS, CHANNELS, 3, refused="a depthwise convolution"
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_graphs():
        yield


def x_of(side: int = 14, dtype: torch.dtype = BF16, channels: int = CHANNELS) -> Tensor:
    return torch.randn(2, channels, side, side + 1).to(dtype, memory_format=LAST)


def weight_of(window: int = 7, dtype: torch.dtype = BF16, channels: int = CHANNELS) -> Tensor:
    return (torch.randn(channels, 1, window, window) / window).to(dtype)


SIZES = [(3, 1, 1), (3, 1, 2), (7, 3, 1), (7, 0, 1), (5, 2, 2), (11, 10, 1), (9, 1, 2)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("window, padding, stride", SIZES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_forward(dtype: torch.dtype, window: int, padding: int, stride: int, biased: bool) -> None:
    x, weight = x_of(dtype=dtype), weight_of(window, dtype)
    bias = [torch.randn(CHANNELS, dtype=dtype)] if biased else []
    PASS.check_result(x, weight, *bias, padding=padding, stride=stride)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("window, padding, stride", SIZES)
def test_backward(window: int, padding: int, stride: int, asked: tuple[bool, ...]) -> None:
    x, weight = x_of(), weight_of(window)
    z = F.conv2d(x, weight, stride=stride, padding=padding, groups=CHANNELS)
    dz = torch.randn(z.shape).to(BF16, memory_format=LAST)
    PASS.check_gradients(asked, dz, x, weight, padding=padding, stride=stride)


@pytest.mark.parametrize("last", [True, False])
def test_operands_in_other_layouts_are_copied(last: bool) -> None:
    """A gradient that is one number everywhere; x that begins in the middle of a vector."""
    x, weight = x_of(), weight_of()
    dz = torch.ones((), dtype=BF16).expand(x.shape)
    if not last:
        memory = torch.randn(x.numel() + 1).to(BF16)
        x = memory[1:].as_strided(x.shape, x.stride())
    gm = PASS.replaced(PASS.backward(dz, x, weight, asked=(True, True, True)))
    assert targets(gm).count(torch.ops.aten.clone.default) == (1 if last else 2)
    counters.clear()
    PASS.check_gradients((True, True, True), dz, x, weight, has_strides=False)


def test_one_number_stands_for_both_dimensions() -> None:
    PASS.check_one_number(x_of(), weight_of())


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    PASS.left("stride is [3, 3]", x, weight, stride=3)
    PASS.left("dilation is [2, 2]", x, weight, dilation=[2, 2])
    PASS.left("window is [4, 4]", x, weight_of(4))
    PASS.left("window is [13, 13]", x, weight_of(13))
    PASS.left("window is [7, 5]", x, weight[..., :5].contiguous())
    PASS.left("padding is [7, 7]", x, weight, padding=7)
    PASS.left("not depthwise", x, torch.randn(2 * CHANNELS, 1, 7, 7).to(BF16))
    PASS.left("not depthwise", x, torch.randn(CHANNELS, 2, 7, 7).to(BF16), groups=CHANNELS // 2)
    PASS.left("window is", x_of(channels=9), weight_of(channels=9), groups=9)
    PASS.left("one 16-bit dtype", x.float(), weight.float())
    PASS.left("not on cuda", x, weight, device="cuda")
    PASS.left("empty", x[:0], weight)
    PASS.left("weight is not contiguous", x, weight.mT)
    PASS.left("not in channels_last", x.contiguous(), weight)
    assert not counters[COUNTERS]


def test_other_convolutions_are_left() -> None:
    x, weight = x_of(), torch.randn(CHANNELS, 1, 7, 7).to(BF16)
    PASS.left("stride is [2, 1]", x, weight, stride=[2, 1])
    PASS.left("transposed", x, weight, transposed=True)
    line, of_line = torch.randn(2, CHANNELS, 20).to(BF16), torch.randn(CHANNELS, 1, 7).to(BF16)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return CONVOLUTION(x, weight, None, [1], [3], [1], False, [0], CHANNELS)

    gm = PASS.replaced(make_fx(f, tracing_mode="fake")(line, of_line))
    assert CONVOLUTION in targets(gm) and not counters[COUNTERS]


@pytest.mark.parametrize("ours, is_taken", [(1.0, True), (1.99, False), (3.0, False)])
def test_the_clock_decides(ours: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [
        PASS.forward(x_of(), weight_of(), torch.randn(CHANNELS).to(BF16)),
        PASS.backward(x_of(), x_of(), weight_of(), asked=(True, True, True)),
    ]
    PASS.check_the_clock_decides(ours, is_taken, graphs, monkeypatch)


def test_a_kernel_that_does_not_build_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    PASS.check_that_no_kernel_builds(PASS.forward(x_of(), weight_of()), monkeypatch)


def test_a_failure_leaves_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    PASS.check_a_failure(PASS.forward(x_of(), weight_of()), monkeypatch)


# ---- whole models --------------------------------------------------------------------------------


class Block(nn.Module):
    """As ConvNeXt has it. By `torch.convolution`, which is no site: with `cpu_ops` every `conv2d`
    is fused."""

    def __init__(self, window: int = 7, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(window, torch.float32))
        self.numbers = PASS.numbers(padding=window // 2, stride=stride)
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (t if t.dtype == torch.float64 else t.to(BF16) for t in (x, self.weight))
        z = torch.convolution(x, weight, None, *self.numbers)
        return F.gelu(self.norm(z.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


STRIDED = pytest.param(5, 2, marks=pytest.mark.slow)


@pytest.mark.parametrize("window, stride", [(7, 1), STRIDED])
def test_a_block_in_training(window: int, stride: int) -> None:
    PASS.check_two_steps(Block(window, stride), x_of(dtype=torch.float32))


def test_strides_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    PASS.check_strides_at_run_time((FORWARD, OF_WEIGHT), monkeypatch, 7)


@pytest.mark.slow
def test_gradients_of_the_weight_alone() -> None:
    PASS.check_gradients_of_weights_alone(Block(), x_of(dtype=torch.float32))


def test_kernels_of_a_graph_are_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def loaded(specs: Sequence[Any], *rest: Any) -> set[Any]:
        asked.append(len(specs))
        return set()

    PASS.on_a_gpu(monkeypatch)
    monkeypatch.setattr(convolution, "loaded", loaded)

    def f(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        z = CONVOLUTION(x, weight, None, *PASS.numbers())
        return CONVOLUTION(z, other, None, *PASS.numbers(padding=1, stride=2))

    gm = make_fx(f, tracing_mode="fake")(x_of(), weight_of(7), weight_of(3))
    PASS.replaced(gm, on_cpu=False)
    assert asked == [2, 1, 1]
