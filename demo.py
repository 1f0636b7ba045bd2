"""fx_fuser on unmodified models: what is fused, how exact, how fast.

    python demo.py                      the three seed models and a Llama MLP, inference in fp32
    python demo.py --train              training step: gradients and running statistics too
    python demo.py --precision bf16 --problem 59 llama_mlp

The models are in benchmarks/problems.py. Exits non-zero if a model's site is neither fused nor,
because timing shows no gain, left to Inductor; if a value is further from float64 than
docs/accuracy.md allows; or if something fails.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters

import fx_fuser
import fx_fuser.native.compilers
from benchmarks import measure
from benchmarks.measure import Call, Case
from benchmarks.problems import PROBLEMS, Problem
from fx_fuser.errors import BuildError

FOUND = {
    "cpu": "every pattern was found",
    "cuda": "every site was fused, or left to Inductor where timing showed no gain",
}
SHOWN = {"59": "59", "70": "70", "73": "73", "llama_mlp": "llama_mlp_M512"}

Errors = dict[str, float]  # name of a tensor → its relative Frobenius error
Compilers = dict[str, Callable[[nn.Module], Call]]


@dataclass
class Outcome:
    problem: str
    precision: str
    mode: str
    input: str
    fused: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, Errors] = field(default_factory=dict)  # against float64, by system
    from_eager: Errors = field(default_factory=dict)  # fx_fuser against eager
    allowed: Errors = field(default_factory=dict)  # for fx_fuser against float64
    ms: dict[str, float] = field(default_factory=dict)  # by system
    rounds: dict[str, list[float]] = field(default_factory=dict)  # of those medians
    failures: list[str] = field(default_factory=list)


def compilers(device: torch.device) -> Compilers:
    """What runs side by side. Inductor needs a C++ compiler: on a CPU for its kernels, which need
    Python's headers too, on a GPU for Triton's launchers.
    """
    found: Compilers = {"eager": lambda model: model}
    try:
        torch.compile(lambda x: x + 1)(torch.ones(1, device=device))
    except Exception as error:
        what = f"Inductor does not work on {device} ({type(error).__name__})"
        print(f"{what}: left out, inner='aot_eager'")
        return found | {
            "fx_fuser": partial(
                torch.compile, backend="fx_fuser", options={"inner": "aot_eager", "strict": True}
            )
        }
    return found | {
        "inductor": torch.compile,
        "fx_fuser": partial(torch.compile, backend="fx_fuser", options={"strict": True}),
    }


def kernel_compiler() -> str:
    try:
        return fx_fuser.native.compilers.of_kernels().title
    except BuildError as error:
        return f"none: {error}"


def run(
    problem: Problem, precision: str, mode: str, device: torch.device, systems: Compilers
) -> Outcome:
    measure.free_memory()
    size = problem.size(device)
    outcome = Outcome(problem.name, precision, mode, f"x{list(size.x)}")
    print(f"\n=== {problem.name}: {problem.title}, {outcome.input}, {precision}, {mode}\n")
    print(inspect.getsource(problem.model.forward))

    case = Case.make(problem, size, precision, mode, device)
    with torch.set_grad_enabled(case.grad is not None):
        report = fx_fuser.explain(case.model, case.x)
    report.header = None  # main has printed it
    print(report, "\n")
    outcome.fused = [{"pattern": site.pattern, "where": site.where} for site in report.fused]

    exact = case.in_float64()
    reference = exact.values(exact.model)
    scale = measure.scales(reference)
    del exact
    eager = case.values(case.model)
    steps: dict[str, Callable[[], object]] = {}
    for name, compile_with in systems.items():
        print(f"  {name}: compile and check … ", end="", flush=True)
        start, before = time.perf_counter(), settled_sites(problem)
        call = compile_with(case.model)
        values = case.values(call)
        outcome.errors[name] = measure.errors(values, reference, scale)
        if name == "fx_fuser":
            outcome.from_eager = measure.errors(values, eager, scale)
            if settled_sites(problem) - before != 1:
                outcome.failures.append(f"{problem.pattern} was not found once")
        steps[name] = partial(case.step, call)
        print(f"{time.perf_counter() - start:.1f} s")
    del reference, eager, values

    outcome.allowed = measure.bounds(precision, device, outcome.errors)
    for tensor, allowed in outcome.allowed.items():
        error = outcome.errors["fx_fuser"][tensor]
        if error > allowed:
            outcome.failures.append(f"{tensor}: error {error:.1e} is above {allowed:.1e}")

    print("  timing …", flush=True)
    timers = {
        name: partial(measure.median_ms, step, case.leaves(), device, warmup=20, rep=100)
        for name, step in steps.items()
    }
    # A CPU's times differ more from round to round.
    rounds = 3 if device.type == "cuda" else 7
    outcome.rounds = measure.interleaved_rounds(timers, rounds)
    outcome.ms = {name: median(times) for name, times in outcome.rounds.items()}
    return outcome


def error_table(outcomes: list[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        for tensor, allowed in outcome.allowed.items():
            error = outcome.errors["fx_fuser"][tensor]
            against = [outcome.errors.get(name, {}).get(tensor) for name in ("eager", "inductor")]
            numbers = [outcome.from_eager[tensor], *against, error, allowed]
            shown = ["" if number is None else f"{number:.1e}" for number in numbers]
            verdict = "ok" if error <= allowed else "WRONG"
            lines.append([outcome.problem, tensor, *shown, verdict])
    v_float64 = [f"{name}\nv float64" for name in ("eager", "torch.compile", "fx_fuser")]
    header = ["problem", "tensor", "fx_fuser\nv eager", *v_float64, "allowed\nof fx_fuser", ""]
    return tabulate(lines, header, disable_numparse=True)


def settled_sites(problem: Problem) -> int:
    """Sites fused, or left to the inner compiler because timing showed no gain, so far."""
    groups = "fx_fuser", "fx_fuser_left"
    return sum(counters[group][problem.pattern] for group in groups)


def time_table(outcomes: list[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        if not outcome.ms:
            continue
        fused = outcome.rounds["fx_fuser"]
        patterns = ", ".join(site["pattern"] for site in outcome.fused) or "left to Inductor"
        line = [outcome.problem, outcome.input, patterns]
        for name in ("eager", "inductor"):
            line.append(f"{outcome.ms[name]:.3f}" if name in outcome.ms else "")
        line.append(f"{outcome.ms['fx_fuser']:.3f}")
        for name in ("eager", "inductor"):
            found = outcome.rounds.get(name)
            line.append(measure.ratio_text(found, fused) if found else "")
        lines.append(line)
    header = ["problem", "input", "pattern", "eager\nms", "torch.compile\nms", "fx_fuser\nms"]
    header += ["speed-up\nover eager", "speed-up over\ntorch.compile"]
    return tabulate(lines, header, disable_numparse=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", nargs="+", choices=SHOWN, default=list(SHOWN))
    parser.add_argument("--precision", choices=measure.DTYPES, default="fp32")
    parser.add_argument("--train", action="store_true", help="training step: forward and backward")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings here")
    args = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = measure.machine(device)
    print(f"fx_fuser {fx_fuser.__version__}, torch {machine['torch']}, {machine['gpu']}")
    if device.type == "cpu":
        if args.precision == "tf32":
            parser.error("tf32 is a number format of GPUs")
        print(
            "No GPU, so sizes are small, and no speed-up over torch.compile is to be expected:\n"
            "fx_fuser has no kernels for a CPU, and Inductor compiles the models as they are."
        )
    else:
        print(f"Kernels are compiled by {kernel_compiler()}")

    mode = "fwd+bwd" if args.train else "eval-fwd"
    systems = compilers(device)
    outcomes = []
    with measure.float32_settings(args.precision):
        for name in args.problem:
            problem = PROBLEMS[SHOWN[name]]
            try:
                outcome = run(problem, args.precision, mode, device, systems)
            except Exception as error:
                print(f"failed: {error}")
                failure = f"{type(error).__name__}: {error}"
                outcome = Outcome(problem.name, args.precision, mode, "", failures=[failure])
            outcomes.append(outcome)

    print(f"\nRelative Frobenius errors:\n\n{error_table(outcomes)}")
    print('\nMedian times. "same": neither was faster in all rounds:\n')
    print(f"{time_table(outcomes)}\n")
    if args.json:
        found = [machine | vars(outcome) for outcome in outcomes]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    failures = [f"{outcome.problem}: {why}" for outcome in outcomes for why in outcome.failures]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    if not failures:
        print(f"OK: {FOUND[device.type]}, and every error is within the bound of docs/accuracy.md.")
        print("Next, your own model: print(fx_fuser.compare(model, *inputs))")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
