"""What a user is told without asking: a line a compilation, and which call is the right one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import linear_program
from plan_cases import decide, swish
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import fx_fuser
from fx_fuser.options import Options
from fx_fuser.outcome import Outcome
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

CPU_ONLY = "on a CPU none of fx_fuser's kernels run"
CUDA = {"cuda"}
OPTIONS = {"inner": "aot_eager", "cpu_ops": True, "strict": True}


def two_linears(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.lin(x)) + m.bare(x)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines of the logger `fx_fuser` itself since the last call."""

    def said() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "fx_fuser"]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO, logger="fx_fuser"):
        yield said


@pytest.mark.slow
def test_a_compilation_says_how_much_is_fused(lines: Callable[[], list[str]]) -> None:
    model = linear_program(two_linears)
    x = torch.randn(4, 8)
    torch.compile(model, backend="fx_fuser", options=OPTIONS)(x)
    assert lines() == ["fused 2 of 2 sites"]
    torch._dynamo.reset()
    torch.compile(model, backend="fx_fuser", options={**OPTIONS, "auto": False})(x)
    assert lines() == ["fused 0 of 2 sites; explain says why the rest is not"]


@pytest.mark.slow
def test_each_graph_has_a_line(lines: Callable[[], list[str]]) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = torch.relu(m.lin(x))
        torch._dynamo.graph_break()
        return z + 1

    torch.compile(linear_program(body), backend="fx_fuser", options=OPTIONS)(torch.randn(4, 8))
    assert lines() == ["fused 1 of 1 site", "no site"]


@pytest.mark.slow
def test_a_gemm_under_an_addition_is_one_site(lines: Callable[[], list[str]]) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x @ m.w.t() + m.b

    model = linear_program(body)
    for options in (OPTIONS, {**OPTIONS, "patterns": [], "auto": True}):
        torch._dynamo.reset()
        torch.compile(model, backend="fx_fuser", options=options)(torch.randn(4, 8))
        assert lines() == ["fused 1 of 1 site"]


def test_on_a_cpu_it_says_that_no_kernel_runs(lines: Callable[[], list[str]]) -> None:
    model = linear_program(two_linears)
    options = {"inner": "aot_eager"}
    torch.compile(model, backend="fx_fuser", options=options)(torch.randn(4, 8))
    assert lines() == [f"fused 0 of 2 sites: {CPU_ONLY}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_installed_says_it_too(lines: Callable[[], list[str]]) -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    with fresh_cache(), fx_fuser.installed(), torch.no_grad():
        torch.compile(model)(x)
        assert lines() == [f"fused 0 of 1 site: {CPU_ONLY}"]


def test_nothing_is_counted_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Outcome, "line", lambda *_: pytest.fail("nothing reads it"))
    with caplog.at_level(logging.WARNING, logger="fx_fuser"):
        torch.compile(nn.Linear(8, 4), backend="fx_fuser", options=OPTIONS)(torch.randn(4, 8))


def test_a_failure_has_its_warning_alone(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("our own fault")

    monkeypatch.setattr("fx_fuser.backend.fuse", fails)
    options = {**OPTIONS, "strict": False}
    with pytest.warns(UserWarning, match="our own fault"):
        torch.compile(nn.Linear(8, 4), backend="fx_fuser", options=options)(torch.randn(4, 8))
    assert lines() == []


# ---- on a GPU ------------------------------------------------------------------------------------


def test_gemms_attentions_and_masks_are_counted() -> None:
    outcome = Outcome(matches=[None] * 24, masks=[None] * 12, sites=49)  # type: ignore[list-item]
    said = "fused 24 of 49 sites, 3 gemms, 1 attention, 12 masks; explain says why the rest is not"
    assert outcome.line(Options(), CUDA, {"gemm": 3, "attention": 1}) == said


def test_a_graph_from_inductors_cache_is_told() -> None:
    said = "Inductor's cache had this graph"
    outcome = Outcome(is_known=False)
    assert outcome.line(Options(), CUDA, {}) == said
    assert outcome.line(Options(), {"cpu"}, {}) == f"{said}: {CPU_ONLY}"


def test_a_graph_without_inputs_is_not_taken_for_a_cpus() -> None:
    outcome = Outcome(matches=[None], sites=1)  # type: ignore[list-item]
    assert outcome.line(Options(), set(), {}) == "fused 1 of 1 site"
    assert Outcome(sites=0).line(Options(), set(), {}) == "no site"


def test_inputs_of_another_device_are_named() -> None:
    said = Outcome(sites=1).line(Options(), {"cpu", "xpu"}, {})
    assert said == "fused 0 of 1 site: on cpu and xpu none of fx_fuser's kernels run"


def left_by(reason: str) -> Any:
    return SimpleNamespace(reason=reason)


def test_sites_that_the_host_bounds_are_counted_with_the_option() -> None:
    """Those whose note `planning` has written with the remedy, once for all."""
    note = contest.host_note(Options())
    left = [left_by(f"nothing is gained (0.1 ms{note}): …")] * 2 + [left_by("as fast")]
    said = Outcome(left=left, sites=3).line(Options(), CUDA, {})
    begin = "fused 0 of 3 sites; 2 sites left unfused, though faster on the GPU; the host is"
    assert said.startswith(begin)
    assert said.count("mode='reduce-overhead'") == 1
    eager = Options(inner="eager")  # which has no such mode
    assert "reduce-overhead" not in Outcome(left=left, sites=3).line(eager, CUDA, {})


def test_planning_writes_the_note_that_is_counted(match_of: Any, on_gpu: Any) -> None:
    on_gpu(Timing(1.0), Timing(0.5, 2.0))  # library, fused: the host takes longer than the GPU
    with torch.no_grad():
        refusal = decide(match_of(swish, torch.randn(64, 32), torch.randn(48, 32)))
    said = Outcome(left=[refusal], sites=1).line(Options(), CUDA, {})
    assert "1 site left unfused, though faster on the GPU" in said


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["install", "installed", "explain", "fuse_exported"])
def test_a_function_that_is_no_backend_names_the_backend(name: str) -> None:
    remedy = r'torch\.compile\(model, backend="fx_fuser"\), or call fx_fuser\.install\(\) once'
    with pytest.raises(Exception, match=rf"fx_fuser\.{name} is not a backend; use {remedy}"):
        torch.compile(nn.Linear(4, 4), backend=getattr(fx_fuser, name))(torch.randn(2, 4))


def test_a_graph_module_can_be_explained() -> None:
    """Called by a user, not by Dynamo."""
    graph = torch.fx.symbolic_trace(nn.Linear(4, 4))
    assert not fx_fuser.explain(graph, torch.randn(2, 4)).refused


def test_compile_of_a_module_reaches_its_calls_alone() -> None:
    """As docs/training.md says of Lightning, whose Trainer calls `training_step`: no backend hears
    of that, so nothing can be said there."""
    graphs: list[Any] = []

    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear_program(two_linears)

        def training_step(self, x: Tensor) -> Tensor:
            return self.net(x)

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    model, x = Lit(), torch.randn(2, 8)
    model.compile(backend=backend)
    model.training_step(x)
    assert not graphs
    model.net.compile(backend=backend)
    model.training_step(x)
    assert len(graphs) == 1
