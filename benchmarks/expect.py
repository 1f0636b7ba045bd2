"""README's table and picture: what a user runs, and what to expect of it, from the rows of all
whole nets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import nets16_tables, tables
from benchmarks.conv_nets import Row as ConvRow
from benchmarks.nets16_models import NETS

MODES = ("inductor", "fx_fuser")
WORTH = 1.05  # of wall time: a gain that a user notices
PICTURE = "expect.svg"  # in the folder of results


@dataclass(frozen=True)
class Gain:
    """One net's ratios of Inductor's time to fx_fuser's."""

    gpu: float
    wall: float
    device: str


@dataclass(frozen=True)
class Kind:
    """What a user runs, and the gain of each net of this kind."""

    precision: str
    nets: str
    step: str
    gains: Sequence[Gain]


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


def kinds(
    whole: Sequence[Mapping[str, Any]], of_16_bits: Sequence[Any], convolutional: Sequence[ConvRow]
) -> list[Kind]:
    """Those kinds of nets and steps of which there are rows."""
    images = _convolutional(convolutional, "fp32")
    transformers, convolutions = "transformers, DLRM, speech", "convolutional nets"
    found = (
        Kind("fp32", "transformers", "training", _whole(whole, "train", "highest")),
        Kind("fp32", "transformers", "inference", _whole(whole, "eval", "highest")),
        Kind("fp32, TF32 allowed", "transformers", "training", _whole(whole, "train", "high")),
        Kind("fp32, TF32 convolutions", "torchvision", "inference", images),
        Kind("AMP", transformers, "training", _of_16_bits(of_16_bits, "train", False)),
        Kind("AMP", convolutions, "training", _of_16_bits(of_16_bits, "train", True)),
        Kind("bf16", transformers, "inference", _of_16_bits(of_16_bits, "eval", False)),
        Kind("bf16", convolutions, "inference", _of_16_bits(of_16_bits, "eval", True)),
    )
    return [kind for kind in found if kind.gains]


def table(of: Sequence[Kind]) -> str:
    """A line for each kind; empty if there is none."""
    lines = []
    for kind in of:
        gpu, wall = [g.gpu for g in kind.gains], [g.wall for g in kind.gains]
        spread = f"{min(wall):.2f}–{max(wall):.2f}"
        many = sum(ratio >= WORTH for ratio in wall)
        lines.append([
            kind.precision, kind.nets, kind.step, f"**{tables.factor(tables.mean(wall))}**", spread,
            f"{many} of {len(wall)}", tables.factor(tables.mean(gpu)),
            ", ".join(sorted({tables.short_name(gain.device) for gain in kind.gains})),
        ])  # fmt: skip
    if not lines:
        return ""
    heads = ["precision", "nets", "step", "wall time", "range", f"{WORTH}× or more", "GPU time"]
    return tables.table(lines, [*heads, "measured on"], 3)


def picture(of: Sequence[Kind]) -> str:
    """The table's wall times as SVG, a dot for each net; empty if there is no kind."""
    if not of:
        return ""
    ratios = [gain.wall for kind in of for gain in kind.gains]
    low, high = min(0.9, *ratios), max(2.0, *ratios)
    left, right, top, step = 330, 700, 40, 30  # of the axis, and from row to row
    bottom = top + step * len(of)

    def across(ratio: float) -> float:
        return round(left + (right - left) * math.log(ratio / low) / math.log(high / low), 1)

    parts = [f'<rect width="780" height="{bottom + 40}" fill="white"/>']
    for tick in (tick for tick in (0.5, 1, 1.5, 2, 3, 4, 5, 10) if low <= tick <= high):
        x, color = across(tick), "#444" if tick == 1 else "#ddd"
        parts.append(f'<path d="M{x} {top - 10}V{bottom}" stroke="{color}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick}×</text>')
    for row, kind in enumerate(of):
        y = top + step * row + 10
        wall = [gain.wall for gain in kind.gains]
        x = across(tables.mean(wall))
        label = f"{kind.nets}, {kind.step}, {kind.precision}"
        parts.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end">{label}</text>')
        parts += [
            f'<circle cx="{across(ratio)}" cy="{y}" r="5" fill="#2a6fb0" fill-opacity="0.45"/>'
            for ratio in sorted(wall)
        ]
        parts.append(f'<path d="M{x} {y - 11}V{y + 11}" stroke="#c2410c" stroke-width="3"/>')
        mean = tables.factor(tables.mean(wall))
        parts.append(f'<text x="{right + 20}" y="{y + 4}" font-weight="bold">{mean}</text>')
    said = "Inductor's wall time over fx_fuser's: a dot for each net, a line for the mean"
    parts.append(f'<text x="390" y="16" text-anchor="middle">{said}</text>')
    size = f'width="780" height="{bottom + 40}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        f"{body}\n</svg>\n"
    )
