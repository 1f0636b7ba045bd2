"""Whatever breaks inside fx_fuser, the user's model runs: one warning, and the graph as it was."""

from __future__ import annotations

import copy
import errno
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compare import (
    ALL_THREE,
    ThreePatterns,
    fresh,  # noqa: F401
    fused_compile,
    images,
    sites,
)
from helpers import slow_but
from toolchains import ARCH, FakeNvcc, put_nvrtc
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser import reading
from fx_fuser.graph.match import rewrite
from fx_fuser.native import binaries, store
from fx_fuser.ops import apply, calls, checks, library
from fx_fuser.options import Options
from fx_fuser.planning import plan


class Boom(Exception):
    pass


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise Boom("our own fault")


def _after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, that raises from its `count`-th call on."""
    calls = iter(range(count))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Boom("our own fault")
        return function(*args, **kwargs)

    return wrapped


# At each site: what fails at one alone leaves the others fused (tests/graph/test_site_faults.py).
AT_SITES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "matching": (reading, "find", _raises),
    "a check": (checks, "fault_of", _raises),
    "the plan": (plan, "runs_native", _raises),
    "the call": (calls, "graph_call", _raises),
}
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    **AT_SITES,
    "rewriting": (rewrite, "replace_all", _raises),
    "the second rewrite": (rewrite, "_insert", _after(1, rewrite._insert)),
    "erasing after the call is in": (rewrite, "_erase", _raises),
    "kernels": (plan, "_build_kernels", _raises),
    "the cache tag": (binaries, "fingerprint", _raises),
    "the report": (fx_fuser.Report, "publish", _raises),
    "the epilogue": (apply, "in_torch", _raises),
    "the anchor": (library.ANCHORS["linear"], "forward_like", _raises),
}


@pytest.fixture(params=FAULTS)
def fault(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(*FAULTS[request.param])
    return str(request.param)


@contextmanager
def _our_warnings() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if "fx_fuser" in str(w.message)]


class Recorder:
    """An inner compiler that keeps what it was given, and runs it."""

    def __init__(self, fails: Callable[[GraphModule], bool] = lambda gm: False) -> None:
        self.graphs: list[str] = []
        self.fails = fails

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Any:
        self.graphs.append(str(gm.graph))
        if self.fails(gm):
            raise ValueError("the inner compiler's own")
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(Options, "inner_compiler", lambda self: made)
    return made


def _plain_graph(model: nn.Module, x: Tensor) -> str:
    seen: list[str] = []

    def look(gm: GraphModule, example_inputs: Any) -> Any:
        seen.append(str(gm.graph))
        return gm.forward

    torch.compile(model, backend=look)(x)
    torch._dynamo.reset()
    return seen[0]


grown = pytest.mark.parametrize("auto", [False, True], ids=["named", "grown"])


def _compile(model: nn.Module, strict: bool = False, auto: bool = False) -> Any:
    options = {"cpu_ops": True, "strict": strict, "auto": auto}
    return torch.compile(model, backend="fx_fuser", options=options)


# The causes are test_strict_raises_the_cause's, too.
@pytest.mark.slow
@pytest.mark.each_once
@grown
@pytest.mark.parametrize(
    "fault", slow_but(["a check", "the second rewrite", "kernels"], FAULTS), indirect=True
)
def test_one_warning_the_untouched_graph_and_the_right_result(
    auto: bool, fault: str, recorder: Recorder
) -> None:
    model, x = ThreePatterns().eval(), images()
    plain = _plain_graph(model, x)
    with _our_warnings() as messages:
        value = _compile(model, auto=auto)(x)
    assert torch.equal(value, model(x))
    assert recorder.graphs[-1] == plain
    assert sites() == {}
    (message,) = messages
    if fault in AT_SITES:
        assert "failed at these sites; running them unfused" in message
        _, *lines, _ = message.splitlines()
        assert len(lines) >= len(ALL_THREE)
        assert all(", compare.py:" in s and s.endswith(": Boom: our own fault") for s in lines)
    else:
        assert "leaves a graph unfused" in message and "Boom: our own fault" in message
    value.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.one_in(2)
@pytest.mark.each_once
@grown
def test_strict_raises_the_cause(auto: bool, fault: str, recorder: Recorder) -> None:
    with pytest.raises(Exception, match="our own fault"):
        _compile(ThreePatterns().eval(), strict=True, auto=auto)(images())


@pytest.mark.slow
def test_the_log_has_the_traceback(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, caplog: Any
) -> None:
    monkeypatch.setattr(rewrite, "replace_all", _raises)
    with caplog.at_level(logging.INFO, logger="fx_fuser.backend"), _our_warnings():
        _compile(ThreePatterns().eval())(images())
    (record,) = [r for r in caplog.records if r.name == "fx_fuser.backend"]
    assert record.exc_info is not None and record.exc_info[0] is Boom


@pytest.mark.slow
def test_a_fault_in_a_checkpointed_body_restores_that_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = ThreePatterns().eval()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, self.body(x)[:, :3, None, None], use_reentrant=False)

    monkeypatch.setattr(rewrite, "_insert", _after(4, rewrite._insert))
    model, x = Checkpointed(), images()
    with _our_warnings() as messages:
        value = torch.compile(
            model,
            backend="fx_fuser",
            options={"inner": "aot_eager", "cpu_ops": True, "auto": False},
        )(x)
    assert len(messages) == 1 and sites() == {}
    torch.testing.assert_close(value, model(x), rtol=0, atol=0)


# ---- the inner compiler -------------------------------------------------------------------------


def _is_rewritten(gm: GraphModule) -> bool:
    return any("fx_fuser" in str(n.target) for n in gm.graph.nodes)


@pytest.mark.slow
def test_an_inner_compiler_that_fails_on_the_rewritten_graph(recorder: Recorder) -> None:
    recorder.fails = _is_rewritten
    model, x = ThreePatterns(), images()
    plain = _plain_graph(model.eval(), x)
    with _our_warnings() as messages:
        value = _compile(model)(x)
    assert torch.equal(value, model(x))
    first, second = recorder.graphs
    assert "fx_fuser" in first and second == plain
    (message,) = messages
    assert "ValueError: the inner compiler's own" in message
    assert sites() == {}


def test_an_inner_compiler_that_always_fails_raises_the_users_error(recorder: Recorder) -> None:
    recorder.fails = lambda gm: True
    with _our_warnings(), pytest.raises(Exception, match="the inner compiler's own") as caught:
        _compile(ThreePatterns().eval())(images())
    cause = caught.value.__cause__ or getattr(caught.value, "inner_exception", None)
    assert isinstance(cause, ValueError) or "ValueError" in str(caught.value)
    assert len(recorder.graphs) == 2  # ours, then the user's


def test_a_failing_inner_compiler_is_not_tried_twice_on_the_same_graph(
    recorder: Recorder,
) -> None:
    recorder.fails = lambda gm: True
    with _our_warnings() as messages, pytest.raises(Exception, match="inner compiler's own"):
        _compile(nn.Linear(3, 3))(torch.ones(2, 3))
    assert len(recorder.graphs) == 1  # nothing was fused, so the fault cannot be ours
    assert messages == []


def test_a_bad_option_raises_and_is_no_fault(recorder: Recorder) -> None:
    run = torch.compile(nn.Linear(3, 3), backend="fx_fuser", options={"strikt": True})
    with _our_warnings() as messages, pytest.raises(Exception, match="did you mean 'strict'"):
        run(torch.ones(2, 3))
    assert messages == [] and recorder.graphs == []


# ---- no kernels on this device ------------------------------------------------------------------


@pytest.mark.slow
def test_a_device_without_kernels_is_a_refusal_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    monkeypatch.setattr(plan, "unavailable", lambda device: "nvcc was not found on PATH")
    model, x = ThreePatterns().eval(), images()
    plain = _plain_graph(model, x)
    report = fx_fuser.explain(model, x)
    assert report.fused == []
    assert {s.pattern for s in report.refused} == set(ALL_THREE)
    assert {s.reason for s in report.refused} == {"nvcc was not found on PATH"}
    torch._dynamo.reset()
    value = _compile(model, strict=True)(x)
    assert torch.equal(value, model(x))
    assert recorder.graphs == [plain] and sites() == {}


# ---- Dynamo's own exceptions are not ours to catch ----------------------------------------------


def test_an_exception_that_steers_dynamo_passes(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    def skip(*args: Any, **kwargs: Any) -> Any:
        raise torch._dynamo.exc.SkipFrame("skip this frame")

    monkeypatch.setattr(rewrite, "replace_all", skip)
    model, x = ThreePatterns().eval(), images()
    with _our_warnings() as messages:
        value = _compile(model)(x)
    assert torch.equal(value, model(x))
    assert messages == [] and recorder.graphs == []


# ---- the compiler and its cache -----------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as fx_fuser knows, tensors are on a GPU."""
    unavailable = plan.unavailable

    def of_a_gpu(device: torch.device) -> str | None:
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        ):
            return unavailable(torch.device("cuda:0"))

    monkeypatch.setattr(plan, "unavailable", of_a_gpu)


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, 12], ids=["none", "one of another version"])
def test_without_a_compiler_the_model_runs_and_says_what_to_install(
    other: int | None, gpu: None, bare: Path, fake_libnvrtc: Path, recorder: Recorder
) -> None:
    if other is not None:
        put_nvrtc(fake_libnvrtc, bare / "cu12/lib", bare / "cu12/include", other)
    model, x = ThreePatterns().eval(), images()
    with _our_warnings() as messages:
        value = _compile(model, strict=True)(x)
    assert torch.equal(value, model(x)) and sites() == {}
    assert len(set(messages)) == 1
    assert "NVRTC of CUDA 13, for which this torch was built, was not found" in messages[0]
    assert "pip install 'nvidia-cuda-nvrtc==13.*'" in messages[0]
    assert "or nvcc: nvcc was not found on PATH" in messages[0]
    assert ("libnvrtc.so.12" in messages[0]) == (other is not None)


@pytest.mark.slow
def test_a_source_that_nvrtc_refuses_costs_one_warning(
    fake_nvrtc: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        plan, "_build_kernels", lambda *_: binaries.cubins(["// a", "// BROKEN"], ARCH)
    )
    model, x = ThreePatterns().eval(), images()
    with _our_warnings() as messages:
        value = _compile(model)(x)
    assert torch.equal(value, model(x)) and sites() == {}
    assert len(messages) == 1 and "error: no such thing" in messages[0]


@pytest.mark.slow
def test_a_truncated_cubin_is_compiled_again(
    fake_nvrtc: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(
        plan, "_build_kernels", lambda *_: built.extend(binaries.cubins(["// a", "// b"], ARCH))
    )
    model, x = ThreePatterns().eval(), images()
    _compile(model, strict=True)(x)
    os.truncate(built[0], 2)
    torch._dynamo.reset()
    with _our_warnings() as messages:
        value = _compile(model, strict=True)(x)
    assert torch.equal(value, model(x)) and messages == []
    assert built[2:] == built[:2] and built[0].read_text() == "// a"
    assert sites() == dict.fromkeys(ALL_THREE, 2)


@pytest.fixture
def builds(fake: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """Each compilation builds something, as on a GPU, with a stand-in for nvcc."""
    monkeypatch.setattr(plan, "_build_kernels", lambda *_: binaries.cubin("// a", ARCH))
    return fake


@pytest.mark.slow
def test_garbage_in_the_cache_is_replaced(builds: FakeNvcc, recorder: Recorder) -> None:
    model, x = ThreePatterns().eval(), images()
    _compile(model, strict=True)(x)
    for entry in store.cache_dir().iterdir():
        entry.write_bytes(b"\0garbage")
    torch._dynamo.reset()
    with _our_warnings() as messages:
        value = _compile(model, strict=True)(x)
    assert torch.equal(value, model(x)) and messages == []
    assert builds.calls == 2 and sites() == dict.fromkeys(ALL_THREE, 2)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_cache_that_cannot_be_written_to(
    error: int,
    everywhere: bool,
    builds: FakeNvcc,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another folder does, and what is fused stays fused; without any, the model runs unfused."""
    right, folder = store._build, store.cache_dir()

    def failing(target: Path, jobs: Any) -> None:
        if everywhere or target == folder:
            raise OSError(error, os.strerror(error))
        right(target, jobs)

    monkeypatch.setattr(store, "_build", failing)
    monkeypatch.setattr(plan, "_build_kernels", lambda *_: binaries.cubin(f"// {error}", ARCH))
    if everywhere:
        shutil.rmtree(store._fallback_dir())
    model, x = ThreePatterns().eval(), images()
    with _our_warnings() as messages:
        value = _compile(model)(x)
    assert torch.equal(value, model(x))
    assert sites() == ({} if everywhere else ALL_THREE)
    assert len(messages) == everywhere and all(os.strerror(error) in m for m in messages)


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "inner, op",
    [
        ("eager", "forward"),
        ("eager", "backward"),  # by the others it was traced
        ("aot_eager", "forward"),
        pytest.param("inductor", "forward", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_inside_an_op_is_the_users_to_catch(
    inner: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in eager mode: the error as it is, and the next call runs."""

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    model, x = ThreePatterns().eval(), images()
    reference = copy.deepcopy(model)
    run = fused_compile(model, inner=inner)
    run(x).sum()
    with monkeypatch.context() as patch:
        patch.setattr(library.ANCHORS["linear"], op, full)
        with pytest.raises(torch.OutOfMemoryError, match=r"^Tried to allocate 2 GiB"):
            run(x).sum().backward()
    model.zero_grad()
    run(x).sum().backward()
    reference(x).sum().backward()
    assert sites() == ALL_THREE
    for mine, its in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_out_of_memory_while_compiling(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")

    monkeypatch.setattr(plan, "_pick", full)
    model, x = ThreePatterns().eval(), images()
    with _our_warnings() as messages:
        value = _compile(model)(x)
    assert torch.equal(value, model(x)) and sites() == {}
    assert len(messages) == 1 and "Tried to allocate 2 GiB" in messages[0]
