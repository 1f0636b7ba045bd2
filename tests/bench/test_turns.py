"""Two trees by turns: here both are this one, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import turns


@pytest.mark.slow
def test_a_tree_beside_itself(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = [str(turns.ROOT), "--case", "dlrm/eval", "--rounds", "2"]
    assert turns.main([*arguments, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert row["case"] == "dlrm/eval"
    assert row["old_ms"] > 0 and row["new_ms"] > 0 and row["ratio"] > 0


@pytest.mark.slow
def test_a_tree_that_cannot_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fx_fuser").mkdir()
    (tmp_path / "fx_fuser" / "__init__.py").touch()
    assert turns.main([str(tmp_path), "--case", "dlrm/eval"]) == 1
    assert "FAILED dlrm/eval: old: its process has died" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([str(turns.ROOT), "--case", "no_net/eval"], "'no_net/eval' is not a case"),
        ([str(turns.ROOT), "--case", "mamba2/train"], "'mamba2/train' is not a case"),
        (["/no/such/folder"], "/no/such/folder is not a checkout"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        turns.main(arguments)
    assert said in capsys.readouterr().err
