"""How long ways take the GPU, whatever the host does, and what is remembered of it."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fx_fuser.native import store
from fx_fuser.planning import timing
from fx_fuser.planning.timing import Timing

GPU = torch.device("cuda", 0)
MACHINE = timing._machine


# ---- what an answer is of ------------------------------------------------------------------------


def test_the_key_holds_the_machine(
    clock: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPU, driver, torch, the kernels' compiler and fx_fuser's sources: each tells it apart."""
    gpu = SimpleNamespace(name="H100", multi_processor_count=132)
    compiler = SimpleNamespace(version="NVRTC 13.2")
    monkeypatch.setattr(timing, "_machine", MACHINE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(timing, "_driver", lambda: 13000)
    monkeypatch.setattr(timing.compilers, "of_kernels", lambda: compiler)
    monkeypatch.setattr(timing.binaries, "fingerprint", lambda: str(tmp_path))
    first = ask("a")
    assert ask("a") == first and clock == [1]
    changes: list[tuple[Any, str, Any]] = [
        (gpu, "name", "H200"),
        (gpu, "multi_processor_count", 114),
        (timing, "_driver", lambda: 13010),
        (torch, "__version__", "2.99.0"),
        (compiler, "version", "NVRTC 13.3"),
        (timing.binaries, "fingerprint", lambda: "other sources"),
    ]
    for i, (owner, name, other) in enumerate(changes):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert ask("a") == [i + 2.0, 2.0], name
    assert ask("a") == first


# ---- the GPU's time ------------------------------------------------------------------------------


class Machine:
    """In place of torch in timing: a host and a GPU with a clock in ms, and a queue between."""

    int8 = torch.int8

    def __init__(self) -> None:
        self.cuda = self
        self.host = self.gpu = 0.0  # where each is; the GPU, once it has done all that is queued
        self.flushes = 0  # since the last way

    def launch(self, host: float, gpu: float) -> None:
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=1)

    def empty(self, *args: Any, **options: Any) -> SimpleNamespace:
        def zero() -> None:
            self.flushes += 1
            assert self.flushes < 512  # of some 1000 that the queue holds
            self.launch(0.005, 0.04)

        return SimpleNamespace(zero_=zero)

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=self.synchronize)

        def record() -> None:
            event.at = max(self.gpu, self.host)

        event.record, event.query = record, lambda: event.at <= self.host
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(timing, "torch", made)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.host / 1e3))
    return made


def timed(machine: Machine, hosts: Iterator[float], waits: bool) -> tuple[float, list[int]]:
    """Of a way that takes the GPU 0.05 ms: what is found, and the flushes before each call."""
    flushes: list[int] = []

    def way() -> None:
        flushes.append(machine.flushes)
        machine.flushes = 0
        assert len(flushes) < 500  # it ends
        if waits:
            machine.synchronize()
        machine.launch(next(hosts), 0.05)

    (took,) = timing.times_of([timing.Candidate(way)], GPU)
    return took.gpu, flushes


@pytest.mark.parametrize("later", [[2.0], [0.01, 2.0, 2.0]], ids=["slow", "noisy"])
def test_a_sample_that_the_host_was_late_for_is_not_taken(
    machine: Machine, later: list[float]
) -> None:
    """The flushes are counted by the second call; then the host takes 2 ms, of which 50 hide."""
    hosts = itertools.chain([0.01, 0.01], itertools.cycle(later))
    found, flushes = timed(machine, hosts, waits=False)
    assert found == pytest.approx(0.05)
    assert flushes[2] == 2 and 50 < flushes[-1] <= 128


def test_flushes_are_not_added_for_a_host_that_is_in_time(machine: Machine) -> None:
    found, flushes = timed(machine, itertools.repeat(0.3), waits=False)
    assert found == pytest.approx(0.05)
    assert set(flushes[2:]) == {9}  # 0.3 / 0.04, and one more


def test_a_host_that_is_always_late(machine: Machine) -> None:
    """As where the way synchronises: its time is in what is found, and the queue is not filled."""
    found, flushes = timed(machine, itertools.repeat(0.2), waits=True)
    assert found == pytest.approx(0.25)
    assert 256 <= max(flushes) < 512


@pytest.mark.parametrize("gpu, runs, calls", [(6.0, 9, 0), (0.3, 30, 30)], ids=["long", "short"])
def test_what_takes_long_is_run_a_few_times(
    machine: Machine, gpu: float, runs: int, calls: int
) -> None:
    """The host's time decides nothing where a step's ten calls take less than the GPU."""
    counts = {"run": 0, "call": 0}

    def launch(what: str, host: float) -> None:
        counts[what] += 1
        machine.launch(host, gpu)

    way = timing.Candidate(lambda: launch("run", 0.05), lambda: launch("call", 0.04))
    (took,) = timing.times_of([way], GPU)
    assert took == pytest.approx((gpu, 0.04 if calls else 0.05))
    assert counts == {"run": runs, "call": calls}


# ---- what is remembered --------------------------------------------------------------------------


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the measurements; each gives other figures."""
    count = [0]

    def measure(make_ways: Any, device: Any) -> list[Timing]:
        count[0] += 1
        return [Timing(float(count[0]), 0.5), Timing(2.0)]

    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(timing, "_known", {})
    monkeypatch.setattr(timing, "_machine", lambda device: ("a GPU", str(tmp_path)))
    monkeypatch.setattr(timing, "_measure", measure)
    yield count


def ask(*key: object) -> list[float] | None:
    found = timing.medians(key, list, GPU)
    assert found is None or [took.host for took in found] == [0.5, 0.0]
    return found and [took.gpu for took in found]


def test_measured_once_in_a_process_and_on_a_machine(
    clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("a") == ask("a") == [1.0, 2.0] and ask("b") == [2.0, 2.0]
    monkeypatch.setattr(timing, "_known", {})
    assert ask("a") == [1.0, 2.0] and clock == [2]
    monkeypatch.setattr(timing, "_machine", lambda device: ("another GPU",))
    assert ask("a") == [3.0, 2.0]


DAMAGED = (
    *("", "{", "null", '"x"', '["x"]', "[1.0, 2.0]", "[]", "{}", "[[1.0]]", "[[1.0, 0.5, 2.0]]"),
    *("[[NaN, 0.5]]", "[[1.0, NaN]]", "[[-1.0, 0.5]]", "[[1.0, -0.5]]", "[[-Infinity, 0.5]]"),
    *("[[1.0, Infinity]]", "[[true, 0.5]]", "[[1.0, false]]", '[["1.0", 0.5]]', "[[null, 0.5]]"),
    *('[{"a": 1, "b": 2}]', '["ab"]', f"[[1{'0' * 400}, 0.5]]", f"[[1{'0' * 9000}, 0.5]]"),
    *("[" * 100_000, "\udcff"),
)


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:20])
def test_a_damaged_answer_is_measured_again(
    clock: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    ask("a")
    (file,) = (tmp_path / store.OWN / "plans").iterdir()
    file.write_bytes(os.fsencode(text))
    monkeypatch.setattr(timing, "_known", {})
    assert ask("a") == [2.0, 2.0]


def test_a_less_exact_candidate_stays_so(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Timing(1.0, 0.5), Timing(math.inf)]
    monkeypatch.setattr(timing, "_measure", lambda *_: found)
    for _ in range(2):
        assert timing.medians(["a"], list, GPU) == found
        monkeypatch.setattr(timing, "_known", {})
        monkeypatch.setattr(timing, "_measure", lambda *_: None)


def test_a_cache_that_cannot_be_written_to(
    clock: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "file"))
    assert ask("a") == [1.0, 2.0] == ask("a")
    monkeypatch.setattr(timing, "_known", {})
    assert ask("a") == [1.0, 2.0], "the temporary folder has it"


def test_a_folder_that_cannot_be_written_to_is_read(
    clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    ask("a")
    monkeypatch.setattr(timing, "_known", {})
    monkeypatch.setattr(os, "utime", fails)
    assert ask("a") == [1.0, 2.0]


@pytest.mark.parametrize("place", [".", store.OWN, "plans", "file", "link"])
def test_timings_that_others_may_have_written_are_measured_again(
    clock: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    """A planted "less exact" could be the only thing that keeps a wrong kernel off."""
    ask("a")
    plans = tmp_path / store.OWN / "plans"
    (file,) = plans.iterdir()
    store._warn_untrusted.cache_clear()
    if place == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        paths = {".": tmp_path, store.OWN: plans.parent, "plans": plans, "file": file}
        paths[place].chmod(0o777)
    text = file.read_text()
    monkeypatch.setattr(timing, "_known", {})
    assert ask("a") == [2.0, 2.0]
    is_replaced = place in ("file", "link")
    assert (file.read_text() != text) == is_replaced and "nothing is loaded from" in caplog.text
    monkeypatch.setattr(timing, "_known", {})
    assert ask("a") == [2.0, 2.0]
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_text() == text


@pytest.mark.parametrize("owner, name", [(store, "open"), (os, "replace")])
def test_a_full_cache(
    clock: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, name, full, raising=False)
    assert ask("a") == [1.0, 2.0] == ask("a")
    assert list((tmp_path / store.OWN / "plans").glob("*.json")) == []


def test_too_little_memory_is_not_remembered(
    clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(timing, "_measure", lambda *_: None)
        assert ask("a") is None
    assert ask("a") == [1.0, 2.0]


def a_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As far as `_measure` looks; the states that its generator is given."""
    states: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.append(state))
    return states


def test_random_numbers_that_a_candidate_draws_are_none_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = a_gpu_is_there(monkeypatch)
    monkeypatch.setattr(timing, "allocations_failed", lambda device: 0)
    monkeypatch.setattr(timing, "times_of", lambda candidates, device: [torch.rand(3)])
    before = torch.get_rng_state()
    timing._measure(list, GPU)
    assert torch.equal(torch.get_rng_state(), before) and states == [f"of {GPU}"]


@pytest.mark.parametrize(
    ("said", "failed", "is_short"),
    [
        ("CUDA out of memory", 0, True),
        ("torch_call_dispatcher API call failed", 1, True),  # the allocator knows why
        ("torch_call_dispatcher API call failed", 0, False),
        ("torch_call_dispatcher API call failed", None, False),  # another allocator
        ("an illegal instruction was encountered", 1, False),
    ],
)
def test_what_is_too_large_is_not_timed(
    said: str, failed: int | None, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ooms = [3]

    def make() -> list[timing.Candidate]:
        ooms[0] += failed or 0
        raise RuntimeError(said)

    a_gpu_is_there(monkeypatch)

    def stats(device: torch.device) -> dict[str, int]:
        if failed is None:
            raise RuntimeError("CUDAPluggableAllocator does not support getDeviceStats")
        return {"num_ooms": ooms[0]}

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    if is_short:
        assert timing._measure(make, GPU) is None
    else:
        with pytest.raises(RuntimeError, match=said):
            timing._measure(make, GPU)
