"""What folds its BatchNorm is left where the host is the bottleneck, by made-up times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_cases import decide
from torch import nn

from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.options import Options
from fx_fuser.planning import convolutions, launches, plan
from fx_fuser.planning.convolutions import InLayout
from fx_fuser.planning.launches import FOLDING, IN_GRAPH
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.timing import Timing

APART, FOLDED = 0.05, 0.03  # ms of the GPU
OTHERS = (Timing(1.0, 0.01),) * 3  # of other kernels that take the site


class Block(nn.Sequential):
    """Of more channels than the direct kernel takes."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())


@pytest.fixture
def block(match_of: Any) -> Match:
    form = torch.channels_last
    model = Block().eval().to(torch.bfloat16, memory_format=form)  # type: ignore[call-overload]
    x = torch.randn(2, 64, 8, 8, dtype=torch.bfloat16).to(memory_format=form)
    with torch.no_grad():
        found: Match = match_of(model, x, options={"cpu_ops": True})
    return found


def product(decision: Any) -> Any:
    return decision.choices["product"] if isinstance(decision, Plan) else None


@pytest.mark.parametrize("launch_bound", [False, True])
def test_a_fold_needs_a_graph_that_waits_for_the_gpu(
    block: Match, on_gpu: Callable[..., None], launch_bound: bool
) -> None:
    host = (1.01 if launch_bound else 0.99) * APART / IN_GRAPH / (1 + FOLDING)
    on_gpu(APART, Timing(FOLDED, host), *OTHERS)
    decision = decide(block)
    assert product(decision) == (None if launch_bound else "folded")
    if launch_bound:
        assert isinstance(decision, Refusal)
        assert "take the GPU 0.05 ms and the host about" in decision.reason
        assert decision.reason.count("mode='reduce-overhead'") == 1
    # Where CUDA graphs are replayed, or no Inductor makes the pass, the host's time is no reason.
    assert product(decide(block, mode="reduce-overhead")) == "folded"
    assert product(decide(block, inner="aot_eager")) == "folded"


def test_all_convolutions_of_the_graph_count(
    block: Match, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is left has its time, too."""
    other = replace(block)
    times = {
        id(block): InLayout(Timing(APART), {"folded": Timing(FOLDED, 0.8 * APART)}),
        id(other): InLayout(Timing(1.0), {"folded": Timing(2.0, 0.02)}),
    }
    monkeypatch.setattr(convolutions, "times_in_layout", lambda match, *_: times[id(match)])
    assert [product(d) for d in plan.decide([block], Options())] == [None]
    assert [product(d) for d in plan.decide([block, other], Options())] == ["folded", None]


def test_another_kernel_takes_its_place(block: Match, on_gpu: Callable[..., None]) -> None:
    """It saves a launch, so the host gains."""
    on_gpu(APART, Timing(FOLDED, 0.035), *(Timing(0.04, 0.01),) * 3)
    assert product(decide(block)) not in (None, "folded", "library")


def test_who_folds_pays_for_it() -> None:
    times = InLayout(Timing(APART), {"folded": Timing(FOLDED, 0.05)})
    found = launches.bound([times, None, times], {2})
    assert found == Timing(2 * APART, pytest.approx((2 + FOLDING) * IN_GRAPH * 0.05))
    inexact = InLayout(Timing(APART), {"folded": Timing(inf), "implicit": Timing(0.04, 0.06)})
    assert launches.bound([inexact], ()) == Timing(APART, pytest.approx(IN_GRAPH * 0.06))
    nothing = InLayout(Timing(APART), {"folded": Timing(inf)})
    assert launches.bound([nothing, times], ()) == Timing(APART, pytest.approx(IN_GRAPH * 0.05))


def test_a_site_that_fails_costs_itself_alone(
    block: Match, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = replace(block)
    folds = InLayout(Timing(APART), {"folded": Timing(FOLDED, 0.01)})

    def times(match: Match, *_: Any) -> InLayout:
        if match is fails:
            raise RuntimeError("planted")
        return folds

    monkeypatch.setattr(convolutions, "times_in_layout", times)
    first, second = plan.decide([block, fails], Options())
    assert product(first) == "folded" and isinstance(second, Refusal)
    assert second.failed and "planted" in second.reason


def test_the_remedy_is_said_once(block: Match, on_gpu: Callable[..., None]) -> None:
    """Also where another kernel would gain but for the host."""
    on_gpu(APART, Timing(FOLDED, 0.035), *(Timing(0.03, 0.2),) * 3)
    decision = decide(block)
    assert isinstance(decision, Refusal)
    assert decision.reason.count("mode='reduce-overhead'") == 1


@pytest.mark.parametrize(("gemms", "counts"), [(0, True), (1, True), (2, False)])
def test_in_a_transformer_the_host_is_not_asked(
    block: Match, gemms: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gemms may keep the GPU busy."""
    names = ["conv2d"] * 4 + ["linear"] * gemms + ["relu"] * 9
    view = SimpleNamespace(nodes=names)
    monkeypatch.setattr(launches, "called_name", lambda name: name)
    assert launches.counts([replace(block, view=view)], Options()) is counts  # type: ignore[arg-type]
