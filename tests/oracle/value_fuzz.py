"""Random programs against their own operations: what is fused computes what the user wrote.

    python tests/oracle/value_fuzz.py --count 20000 --seed 0 --train --jobs 2
    python tests/oracle/value_fuzz.py --seed 1234 --count 1 --show
    python tests/oracle/value_fuzz.py --auto --count 2000
    python tests/oracle/value_fuzz.py --device cuda --count 2000 --structures 60

Most programs are read without Dynamo: torch.fx records the calls, an interpreter runs them for the
values in between, and `fx_fuser.backend.fuse` rewrites the graph, which then runs as it is. A
fraction, `--compiled`, goes through torch.compile. A CUDA kernel takes a while to compile: there, a
run has a number of structures, compiled in one go, with many values each.

What is right is said by `value_oracle`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from value_check import Illegal, Loaded, check, chosen_options, names, recorded
from value_patterns import registered
from value_programs import Program, generate
from value_shares import Shares
from value_writer import NothingToWrite

from fx_fuser import reading
from fx_fuser.errors import BuildError
from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.read.view import View
from fx_fuser.options import Options
from fx_fuser.planning import plan

MAGNITUDES = ("mixed", "ordinary", "extreme")
UNCOMPARED = 0.005  # of the programs, at most
UNBUILT = 0.05  # of the programs, at most
# Of the elements of programs of ordinary magnitudes, at most: of all, and of each anchor's results
# and gradients where those are not few.
OPEN, OPEN_BOUNDED, FEW = 0.005, 0.02, 1000

# ---- failures ----------------------------------------------------------------------------------


def runnable(program: Program, seed: int, device: str, message: str) -> str:
    """The program with its inputs as a script of its own."""
    lines = [f"    {n}={_literal(v)}," for n, v in program.inputs.items()]
    told = "\n".join(f"# {line}" for line in message.splitlines())
    return f"""\
# seed {seed}, {program.label}
{told}
import torch
import torch.nn.functional as F
from math import inf, nan

{program.source}

inputs = dict(
{chr(10).join(lines)}
)
stays = {program.stays}
inputs = {{n: v if n in stays else v.detach().to("{device}").requires_grad_(v.requires_grad)
          for n, v in inputs.items()}}

if __name__ == "__main__":  # with tests/oracle and the checkout on PYTHONPATH
    from value_patterns import registered

    # the pattern, after a {program.pattern.kind}: {program.pattern.epilogue}
    with registered(), torch.set_grad_enabled({program.train}):
        print("eager", forward(**inputs)[0])
        options = {chosen_options(program, "aot_eager")}
        run = torch.compile(forward, backend="fx_fuser", options=options)
        print("fused", run(**inputs)[0])
        print(torch._dynamo.utils.counters["fx_fuser"])
"""


def _literal(tensor: Tensor) -> str:
    """A tensor's values and strides as an expression."""
    held = tensor.detach().as_subclass(Tensor)
    elements = held.untyped_storage().nbytes() // held.element_size()
    data = held.as_strided((elements,), (1,), 0).tolist()
    text = f"torch.tensor({data}, dtype={held.dtype})"
    text += f".as_strided({tuple(held.shape)}, {held.stride()}, {held.storage_offset()})"
    return text + (".requires_grad_()" if tensor.requires_grad else "")


# ---- many --------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Of one run. sites: those that fused. whole: tails that were fused to their end, of programs
    without Dynamo. illegal: seeds of programs that eager mode refuses. uncompared: reason →
    programs. unbuilt: kernel → programs, see `Unbuilt`. ordinary, extreme: what was compared of
    programs of such magnitudes."""

    programs: int = 0
    illegal: int = 0
    sites: int = 0
    whole: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    uncompared: Counter[str] = field(default_factory=Counter)
    unbuilt: Counter[str] = field(default_factory=Counter)
    ordinary: Shares = field(default_factory=Shares)
    extreme: Shares = field(default_factory=Shares)
    reached: dict[str, int] = field(default_factory=dict)  # pattern → sites


@dataclass(frozen=True)
class Run:
    """What to try. structures: how many there are; 0: each seed has its own.

    compiled: the fraction that goes through torch.compile, with `inner`. first: the first seed.
    only: names of patterns; default: all. auto: their tails are grown, see `generate`.
    """

    train: bool = False
    dtype: str = ""
    device: str = "cpu"
    structures: int = 0
    compiled: float = 0.0
    inner: str = "aot_eager"
    seconds: float = math.inf
    first: int = 0
    bounded: bool = False
    only: tuple[str, ...] = ()
    auto: bool = False
    magnitudes: str = "mixed"

    @property
    def is_exact(self) -> bool:
        """Are results compared to the bit?"""
        return self.device == "cpu" and not self.bounded and self.inner != "inductor"

    def is_extreme(self, seed: int) -> bool:
        """Of `mixed` one in two is."""
        half = random.Random(f"magnitudes {seed}").random() < 0.5
        return half if self.magnitudes == "mixed" else self.magnitudes == "extreme"

    def program(self, seed: int, patterns: Sequence[Pattern]) -> Program:
        patterns = [p for p in patterns if not self.only or p.name in self.only]
        structure = self.first + seed % self.structures if self.structures else seed
        of_run = (self.train, self.dtype, self.device, self.auto)
        return generate(structure, seed, patterns, *of_run, self.is_extreme(seed))


class Unbuilt(Exception):
    """A kernel would be slow (it spills registers, say), so it is refused, and without `strict` the
    site runs as the user wrote it: no value is wrong."""


def _unbuilt(program: Program, error: Exception) -> Unbuilt | None:
    cause = getattr(error, "inner_exception", error)  # of torch.compile
    said = str(cause)
    is_slow = "compile fewer operands" in said and " failed:" not in said  # which is no C++
    if not (isinstance(cause, BuildError) and is_slow):
        return None
    return Unbuilt(f"{said.partition(' (')[0]}, of {program.label.partition(':')[0]}")


def attempt(
    run: Run, seed: int, patterns: Sequence[Pattern], shares: Shares | None = None
) -> tuple[Program, str]:
    """One program, and what is wrong with it. Raises NothingToWrite, Illegal or Unbuilt."""
    program = run.program(seed, patterns)
    compiled = random.Random(f"compiled {seed}").random() < run.compiled
    try:
        inner = run.inner if compiled else ""
        return program, check(program, run.device, seed, inner, run.bounded, shares)
    except Illegal:
        raise
    except Exception as error:
        if (unbuilt := _unbuilt(program, error)) is not None:
            raise unbuilt from error
        return program, f"{type(error).__name__}: {error}"


def fuzz(
    run: Run, seeds: Sequence[int], report: Callable[[int, Program, str], None] | None = None
) -> Tally:
    """Check the programs of these seeds, until the time is up; report each failure at once."""
    tally, start = Tally(), time.monotonic()
    with registered() as patterns, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if run.structures:
            _compile_kernels(run, patterns)
        for seed in seeds:
            if time.monotonic() - start > run.seconds:
                break
            try:
                shares = tally.extreme if run.is_extreme(seed) else tally.ordinary
                program, message = attempt(run, seed, patterns, shares)
            except (NothingToWrite, Illegal):
                tally.illegal += 1
                continue
            except Unbuilt as error:
                tally.programs += 1
                tally.unbuilt.update([str(error)])
                continue
            tally.programs += 1
            tally.sites += program.fused
            tally.whole += program.whole
            tally.uncompared.update([program.uncompared] if program.uncompared else ())
            name = program.pattern.name
            tally.reached[name] = tally.reached.get(name, 0) + program.fused
            if message:
                tally.failures[seed] = message
                if report is not None:
                    report(seed, program, message)
    return tally


def _compile_kernels(run: Run, patterns: Sequence[Pattern]) -> None:
    """Those of all structures, side by side."""
    matches = []
    for seed in range(run.structures):
        try:
            loaded = Loaded.of(run.program(seed, patterns), run.device)
            gm, *_ = recorded(loaded)
        except Exception:  # no program: the run will tell
            continue
        view = View(gm.graph)
        chosen = chosen_options(loaded.program, "eager")
        options = Options.parse(None, chosen, names())
        active = [] if run.auto else [loaded.program.pattern]
        matches += reading.read_graph(view, active, options).matches
    if matches:
        plan.decide(matches, Options(plan="always", cpu_ops=True))


def merged(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        for name in ("programs", "illegal", "sites", "whole"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.failures.update(tally.failures)
        for mine, theirs in zip(vars(total).values(), vars(tally).values()):
            if isinstance(mine, (Counter, Shares)):
                mine.update(theirs)
    return total


def too_little(run: Run, tally: Tally) -> str:
    """What a run did not look at, if that is more than it may be, or nothing."""
    missed = sum(tally.uncompared.values())
    if missed > max(1, UNCOMPARED * tally.programs):
        return f"{missed} of {tally.programs} programs were not compared: {dict(tally.uncompared)}"
    unbuilt = sum(tally.unbuilt.values())
    if unbuilt > max(1, UNBUILT * tally.programs):
        return f"kernels of {unbuilt} of {tally.programs} programs do not compile"
    limit = OPEN if run.is_exact else OPEN_BOUNDED
    for part, share in tally.ordinary.of_parts(FEW):
        if share > limit:
            return (
                f"of ordinary magnitudes {share:.2%} of the elements were accepted unseen: {part}"
            )
    return ""


def _told(run: Run, seed: int, program: Program, message: str) -> None:
    print(f"\n{runnable(program, seed, run.device, message)}", flush=True)


def _job(run: Run, seeds: Sequence[int]) -> Tally:
    torch.set_num_threads(1)
    return fuzz(run, seeds, lambda *found: _told(run, *found))


def _all_jobs(run: Run, seeds: Sequence[int], jobs: int) -> Iterator[Tally]:
    parts = [seeds[i::jobs] for i in range(jobs)]
    if jobs == 1:
        yield _job(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.starmap(_job, [(run, part) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="seeds to try")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--train", action="store_true", help="with gradients")
    parser.add_argument("--dtype", default="", help="of the net; default: random")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after these")
    parser.add_argument("--compiled", type=float, default=0.02, help="fraction through Dynamo")
    parser.add_argument("--inner", default="aot_eager", help="what compiles those")
    parser.add_argument("--bounded", action="store_true", help="on a CPU too, within the bound")
    parser.add_argument("--only", nargs="*", default=(), help="names of patterns")
    parser.add_argument("--auto", action="store_true", help="random tails, and no named pattern")
    parser.add_argument(
        "--magnitudes",
        choices=MAGNITUDES,
        default="mixed",
        help="mixed: half of each",
    )
    parser.add_argument("--structures", type=int, help="default: 50 on cuda, else one a seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the programs, check nothing")
    given = parser.parse_args()
    structures = given.structures
    if structures is None:
        structures = 50 if given.device == "cuda" else 0
    run = Run(given.train, given.dtype, given.device, structures, given.compiled, given.inner,
              given.seconds, given.seed, given.bounded, tuple(given.only), given.auto,
              given.magnitudes)  # fmt: skip
    seeds = range(given.seed, given.seed + given.count)
    if given.show:
        with registered() as patterns:
            for seed in seeds:
                print(runnable(run.program(seed, patterns), seed, given.device, ""))
        return
    start = time.monotonic()
    tally = merged(list(_all_jobs(run, seeds, given.jobs)))
    spent = time.monotonic() - start
    failures = sorted(tally.failures)
    grown = f"{tally.whole} tails grown to their end, " if run.auto else ""
    for population in ("ordinary", "extreme"):
        for line in getattr(tally, population).lines():
            print(f"{population}: {line}")
    for reason, count in tally.uncompared.items():
        print(f"not compared: {count} programs, {reason}")
    for kernel, count in tally.unbuilt.items():
        print(f"kernel does not compile: {count} programs, {kernel}")
    print(
        f"{tally.programs} programs, {tally.sites} sites fused, {grown}"
        f"{len(failures)} failures {failures[:20]}; "
        f"{'training' if run.train else 'eval'}, {run.device}, {run.dtype or 'all dtypes'}, "
        f"seeds from {given.seed} ({tally.illegal} gave no legal program), "
        f"{tally.programs / spent:.1f} a second"
    )
    fault = too_little(run, tally)
    print(fault, end="\n" if fault else "")
    sys.exit(bool(failures or fault))


if __name__ == "__main__":
    main()
