"""Convolutions of real nets, each with BatchNorm and a scale: right, and never slower?

    python -m benchmarks.conv_sweep [--cases 100] [--seed 0] [--max-autotune 10]

A case is drawn from a net's layers, with a batch, a layout, a dtype and a mode; `--nets fp32 bf16`
adds two whole nets. Each is compared with float64, and timed against eager mode and Inductor (in
fp32 also Inductor without TF32); the first ones also in max-autotune, fx_fuser against Inductor. It
must be within the accuracy bound, and reach 0.97 of Inductor's speed in either mode; on a whole net
0.98. What is slower is measured again, only the GPU's part: a layer by itself is mostly host time,
which differs by 20 % between runs of the same code.

Writes `conv_sweep/<gpu>.json` and a table next to it. `--again` repeats what failed there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fx_fuser  # noqa: F401  (registers the backend when it is not installed)
from benchmarks import measure, results
from benchmarks.measure import Case, Machine
from benchmarks.nets import ConvScale, MobileNetV2, ResNet18
from benchmarks.problems import Problem, Size
from benchmarks.results import Row
from benchmarks.run import SYSTEMS, System, Timing, commit_here, complaint, measure_group

SLOWEST = 0.97  # of the peer's speed
SLOWEST_NET = 0.98
ELEMENTS = 2**28  # of an output, at most
BATCHES = (1, 8, 32, 128)
MODES = ("eval-fwd", "train-fwd", "fwd+bwd")
TUNED = System(
    "fx_fuser tuned",
    partial(torch.compile, backend="fx_fuser", mode="max-autotune-no-cudagraphs"),
    is_ours=True,
)


@dataclass(frozen=True)
class Layer:
    net: str
    inputs: int
    outputs: int
    kernel: int
    stride: int
    groups: int
    side: int  # of the input, a square


def _layers(net: str, *shapes: tuple[int, int, int, int, int, int]) -> tuple[Layer, ...]:
    return tuple(Layer(net, *shape) for shape in shapes)


# inputs, outputs, kernel, stride, groups, side
LAYERS = (
    *_layers(
        "ResNet-18", (3, 64, 7, 2, 1, 224), (64, 64, 3, 1, 1, 56), (64, 128, 3, 2, 1, 56),
        (128, 128, 3, 1, 1, 28), (256, 256, 3, 1, 1, 14), (512, 512, 3, 1, 1, 7),
        (64, 128, 1, 2, 1, 56),
    ),
    *_layers(
        "ResNet-50", (64, 64, 1, 1, 1, 56), (64, 256, 1, 1, 1, 56), (256, 128, 1, 1, 1, 56),
        (128, 128, 3, 2, 1, 56), (512, 1024, 1, 2, 1, 28), (1024, 256, 1, 1, 1, 14),
        (2048, 512, 1, 1, 1, 7),
    ),
    *_layers(
        "MobileNetV2", (3, 32, 3, 2, 1, 224), (32, 32, 3, 1, 32, 112), (32, 16, 1, 1, 1, 112),
        (96, 96, 3, 2, 96, 112), (144, 24, 1, 1, 1, 56), (960, 320, 1, 1, 1, 7),
    ),
    *_layers(
        "MobileNetV4", (32, 32, 3, 2, 1, 112), (96, 64, 1, 1, 1, 28), (192, 192, 5, 1, 192, 14),
        (480, 96, 1, 1, 1, 14),
    ),
    *_layers(
        "EfficientNet-B0", (240, 240, 5, 2, 240, 28), (672, 112, 1, 1, 1, 14),
        (1152, 1152, 5, 1, 1152, 7), (40, 240, 1, 1, 1, 28),
    ),
    *_layers(
        "YOLOv8-n", (3, 16, 3, 2, 1, 640), (16, 32, 3, 2, 1, 320), (32, 32, 1, 1, 1, 160),
        (64, 64, 3, 1, 1, 80), (128, 128, 3, 1, 1, 40),
    ),
    *_layers(
        "stem", (3, 32, 3, 1, 1, 224), (4, 32, 3, 1, 1, 128), (3, 64, 3, 1, 1, 32),
        (4, 64, 3, 1, 1, 64), (3, 16, 3, 1, 1, 96),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ConvProblem(Problem):
    """A layer or a net, in a layout."""

    channels_last: bool = False

    def make(self, size: Size, device: torch.device) -> tuple[nn.Module, Tensor]:
        model, x = super().make(size, device)
        if not self.channels_last:
            return model, x
        last: dict[str, Any] = {"memory_format": torch.channels_last}
        return model.to(**last), x.contiguous(**last)


@dataclass(frozen=True)
class DrawnCase:
    problem: ConvProblem
    precision: str
    mode: str


def draw(count: int, seed: int, largest: int = ELEMENTS) -> list[DrawnCase]:
    """Cases that differ; in each the output has `largest` elements at most."""
    choose = random.Random(seed)
    found: dict[str, DrawnCase] = {}
    while len(found) < count:
        layer, batch = choose.choice(LAYERS), choose.choice(BATCHES)
        channels_last = choose.random() < 0.5
        precision, mode = choose.choice(("fp32", "bf16", "fp16")), choose.choice(MODES)
        out_side = (layer.side - 1) // layer.stride + 1
        if batch * layer.outputs * out_side**2 > largest:
            continue
        x = (batch, layer.inputs, layer.side, layer.side)
        groups = f" in {layer.groups} groups" if layer.groups > 1 else ""
        layout = "NHWC" if channels_last else "NCHW"
        name = (
            f"{layer.net} {layer.inputs}→{layer.outputs} {layer.kernel}×{layer.kernel}/"
            f"{layer.stride}{groups}, {batch} of {layer.side}², {layout}"
        )
        size = Size((layer.inputs, layer.outputs, layer.stride, layer.kernel, layer.groups), x)
        problem = _problem(name, ConvScale, size, channels_last)
        found[f"{name} {precision} {mode}"] = DrawnCase(problem, precision, mode)
    return list(found.values())


def _problem(name: str, model: type[nn.Module], size: Size, channels_last: bool) -> ConvProblem:
    pattern = "conv2d_batchnorm_mul"
    return ConvProblem(name, name, model, pattern, size, size, channels_last=channels_last)


def whole_nets(precisions: Sequence[str], batch: int, side: int) -> list[DrawnCase]:
    """Two nets, in both layouts, in evaluation and trained."""
    size = Size((), (batch, 3, side, side))
    return [
        DrawnCase(
            _problem(
                f"{net.__name__}, {batch} of {side}², {'NHWC' if channels_last else 'NCHW'}",
                *(net, size, channels_last),
            ),
            *(precision, mode),
        )
        for precision in precisions
        for net in (ResNet18, MobileNetV2)
        for mode in ("eval-fwd", "fwd+bwd")
        for channels_last in (False, True)
    ]


def judged(rows: Sequence[Row], slowest: float = SLOWEST) -> tuple[dict[str, Any], str | None]:
    """A line of the table, and what is wrong with it."""
    of = {row["system"]: row for row in rows}
    reasons, ratios = [], []
    for name, peer in (("fx_fuser", "inductor"), (TUNED.name, "max-autotune")):
        if name not in of:
            continue
        row, theirs = of[name], of[peer]["ms"] if peer in of else None
        # What is not fused is as exact as Inductor, which is not tested here.
        was_left = row.get("left") and not row.get("fused") and "error" not in row
        reasons.append(None if was_left else complaint(row))
        if not theirs or not row["ms"]:
            reasons.append("nothing to compare with")
            continue
        ratios.append(theirs / row["ms"])
        if ratios[-1] < slowest:
            reasons.append(f"{ratios[-1]:.2f} of {peer}'s speed")
    reason = next(filter(None, reasons), None)
    ours = of["fx_fuser"]
    times = {name: row["ms"] for name, row in of.items()}
    line = {
        "case": ours["problem"],
        "dtype": ours["precision"],
        "mode": ours["mode"],
        "": "fused" if ours.get("fused") else "left",
        **{name: times.get(name) for name in ("eager", "inductor", "inductor-ieee", "fx_fuser")},
        **{name: times.get(name) for name in ("max-autotune", TUNED.name)},
        "over Inductor": min(ratios, default=None),
        "error": ours["err_fp64"],
    }
    return line, reason


def warm(case: DrawnCase, device: torch.device) -> None:
    """Compile, and call once, all that `run_case` times without max-autotune."""
    torch._dynamo.reset()
    made = Case.make(case.problem, case.problem.full, case.precision, case.mode, device)
    for system in SYSTEMS:
        if system.name != "max-autotune" and system.runs(case.problem, case.precision):
            with measure.float32_settings(case.precision, system.cudnn_tf32):
                made.values(system.compile(made.model))


def run_case(case: DrawnCase, device: torch.device, tuned: bool, timing: Timing) -> list[Row]:
    systems = [*SYSTEMS, TUNED]
    if not tuned:
        systems = [system for system in SYSTEMS if system.name != "max-autotune"]
    torch._dynamo.reset()
    where = (case.problem, case.precision, case.mode, device, case.problem.full)
    return measure_group(*where, systems, timing)


def write(path: Path, here: Machine, commit: str | None, lines: Sequence[dict[str, Any]]) -> str:
    """Writes the record and, next to it, its table; returns a summary."""
    record = results.save(path, here, commit, cases=lines)
    failures = failures_of(lines)
    summary = (
        "{gpu}, torch {torch}, {date}, {commit}: ".format(**record)
        + f"{len(lines)} cases, {len(failures)} failed"
    )
    if ratios := sorted(line["over Inductor"] for line in lines if line["over Inductor"]):
        summary += f"; over Inductor {ratios[0]:.2f}× to {ratios[-1]:.2f}×"
        summary += f", median {ratios[len(ratios) // 2]:.2f}×"
    table = tabulate([{**line, "wrong": ""} for line in lines], "keys", "github", floatfmt=".3g")
    failed = "\n".join(f"- {failure}" for failure in failures)
    path.with_suffix(".md").write_text("\n\n".join(filter(None, (summary, failed, table))) + "\n")
    return summary


def _key(line: dict[str, Any]) -> tuple[str, ...]:
    return line["case"], line["dtype"], line["mode"]


def _key_of(case: DrawnCase) -> tuple[str, ...]:
    return case.problem.name, case.precision, case.mode


def failures_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{v['case']} {v['dtype']} {v['mode']}: {v['wrong']}" for v in lines if v["wrong"]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conv_sweep")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-autotune", type=int, default=10, metavar="CASES")
    parser.add_argument("--largest", type=int, default=ELEMENTS, metavar="ELEMENTS")
    parser.add_argument("--results", type=Path, default=results.FOLDER / "conv_sweep")
    parser.add_argument("--commit", help="the measured commit, if there is no git")
    parser.add_argument(
        "--nets", nargs="+", default=[], metavar="PRECISION", help="whole nets, too"
    )
    parser.add_argument("--net-input", nargs=2, type=int, default=(32, 224), metavar="N")
    parser.add_argument(
        "--part", nargs=2, type=int, default=(0, 1), metavar=("K", "N"),
        help="each Nth case, from the Kth on; parts on different GPUs may run at once",
    )  # fmt: skip
    parser.add_argument(
        "--warm", action="store_true",
        help="time nothing, but fill the compilers' caches; several parts may do so at once, and "
        "then $FX_FUSER_CACHE_DIR/fx_fuser-v1/plans can be deleted",
    )  # fmt: skip
    parser.add_argument("--again", type=Path, metavar="FILE", help="the record of another run")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="the records of parts")
    args = parser.parse_args(arguments)
    if args.join:
        parts = [json.loads(path.read_text()) for path in args.join]
        lines = [line for part in parts for line in part["cases"]]
        path = results.path_for(parts[0]["gpu"], args.results)
        print(write(path, parts[0], parts[0]["commit"], lines))
        return results.verdict(failures_of(lines))

    drawn = [
        (case, i < args.max_autotune, SLOWEST)
        for i, case in enumerate(draw(args.cases, args.seed, args.largest))
    ]
    nets = [(case, False, SLOWEST_NET) for case in whole_nets(args.nets, *args.net_input)]
    first, step = args.part
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = measure.machine(device)
    path = results.path_for(here["gpu"], args.results)
    commit = args.commit or commit_here()
    cases = {_key_of(case): (case, *how) for case, *how in [*nets, *drawn][first::step]}
    before = json.loads(args.again.read_text())["cases"] if args.again else []
    found = {_key(line): line for line in before}
    passed = {key for key, line in found.items() if not line["wrong"]}
    for key, (case, tuned, slowest) in cases.items():
        if key in passed:
            continue
        if args.warm:
            warm(case, device)
            continue
        timed = "whole"
        line, wrong = judged(run_case(case, device, tuned, Timing(10, 30, 3)), slowest)
        if wrong and wrong.endswith("speed"):
            timed = "GPU"
            line, wrong = judged(run_case(case, device, tuned, Timing(host=False)), slowest)
        found[key] = {**line, "timed": timed, "commit": commit, "wrong": wrong or ""}
        print(*(f"{v:.4g}" if isinstance(v, float) else v for v in line.values()), flush=True)
        write(path, here, commit, list(found.values()))
    if args.warm:
        return 0
    print(write(path, here, commit, list(found.values())))
    return results.verdict(failures_of(list(found.values())))


if __name__ == "__main__":
    sys.exit(main())
