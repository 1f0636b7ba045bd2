"""The columns of `compare`: which there are, what they measure, and what a failure costs."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from compared import ALL, MODULE, break_column, compared
from helpers import slow_but
from torch import Tensor, nn

from fx_fuser import Comparison
from fx_fuser.compare import race as race_module
from fx_fuser.compare import turns
from fx_fuser.compare.counting import Sites, counted
from fx_fuser.compare.race import Race
from fx_fuser.compare.untouched import tf32_allowed
from fx_fuser.compare.variants import variants_of
from fx_fuser.options import Options


@pytest.mark.slow
def test_on_a_cpu_eager_and_inductor_are_shown_and_nothing_is_claimed() -> None:
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), columns=None)
    assert list(found.columns) == ["eager", "inductor"]
    assert [c.title for c in found.columns.values()] == ["eager", "inner=eager"]
    assert found.verdict.startswith("NO GPU: fx_fuser has no kernels for a CPU")
    assert not found.use and not found.launch_bound
    assert found.columns["inductor"].first_s is not None


def test_inductors_column_has_the_users_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **given: seen.append(given))
    for given in ({}, {"mode": "max-autotune-no-cudagraphs", "fp32": "ieee", "max_fusion_size": 3}):
        variants = variants_of(ALL, Options.parse(None, given, []), given)
        variants["inductor"].compile(None)
        variants["fx_fuser"].compile(None)
    plain, _, tuned, own = seen
    assert plain == {}
    assert tuned["options"]["max_autotune"] is True and tuned["options"]["max_fusion_size"] == 3
    assert "fp32" not in tuned["options"] and own["options"] == given


@pytest.mark.slow
@pytest.mark.parametrize("after", slow_but([1], [None, 0, 1, 4]))
def test_a_mode_that_raises_costs_its_column_alone(
    monkeypatch: pytest.MonkeyPatch, after: int | None
) -> None:
    break_column(monkeypatch, "inductor", ValueError("no such\nluck"), after)
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), train=True)
    failed = found.columns.pop("inductor")
    assert failed.failed == "ValueError: no such" and not failed.wall and not failed.out_of_memory
    assert all(c.ran and c.error is not None for c in found.columns.values())
    assert "inner=eager failed: ValueError: no such" in str(
        dataclasses.replace(found, columns=found.columns | {"inductor": failed})
    )


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("column", ["inductor", "fx_fuser"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("ran out of memory")]
)
def test_out_of_memory_costs_its_column_alone(
    monkeypatch: pytest.MonkeyPatch, column: str, error: Exception
) -> None:
    break_column(monkeypatch, column, error, after=0)
    found = compared(nn.Linear(4, 4), torch.ones(2, 4))
    assert found.columns[column].out_of_memory
    assert all(c.ran for name, c in found.columns.items() if name != column)
    assert re_has(found, "out of memory")
    assert found.judged.word == ("DO NOT USE" if column == "fx_fuser" else "NO GPU")


def re_has(found: Comparison, text: str) -> bool:
    return text in str(found) and text in found.to_html() and text in found.to_json()


@pytest.mark.slow
def test_out_of_memory_in_eager_mode_costs_its_column_alone() -> None:
    class Hungry(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    found = compared(Hungry(4, 4), torch.ones(2, 4), train=True)
    assert found.columns["eager"].out_of_memory and found.step == "training step"
    assert found.columns["inductor"].ran and found.columns["fx_fuser"].ran
    assert any("eager mode, which bounds them, did not run" in note for note in found.notes)


@pytest.mark.slow
def test_progress_is_on_stderr_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    compared(nn.Linear(4, 4), torch.ones(2, 4), progress=True)
    said = capsys.readouterr()
    assert not said.out and "fx_fuser: compile and first step" in said.err
    compared(nn.Linear(4, 4), torch.ones(2, 4))
    assert capsys.readouterr() == ("", "")


# ---- times, by made-up clocks -------------------------------------------------------------------


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """As if on a GPU: wall times by column, and a profile."""
    ms = {"eager": 3.0, "inductor": 2.0, "fx_fuser": 1.0, "inductor_tf32": 1.5}
    profile = [("fx_fuser_linear_split", 0.6), ("triton_poi_fused_gelu_0", 0.35)]
    monkeypatch.setattr(MODULE, "_device", lambda tensors: torch.device("cuda"))
    monkeypatch.setattr(Race, "_wall_ms", lambda race, name: ms[name])
    monkeypatch.setattr(Race, "_warm_up", lambda race: None)
    monkeypatch.setattr(Race, "_synchronize", lambda race: None)
    monkeypatch.setattr(turns, "peak_mib", lambda step, device: 100.0)
    monkeypatch.setattr(turns, "steady_ms", lambda step, device, steps: 300.0 / steps)
    monkeypatch.setattr(turns, "kernels_of", lambda step, device: profile)
    return ms


@pytest.mark.slow
def test_on_a_gpu_all_columns_are_measured(clocks: dict[str, float]) -> None:
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), columns=None, cold=False)
    assert list(found.columns) == ["eager", "inductor", "fx_fuser", "inductor_tf32"]
    assert {name: column.wall_ms for name, column in found.columns.items()} == clocks
    mine = found.columns["fx_fuser"]
    assert (mine.gpu_ms, mine.peak_mib, mine.steady_ms) == (0.95, 100.0, 3.0)
    assert mine.kinds == {"fx_fuser": 0.6, "Triton": 0.35} and mine.faults == []
    assert found.verdict.startswith("USE IT: 2.00 times as fast as inner=eager in wall time")


@pytest.mark.slow
def test_no_tf32_column_for_16_bits_or_where_tf32_is_on_already(clocks: dict[str, float]) -> None:
    def columns(model: nn.Module, x: Tensor) -> list[str]:
        given = {"columns": None, "cold": False, "reference": False}
        return list(compared(model, x, **given).columns)

    assert columns(nn.Linear(4, 4).bfloat16(), torch.ones(2, 4).bfloat16()) == list(ALL)
    with tf32_allowed():
        assert columns(nn.Linear(4, 4), torch.ones(2, 4)) == list(ALL)


@pytest.mark.slow
def test_a_launch_bound_net_is_told_so(clocks: dict[str, float]) -> None:
    clocks |= {"fx_fuser": 1.95, "inductor_reduce_overhead": 1.6, "fx_fuser_reduce_overhead": 0.9}
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), cold=False)
    assert found.launch_bound and not found.use and "LAUNCH-BOUND" in found.verdict
    given = {"options": None, "reference": False, "reduce_overhead": True, "cold": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Race, "_first", lambda race, name, variant: race.calls.update({name: race.model})
        )
        found = compared(nn.Linear(4, 4), torch.ones(2, 4), **given)
    assert "1.78 times as fast as Inductor, reduce-overhead" in found.verdict and found.use


@pytest.mark.slow
def test_a_profiler_that_fails_costs_gpu_time_alone(
    clocks: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(step: Any, device: Any) -> Any:
        raise RuntimeError("CUPTI is missing")

    monkeypatch.setattr(turns, "kernels_of", fails)
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), cold=False)
    assert all(c.ran and c.gpu_ms is None for c in found.columns.values())
    assert found.use and "GPU time is unknown: RuntimeError: CUPTI is missing" in found.notes


@pytest.mark.slow
def test_a_profiler_that_sees_nothing_is_said_so(
    clocks: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "kernels_of", lambda step, device: [])
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), cold=False)
    assert all(c.ran and c.gpu_ms is None for c in found.columns.values())
    assert "GPU time is unknown: the profiler saw no kernel." in found.notes


@pytest.mark.slow
def test_caches_are_cold_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    cold = race_module.cold_caches
    monkeypatch.setattr(race_module, "cold_caches", lambda: entered.append(1) or cold())
    compared(nn.Linear(4, 4), torch.ones(2, 4))
    assert not entered
    compared(nn.Linear(4, 4), torch.ones(2, 4), cold=True)
    assert len(entered) == 2  # not eager mode's


def test_a_warning_is_told_with_its_reason() -> None:
    sites: Sites = {}
    with counted(sites):
        warnings.warn(
            "fx_fuser failed at these sites:\nauto_linear: a reason\nReport it.", stacklevel=1
        )
        warnings.warn("another's", stacklevel=1)
    assert sites["warnings"] == ["fx_fuser failed at these sites: auto_linear: a reason Report it."]
