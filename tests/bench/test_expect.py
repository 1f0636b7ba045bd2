"""README's table: which rows stand for which kind of net."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import expect
from benchmarks.conv_nets import Row


def whole(phase: str, precision: str, gpu: float, wall: float) -> dict[str, Any]:
    modes = {
        "inductor": {"gpu_ms": 10.0, "wall_ms": 12.0},
        "fx_fuser": {"gpu_ms": 10.0 / gpu, "wall_ms": 12.0 / wall},
    }
    return {"phase": phase, "precision": precision, "gpu": "NVIDIA Test", "modes": modes}


def of_16_bits(net: str, step: str, gpu: float, wall: float) -> dict[str, Any]:
    times = {"inductor_ms": 10.0, "fx_fuser_ms": 10.0 / gpu}
    times |= {"inductor_wall_ms": 12.0, "fx_fuser_wall_ms": 12.0 / wall}
    return {"net": net, "step": step, "gpu": "NVIDIA Other", **times}


def convolutional(inputs: str, alone: bool, gpu: float, wall: float) -> Row:
    times = {"inductor": {"all": 10.0}, "fx_fuser": {"all": 10.0 / gpu}}
    walls = {"inductor": 12.0, "fx_fuser": 12.0 / wall}
    machine = {"gpu": "NVIDIA Third"}
    row = Row("resnet50", inputs, machine, "2026-11-27", "abc", 1, times, walls)
    row.alone = alone
    return row


def cells(table: str) -> list[list[str]]:
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_kind_has_its_rows() -> None:
    rows = [whole("train", "highest", 4.0, 2.0), whole("train", "highest", 1.0, 8.0)]
    rows += [whole("train", "high", 1.5, 1.25), whole("eval", "ieee", 9.0, 9.0)]
    halves = [of_16_bits("bert", "eval", 2.0, 1.5), of_16_bits("resnet50", "eval", 1.5, 0.5)]
    halves += [of_16_bits("no such net", "eval", 9.0, 9.0)]
    images = [convolutional("fp32", True, 3.0, 2.5), convolutional("fp32", False, 9.0, 9.0)]
    images += [convolutional("bf16", True, 9.0, 9.0)]
    assert cells(expect.table(expect.kinds(rows, halves, images))) == [
        [
            *("fp32", "transformers", "training", "**4.00×**", "2.00–8.00"),
            *("2 of 2", "2.00×", "Test"),
        ],
        [
            *("fp32, TF32 allowed", "transformers", "training", "**1.25×**", "1.25–1.25"),
            *("1 of 1", "1.50×", "Test"),
        ],
        [
            *("fp32, TF32 convolutions", "torchvision", "inference", "**2.50×**"),
            *("2.50–2.50", "1 of 1", "3.00×", "Third"),
        ],
        [
            *("bf16", "transformers, DLRM, speech", "inference", "**1.50×**", "1.50–1.50"),
            *("1 of 1", "2.00×", "Other"),
        ],
        [
            *("bf16", "convolutional nets", "inference", "**0.50×**", "0.50–0.50"),
            *("0 of 1", "1.50×", "Other"),
        ],
    ]


@pytest.mark.parametrize("field", ["fx_fuser_ms", "fx_fuser_wall_ms"])
def test_a_row_without_a_time_is_left_out(field: str) -> None:
    row = {**of_16_bits("bert", "eval", 2.0, 1.5), field: None}
    assert expect.kinds([], [row], []) == []


def test_the_picture_has_a_dot_for_each_net() -> None:
    rows = [of_16_bits("bert", "eval", 2.0, 1.5), of_16_bits("gpt2", "eval", 2.0, 1.25)]
    drawn = expect.picture(expect.kinds([], rows, []))
    assert drawn.count("<circle") == 2
    assert "transformers, DLRM, speech, inference, bf16" in drawn
    assert f">{(1.5 * 1.25) ** 0.5:.2f}×</text>" in drawn
    slower = [of_16_bits("bert", "eval", 2.0, 1.4), rows[1]]
    assert expect.picture(expect.kinds([], slower, [])) != drawn
    assert expect.picture([]) == ""
