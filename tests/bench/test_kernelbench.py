"""KernelBench's runner, on problem files in its form written here."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import harness, kernelbench, kernelbench_problem, tables
from benchmarks.kernelbench_problem import Problem, Result, Row, measure_problem
from benchmarks.run import System

CPU = torch.device("cpu")
FILE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        {init}

    def forward(self, x, *more):
        {forward}

def get_inputs():
    return {inputs}

def get_init_inputs():
    return {sizes}
"""
LINEAR = {
    "init": "self.gemm = nn.Linear(*sizes)",
    "forward": "z = self.gemm(x); return z * torch.sigmoid(z) * 2.0",
    "inputs": "[torch.rand(6, 16)]",
    "sizes": "[16, 8]",
}
PRODUCT = {
    "init": "pass",
    "forward": "return torch.matmul(x, more[0])",
    "inputs": "[torch.rand(6, 16), torch.rand(16, 6)]",
    "sizes": "[]",
}
TRAINS = {
    "init": "self.norm = nn.BatchNorm1d(*sizes)",
    "forward": "return self.norm(x)",
    "inputs": "[torch.rand(8, 16)]",
    "sizes": "[16]",
}
EAGER = System("eager", lambda model: model)
OURS = System(
    "fx_fuser",
    lambda model: torch.compile(
        model, backend="fx_fuser", options={"inner": "aot_eager", "cpu_ops": True}
    ),
    is_ours=True,
)


def write(folder: Path, name: str, **parts: str) -> None:
    path = folder / "KernelBench" / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FILE.format(**parts))


def only(folder: Path, level: int) -> Problem:
    (problem,) = kernelbench_problem.find(folder, [level])
    return problem


def numbers_of(problem: Problem) -> tuple[nn.Module, list[torch.Tensor]]:
    """By KernelBench's own rules, restated: what the runner must have run on."""
    module = problem.load()
    torch.manual_seed(42)
    sizes = module.get_init_inputs()
    torch.manual_seed(42)
    model = module.Model(*sizes)
    torch.manual_seed(42)
    torch.manual_seed(torch.randint(0, 2**32 - 1, (1,)).item())
    return model, module.get_inputs()


def test_a_problem_is_run_by_its_rules_and_compared_with_float64(tmp_path: Path) -> None:
    write(tmp_path, "level2/59_Swish_Scaling", **LINEAR)
    problem = only(tmp_path, 2)
    seen: list[tuple[torch.Tensor, torch.Tensor, bool, bool]] = []

    def spy(model: nn.Module) -> object:
        def call(x: torch.Tensor) -> torch.Tensor:
            weight = model.get_submodule("gemm").get_parameter("weight")
            seen.append((x, weight, model.training, torch.is_grad_enabled()))
            return model(x)

        return call

    systems = (EAGER, System("inductor", spy), OURS)  # type: ignore[arg-type]
    row = measure_problem(problem, systems, CPU, seconds=60)
    assert "error" not in row and not row["notes"]
    model, (x,) = numbers_of(problem)
    assert torch.equal(seen[0][0], x)
    assert torch.equal(seen[0][1], model.get_submodule("gemm").get_parameter("weight"))
    assert seen[0][2:] == (True, False)
    assert row["linear"] and row["modes"]["fx_fuser"]["fused"] == {"linear_sigmoid_mul_mul": 1}
    for result in row["modes"].values():
        assert "error" not in result and result["matches"] and result["wall_ms"] > 0
        assert 0 < result["err_fro"] < 1e-6 and 0 < result["err_max"] < 1e-6
    assert not tables.faults(row)


def test_a_wrong_result_and_one_that_raises_are_recorded_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    write(tmp_path, "level2/1_Linear", **LINEAR)

    def broken(model: nn.Module) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory\nat length")

    def wrong(model: nn.Module) -> object:
        return lambda x: model(x) + 1e-3

    systems = (EAGER, System("inductor", broken), System("fx_fuser", wrong))  # type: ignore[arg-type]
    row = measure_problem(only(tmp_path, 2), systems, CPU, seconds=60)
    assert row["modes"]["inductor"]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert row["modes"]["fx_fuser"]["matches"] is False
    assert row["modes"]["fx_fuser"]["err_fro"] == pytest.approx(1e-3, rel=1)
    assert "wall_ms" in row["modes"]["eager"] and "wall_ms" not in row["modes"]["inductor"]
    assert not tables.faults(row)  # Inductor's does not match either: there is none
    row["modes"]["inductor"] = {"matches": True}
    assert "not within 1e-4" in tables.faults(row)[0]


@pytest.mark.slow
def test_a_problem_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    write(tmp_path, "level2/1_Linear", **LINEAR)

    def slow(model: nn.Module) -> object:
        try:
            time.sleep(60)
        except Exception:
            pytest.fail("a compiler would have gone on from this")
        return model

    start = time.monotonic()
    systems = (EAGER, System("inductor", slow))  # type: ignore[arg-type]
    row = measure_problem(only(tmp_path, 2), systems, CPU, seconds=0.5)
    assert time.monotonic() - start < 30
    assert row["error"].startswith("Overtime: not finished in")
    assert row["modes"]["eager"]["matches"]
    assert tables.faults(row) == [f"2/1 Linear: {row['error']}"]


def test_float64_of_some_rows_only_where_they_stand_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "level1/1_Product", **PRODUCT)
    write(tmp_path, "level2/2_Trains", **TRAINS)
    monkeypatch.setattr(kernelbench_problem, "EXACT_SECONDS", 1e9)
    product = measure_problem(only(tmp_path, 1), (EAGER,), CPU, seconds=60)
    assert not product["notes"]
    model, inputs = numbers_of(only(tmp_path, 1))
    takes = 2 * kernelbench_problem.size_of(inputs)
    monkeypatch.setattr(kernelbench_problem, "EXACT_BYTES", takes * 0.75)
    exact, said = kernelbench_problem.reference(model, inputs, 0, 0.0)
    assert exact is not None and said == "compared with float64 in 4 rows"
    torch.testing.assert_close(exact[0], (inputs[0].double() @ inputs[1].double())[:4])
    assert kernelbench_problem.errors([model(*inputs)], exact)[0] < 1e-6
    model, inputs = numbers_of(only(tmp_path, 2))
    assert kernelbench_problem.reference(model, inputs, takes, 0.0)[0] is None


def test_dropout_is_noted(tmp_path: Path) -> None:
    write(tmp_path, "level2/3_Dropout", **{**LINEAR, "init": "self.gemm = nn.Dropout()"})
    row = measure_problem(only(tmp_path, 2), (EAGER,), CPU, seconds=60)
    assert row["notes"] == ["draws random numbers: two calls differ"]


def test_errors_ignore_what_is_no_number_in_float64_and_find_what_is_none_beside() -> None:
    exact = torch.tensor([3.0, 4.0, torch.inf], dtype=torch.float64)
    found = torch.tensor([3.0, 4.5, torch.inf])
    assert kernelbench_problem.errors([found], [exact]) == pytest.approx((0.1, 0.125))
    found[0] = torch.nan
    assert not kernelbench_problem.errors([found], [exact])[0] < torch.inf


def test_the_runner_selects_resumes_and_starts_anew_when_the_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "level1/1_Product", **PRODUCT)
    write(tmp_path, "level1/4_Other", **TRAINS)
    write(tmp_path, "level2/10_Linear", **LINEAR)
    write(tmp_path, "level2/9_Raises", **{**LINEAR, "sizes": "[17, 8]"})
    monkeypatch.setattr(kernelbench, "SYSTEMS", (EAGER, OURS))
    monkeypatch.setattr(kernelbench, "MODES", ("eager", "fx_fuser"))
    out = tmp_path / "out.json"
    arguments = [str(tmp_path), "--out", str(out), "--commit", "abc", "--set", "products", "linear"]

    def measured() -> list[tuple[int, int]]:
        return [tables.kernelbench_place(row) for row in json.loads(out.read_text())]

    assert kernelbench.main([*arguments, "--problems", "1-3", "10"]) == 0
    assert measured() == [(1, 1), (2, 10)]
    rows = json.loads(out.read_text())
    assert all(row["commit"] == "abc" and row["gpu"].startswith("CPU") for row in rows)
    assert kernelbench.main([*arguments, "--budget", "1"]) == 0
    assert "no time left for 1/1, 2/9, 2/10" in capsys.readouterr().out
    assert measured() == [(1, 1), (2, 10)]

    started: list[list[str]] = []
    monkeypatch.setattr(kernelbench, "lost", lambda device: True)
    monkeypatch.setattr(kernelbench.os, "execv", lambda _, command: started.append(command))
    assert kernelbench.main([*arguments, "--resume", "--budget", "99"]) == 1
    said = capsys.readouterr()
    assert re.search("FAILED 2/9 Raises: RuntimeError: (addmm: )?mat1 and mat2 shapes", said.err)
    assert measured() == [(1, 1), (2, 9), (2, 10)]
    (again,) = started
    parsed = kernelbench.parser().parse_args(again[3:])
    assert parsed.resume and 0 < parsed.budget < 99 and parsed.out == out


def test_what_is_left_of_a_budget_goes_to_the_others() -> None:
    budget = harness.Budget(100.0)
    share = budget.share(10)
    assert share is not None and 29 < share <= 30
    share = budget.share(2)
    assert share is not None and 99 < share <= 100
    assert harness.Budget(1.0).share(1) is None


def test_set_of_anchors_is_what_has_a_product_or_a_convolution(tmp_path: Path) -> None:
    for i, forward in enumerate(["return x @ more[0]", "return torch.relu(x)", "return x.mm(x)"]):
        write(tmp_path, f"level1/{i + 1}_P", **{**PRODUCT, "forward": forward})
    write(tmp_path, "level1/9_Conv", **{**PRODUCT, "init": "self.c = nn.Conv2d(1, 1, 1)"})
    write(tmp_path, "level1/10_Conv", **{**LINEAR, "init": "self.c = nn.Conv3d(1, 1, 1)"})
    found = kernelbench_problem.find(tmp_path, [1])
    assert [p.number for p in found] == [1, 2, 3, 9, 10]
    assert [p.number for p in found if kernelbench.SETS["anchors"](p)] == [1, 3, 9]


def timed(level: int, number: int, linear: bool, inductor: float, ours: float) -> Row:
    """A fixture: no one measured this."""
    theirs: Result = {"gpu_ms": inductor, "wall_ms": inductor, "err_fro": 1e-6, "matches": True}
    mine: Result = {"gpu_ms": ours, "wall_ms": 2 * ours, "err_fro": 2e-7, "matches": True}
    return {
        "level": level,
        "problem": number,
        "name": "Made_up",
        "linear": linear,
        "on_device": False,
        "notes": [],
        "modes": {"eager": theirs, "inductor": theirs, "fx_fuser": mine},
        "gpu": "NVIDIA Test",
        "driver": "1.2",
        "torch": "2.11.0",
        "date": "2026-11-22 10:00",
        "commit": "abc",
    }


def test_means_are_geometric_and_of_their_group() -> None:
    rows = [timed(2, 12, True, 8.0, 2.0), timed(2, 14, True, 9.0, 1.0), timed(2, 1, False, 1.0, 2)]
    rows += [timed(1, 16, False, 4.0, 2.0), timed(1, 4, False, 1.0, 1.0)]
    said = tables.kernelbench_summary(rows)
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in said.splitlines()]
    assert cells[2][1:] == ["2 of 2", "**6.00×**", "4.00×", "3.00×", "2 of 2"]
    assert cells[3][1:] == ["1 of 1", "**2.00×**", "2.00×", "1.00×", "1 of 1"]
    assert said.endswith("Below 0.98× by GPU time: 2/1 (0.50×).")
    section = tables.kernelbench_section(rows)
    assert section.startswith("NVIDIA Test, driver 1.2, torch 2.11.0, measured 2026-11-22 at abc")
    assert "| 2/12 Made_up" in section and "1.0e-06" in section
