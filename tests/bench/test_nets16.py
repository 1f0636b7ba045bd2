"""The benchmark of nets in 16 bits at a CPU's size, and its tables from made-up figures."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets16_rows import made_up
from torch import nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

from benchmarks import harness, lowered, net16, nets16, nets16_tables, results, turnstile
from benchmarks.net16 import Row, as_inductors, case_of, exact_of, measured, spread
from benchmarks.nets16_models import NETS, STEPS, Net16, without_dropout
from benchmarks.run import System
from benchmarks.turnstile import Turnstile
from fx_fuser.planning import timing
from fx_fuser.verify.accuracy import Observed, compare

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
INDUCTOR = System("inductor", lambda model: torch.compile(model, backend="aot_eager"))
EAGER = System("inductor", lambda model: model)
HERE = {"inner": "aot_eager", "cpu_ops": True}
OURS = System(
    "fx_fuser", lambda m: torch.compile(m, backend="fx_fuser", options=HERE), is_ours=True
)
KEYS = [
    "net",
    "step",
    "precision",
    "config",
    "inductor_ms",
    "fx_fuser_ms",
    "spread",
    "inductor_wall_ms",
    "fx_fuser_wall_ms",
    "inductor_compile_s",
    "fx_fuser_compile_s",
    "inductor_peak_mib",
    "fx_fuser_peak_mib",
    "error",
    "eager_error",
    "sites",
    "same_graphs",
    "again_ms",
    "again_wall_ms",
    "gpu",
    "torch",
    "date",
    "commit",
]
# Gradients of a small convolutional net in AMP are rounding noise: eager's own are off by their own
# size, and which of the two is farther off is luck. A GPU judges these at full size.
CASES = [
    (name, step)
    for name, net in NETS.items()
    for step in net.phases
    if step == "eval" or net.package != "torchvision"
]
QUICK = [("dlrm", "train")]


def net(name: str) -> Net16:
    pytest.importorskip(NETS[name].package)
    return NETS[name]


def broken_by(change: Any) -> System:
    """fx_fuser, if it changed the outputs so."""

    def compiled(model: nn.Module) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return change(model(*args, **kwargs))

        return call

    return System("fx_fuser", compiled, is_ours=True)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(*c, marks=() if c in QUICK else (pytest.mark.slow, pytest.mark.combination))
        for c in CASES
    ],
)
def test_a_net_is_compared_and_timed(name: str, step: str) -> None:
    row = measured(net(name), step, CPU, small=True, rivals=(INDUCTOR, OURS), seconds=0.01)
    assert list(row) == KEYS
    assert (row["net"], row["step"], row["precision"]) == (name, step, NETS[name].precisions[step])
    assert isinstance(row["error"], float), row["error"]
    assert row["eager_error"] is not None and row["eager_error"] > 1e-5
    taken = [key for key in KEYS if key.endswith(("wall_ms", "compile_s"))]
    assert all(row[key] > 0 for key in taken if key != "again_wall_ms")  # type: ignore[literal-required]
    assert row["again_wall_ms"] is None
    assert row["inductor_ms"] is None and row["fx_fuser_peak_mib"] is None  # a GPU's
    assert row["config"].startswith("2 × ") and "small" in row["config"]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_in_16_bits(step: str) -> None:
    case = case_of(net("dlrm"), step, CPU, small=True)
    (output,) = case.step(case.model).values()
    assert output.dtype == torch.bfloat16
    weights = {p.dtype for p in case.model.parameters()}
    assert weights == {torch.bfloat16 if step == "eval" else torch.float32}
    assert all(v.dtype == torch.float64 for v in case.exact().everything().values())


def test_the_statistics_of_training_are_compared_and_put_back() -> None:
    class Small(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))

    of = replace(NETS["unet_blocks"], make=lambda small, dropout: Small())
    case = case_of(of, "train", CPU, small=True)
    case.model.train()
    before = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
    seen, again = case.observe(case.model), case.observe(case.model)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} == seen.state.keys()
    assert all(torch.equal(seen.state[n], again.state[n]) for n in seen.state)
    assert all(torch.equal(b, before[n]) for n, b in case.model.named_buffers())
    assert not any(torch.equal(b, before[n]) for n, b in seen.state.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y.t().contiguous().t(), "output 0: strides (1, 2), in eager (3, 1)"),
        (lambda y: y * 1.1, "output 0: error "),
    ],
    ids=["strides", "values"],
)
def test_what_is_not_as_in_eager_is_named(change: Any, said: str) -> None:
    of = replace(NETS["dlrm"], make=lambda small, dropout: nn.Linear(13, 3))
    row = measured(of, "eval", CPU, True, (EAGER, broken_by(change)), 0.01)
    assert isinstance(row["error"], str)
    assert row["error"].startswith(f"1 beyond the contract: {said}")
    assert row["inductor_wall_ms"] is not None  # its times are kept


def test_strides_may_be_inductors_and_values_are_compared_all_the_same() -> None:
    eager, inductors, found, wrong = (Observed({"0": torch.arange(6.0).view(2, 3)}) for _ in "1234")
    for other in (inductors, found, wrong):
        other.outputs["0"] = torch.arange(6.0).view(2, 3).t().contiguous().t()
    wrong.outputs["0"] = wrong.outputs["0"] * 1.1
    assert as_inductors(found, eager, eager) == []
    assert compare(found, eager, eager) == ["output 0: strides (1, 2), in eager (3, 1)"]
    assert as_inductors(found, eager, inductors) == ["0"] and not compare(found, eager, eager)
    inductors.outputs["0"] = inductors.outputs["0"].t().contiguous().t()
    assert as_inductors(wrong, eager, inductors) == ["0"]
    (fault,) = compare(wrong, eager, eager)
    assert fault.startswith("output 0: error")


def test_what_raises_is_named() -> None:
    def out_of_memory(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nat length")

    row = measured(NETS["dlrm"], "eval", CPU, True, (EAGER, broken_by(out_of_memory)), 0.01)
    assert row["error"] == "OutOfMemoryError: CUDA out of memory"
    assert nets16_tables.faults(row) == ["OutOfMemoryError: CUDA out of memory"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "swin_t", "wav2vec2", "efficientnet_b0"])
def test_values_are_compared_without_dropout(name: str) -> None:
    case = case_of(net(name), "train", CPU, small=True)
    assert without_dropout(case.model) > 0 == without_dropout(case.model)
    first, second = case.observe(case.model), case.observe(case.model)
    assert all(torch.equal(g, second.grads[n]) for n, g in first.grads.items())


def test_a_row_is_judged_without_dropout() -> None:
    layers = nn.Linear(13, 32), nn.Dropout(0.5), nn.Linear(32, 3)
    of = replace(NETS["dlrm"], make=lambda small, dropout: nn.Sequential(*layers))
    row = measured(of, "train", CPU, True, (EAGER, broken_by(lambda y: y)), 0.01)
    assert row["error"] == row["eager_error"] and layers[1].p == 0


def test_a_row_without_dropout_compiles_no_net_again() -> None:
    layers = nn.Linear(13, 32), nn.Dropout(0.5), nn.Linear(32, 3)
    of = replace(NETS["dlrm"], make=lambda small, dropout: nn.Sequential(*layers))
    compiled = []
    ours = System("fx_fuser", lambda m: compiled.append(m) or m, is_ours=True)  # type: ignore[func-returns-value]
    row = measured(of, "train", CPU, True, (EAGER, ours), 0.01, dropout=False)
    assert len(compiled) == 1 and row["config"].endswith("; no dropout")
    assert row["error"] == row["eager_error"]
    layers[1].p = 0.5
    measured(of, "train", CPU, True, (EAGER, ours), 0.01)
    assert len(compiled) == 3


def test_float64_of_fewer_items_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = net16.Case.exact

    def exact(case: net16.Case) -> Any:
        if len(case.batch["x"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(case)

    monkeypatch.setattr(net16.Case, "exact", exact)
    case = case_of(NETS["dlrm"], "eval", CPU, small=True)
    part, seen = exact_of(case)
    assert len(part.batch["x"]) == 1 == len(seen.outputs["0"]) and len(case.batch["x"]) == 2
    row = measured(NETS["dlrm"], "eval", CPU, True, (EAGER, broken_by(lambda y: y)), 0.01)
    assert row["config"].endswith("; errors of 1 items") and isinstance(row["error"], float)


def test_caches_are_cold_and_the_users_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", "/tmp/theirs")
    with net16.cold_caches():
        inside = os.environ["FX_FUSER_CACHE_DIR"]
        assert inside != "/tmp/theirs" and not os.listdir(inside)
    assert os.environ["FX_FUSER_CACHE_DIR"] == "/tmp/theirs" and not Path(inside).exists()
    monkeypatch.delenv("FX_FUSER_CACHE_DIR")
    with net16.cold_caches():
        pass
    assert "FX_FUSER_CACHE_DIR" not in os.environ


# ---- what is beside it --------------------------------------------------------------------------


def test_the_spread_is_half_the_range_of_the_ratio() -> None:
    assert spread([10.0, 10.2, 9.8], [10.0, 10.0, 10.0]) == 0.02
    assert spread([10.0, 12.0], [5.0, 6.0]) == 0.0


def test_inductor_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return gm.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    torch._dynamo.reset()
    row = measured(
        net("dlrm"), "eval", CPU, True, (EAGER, broken_by(lambda y: y)), 0.01, twice=True
    )
    assert len(compiled) == 1 and row["again_wall_ms"] > 0 and row["again_ms"] is None  # type: ignore[operator]
    model = nn.Linear(3, 3)
    for _ in range(2):
        net16.again(INDUCTOR).compile(model)(torch.ones(3))
    assert len(compiled) == 3
    said = nets16_tables.section([made_up(same_graphs=True, again_ms=8.0, again_wall_ms=12.0)])
    assert "± 0.5 %, same graphs, Inductor again 1.25× and 1.00×" in said


@pytest.mark.slow
@pytest.mark.parametrize("other", [{}, {"factor": 3.0}, {"rows": 5}, {"strided": True}])
def test_the_graphs_that_inductor_lowers_are_told_apart(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a C++ compiler takes seconds")

    monkeypatch.setattr(GraphLowering, "__init__", stop)

    def graphs(factor: float = 2.0, rows: int = 4, strided: bool = False) -> list[str]:
        found: list[str] = []
        x = torch.randn(6, rows).t() if strided else torch.randn(rows, 6)
        torch._dynamo.reset()
        with fresh_cache(), lowered.seen(found), pytest.raises(Exception, match="takes seconds"):
            torch.compile(lambda x: (x * factor).sin())(x)
        return found

    assert len(graphs()) == 1
    assert (graphs() == graphs(**other)) is (not other)


def test_merge_takes_rows_of_other_commits(tmp_path: Path) -> None:
    out, part = tmp_path / "gpu.json", tmp_path / "part.json"
    out.write_text(json.dumps([made_up("gpt2"), made_up("resnet18", "eval"), made_up("bert")]))
    newer = made_up("gpt2", fx_fuser_ms=7.0, commit="123")
    part.write_text(json.dumps([newer, made_up("hf_vit_b", "eval", commit="123")]))
    before = tmp_path / "before.json"  # of which another file has a row, too
    before.write_text(json.dumps([made_up("gpt2", commit="000")]))
    assert nets16.main(["--merge", str(before), str(part), "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(row["net"], row["commit"][:3]) for row in rows] == [
        *(("hf_vit_b", "123"), ("bert", "abc"), ("gpt2", "123"), ("resnet18", "abc"))
    ]
    assert rows[2] == newer


# ---- the command --------------------------------------------------------------------------------


def test_rows_are_written_as_they_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    done: list[int] = []

    def stand_in(net: Net16, step: str, *_: Any, **__: Any) -> Row:
        done.append(len(json.loads(out.read_text())) if out.exists() else 0)
        error = "ValueError: no" if net.name == "bert" else 1e-3
        return made_up(net.name, step, error=error)

    monkeypatch.setattr(net16, "measured", stand_in)
    monkeypatch.setattr(net16, "warm_up", lambda device: None)
    arguments = ["--here", "--only", "gpt2", "bert", "dlrm", "--step", "train", "--commit", "abc"]
    assert nets16.main([*arguments, "--out", str(out)]) == 1
    assert done == [0, 1, 2]
    rows = json.loads(out.read_text())
    assert [(row["net"], row["commit"]) for row in rows] == [
        *(("bert", "abc"), ("gpt2", "abc"), ("dlrm", "abc"))
    ]


def test_a_process_a_net_until_time_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[Sequence[str], float]] = []

    def spawn(arguments: Sequence[str], seconds: float, gpu: None, place: None) -> str:
        assert gpu is place is None
        seen.append((arguments, seconds))
        return "not finished in 9 s" if "bert" in arguments else ""

    monkeypatch.setattr(nets16, "spawn", spawn)
    monkeypatch.setattr(Net16, "missing", lambda net: "no timm" * (net.package == "timm"))
    monkeypatch.setattr(harness.Budget, "left", lambda budget: 100.0 - 31 * len(seen))
    arguments = ["--only", "gpt2", "timm_vit_b", "bert", "dlrm", "--step", "train"]
    assert nets16.main([*arguments, "--commit", "abc", "--out", str(tmp_path / "o")]) == 1
    assert [a[1] for a, _ in seen] == ["gpt2", "bert"] and [s for _, s in seen] == [100.0, 69.0]
    out, err = capsys.readouterr()
    assert "timm_vit_b train: skipped, no timm" in out
    assert err.splitlines() == [
        "FAILED bert train: not finished in 9 s",
        "FAILED dlrm train: no time was left",
    ]
    seen.clear()
    both = ["--only", "gpt2", "dlrm", "--small", "--commit", "abc", "--out", str(tmp_path / "o")]
    nets16.main(both)
    assert [[a[1], a[3]] for a, _ in seen] == [["gpt2", "eval"], ["dlrm", "eval"]]  # then train
    assert all(a[-1] == "--small" for a, _ in seen)


def test_several_gpus_take_rows_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: dict[str, int | None] = {}
    both = threading.Barrier(2)

    def spawn(
        arguments: Sequence[str], seconds: float, gpu: int | None, place: Turnstile | None
    ) -> str:
        assert place is not None and place.folder.is_dir()
        name, out = arguments[1], Path(arguments[5])
        both.wait(20)  # neither ends before the other has begun
        taken[name] = gpu
        row = {"net": name, "step": "train"}
        results.replace_rows(out, [row], nets16_tables.key, nets16_tables.place)
        return "beyond the contract" if name == "bert" else ""

    monkeypatch.setattr(nets16, "spawn", spawn)
    out = tmp_path / "rows.json"
    arguments = ["--only", "gpt2", "bert", "--step", "train", "--gpus", "2", "--commit", "abc"]
    assert nets16.main([*arguments, "--out", str(out)]) == 1
    assert sorted(taken.values(), key=str) == [0, 1]
    assert [row["net"] for row in json.loads(out.read_text())] == ["bert", "gpt2"]
    assert capsys.readouterr().err == "FAILED bert train: beyond the contract\n"


WORKS = """
import sys, time
from pathlib import Path
while True:
    Path(sys.argv[1]).write_text(str(time.monotonic()))
    time.sleep(0.01)
"""
MEASURES = """
import sys, time
from pathlib import Path
from benchmarks.turnstile import Turnstile
place, seen = Turnstile(Path(sys.argv[1])), Path(sys.argv[2])
with place.alone(), place.alone():
    begin = seen.read_text()
    time.sleep(0.5)
    print(seen.read_text() == begin, flush=True)
    time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def place(tmp_path: Path) -> Turnstile:
    (tmp_path / "turnstile").mkdir()
    return Turnstile(tmp_path / "turnstile")


def began(place: Turnstile, program: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    start = functools.partial(
        subprocess.Popen, command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    return place.enter(start)


def goes_on(seen: Path) -> bool:
    begin, end = seen.read_text(), time.monotonic() + 20
    while seen.read_text() == begin and time.monotonic() < end:
        time.sleep(0.02)
    return seen.read_text() != begin


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_who_times_something_is_alone(tmp_path: Path, place: Turnstile, is_killed: bool) -> None:
    """And the others go on, also if it is killed meanwhile."""
    seen = tmp_path / "seen"
    seen.write_text("")
    works = began(place, WORKS, seen)
    try:
        assert goes_on(seen)
        measures = began(place, MEASURES, place.folder, seen, 100 if is_killed else 0)
        assert measures.stdout is not None and measures.stdout.readline() == b"True\n"
        if is_killed:
            measures.kill()
        assert measures.wait(20) == (-9 if is_killed else 0)
        place.leave(measures)
        assert goes_on(seen)
    finally:
        works.kill()
        works.wait(20)
    place.leave(works)
    assert [path.name for path in place.folder.iterdir()] == ["lock"]


def test_what_chooses_kernels_is_timed_alone(
    place: Turnstile, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[signal.Signals] = []
    monkeypatch.setattr(turnstile.Turnstile, "_signal", lambda _, number: stopped.append(number))
    monkeypatch.setattr(turnstile, "SETTLE_S", 0.0)
    monkeypatch.setattr(timing, "times_of", lambda *_: [])  # needs a GPU
    with place.clocks():
        assert timing.times_of([], torch.device("cpu")) == []
    assert stopped == [signal.SIGSTOP, signal.SIGCONT]
    assert timing.times_of([], torch.device("cpu")) == [] and len(stopped) == 2


@pytest.mark.slow
def test_nets_that_compile_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--only", "dlrm", "mamba2", "--step", "eval", "--small", "--commit", "abc"]
    assert nets16.main([*arguments, "--out", str(out), "--seconds", "600", "--jobs", "2"]) == 0
    rows = json.loads(out.read_text())
    assert [row["net"] for row in rows] == ["mamba2", "dlrm"]
    assert all(row["inductor_wall_ms"] > 0 and row["inductor_compile_s"] is None for row in rows)


@pytest.mark.slow
def test_a_net_has_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--only", "dlrm", "--step", "eval", "--small", "--commit", "abc"]
    assert nets16.main([*arguments, "--out", str(out), "--seconds", "600"]) == 0
    (row,) = json.loads(out.read_text())
    assert list(row) == KEYS and row["commit"] == "abc"
    assert nets16.spawn([*arguments, "--out", str(out)], 0.01) == "not finished in 0 s"


def test_list_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert nets16.main(["--list", "--only", "dlrm", "mamba2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "dlrm train amp: 32768 × 13, 26 tables of 1000 × 64"
    assert len(lines) == 3 and lines[2].startswith("mamba2 eval bf16: ")
