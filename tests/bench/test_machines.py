"""Files of `python -m fx_fuser --report`, made up here, as the table of docs/gpus.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctors_machines import A100, diagnosed

from benchmarks import machines, report
from fx_fuser.doctor.selftest import Result, Times


def made(**changes: Any) -> dict[str, Any]:
    """What an A100's owner would send in, with these changes of the JSON; all times are made up."""
    found = diagnosed(gpus=(A100,))
    found.tests = [
        Result("fp32 Linear", "split", "cuda:1", "ok", "split by mma.sync"),
        Result("depthwise", "depthwise", "cuda:1", "FAIL", detail="beyond the bound"),
        Result("folded", "folded", "cuda:1", "note"),
    ]
    found.times = [
        Times("fp32 Linear", "split", "cuda:1", "8×4", "split by mma.sync", 3.5, 3.0, 1.5),
        Times("depthwise", "depthwise", "cuda:1", "2×2", "depthwise", 2.0, 2.0, 0.5),
        Times("folded", "folded", "cuda:1", "1×1", left="nothing was fused"),
    ]
    return {**json.loads(found.to_json()), "date": "2026-11-26", **changes}


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_row_for_each_case_with_its_speed_up() -> None:
    name = A100.name
    assert cells(machines.table([made()])) == [
        [name, "split by mma.sync", "fp32 Linear, 8×4", "3.000", "1.500", "2.00×", "ok"],
        [name, "depthwise", "depthwise, 2×2", "", "", "", "**failed**"],
        [name, "folded", "folded, 1×1", "", "", "nothing was fused", "note"],
    ]
    said = f"- {name}: driver 580.159.04, torch 2.15.0+cu132, fx_fuser 0.1.0, 2026-11-26"
    assert said in machines.table([made()])


def test_without_files_there_is_no_table(tmp_path: Path) -> None:
    assert machines.table(machines.read(tmp_path)) == ""


def test_files_are_kept_one_a_gpu_and_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, date in enumerate(("2026-11-26", "2026-11-27")):
        (tmp_path / f"{i}.json").write_text(json.dumps(made(date=date)))
    files = [str(tmp_path / f"{i}.json") for i in range(2)]
    assert machines.main([*files, "--results", str(tmp_path / "results")]) == 0
    (kept,) = machines.read(tmp_path / "results")
    assert kept["date"] == "2026-11-27"
    assert machines.table([kept]) in capsys.readouterr().out
    name = "nvidia-a100-sxm4-80gb-torch-2.15.0-cu132.json"
    assert (tmp_path / "results/machines" / name).exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not from python -m fx_fuser --report"),
        ("{", "is not from python -m fx_fuser --report"),
        (json.dumps({"facts": {}}), "is not from python -m fx_fuser --report"),
        (json.dumps(made(schema=99)), "has schema 99, and this is for 1"),
        (json.dumps(made(times=[])), "has no times"),
        (json.dumps(made(times=None)), "has no times"),
    ],
)
def test_what_is_no_report_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    arguments = [str(tmp_path / "x.json"), "--results", str(tmp_path / "results")]
    assert machines.main(arguments) == 1
    assert f"x.json {said}" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_page_has_the_table(tmp_path: Path) -> None:
    kept = tmp_path / machines.FOLDER / "a.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps(made()))
    texts = report.generated({}, [], tmp_path)
    page = (report.ROOT / "docs/gpus.md").read_text()
    assert machines.table([made()]) in report.render(page, report.PAGES["docs/gpus.md"], texts)
