"""Loss curves of eager and fx_fuser over real training runs:  python -m benchmarks.training

Two nets (benchmarks/nets.py), AdamW, fp32 and bf16 autocast. Eager mode trains with several seeds,
which give a spread; fx_fuser trains with the first of them. Fails if its curve is farther from
eager's with the same seed than eager's own seeds are apart. Both start from the same weights and
see the same batches. Curves are means over windows of 25 steps.

Writes `training/<gpu>.json` and a picture next to it, if matplotlib is installed. Nets and
precisions may run at once, each with its own `--results`; `--join` merges their records.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser  # noqa: F401  (registers the backend when it is not installed)
from benchmarks import measure, results
from benchmarks.nets import Net, small_nets
from benchmarks.run import commit_here

WINDOW = 25
PRECISIONS = ("fp32", "bf16")

Options = dict[str, Any]


@dataclass
class Curves:
    """A net in a precision. Each curve has the mean loss of every window of steps."""

    net: str
    precision: str
    eager: list[list[float]]  # a curve per seed
    fx_fuser: list[float]  # with the first of the seeds
    sites: int

    def spread(self) -> list[float]:
        """How far eager's seeds are apart, in each window."""
        return [max(found) - min(found) for found in zip(*self.eager)]

    def distance(self) -> float:
        """The largest distance from eager with the same seed, in spreads of the same window.

        Infinite if a loss is NaN.
        """
        pairs = zip(self.fx_fuser, self.eager[0], self.spread())
        found = [abs(ours - theirs) / max(spread, 1e-12) for ours, theirs, spread in pairs]
        return max(found) if all(map(math.isfinite, found)) else math.inf


def train(
    net: Net,
    compiled: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    precision: str,
    seed: int,
    steps: int,
    device: torch.device,
) -> list[float]:
    torch.manual_seed(seed)
    model = net.make().to(device)
    run = compiled(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=net.rate)
    generator = torch.Generator(device).manual_seed(seed)
    losses = []
    for _ in range(steps):
        batch = net.batch(generator)
        half = torch.autocast(device.type, torch.bfloat16)
        with half if precision == "bf16" else nullcontext():
            loss = net.loss(run, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    means = torch.stack(losses)[: steps // WINDOW * WINDOW].view(-1, WINDOW).mean(1)
    return [float(mean) for mean in means]


def compare(
    net: Net,
    precision: str,
    seeds: int,
    steps: int,
    device: torch.device,
    options: Options,
) -> Curves:
    eager = [train(net, lambda m: m, precision, seed, steps, device) for seed in range(seeds)]
    torch._dynamo.reset()
    before = counters["fx_fuser"][net.pattern]

    def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] = torch.compile(
            model, backend="fx_fuser", options=options
        )
        return found

    ours = train(net, compiled, precision, 0, steps, device)
    return Curves(net.name, precision, eager, ours, counters["fx_fuser"][net.pattern] - before)


def draw(found: list[Curves], record: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"no picture without matplotlib; with it, run --join {path}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    title = "{gpu}, torch {torch}, {date}, {commit}".format(**record)
    figure, axes = pyplot.subplots(1, len(found), figsize=(3.4 * len(found), 3), squeeze=False)
    for one, plot in zip(found, axes[0]):
        at = [WINDOW * (i + 0.5) for i in range(len(one.fx_fuser))]
        for i, curve in enumerate(one.eager):
            plot.plot(at, curve, color="0.7", label=None if i else "eager, other seeds")
        plot.plot(at, one.eager[0], color="black", label="eager")
        plot.plot(at, one.fx_fuser, "--", color="tab:green", label="fx_fuser")
        plot.set_title(f"{one.net}, {one.precision}", fontsize=9)
        plot.set_xlabel("step")
    axes[0][0].set_ylabel("loss")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"))
    pyplot.close(figure)


def join(parts: list[Path], folder: Path) -> int:
    """Merges the records of parts from one machine and commit into one record and picture."""
    records = [json.loads(path.read_text()) for path in parts]
    curves = [curve for record in records for curve in record.pop("curves")]
    if any(record != records[0] for record in records):
        print("the records differ in machine, date, commit or steps", file=sys.stderr)
        return 1
    path = results.path_for(records[0]["gpu"], folder)
    results.write(path, {**records[0], "curves": curves})
    draw([Curves(**curve) for curve in curves], records[0], path)
    print(f"wrote {path}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    nets = {net.name: net for net in small_nets()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--net", nargs="+", choices=nets, default=list(nets))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--plan", choices=("measure", "always"), default="always")
    parser.add_argument("--results", type=Path, default=results.FOLDER / "training")
    parser.add_argument("--commit", help="the measured commit, if there is no git")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="the records of parts")
    args = parser.parse_args(arguments)
    if args.join:
        return join(args.join, args.results)
    if args.steps < WINDOW or args.seeds < 2:
        parser.error(f"a curve needs {WINDOW} steps and a spread two seeds")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.size == "small":
        nets = {net.name: net for net in small_nets(scale=4)}
    # "always": fused kernels run, although at this size the library's may be as fast.
    options: Options = {"strict": True, "plan": args.plan, "cpu_ops": True}
    found, failures = [], []
    for name in args.net:
        for precision in args.precision:
            start = time.perf_counter()
            one = compare(nets[name], precision, args.seeds, args.steps, device, options)
            found.append(one)
            print(
                f"{name} {precision}: loss {one.eager[0][0]:.3f} → eager {one.eager[0][-1]:.4f}, "
                f"fx_fuser {one.fx_fuser[-1]:.4f}; at most {one.distance():.2f} of the spread over "
                f"{args.seeds} seeds apart; {one.sites} sites; {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if one.sites != nets[name].sites:
                failures.append(f"{name} {precision}: {one.sites} sites fused")
            if not one.distance() <= 1:
                failures.append(f"{name} {precision}: the curves differ")
    here = measure.machine(device)
    path = results.path_for(here["gpu"], args.results)
    curves = [asdict(one) for one in found]
    commit = args.commit or commit_here()
    record = results.save(path, here, commit, steps=args.steps, curves=curves)
    draw(found, record, path)
    print(f"wrote {path}")
    return results.verdict(failures)


if __name__ == "__main__":
    sys.exit(main())
