"""README's table: what a user runs, and what to expect of it, from the rows of all whole nets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import nets16_tables, tables
from benchmarks.conv_nets import Row as ConvRow
from benchmarks.nets16_models import NETS

MODES = ("inductor", "fx_fuser")
WORTH = 1.05  # of wall time: a gain that a user notices


@dataclass(frozen=True)
class Gain:
    """One net's ratios of Inductor's time to fx_fuser's."""

    gpu: float
    wall: float
    device: str


def _whole(rows: Iterable[Mapping[str, Any]], phase: str, precision: str) -> list[Gain]:
    found = []
    for row in rows:
        if (row["phase"], row["precision"]) == (phase, precision):
            gpu, wall = (tables.ratio(row, field) for field in ("gpu_ms", "wall_ms"))
            if gpu and wall:
                found.append(Gain(gpu, wall, row["gpu"]))
    return found


def _of_16_bits(rows: Iterable[Any], step: str, convolutional: bool) -> list[Gain]:
    found = []
    for row in rows:
        net = NETS.get(row["net"])
        if net is None or row["step"] != step or net.channels_last != convolutional:
            continue
        gpu, wall = (nets16_tables.ratio(row, what) for what in ("ms", "wall_ms"))
        if gpu and wall:
            found.append(Gain(gpu, wall, row["gpu"]))
    return found


def _convolutional(rows: Iterable[ConvRow], inputs: str) -> list[Gain]:
    """Only nets that ran alone."""
    found = []
    for row in rows:
        if row.inputs == inputs and row.alone:
            gpu = [row.gpu_ms[mode]["all"] for mode in MODES]
            wall = [row.wall_ms[mode] for mode in MODES]
            found.append(Gain(gpu[0] / gpu[1], wall[0] / wall[1], row.machine["gpu"]))
    return found


def table(
    whole: Sequence[Mapping[str, Any]], of_16_bits: Sequence[Any], convolutional: Sequence[ConvRow]
) -> str:
    """A line for each kind of net and step; empty if there are no rows."""
    images = _convolutional(convolutional, "fp32")
    transformers, convolutions = "transformers, DLRM, speech", "convolutional nets"
    kinds = (
        ("fp32", "transformers", "training", _whole(whole, "train", "highest")),
        ("fp32", "transformers", "inference", _whole(whole, "eval", "highest")),
        ("fp32, TF32 allowed", "transformers", "training", _whole(whole, "train", "high")),
        ("fp32, TF32 convolutions", "torchvision", "inference", images),
        ("AMP", transformers, "training", _of_16_bits(of_16_bits, "train", False)),
        ("AMP", convolutions, "training", _of_16_bits(of_16_bits, "train", True)),
        ("bf16", transformers, "inference", _of_16_bits(of_16_bits, "eval", False)),
        ("bf16", convolutions, "inference", _of_16_bits(of_16_bits, "eval", True)),
    )
    lines = []
    for *names, gains in kinds:
        if gains:
            gpu, wall = [g.gpu for g in gains], [g.wall for g in gains]
            spread = f"{min(wall):.2f}–{max(wall):.2f}"
            many = sum(ratio >= WORTH for ratio in wall)
            lines.append([
                *names, f"**{tables.factor(tables.mean(wall))}**", spread,
                f"{many} of {len(gains)}", tables.factor(tables.mean(gpu)),
                ", ".join(sorted({tables.short_name(gain.device) for gain in gains})),
            ])  # fmt: skip
    if not lines:
        return ""
    heads = ["precision", "nets", "step", "wall time", "range", f"{WORTH}× or more", "GPU time"]
    return tables.table(lines, [*heads, "measured on"], 3)
