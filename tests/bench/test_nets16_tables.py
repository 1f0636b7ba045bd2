"""Which rows of nets in 16 bits fall short, and their tables, from made-up figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from nets16_rows import made_up

from benchmarks import nets16, nets16_tables, report


@pytest.mark.parametrize(
    ("inductor", "again", "same_graphs", "is_slower"),
    [
        (7.8, None, True, True),  # 0.975×, and nothing tells how Inductor's own differ
        (7.8, 7.8, True, True),
        (7.8, 8.1, False, False),  # the other one is slower than fx_fuser
        (8.1, 7.8, False, False),
        (7.6, 7.8, False, True),
        (7.5, 7.7, True, True),  # 0.9625× of the slower one, while the two differ by 2.7 %
        (7.7, 7.9, True, False),  # 0.9875×, by 2.6 %
        (7.9, 7.7, True, False),
    ],
)
def test_inductors_own_two_compilations_say_what_is_slower(
    inductor: float, again: float | None, same_graphs: bool, is_slower: bool
) -> None:
    gpu = made_up(inductor_ms=inductor, again_ms=again, same_graphs=same_graphs)
    wall = {"inductor_wall_ms": inductor, "again_wall_ms": again, "fx_fuser_wall_ms": 8.0}
    for row in (gpu, made_up(**wall, same_graphs=same_graphs)):
        assert bool(nets16_tables.slower(row)) is is_slower


@pytest.mark.parametrize(
    ("inductor", "spread", "is_slower"),
    [
        (8.0, 0.0, False),
        (7.93, 0.02, False),  # 0.991×: the spread is wide
        (7.91, 0.02, True),  # 0.989×: below 0.99, however wide it is
        (7.95, 0.002, True),  # 0.994×: less than 1 by more than the spread
        (7.99, 0.002, False),
        (7.95, None, True),
    ],
)
def test_slower_is_below_099_or_below_1_less_the_spread(
    inductor: float, spread: float | None, is_slower: bool
) -> None:
    row = made_up(inductor_ms=inductor, spread=spread)
    assert bool(nets16_tables.slower(row)) is is_slower
    wall = made_up(inductor_wall_ms=inductor * 10 / 8, spread=spread)
    assert bool(nets16_tables.slower(wall)) is is_slower
    assert all(said.startswith("wall 0.9") for said in nets16_tables.slower(wall))


def test_check_lists_the_rows_that_fall_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, rows = tmp_path / "gpu.json", [made_up()]
    out.write_text(json.dumps(rows))
    assert nets16.main(["--check", "--out", str(out)]) == 0
    rows.append(made_up("bert", fx_fuser_ms=11.0))
    rows.append(made_up("llama", fx_fuser_peak_mib=1011.0))
    rows.append(made_up("dlrm", error="1 beyond the contract: output 0: strides"))
    rows.append(made_up("unet3d", inductor_ms=None, fx_fuser_ms=None, spread=None))
    out.write_text(json.dumps(rows))
    assert nets16.main(["--check", "--out", str(out)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "FAILED bert train: GPU 0.909×, not 0.995",
        "FAILED llama train: peak memory 1.01×",
        "FAILED dlrm train: 1 beyond the contract: output 0: strides",
    ]


# ---- the tables ---------------------------------------------------------------------------------


def test_without_rows_there_is_no_text() -> None:
    assert nets16_tables.section([]) == ""


def test_pages_show_nets_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [made_up("gpt2"), made_up("bert", fx_fuser_ms=5.0), made_up("hf_vit_b", "eval")]
    rows.append(made_up("resnet50", fx_fuser_ms=10.0, error="1 beyond the contract"))
    monkeypatch.setattr(nets16_tables, "CASES", set(map(nets16_tables.key, rows)))
    path = tmp_path / nets16_tables.PATH
    path.parent.mkdir()
    path.write_text(json.dumps(rows))
    texts = report.generated({}, [], tmp_path)
    section = texts["nets16"].splitlines()
    assert section[0] == "## Nets in 16 bits"
    (first,) = (line for line in section if line.startswith("| gpt2"))
    assert cells(first) == [
        *("gpt2", "8 × 1024", "train", "amp", "Test", "10.00", "8.00", "**1.25×**", "± 0.5 %"),
        *("1.20×", "+0.5 %", "20.0", "25.0", "3.0e-03", "4.0e-03", ""),
    ]
    (last,) = (line for line in section if line.startswith("| resnet50"))
    assert cells(last)[-3:] == ["", "4.0e-03", "1 beyond the contract"]
    assert "nets16" in report.PAGES["docs/results.md"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_not_measured_is_counted() -> None:
    rows = [made_up(net, step=step) for net, step in sorted(nets16_tables.CASES)]
    assert f"Measured: {len(rows) - 1} of the {len(rows)} cases" in nets16_tables.section(rows[1:])


def test_readme_says_how_many_are_slower_and_how_much() -> None:
    rows = json.loads((report.results.FOLDER / nets16_tables.PATH).read_text())
    slower = [row for row in rows if nets16_tables.slower(row)]
    text = " ".join((report.ROOT / "README.md").read_text().split())
    said = re.search(
        r"Inductor\*\*: (\d+) of the (\d+) .*? by up to ([\d.]+) % in GPU time and ([\d.]+) %", text
    )
    assert said
    least = [
        min(nets16_tables.ratio(row, what) or 1 for row in slower) for what in ("ms", "wall_ms")
    ]
    assert [int(said[1]), int(said[2])] == [len(slower), len(rows)]
    assert [said[3], said[4]] == [f"{100 * (1 - least[0]):.1f}", f"{100 * (1 - least[1]):.0f}"]
