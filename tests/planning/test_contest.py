"""One contest for sites, convolutions and gemms: who wins, and what counts besides the times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_cases import DENSE, GPU, LIBRARY, SPLIT, decide, linear_tensors, swish
from torch import Tensor

from fx_fuser import kernels
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.native import limits
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, contest, surroundings, timing
from fx_fuser.planning.contest import Winner, winner
from fx_fuser.planning.timing import Candidate, Timing

HOST = "; the host is the bottleneck: mode='reduce-overhead' (CUDA graphs) avoids its cost"


# ---- who wins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "extra", "place"),
    [
        ([Timing(0.9), Timing(0.8)], (), 1),
        ([Timing(0.9), Timing(0.8)], (0.0, 0.2), 0),
        ([Timing(0.9), Timing(0.8)], (0.1, 0.2), None),
        ([Timing(0.5, host=0.9)], (), 0),
        ([Timing(0.5, host=1.1)], (), None),
        ([Timing(0.985)], (), None),
    ],
)
def test_the_fastest_wins_with_what_it_costs_where_it_stands(
    candidates: Sequence[Timing], extra: Sequence[float], place: int | None
) -> None:
    assert winner(candidates, 1.0, extra).place == place


def test_a_microsecond_is_the_least_gain() -> None:
    assert winner([Timing(0.0091)], 0.01).place is None
    assert winner([Timing(0.0089)], 0.01).place == 0


def test_what_costs_the_gain_is_said() -> None:
    assert winner([Timing(0.9)], 1.0, [0.25]).note == "; 0.25 ms more in this graph"
    assert winner([Timing(1.5)], 1.0).note == ""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Options(), True),
        (Options(inner="eager"), False),
        (Options(exported=True), False),
        (None, False),
    ],
    ids=["inductor", "eager", "exported", "none"],
)
def test_the_option_that_avoids_the_hosts_cost_is_named_where_it_would_help(
    options: Options | None, told: bool
) -> None:
    assert winner([Timing(0.5, host=1.1)], 1.0, options=options) == Winner(None, HOST * told)
    assert winner([Timing(1.5, host=2.0)], 1.0, options=options) == Winner(None)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((1.0, 0.9, 0.5), ("dense", "library")),
        ((1.0, 0.5, 0.9), ("split", "library")),
        ((1.0, 1.1, 1.2), None),
        # forward, then backward, of each
        ((1.0, 0.9, 0.8, 1.0, 0.5, 1.0), ("split", "split")),
        ((1.0, 0.9, 0.2, 1.0, 0.9, 1.0), ("dense", "library")),
        ((1.0, 0.5, 0.9, 1.0, 1.5, 1.0), ("split", "library")),
    ],
)
def test_of_several_kernels_for_a_gemm_the_fastest_runs(
    match_of: Any,
    on_gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    times: Sequence[float],
    chosen: tuple[str, str] | None,
) -> None:
    monkeypatch.setattr(kernels, "candidates", lambda _: [dict(LIBRARY), dict(SPLIT), dict(DENSE)])
    on_gpu(*times)
    decision = decide(match_of(swish, *linear_tensors()))
    found = None if isinstance(decision, Refusal) else decision.choices
    assert (found and (found["product"], found["backward"])) == chosen


# ---- the times -----------------------------------------------------------------------------------


def _given(monkeypatch: pytest.MonkeyPatch, found: list[Timing] | None) -> None:
    monkeypatch.setattr(timing, "medians", lambda *_: found)


def test_where_cuda_graphs_are_replayed_the_host_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _given(monkeypatch, [Timing(1.0), Timing(0.5, host=2.0)])
    replays = Options(inductor={"triton.cudagraphs": True})
    assert replays.replays_cuda_graphs and not Options().replays_cuda_graphs
    assert contest.times((), list, GPU, replays) == [Timing(1.0), Timing(0.5)]
    for options in (None, Options()):
        assert contest.times((), list, GPU, options)[1] == Timing(0.5, host=2.0)


def test_a_contest_that_finds_no_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, None)
    assert contest.times((), list, GPU) == "not enough memory to time it"


def test_a_kernel_that_is_wrong_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "medians", lambda key, make, device: make())

    def make() -> list[Candidate]:
        right, wrong = torch.ones(4), torch.full((4,), 1.1)
        bench_ops.compare([lambda: [right], lambda: [wrong]], "new", torch.float32)
        return []

    with pytest.warns(UserWarning, match=r"kernel's \[4\] in torch.float32 differs by 0.1 from"):
        said = contest.times((), make, GPU)
    assert isinstance(said, str) and said.startswith("the new kernel's")


@pytest.mark.parametrize("comb", range(8))
def test_of_each_eighth_row_some_are_compared(monkeypatch: pytest.MonkeyPatch, comb: int) -> None:
    monkeypatch.setattr(bench_ops, "_COMPARED", 128)
    right = torch.ones(120, 8)  # seven times as many and more
    wrong = right.clone()
    wrong[comb::8] = 0
    with pytest.raises(bench_ops.DisagreementError):
        bench_ops.compare([lambda: [right], lambda: [wrong]], "new", torch.bfloat16)


# ---- a value that goes into a cat ----------------------------------------------------------------


def tail_into_cat(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    z = F.linear(x, weight, bias)
    return torch.cat([z * torch.sigmoid(z) * 2.0, x], 1)


def tail_alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    z = F.linear(x, weight, bias)
    return (z * torch.sigmoid(z) * 2.0).sum()


def cat_that_a_product_reads(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return tail_into_cat(x, weight, bias) * 3.0


def norm_into_concat(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    image = x[:, :, None, None]
    c = F.conv2d(image, weight[:, :, None, None])
    return torch.concat([F.batch_norm(c, None, None, training=True) * 2.0, image], 1)


def cat_of_many(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of more than Inductor computes in its readers' kernels."""
    y = F.linear(x, weight, bias)
    return torch.cat([torch.sigmoid(y) * y * 2.0, *[x] * 8], 1) * 3.0


def with_another_reader(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight, bias)
    y = z * torch.sigmoid(z) * 2.0
    return torch.cat([y, x], 1) * 3.0, y + 1.0


def views_into_a_stack(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    z = F.linear(x, weight, bias)
    y = z * torch.sigmoid(z) * 2.0
    return torch.stack([y.view(2, 16), x.view(4, 16)[:2]], 1).sum()


def chunks_of_a_cat(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    first, second = tail_into_cat(x, weight, bias).chunk(2, 1)
    return torch.relu(first) + torch.tanh(second)


def norm_behind_the_cat(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    joined = tail_into_cat(x, weight, bias)
    vector = torch.ones(24)
    return torch.relu(F.batch_norm(joined, vector, vector))


@pytest.mark.parametrize(
    ("f", "bytes_of_y"),
    [
        (tail_into_cat, 4 * 4 * 8),
        (norm_into_concat, 4 * 4 * 8),
        (cat_of_many, 4 * 4 * 8),
        (with_another_reader, 4 * 4 * 8),
        (views_into_a_stack, 4 * 4 * 8),
        (tail_alone, 0),
        (cat_that_a_product_reads, 0),
        (chunks_of_a_cat, 0),
        (norm_behind_the_cat, 0),
    ],
)
def test_a_copy_into_a_cat_is_charged(match_of: Any, on_gpu: Any, f: Any, bytes_of_y: int) -> None:
    """The inner compiler writes a tail's result straight into the joined buffer."""
    match = match_of(f, *linear_tensors(), options={"plan": "always", "cpu_ops": True})
    written_and_read = 2 * bytes_of_y / limits.H200.bandwidth
    assert surroundings.ms_into_cat(match) == pytest.approx(1e3 * written_and_read)


@pytest.mark.parametrize(
    ("of", "is_pointwise"), [("conv and bias", True), ("conv", False), ("linear and bias", False)]
)
def test_a_bias_is_an_operation_of_its_own_behind_a_convolution(
    match_of: Any, on_gpu: Any, of: str, is_pointwise: bool
) -> None:
    def tail(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made = F.linear if of.startswith("linear") else F.conv2d
        return torch.tanh(made(x, weight, bias))

    images = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    x, weight, bias = linear_tensors() if of.startswith("linear") else images
    given = (x, weight, bias if "bias" in of else None)
    match = match_of(tail, *given, options={"plan": "always", "cpu_ops": True})
    assert surroundings._is_pointwise(match)
    assert surroundings._is_pointwise(match.alone) is is_pointwise


def test_a_gemm_without_a_tail_is_copied_by_all(match_of: Any, on_gpu: Any) -> None:
    def alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([F.linear(x, weight, bias), x], 1)

    match = match_of(alone, *linear_tensors(), options={"plan": "always"})
    assert surroundings.ms_into_cat(match) == 0


@pytest.mark.parametrize(("copy", "fuses"), [(0.0, True), (0.2, False)])
def test_a_gain_that_the_copy_takes_is_none(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, copy: float, fuses: bool
) -> None:
    match = match_of(tail_into_cat, *linear_tensors())
    monkeypatch.setattr(surroundings, "ms_into_cat", lambda _: copy)
    on_gpu(1.0, 0.9)
    decision = decide(match)
    assert isinstance(decision, Refusal) != fuses
    if isinstance(decision, Refusal):
        assert "0.2 ms more in this graph" in decision.reason
