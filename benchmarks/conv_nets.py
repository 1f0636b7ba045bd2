"""torchvision's classifiers in evaluation, unmodified, compared with Inductor:

    python -m benchmarks.conv_nets [NET …] [--dtype bf16 fp32] [--lock FILE]

128 images of 224², statistics from a training batch; fp32 from contiguous tensors at torch's
defaults (convolutions in TF32), bf16 from channels_last, `fp32-cl` and `bf16-nchw` the other way
round. `bf16-frozen` and `fp32-frozen`: a training step (forward, loss, backward) of a net whose
BatchNorms are in evaluation, as detectors have them. In one process for both modes: GPU time by
kind, wall time, peak memory, the first call with empty caches (fx_fuser's kernels included), and
errors against float64. Several processes may run side by side: whichever times something holds
`--lock`. The rows go to benchmarks/results/conv_nets/gpu.json; `python -m benchmarks.report` puts
them into docs/results.md.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fcntl
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks import gpu_kinds, measure, tables
from benchmarks.big_nets import fill_zeros
from benchmarks.results import FOLDER
from benchmarks.run import commit_here
from fx_fuser.planning import timing

PATH = Path("conv_nets", "gpu.json")
CUDA = torch.device("cuda")
MODES = ("inductor", "fx_fuser")
IMAGES, SIZE, JUDGED = 128, 224, 4
_NAMES = """
alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t
mnasnet1_0 mobilenet_v2 mobilenet_v3_large regnet_x_1_6gf regnet_y_1_6gf resnet50 resnext50_32x4d
shufflenet_v2_x1_0 squeezenet1_0 swin_t vgg16_bn vit_b_16 wide_resnet50_2
"""
NETS = _NAMES.split()
INPUTS: dict[str, tuple[torch.dtype, torch.memory_format]] = {
    "bf16": (torch.bfloat16, torch.channels_last),
    "fp32": (torch.float32, torch.contiguous_format),
    "bf16-nchw": (torch.bfloat16, torch.contiguous_format),
    "fp32-cl": (torch.float32, torch.channels_last),
    "bf16-frozen": (torch.bfloat16, torch.channels_last),
    "fp32-frozen": (torch.float32, torch.contiguous_format),
}
NOISE = 1.02


@dataclass
class Row:
    """By mode: GPU ms by kind and in "all", wall ms, peak MiB beyond parameters and input, s of the
    first call. errors: by mode, and eager's; of a training step those of all gradients as one
    vector. alone: no other process ran."""

    net: str
    inputs: str
    machine: dict[str, Any]
    date: str
    commit: str
    fused: int = 0
    gpu_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    wall_ms: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    alone: bool = False


def is_random(module: nn.Module) -> bool:
    return type(module).__name__.startswith(("Dropout", "StochasticDepth"))


def net_of(name: str) -> tuple[nn.Module, Tensor]:
    """The net with random weights and statistics of a batch, in fp32, and images."""
    import torchvision

    torch.manual_seed(0)
    with_heads = name in ("googlenet", "inception_v3")
    more = {"aux_logits": False, "init_weights": False} if with_heads else {}
    model = torchvision.models.get_model(name, weights=None, **more).to(CUDA)
    x = torch.randn(IMAGES, 3, SIZE, SIZE, device=CUDA)
    settle(model, x[:32])
    return model.eval(), x


def settle(model: nn.Module, x: Tensor) -> None:
    """Gives BatchNorms random parameters and the statistics of these images."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    model.train()
    for module in model.modules():
        if is_random(module):
            module.eval()
    with torch.no_grad():
        for norm in norms:
            norm.momentum = None  # the batch's own
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.2)
        if norms:
            model(x)
    fill_zeros(model)


@contextmanager
def holding(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def freeze(model: nn.Module) -> None:
    """Training mode, except for BatchNorms and what is random."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) or is_random(module):
            module.eval()


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """One call. The logits or, if gradients are enabled, all gradients of a loss as one vector."""
    y = run(x)
    if not torch.is_grad_enabled():
        return y[:JUDGED]
    parameters = list(model.parameters())
    grads = torch.autograd.grad(y.float().square().mean(), parameters)
    return torch.cat([grad.reshape(-1) for grad in grads])


def warm_up(device: torch.device = CUDA) -> None:
    """Do what only a process's first compilation does: imports, Inductor's own processes."""
    with fresh_cache():
        torch.compile(torch.sin)(torch.ones(1000, device=device))


def measured(name: str, inputs: str, commit: str, lock: Path | None) -> Row:
    dtype, form = INPUTS[inputs]
    frozen = inputs.endswith("frozen")
    today = datetime.date.today().isoformat()
    row = Row(name, inputs, dict(measure.machine(CUDA)), today, commit, alone=lock is None)
    with torch.no_grad():
        model, x = net_of(name)
    if frozen:
        freeze(model)
    with torch.set_grad_enabled(frozen):
        wide = copy.deepcopy(model).double()
        exact = step(wide, wide, (x if frozen else x[:JUDGED]).double())
        del wide
        with torch.no_grad():
            model, x = model.to(dtype).to(memory_format=form), x.to(dtype).to(memory_format=form)

        def judge(mode: str, found: Tensor) -> None:
            row.errors[mode] = float((found.double() - exact).norm() / exact.norm())

        judge("eager", step(model, model, x))
        steps = {}
        for mode in MODES:
            counters["fx_fuser"].clear()
            twin = copy.deepcopy(model)
            run = partial(step, twin, torch.compile(twin, backend=mode, dynamic=False), x)
            with fresh_cache():
                torch.cuda.synchronize()
                start = time.perf_counter()
                found = run()
                torch.cuda.synchronize()
                row.compile_s[mode] = time.perf_counter() - start
            judge(mode, found)
            before = torch.cuda.memory_allocated() / 2**20
            row.peak_mib[mode] = measure.peak_mib(run, [], CUDA) - before
            steps[mode] = run
        row.fused = sum(counters["fx_fuser"].values())
        with holding(lock):
            row.gpu_ms = gpu_kinds.medians(steps, [], CUDA)
            row.wall_ms = measure.wall_medians(steps, [], CUDA, budget_s=0.5)
    return row


def faults(row: Row) -> list[str]:
    found = []
    ratio = row.gpu_ms["fx_fuser"]["all"] / row.gpu_ms["inductor"]["all"]
    if ratio > NOISE:
        found.append(f"{ratio:.3f} of Inductor's time")
    allowed = 2 * max(row.errors["eager"], row.errors["inductor"])
    if row.errors["fx_fuser"] > allowed:
        found.append(f"error {row.errors['fx_fuser']:.1e}")
    if row.peak_mib["fx_fuser"] > 1.02 * row.peak_mib["inductor"]:
        found.append(f"peak {row.peak_mib['fx_fuser'] / row.peak_mib['inductor']:.3f}")
    if row.compile_s["fx_fuser"] > 1.3 * row.compile_s["inductor"]:
        found.append("compiles longer")
    return found


def read(folder: Path = FOLDER) -> list[Row]:
    path = folder / PATH
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def _pair(of_mode: Mapping[str, float], digits: int) -> list[str]:
    return [f"{of_mode[mode]:.{digits}f}" for mode in MODES]


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; empty if there are none."""
    if not rows:
        return ""
    cells = []
    for row in rows:
        gpu = {mode: found["all"] for mode, found in row.gpu_ms.items()}
        kinds = row.gpu_ms["fx_fuser"]
        cells.append([
            row.net,
            row.inputs,
            ", ".join(filter(None, ("alone" if row.alone else "", tables.mark(row, rows)))),
            row.fused,
            *_pair(gpu, 3),
            f"{gpu['inductor'] / gpu['fx_fuser']:.2f}×",
            f"{row.wall_ms['inductor'] / row.wall_ms['fx_fuser']:.2f}×",
            ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items() if kind != "all" and ms > 0),
            *_pair(row.compile_s, 1),
            f"{row.peak_mib['fx_fuser'] / row.peak_mib['inductor']:.3f}",
            f"{row.errors['fx_fuser']:.1e} ({row.errors['eager']:.1e})",
            "; ".join(faults(row)),
        ])  # fmt: skip
    heads = ["net", "from", "", "fused", "Inductor, GPU ms", "fx_fuser, GPU ms", "GPU", "wall"]
    heads += ["fx_fuser's ms by kind", "Inductor compiles, s", "fx_fuser, s", "peak"]
    heads += ["error (eager's)", "falls short"]
    said = tables.measured_on(rows)
    found = tabulate(cells, heads, tablefmt="github", disable_numparse=True)
    return f"{said}\n\n{found}"


def write(rows: Sequence[Row], path: Path, lock: Path | None = None) -> None:
    """Adds the rows to those in the file, replacing those of the same nets and inputs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with holding(lock and lock.with_suffix(".rows")):
        known = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
        merged = {(row.net, row.inputs): row for row in (*known, *rows)}
        ordered = sorted(merged.values(), key=lambda row: (row.net, row.inputs))
        path.write_text(json.dumps([asdict(row) for row in ordered], indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conv_nets")
    parser.add_argument("nets", nargs="*", metavar="NET", default=NETS)
    parser.add_argument("--dtype", nargs="+", choices=INPUTS, default=["bf16", "fp32"])
    parser.add_argument("--lock", type=Path, metavar="FILE", help="held while something is timed")
    parser.add_argument("--commit", default=commit_here() or "", help="if there is no git")
    parser.add_argument("--out", type=Path, default=FOLDER / PATH, metavar="FILE")
    chosen = parser.parse_args(arguments)
    times_of = timing.times_of

    def alone(*args: Any) -> list[timing.Timing]:
        with holding(chosen.lock):
            return times_of(*args)

    setattr(timing, "times_of", alone)  # noqa: B010  (the planner's, too)
    warm_up()
    rows = []
    for name in chosen.nets:
        for inputs in chosen.dtype:
            try:
                rows.append(measured(name, inputs, chosen.commit, chosen.lock))
                write(rows[-1:], chosen.out, chosen.lock)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
            except Exception:
                print(f"{name} {inputs}: {traceback.format_exc(limit=-3)}", flush=True)
            measure.free_memory()
    return 1 if any(map(faults, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
