"""The benchmark of whole nets at a CPU's size, and its tables from made-up figures."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu_kinds, harness, report, results, tables, whole_nets
from benchmarks.big_nets import NETS
from benchmarks.run import System
from benchmarks.whole_net import Case, Row, first_step, measure_case
from benchmarks.whole_nets import Job

CPU = torch.device("cpu")
EAGER = System("eager", lambda model: model)
OURS = System(
    "fx_fuser",
    lambda model: torch.compile(
        model, backend="fx_fuser", options={"inner": "aot_eager", "cpu_ops": True}
    ),
    is_ours=True,
)


def net(name: str) -> Any:
    pytest.importorskip("torchvision" if name.startswith("torchvision") else "transformers")
    return NETS[name]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", NETS)
def test_a_step_leaves_gradients_that_are_not_zero(name: str) -> None:
    case, same = (Case.make(net(name), "train", CPU, small=True, dropout=False) for _ in range(2))
    seen, again = case.observe(case.model), same.observe(same.model)
    assert all(torch.equal(seen.grads[n], again.grads[n]) for n in seen.grads)
    weights = [n for n, p in case.model.named_parameters() if p.ndim > 1]
    assert set(weights) <= seen.grads.keys()
    assert all(seen.grads[n].any() for n in weights)
    assert all(p.grad is None for p in case.leaves())
    drops = [m for m in case.model.modules() if isinstance(m, nn.Dropout)]
    assert all(m.p == 0 for m in drops)


def test_the_reference_is_float64_throughout() -> None:
    """Llama's norms ask for float32 by name, which would round the change away."""
    case = Case.make(net("llama"), "train", CPU, small=True, dropout=False)
    exact = case.exact()
    assert all(value.dtype == torch.float64 for value in exact.everything().values())
    moved = copy.deepcopy(case)
    with torch.no_grad():
        factors = 1 + 1e-12 * torch.arange(32, dtype=torch.float64)
        next(moved.model.double().parameters()).mul_(factors)
    change = moved.exact().outputs["logits"] - exact.outputs["logits"]
    assert 0 < float(change.norm() / exact.outputs["logits"].norm()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "phase"), [("llama", "eval"), pytest.param("bert", "train", marks=pytest.mark.slow)]
)
def test_a_case_is_compared_and_timed(name: str, phase: str) -> None:
    systems = (EAGER, OURS)
    row = measure_case(net(name), phase, "highest", systems, CPU, small=True, seconds=0.1)
    assert (row["net"], row["phase"], row["precision"]) == (name, phase, "highest")
    for result in row["modes"].values():
        assert result["wall_ms"] > 0 and result["first_s"] > 0
        assert 0 < result["err"] < 1e-5 and result["accurate"]
        assert ("worst_grad" in result) == (phase == "train")
    if name == "llama":
        assert row["modes"]["fx_fuser"]["fused"]["linear_sigmoid_mul_mul"] == 1
    assert not row["modes"]["eager"]["fused"]


def test_a_mode_that_raises_or_is_wrong_is_recorded_and_the_others_go_on() -> None:
    def broken(model: nn.Module) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nat length")

    def wrong(model: nn.Module) -> Any:
        class Wrong(nn.Module):
            def forward(self, **batch: Any) -> Any:
                output = model(**batch)
                output.logits = output.logits * (1 + 1e-4)
                return output

        return Wrong()

    systems = (EAGER, System("inductor", broken), System("fx_fuser", wrong))
    row = measure_case(net("gpt2"), "eval", "highest", systems, CPU, small=True, seconds=0.1)
    assert row["modes"]["inductor"]["error"] == "OutOfMemoryError: CUDA out of memory"
    ours = row["modes"]["fx_fuser"]
    assert ours["err"] == pytest.approx(1e-4, rel=0.1) and ours["accurate"] is False
    assert ours["faults"][0] == "1 in all" and "wall_ms" in ours
    found = whole_nets.faults(row)
    assert found[0] == "gpt2 eval highest: inductor: OutOfMemoryError: CUDA out of memory"
    assert any("output logits: error" in fault for fault in found)
    with pytest.raises(RuntimeError, match="out of memory"):
        first_step(net("gpt2"), "eval", "highest", systems[1], CPU, small=True)


@pytest.mark.parametrize("inductors", [1e-4, pytest.param(1e-6, marks=pytest.mark.slow)])
def test_an_error_that_is_inductors_too_is_told_apart(inductors: float) -> None:
    def off_by(error: float) -> Any:
        def compiled(model: nn.Module) -> Any:
            def call(**batch: Any) -> Any:
                output = model(**batch)
                output.logits = output.logits * (1 + error)
                return output

            return call

        return compiled

    systems = (EAGER, System("inductor", off_by(inductors)), System("fx_fuser", off_by(1e-4)))
    row = measure_case(net("gpt2"), "eval", "highest", systems, CPU, small=True, seconds=0.1)
    ours, as_bad = row["modes"]["fx_fuser"], inductors == 1e-4
    assert ours["accurate"] is False and ours["as_inductor"] is as_bad
    assert (whole_nets.faults(row) == []) is as_bad
    assert ("as Inductor" in tables.whole_nets_table([row])) is as_bad


@pytest.mark.slow
def test_a_job_has_a_process_of_its_own(tmp_path: Path) -> None:
    net("gpt2")
    job = Job("gpt2", "eval", "high", ("eager",), values=False, small=True)
    row = whole_nets.spawn(job, tmp_path, seconds=300)
    assert row["modes"]["eager"]["wall_ms"] > 0 and row["precision"] == "high"
    with pytest.raises(RuntimeError, match="not finished in"):
        whole_nets.spawn(job, tmp_path, seconds=0.01)


def test_each_case_becomes_a_row_and_a_failure_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str, bool]] = []

    def spawn(job: Job, caches: Path, seconds: float) -> Any:
        assert 0 < seconds <= 500
        warm = (caches / "inductor" / "left").exists()
        seen.append((job.name(), job.compile, warm))  # by several threads
        if job.compile:
            (caches / "inductor").mkdir(parents=True, exist_ok=True)
            (caches / "inductor" / "left").touch()
            return 2.0 if warm else 20.0
        if job.net == "bert":
            raise RuntimeError("exit status -11: nothing said")
        return {**made_up(job.net, job.phase), "precision": job.precision}

    monkeypatch.setattr(whole_nets, "spawn", spawn)
    out = tmp_path / "out.json"
    arguments = ["--nets", "vit_b", "bert", "--compile-times", "vit_b", "--train"]
    arguments += ["--precision", "highest", "high", "--budget", "500"]
    assert whole_nets.main([*arguments, "--out", str(out), "--commit", "abc"]) == 1
    # The modes beside each other, each cold and then warm.
    assert [warm for _, mode, warm in seen if mode == "inductor"] == [False, True]
    assert [warm for _, mode, warm in seen if mode == "fx_fuser"] == [False, True]
    assert all(warm for name, mode, warm in seen if not mode)
    rows = {tables.nets_place(row): row for row in json.loads(out.read_text())}
    assert len(rows) == 4 and all(row["commit"] == "abc" for row in rows.values())
    vit = rows["vit_b", "train", "highest"]
    assert (vit["modes"]["fx_fuser"]["cold_s"], vit["modes"]["fx_fuser"]["warm_s"]) == (20.0, 2.0)
    assert "cold_s" not in rows["vit_b", "train", "high"]["modes"]["fx_fuser"]
    assert rows["bert", "train", "high"]["error"] == "exit status -11: nothing said"
    assert "FAILED bert train highest: exit status -11" in capsys.readouterr().err


def test_a_compile_time_that_was_measured_is_kept_where_the_next_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Counter[str]()

    def spawn(job: Job, caches: Path, seconds: float) -> Any:
        calls[job.compile] += 1
        if job.compile == "fx_fuser" and calls[job.compile] == 2:
            raise RuntimeError("not finished in 3 s")
        return 7.0

    monkeypatch.setattr(whole_nets, "spawn", spawn)
    modes = ("eager", "inductor", "fx_fuser")
    job = Job("vit_b", "eval", "highest", modes, values=False, small=True)
    found = whole_nets.compile_times(job, tmp_path, harness.Budget(9.0))
    assert found == {"inductor": {"cold_s": 7.0, "warm_s": 7.0}, "fx_fuser": {"cold_s": 7.0}}
    said = capsys.readouterr().err
    assert "vit_b eval highest: fx_fuser: no warm compile time: not finished in 3 s" in said
    assert not list(tmp_path.iterdir())


def test_no_job_begins_without_time(tmp_path: Path) -> None:
    job = Job("bert", "train", "highest", ("eager",), values=False, small=True)
    row = whole_nets.measured(job, tmp_path, harness.Budget(0.0), 1, timed=True)
    assert row["error"] == "no time was left"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fx_fuser_linear_split", "ours"),
        ("fx_fuser_conv_direct", "ours"),
        ("triton_poi_fused_convolution_gelu_0", "Triton"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::P)", "attention"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(Params)", "GEMM"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", "GEMM"),
        ("nvjet_tst_128x256_64x4", "GEMM"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "convolution"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)  # fmt: skip
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert gpu_kinds.kind(name) == kind


def test_gpu_time_is_that_of_kernels_copies_and_fills() -> None:
    events = [
        {"cat": "kernel", "name": "triton_red_fused_0", "ts": 4000.0, "dur": 250.0},
        {"cat": "kernel", "name": "fx_fuser_linear_split", "ts": 1000.0, "dur": 1500.0},
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 5000.0, "dur": 50.0},
        {"cat": "gpu_user_annotation", "name": "## Call CompiledFxGraph", "ts": 0, "dur": 9800.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 900.0, "dur": 5.0},
        {"name": "no category"},
    ]
    found = gpu_kinds.by_kind(events)
    assert found == {**dict.fromkeys(tables.KINDS, 0.0), "ours": 1.5, "Triton": 0.25, "other": 0.05}


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    events = [
        {"cat": "kernel", "name": "fx_fuser_linear_split_rows", "ts": 0.0, "dur": 1000.0},
        {"cat": "kernel", "name": "fx_fuser_linear_split", "ts": 100.0, "dur": 2900.0},
        {"cat": "kernel", "name": "triton_poi_fused_0", "ts": 200.0, "dur": 300.0},
    ]
    found = gpu_kinds.by_kind(events)
    assert found == {**dict.fromkeys(tables.KINDS, 0.0), "ours": 3.0}


def made_up(name: str, phase: str) -> Row:
    """A fixture: no one measured this."""
    mode: Any = {"wall_ms": 61.0, "gpu_ms": 60.0, "peak_mib": 1000.0, "err": 1e-6}
    ours: Any = {"wall_ms": 30.5, "gpu_ms": 20.0, "peak_mib": 1010.0, "err": 2e-7}
    ours |= {"accurate": True, "fused": {"auto_linear": 73}, "left": {"auto_linear": 2}}
    ours |= {"kinds": {**dict.fromkeys(tables.KINDS, 0.0), "ours": 15.0, "Triton": 5.0}}
    return {
        "net": name,
        "phase": phase,
        "precision": "highest",
        "batch": "64 × 3 × 224 × 224",
        "modes": {"eager": dict(mode), "inductor": dict(mode), "fx_fuser": ours},  # type: ignore[typeddict-item]
    }


def test_pages_show_whole_nets_and_check_sees_a_change(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name, marks in report.PAGES.items():
        empty = "".join(f"<!-- {m}:begin -->\n<!-- {m}:end -->\n" for m in marks)
        (tmp_path / name).write_text(empty)
    stamp = {"gpu": "NVIDIA Test", "driver": "1.2", "torch": "2.11.0"}
    row = {**made_up("vit_b", "eval"), **stamp, "date": "2026-11-22 10:00", "commit": "abc"}
    at_high = {**row, "precision": "high", "modes": {**row["modes"], "fx_fuser": {"gpu_ms": 48.0}}}
    part = tmp_path / "part.json"
    results.replace_rows(part, [row, at_high], tables.nets_place, tables.nets_place)
    arguments = ["--results", str(tmp_path / "results"), "--root", str(tmp_path)]
    assert report.main([*arguments, "--check"]) == 0  # no results: nothing to show
    assert tables.main([str(part), "--results", str(tmp_path / "results")]) == 0
    assert (tmp_path / "results" / "whole_nets" / "nvidia-test.json").exists()
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0 and report.main([*arguments, "--check"]) == 0
    lines = (tmp_path / "docs/results.md").read_text().splitlines()
    first = lines.index("<!-- whole-nets:begin -->") + 2
    assert lines[first].startswith(
        "NVIDIA Test, driver 1.2, torch 2.11.0, measured 2026-11-22 at abc"
    )
    of_net = [line for line in lines if "| highest" in line]
    (shown, ours) = (cells(line) for line in of_net if "224" in line or "fx_fuser" in line)
    assert shown == [
        *("vit_b", "64 × 3 × 224 × 224", "eval", "highest", "60.00", "60.00", "20.00"),
        *("**3.00×**", "2.00×", "+1.0 %", "1.0e-06", "1.0e-06", "2.0e-07", "yes"),
    ]
    assert ours[4:10] == ["15.00", "0.00", "0.00", "0.00", "5.00", "0.00"]
    assert ours[-1] == "73 auto_linear, 2 left"
    shortest = (tmp_path / "README.md").read_text().splitlines()
    (found,) = (cells(line) for line in shortest if line.startswith("| fp32"))
    assert found[:4] == ["fp32", "transformers", "inference", "**2.00×**"]
    assert found[4:] == ["2.00–2.00", "1 of 1", "3.00×", "Test"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
