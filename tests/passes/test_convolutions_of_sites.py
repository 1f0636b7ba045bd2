"""The gradients of a convolution that became a site with its tail are of a convolution, too: the
passes over Inductor's graphs replace them, whichever way torch.compile comes to fx_fuser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from convolutions import LAST, OPTIONS, check_a_step, fresh_graphs
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser.passes import depthwise, grouped

CHANNELS = 48
GROUPED, DEPTHWISE, DENSE = 6, CHANNELS, 1  # groups
PASS_OF = {GROUPED: grouped, DEPTHWISE: depthwise}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_graphs():
        yield


class Net(nn.Module):
    """Every convolution has a BatchNorm and a relu, so with `cpu_ops` every one is a site."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for groups in layers:
            layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups, bias=False)
            self.body.extend([layer, nn.BatchNorm2d(CHANNELS), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def by_backend(model: nn.Module, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="fx_fuser", options=options)


def installed(model: nn.Module, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(model)

    def run(x: Tensor) -> Tensor:
        with fx_fuser.installed(options):
            return compiled(x)

    return run


@pytest.mark.parametrize(
    "way, train, layers",
    [
        (by_backend, True, [GROUPED]),
        *(
            pytest.param(way, train, [GROUPED, DEPTHWISE, DENSE], marks=pytest.mark.slow)
            for way in (by_backend, installed)
            for train in (True, False)
        ),
    ],
)
def test_the_gradients_of_a_site_are_replaced_once(
    way: Callable[..., Any], train: bool, layers: list[int]
) -> None:
    model = Net(layers).train(train).to(memory_format=LAST)
    x = torch.randn(2, CHANNELS, 9, 10).contiguous(memory_format=LAST)
    check_a_step(model, x, way(model, OPTIONS))
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == len(layers)
    for groups, kind in PASS_OF.items():
        wanted = {"convolution_backward": 1} if groups in layers else {}
        assert counters[kind.COUNTERS] == wanted
