"""16-bit convolutions in groups of Inductor's graphs: what is replaced and what is left, and values
and strides stay right. On a CPU our functions run in torch (`cpu_ops`); the kernels themselves:
tests/kernels/grouped_checks.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from convolutions import ASKED, BF16, LAST, Convolutions, fresh_graphs, targets
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.ops.grouped import FORWARD, OF_INPUT, OF_WEIGHT
from fx_fuser.passes.convolution.site import CONVOLUTION_BACKWARD
from fx_fuser.passes.grouped import COUNTERS, Grouped
from fx_fuser.passes.grouped.site import GroupedSite

CHANNELS, GROUPS = 48, 6
PASS = Convolutions(
    Grouped, GroupedSite, COUNTERS, 2, CHANNELS, GROUPS, 1, refused="a grouped convolution"
)


@pytest.fixture(autouse=True)
def offered() -> Iterator[None]:
    with fresh_graphs():
        yield


def x_of(side: int = 14, dtype: torch.dtype = BF16, channels: int = CHANNELS) -> Tensor:
    return torch.randn(2, channels, side, side + 1).to(dtype, memory_format=LAST)


def weight_of(
    window: int = 3, dtype: torch.dtype = BF16, inputs: int = CHANNELS // GROUPS
) -> Tensor:
    return (torch.randn(CHANNELS, inputs, window, window) / window / inputs**0.5).to(dtype)


SIZES = [(3, 1, 1), (3, 1, 2), (1, 0, 1), (7, 0, 1), (5, 4, 2)]


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
    z = F.conv2d(x, weight, stride=stride, padding=padding, groups=GROUPS)
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


def test_a_gradient_of_a_weight_in_channels_last() -> None:
    x, weight = x_of(), weight_of().to(memory_format=LAST)
    dz = torch.randn(x.shape).to(BF16, memory_format=LAST)
    PASS.check_gradients((True, True, False), dz, x, weight)


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    PASS.left("its 1 groups", x, weight_of(inputs=CHANNELS), groups=1)
    PASS.left("groups have 1 and 1", x, weight_of(inputs=1), groups=CHANNELS)
    PASS.left("groups have 17 and 1", x_of(channels=17 * 48), weight_of(inputs=17), groups=48)
    PASS.left("padding is [3, 3]", x, weight, padding=3)
    PASS.left("one 16-bit dtype", x.float(), weight.float())
    PASS.left("not on cuda", x, weight, device="cuda")
    PASS.left("empty", x[:0], weight)
    PASS.left("transposed", x, weight, transposed=True)
    PASS.left("not in channels_last", x.contiguous(), weight)
    assert not counters[COUNTERS]


def test_a_stride_beyond_the_window_has_no_gradient_here() -> None:
    x, weight = x_of(), weight_of(1)
    dz = torch.randn(2, CHANNELS, 7, 8).to(BF16, memory_format=LAST)
    for asked, is_left in (((True, False, False), True), ((False, True, False), False)):
        gm = PASS.replaced(PASS.backward(dz, x, weight, asked=asked, padding=0, stride=2))
        assert (CONVOLUTION_BACKWARD in targets(gm)) == is_left


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
    """As RegNet has it, with another norm. By `torch.convolution`, which is no site: with `cpu_ops`
    every `conv2d` is fused."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(3, torch.float32))
        self.numbers = PASS.numbers(stride=stride)
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (t if t.dtype == torch.float64 else t.to(BF16) for t in (x, self.weight))
        z = torch.convolution(x, weight, None, *self.numbers)
        return F.relu(self.norm(z.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


@pytest.mark.parametrize("stride", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_block_in_training(stride: int) -> None:
    PASS.check_two_steps(Block(stride), x_of(dtype=torch.float32))


@pytest.mark.slow
def test_gradients_of_the_weight_alone() -> None:
    PASS.check_gradients_of_weights_alone(Block(), x_of(dtype=torch.float32))


def test_strides_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    PASS.check_strides_at_run_time((FORWARD, OF_INPUT, OF_WEIGHT), monkeypatch, 3)
