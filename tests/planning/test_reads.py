"""After how many reads Inductor keeps a sum that a fused gemm's result is part of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

from fx_fuser.planning.reads import THRESHOLD

BY_DEFAULT = getattr(config, THRESHOLD)


class Layer(nn.Module):
    """The gemm's result has two readers, so that no tail is grown."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.linear(x)
        return x + z, z.sum(0)


class Seen:
    """A pass of the user's that looks at what is set."""

    def __init__(self) -> None:
        self.thresholds: list[int] = []

    def __call__(self, graph: Graph) -> None:
        self.thresholds.append(getattr(config, THRESHOLD))


def threshold_of(model: nn.Module, grad: bool = False, **options: Any) -> int:
    seen = Seen()
    options |= {"cpu_ops": True, "strict": True, "post_grad_custom_pre_pass": seen}
    run = torch.compile(model, backend="fx_fuser", options=options)
    with fresh_cache(), torch.set_grad_enabled(grad):
        run(torch.randn(5, 8))
    assert sum(counters["fx_fuser"].values()) == 1
    return seen.thresholds[0]


@pytest.mark.slow  # a cold cache: Inductor compiles its headers
def test_one_less_where_a_bias_is_fused_and_its_sum_is_not() -> None:
    assert threshold_of(Layer(bias=True)) == BY_DEFAULT - 1


@pytest.mark.slow
def test_a_choice_for_all_calls_stays() -> None:
    with config.patch(THRESHOLD, 0):  # one less would keep constants, too
        assert threshold_of(Layer(bias=True)) == 0


_SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "why",
    [
        "the user chose",
        "training",
        pytest.param("no bias", marks=_SLOW),
        pytest.param("the sum is fused", marks=_SLOW),
    ],
)
def test_elsewhere_it_stays(why: str) -> None:
    model = Layer(bias=why != "no bias")
    if why == "the user chose":
        assert threshold_of(model, **{THRESHOLD: 7}) == 7
        return
    if why == "the sum is fused":
        model.forward = lambda x: x + model.linear(x)  # type: ignore[method-assign,assignment]
    assert threshold_of(model, grad=why == "training") == BY_DEFAULT
