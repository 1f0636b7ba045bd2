"""The benchmark measures what it says, and its files and tables say what was measured."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import slow_but
from torch import Tensor, nn

from benchmarks import harness, measure, report, results, run
from benchmarks.measure import Case
from benchmarks.problems import PROBLEMS, Size
from benchmarks.results import Row

CPU = torch.device("cpu")
TIMING = run.Timing(warmup=1, rep=1, rounds=1)
TINY = {"70": Size((64, 48, 2.0), (8, 64)), "73": Size((8, 16, 3, 2.0), (2, 8, 12, 12))}
EAGER = run.System("eager", lambda model: model)
OURS = run.System(
    "fx_fuser",
    partial(torch.compile, backend="fx_fuser", options={"inner": "aot_eager"}),
    is_ours=True,
)


def row(system: str, ms: float | None = 1.0, **fields: object) -> Row:
    found: Row = {
        "problem": "73",
        "precision": "fp32",
        "mode": "eval-fwd",
        "system": system,
        "input": "x[2, 3]",
        "ms": ms,
        "err_fp64": None if ms is None else 1e-7,
        "gpu": "NVIDIA Test",
        "driver": "1.2",
        "torch": "2.11.0",
        "date": "2026-11-21 10:00",
        "commit": "abc",
    }
    found.update(fields)  # type: ignore[typeddict-item]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(PROBLEMS["73"].modes[-1:], PROBLEMS["73"].modes))
def test_a_group_measures_and_verifies_each_system(mode: str) -> None:
    rows = run.measure_group(
        PROBLEMS["73"], "fp32", mode, CPU, TINY["73"], (EAGER, OURS), timing=TIMING
    )
    assert [r["system"] for r in rows] == ["eager", "fx_fuser"]
    for r in rows:
        assert "error" not in r and r["accurate"]
        assert r["ms"] is not None and r["ms"] > 0
        assert r["err_fp64"] is not None and 0 < r["err_fp64"] < 1e-5
    assert rows[1]["fused"] == 1
    assert [run.complaint(r) for r in rows] == [None, None]


def test_a_system_that_raises_leaves_a_row_and_the_others_go_on() -> None:
    def broken(model: nn.Module) -> measure.Call:
        raise RuntimeError("out of luck\nand more")

    systems = (EAGER, run.System("inductor", broken), OURS)
    rows = run.measure_group(
        PROBLEMS["70"], "fp32", "eval-fwd", CPU, TINY["70"], systems, timing=TIMING
    )
    assert [r["ms"] is None for r in rows] == [False, True, False]
    assert run.complaint(rows[1]) == "RuntimeError: out of luck"


def test_a_row_of_ours_that_is_unfused_or_wrong_fails_the_run() -> None:
    unfused = row("fx_fuser", fused=0, left=0, accurate=True)
    assert run.complaint(unfused) == "nothing was fused"
    assert run.complaint({**unfused, "left": 1}) is None
    wrong = row("fx_fuser", fused=1, left=0, accurate=False)
    assert "beyond the bound" in str(run.complaint(wrong))
    assert run.complaint(row("inductor", accurate=False)) is None


def test_every_system_sees_the_same_numbers() -> None:
    first, second = (
        Case.make(PROBLEMS["73"], TINY["73"], "bf16", "fwd+bwd", CPU) for _ in range(2)
    )
    assert torch.equal(first.x, second.x)
    assert first.grad is not None and second.grad is not None
    assert torch.equal(first.grad, second.grad)
    state = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    once, twice = first.values(first.model), first.values(first.model)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert all(torch.equal(state[n], tensor) for n, tensor in first.model.state_dict().items())
    assert all(leaf.grad is None for leaf in first.leaves())


def test_errors_are_relative_and_vanishing_gradients_have_a_scale() -> None:
    exact = {
        "output": torch.tensor([3.0, 4.0], dtype=torch.float64),
        "grad weight": torch.tensor([0.0, 10.0], dtype=torch.float64),
        "grad bias": torch.tensor([1e-15], dtype=torch.float64),
    }
    found = {"output": torch.tensor([3.0, 4.5]), "grad weight": torch.tensor([0.0, 10.0])}
    found["grad bias"] = torch.tensor([1e-6])
    scale = measure.scales(exact)
    errors = measure.errors(found, exact, scale)
    assert errors["output"] == pytest.approx(0.1)
    assert errors["grad weight"] == 0
    assert errors["grad bias"] == pytest.approx(1e-7, rel=1e-3)
    with pytest.raises(ArithmeticError, match="output"):
        measure.errors({**found, "output": torch.tensor([math.nan, 4.0])}, exact, scale)


@pytest.mark.parametrize(
    ("precision", "eager", "allowed"),
    [("fp32", 1e-7, 4e-7), ("fp32", 1e-6, 1.5e-6), ("bf16", 2e-3, 4e-3), ("fp16", 2e-4, 4e-4)],
)
def test_bounds_come_from_eager_and_on_a_cpu_from_inductor_too(
    precision: str, eager: float, allowed: float
) -> None:
    errors = {"eager": {"output": eager}, "inductor": {"output": 10 * eager}}
    gpu = measure.bounds(precision, torch.device("cuda"), errors)
    cpu = measure.bounds(precision, CPU, errors)
    assert gpu["output"] == pytest.approx(allowed)
    assert cpu["output"] == pytest.approx(max(eager * (15 if precision == "fp32" else 20), 4e-7))
    assert measure.bounds(precision, CPU, {"eager": errors["eager"]}) == gpu


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcde"])
def test_rounds_take_all_in_changing_orders_and_none_twice_running(names: str) -> None:
    seen: list[str] = []

    def timer(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    medians = measure.interleaved({name: partial(timer, name) for name in names}, rounds=9)
    rounds = [seen[i : i + len(names)] for i in range(0, len(seen), len(names))]
    assert len(rounds) == 9
    assert all(sorted(one) == list(names) for one in rounds)
    places = {name: [i + 1 for i, one in enumerate(seen) if one == name] for name in names}
    assert medians == {name: places[name][4] for name in names}
    behind = {(a, b) for a, b in itertools.pairwise(seen)}
    if len(names) > 1:
        assert all(a != b for a, b in behind)
    if len(names) > 2:
        assert all(len({a for a, b in behind if b == name}) > 1 for name in names)


def test_rounds_that_disagree_are_no_ratio() -> None:
    assert measure.ratio_text([2.0, 2.2, 1.9], [1.0, 1.0, 1.0]) == "2.00×"
    assert measure.ratio_text([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]) == "0.50×"
    assert measure.ratio_text([1.0, 1.2, 0.9], [1.0, 1.0, 1.0]) == "same"
    assert measure.ratio_text([3.0], [2.0]) == "1.50×"


def test_float32_settings_are_put_back() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with measure.float32_settings("tf32", cudnn_tf32=False):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_a_group_replaces_all_of_its_rows_and_keeps_the_rest(tmp_path: Path) -> None:
    path = results.path_for("NVIDIA H200", tmp_path / "new")
    assert path.name == "nvidia-h200.json"
    results.replace_group(path, [row("fx_fuser", 3.0), row("inductor", 2.0)])
    results.replace_group(path, [row("eager", 2.0, problem="59")])
    results.replace_group(path, [row("fx_fuser", 1.0), row("eager", 2.0)])
    rows = results.read(path)
    assert [(r["problem"], r["system"], r["ms"]) for r in rows] == [
        ("59", "eager", 2.0),
        ("73", "eager", 2.0),
        ("73", "fx_fuser", 1.0),
    ]


@pytest.mark.slow
def test_a_run_writes_rows_that_say_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SYSTEMS", (EAGER, OURS))
    monkeypatch.setitem(PROBLEMS, "70", replace(PROBLEMS["70"], small=TINY["70"]))
    monkeypatch.setattr(run, "commit_here", lambda: None)
    arguments = ["--problem", "70", "--precision", "fp32", "bf16", "--mode", "eval-fwd"]
    arguments += ["--size", "small", "--results", str(tmp_path), "--rounds", "1", "--rep", "1"]
    with pytest.raises(SystemExit):  # no git, and no --commit: nothing is made up
        run.main(arguments)
    assert run.main([*arguments, "--commit", "0123abc"]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = results.read(path)
    assert [(r["precision"], r["system"]) for r in rows] == [
        ("fp32", "eager"),
        ("fp32", "fx_fuser"),
        ("bf16", "eager"),
        ("bf16", "fx_fuser"),
    ]
    fields = {"problem", "precision", "mode", "system", "ms", "err_fp64"}
    fields |= {"gpu", "torch", "driver", "date", "commit"}
    assert all(fields <= set(r) and r["commit"] == "0123abc" for r in rows)


def pages(folder: Path) -> Path:
    """The folder, with a page of old text for each of the report's."""
    (folder / "docs").mkdir()
    for name, marks in report.PAGES.items():
        (folder / name).write_text(marked(marks, "old\n"))
    return folder


def marked(marks: tuple[str, ...], body: str) -> str:
    """A page with this between each pair of marks."""
    parts = (f"{report.BEGIN.format(mark)}\n{body}{report.END.format(mark)}" for mark in marks)
    return "before\n" + "\nbetween\n".join(parts) + "\nafter\n"


def test_without_results_the_tables_are_empty(tmp_path: Path) -> None:
    arguments = ["--results", str(tmp_path), "--root", str(pages(tmp_path))]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    for name, marks in report.PAGES.items():
        assert (tmp_path / name).read_text() == marked(marks, "")
    assert report.main([*arguments, "--check"]) == 0


@pytest.mark.parametrize("name", report.PAGES)
def test_check_reads_every_page(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--results", str(tmp_path), "--root", str(pages(tmp_path))]
    assert report.main(arguments) == 0
    (tmp_path / name).write_text(marked(report.PAGES[name], "old\n"))
    assert report.main([*arguments, "--check"]) == 1
    assert capsys.readouterr().err.startswith(f"{name} does not show")


def test_the_table_shows_times_speed_ups_and_errors() -> None:
    rows = [row("eager", 4.0), row("inductor", 2.0), row("max-autotune", None, error="E: no")]
    rows += [row("inductor-ieee", 3.0), row("fx_fuser", 1.0, err_fp64=2e-7)]
    lines = report.section(Path("nvidia-test.json"), rows).splitlines()
    assert lines[0].startswith("NVIDIA Test, driver 1.2, torch 2.11.0, measured 2026-11-21 at abc")
    (line,) = [line for line in lines if line.startswith("| #73")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        *("#73 Conv2d_BatchNorm_Scaling", "x[2, 3]", "eval-fwd"),
        *("4.000", "2.000", "failed", "3.000", "1.000"),
        *("**2.00×**", "3.00×", "1.0e-07", "1.0e-07", "2.0e-07"),
    ]


@pytest.mark.slow
def test_check_fails_when_results_change(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    json_file = tmp_path / "nvidia-test.json"
    results.replace_group(json_file, [row("inductor", 2.0), row("fx_fuser", 1.0)])
    arguments = ["--results", str(tmp_path), "--root", str(pages(tmp_path))]
    assert report.main(arguments) == 0
    assert "**2.00×**" in (tmp_path / "docs/kernelbench.md").read_text()
    assert report.main([*arguments, "--check"]) == 0
    results.replace_group(json_file, [row("inductor", 2.0), row("fx_fuser", 0.5)])
    assert report.main([*arguments, "--check"]) == 1


def test_the_accuracy_table_is_what_the_kernels_harness_found(tmp_path: Path) -> None:
    found = (("normal", 64, 1e-7), ("normal", 1024, 1.5e-7), ("outliers", 64, 3e-7))
    sgemm = {"sgemm": 2e-7, "sgemm_worst_row": 3e-7}
    accuracy = [
        {"k": k, "data": data, "error": error, "worst_row": 2 * error, **sgemm}
        for data, k, error in found
    ]
    timing = [{"problem": "#70", "ms": 0.6, "sustained": 0.7, "eager": 2.8, "tflops": 210.0}]
    machine = {"gpu": "NVIDIA Test", "driver": "1.2", "torch": "2.11.0", "date": "2026-11-21 09:00"}
    file = results.linear_path_for("NVIDIA Test", tmp_path)
    file.parent.mkdir()
    file.write_text(
        json.dumps({**machine, "commit": "abc", "accuracy": accuracy, "timing": timing})
    )
    assert report.main(["--results", str(tmp_path), "--root", str(pages(tmp_path))]) == 0
    page = (tmp_path / "docs/kernelbench.md").read_text()
    cells = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in page.splitlines()
        if line.startswith("|")
    }
    assert {
        ("data", "K = 64", "K = 1,024"),
        ("normal", "1.0 (2.0)", "1.5 (2.0)"),
        ("outliers", "3.0 (2.0)", ""),
        ("#70", "0.600", "0.700", "2.800", "210"),
    } <= cells
    assert "The worst single row of an output has an error of 6.0e-07 (outliers, K = 64" in page


def test_check_needs_no_matplotlib_to_see_a_stale_picture(tmp_path: Path) -> None:
    json_file = tmp_path / "nvidia-test.json"
    results.replace_group(json_file, [row("inductor", 2.0), row("fx_fuser", 1.0)])
    files = {json_file: results.read(json_file)}
    texts = report.generated(files, [], tmp_path)
    pages(tmp_path)
    for name, marks in report.PAGES.items():
        (tmp_path / name).write_text(report.render((tmp_path / name).read_text(), marks, texts))
    picture = tmp_path / "nvidia-test.svg"
    picture.write_text("<svg/>")
    assert report.stale(tmp_path, files, texts) == [
        "nvidia-test.svg does not show what nvidia-test.json says"
    ]
    picture.write_text(f"<svg>{report.digest(report.bars(files[json_file]))}</svg>")
    assert report.stale(tmp_path, files, texts) == []


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(SystemExit, match="expect:begin"):
        report.render("no marks", ("expect",), {"expect": ""})


def test_the_seed_models_compute_what_they_are_named_for() -> None:
    model, x = PROBLEMS["70"].make(TINY["70"], CPU)
    z: Tensor = model.get_submodule("gemm")(x)
    torch.testing.assert_close(model(x), z + 2.0 * torch.sigmoid(z))


def test_a_harness_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert harness.parser("conv_sm90").prog == "python -m benchmarks.conv_sm90"
    harness.progress()("the first step")
    assert harness.report(["a table"], []) == 0
    out = capsys.readouterr().out
    assert all(
        text in out for text in ("s  the first step", "NVIDIA Test", "a table", "within its bound")
    )
    assert harness.report([], None) == 0  # nothing was compared
    assert "bound" not in capsys.readouterr().out
    assert harness.report([], [f"case {i}" for i in range(40)]) == 1
    said = capsys.readouterr()
    assert "FAILED case 29\n" in said.err and "and 10 more" in said.err
    assert "bound" not in said.out
