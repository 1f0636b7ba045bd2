"""The sweep over real nets' convolutions draws what it says, and judges by the right peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import conv_sweep, measure
from benchmarks.results import Row


def test_cases_differ_fit_and_are_the_same_for_a_seed() -> None:
    cases = conv_sweep.draw(100, seed=0)
    names = [f"{c.problem.name} {c.precision} {c.mode}" for c in cases]
    assert len(set(names)) == 100
    assert cases == conv_sweep.draw(100, seed=0) != conv_sweep.draw(100, seed=1)
    assert {c.precision for c in cases} == {"fp32", "bf16", "fp16"}
    for case in conv_sweep.draw(5, seed=0, largest=10**5):
        model, x = case.problem.make(case.problem.full, torch.device("cpu"))
        y = model(x)
        assert y.numel() <= 10**5
        last = case.problem.channels_last
        assert x.is_contiguous(memory_format=torch.channels_last) or not last


def rows(fused: int, accurate: bool, **times: float) -> list[Row]:
    found: list[Row] = []
    for system, ms in times.items():
        ours = {"fx_fuser": "fx_fuser", "tuned": conv_sweep.TUNED.name}
        name = ours.get(system, system.replace("_", "-"))
        row = Row(problem="a", precision="fp32", mode="eval-fwd", system=name, ms=ms, err_fp64=1e-7)
        row["accurate"] = accurate or name != "inductor"
        if system in ours:
            row["fused"], row["left"] = fused, 1 - fused
        found.append(row)
    return found


@pytest.mark.parametrize(
    "fused, accurate, times, ratio",
    [
        (1, False, {"inductor": 1.0, "inductor_ieee": 3.0, "fx_fuser": 2.0}, 0.5),
        (0, False, {"inductor": 1.0, "inductor_ieee": 3.0, "fx_fuser": 1.0}, 1.0),
        (1, True, {"inductor": 1.0, "max_autotune": 0.5, "fx_fuser": 1.0, "tuned": 0.5}, 1.0),
        (0, True, {"inductor": 1.0, "max_autotune": 0.5, "fx_fuser": 1.0, "tuned": 1.0}, 0.5),
        (1, True, {"inductor": 0.5, "max_autotune": 0.5, "fx_fuser": 1.0, "tuned": 0.5}, 0.5),
    ],
)
def test_the_peer_is_inductor_in_the_same_mode(
    fused: int, accurate: bool, times: dict[str, float], ratio: float
) -> None:
    line, reason = conv_sweep.judged(rows(fused, accurate, **times))
    assert line["over Inductor"] == ratio
    assert (reason is None) == (ratio >= conv_sweep.SLOWEST)


@pytest.mark.parametrize("fused", [1, 0])
def test_what_is_left_alone_is_not_judged_by_its_error(fused: int) -> None:
    found = rows(fused, True, inductor=1.0, fx_fuser=1.0)
    found[-1]["accurate"] = False
    _, reason = conv_sweep.judged(found)
    assert (reason is None) == (not fused)


@pytest.mark.slow
def test_a_table_is_written(tmp_path: Path) -> None:
    arguments = ["--cases", "1", "--seed", "3", "--max-autotune", "0", "--largest", "100000"]
    conv_sweep.main([*arguments, "--results", str(tmp_path), "--commit", "abc"])
    (path,) = tmp_path.glob("*.json")
    (line,) = json.loads(path.read_text())["cases"]
    assert line["fx_fuser"] > 0 and line["case"] in path.with_suffix(".md").read_text()


def test_parts_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for i, ratio in enumerate((1.5, 0.5)):
        times = {"inductor": 1.0, "fx_fuser": 1 / ratio}
        line, wrong = conv_sweep.judged(rows(1, True, **times))
        line = {**line, "case": f"case {i}", "wrong": wrong or ""}
        here = measure.machine(torch.device("cpu"))
        conv_sweep.write(tmp_path / f"{i}.json", here, "abc", [line])
        files.append(str(tmp_path / f"{i}.json"))
    assert conv_sweep.main(["--join", *files, "--results", str(tmp_path / "both")]) == 1
    assert "2 cases, 1 failed; over Inductor 0.50× to 1.50×" in capsys.readouterr().out
    (table,) = (tmp_path / "both").glob("*.md")
    assert "- case 1 fp32 eval-fwd: 0.50 of inductor's speed" in table.read_text()


@pytest.mark.slow
def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    cases = conv_sweep.draw(2, seed=3, largest=100_000)
    failed, kept = (
        {"case": c.problem.name, "dtype": c.precision, "mode": c.mode, "over Inductor": 1.0}
        for c in cases
    )
    other = {**kept, "case": "a net"}
    before = [{**failed, "wrong": "slow"}, {**kept, "wrong": ""}, {**other, "wrong": ""}]
    (tmp_path / "before.json").write_text(json.dumps({"cases": before}))
    arguments = ["--cases", "2", "--seed", "3", "--max-autotune", "0", "--largest", "100000"]
    again = ["--again", str(tmp_path / "before.json")]
    conv_sweep.main([*arguments, *again, "--results", str(tmp_path / "after"), "--commit", "def"])
    (path,) = (tmp_path / "after").glob("*.json")
    first, *others = json.loads(path.read_text())["cases"]
    assert first["commit"] == "def"
    assert first["fx_fuser"] > 0
    assert others == before[1:]
