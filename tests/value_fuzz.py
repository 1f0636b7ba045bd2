"""Random programs against their own operations: what is fused computes what the user wrote.

    python tests/value_fuzz.py --count 20000 --seed 0 --train --jobs 2
    python tests/value_fuzz.py --seed 1234 --count 1 --show
    python tests/value_fuzz.py --auto --count 2000
    python tests/value_fuzz.py --device cuda --count 2000 --structures 60

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Interpreter, Node
from value_oracle import faults_of
from value_patterns import registered
from value_programs import Named, Program, generate, values
from value_seen import Seen, is_plain, state_faults, unfused_faults
from value_writer import NothingToWrite

import fx_fuser
from fx_fuser import backend, reading
from fx_fuser.graph.match import Match
from fx_fuser.graph.pattern import Pattern
from fx_fuser.graph.view import View
from fx_fuser.options import Options
from fx_fuser.planning import plan
from fx_fuser.planning.case import MatchCase

SLOW_S = 5.0  # reading a program of some forty operations
SPACE = {"torch": torch, "F": F, "inf": math.inf, "nan": math.nan}


class Illegal(Exception):
    """Eager mode refuses the program."""


@dataclass
class Loaded:
    """A program with its functions, and its inputs on the device."""

    program: Program
    space: dict[str, Any]
    inputs: dict[str, Tensor]

    @classmethod
    def of(cls, program: Program, device: str) -> Loaded:
        space = dict(SPACE)
        exec(compile(program.source, "<program>", "exec"), space)
        inputs = {n: _moved(v, device) for n, v in program.inputs.items()}
        return cls(program, space, inputs | {n: program.inputs[n] for n in program.stays})

    def given(self) -> list[Tensor]:
        """The inputs of one run, which writes to the running statistics."""
        return [v.clone() if n.startswith("running") else v for n, v in self.inputs.items()]


def _moved(tensor: Tensor, device: str) -> Tensor:
    if device == "cpu":
        return tensor
    kind, held = type(tensor), tensor.detach().as_subclass(Tensor)
    elements = held.untyped_storage().nbytes() // held.element_size()  # to() would lay it out anew
    whole = held.as_strided((elements,), (1,), 0).to(device)
    placed = whole.as_strided(held.shape, held.stride(), held.storage_offset())
    return placed.as_subclass(kind).requires_grad_(tensor.requires_grad)


# ---- runs --------------------------------------------------------------------------------------


class _Recorder(Interpreter):
    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def _options(program: Program, inner: str) -> dict[str, Any]:
    chosen = {"inner": inner, "cpu_ops": True, "strict": True, "plan": "always"}
    only: dict[str, Any] = {"patterns": [program.pattern.name]}
    if program.auto or program.crowd:
        only = {"patterns": [] if program.auto else None}
    chosen["auto"] = program.auto
    return {**chosen, **only, "save": program.save}


def _seen(loaded: Loaded, given: Sequence[Tensor], results: Any, dy: Tensor | None) -> Seen:
    """What a run left behind, and its gradients from dy."""
    y, later = results
    named = dict(zip(loaded.inputs, given))
    seen = Seen(y.detach(), later.detach())
    seen.state = {n: v.detach() for n, v in named.items() if n.startswith("running")}
    if loaded.program.train and y.requires_grad:
        leaves = {n: v for n, v in named.items() if v.requires_grad}
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
        seen.grads = {n: g for n, g in zip(leaves, grads) if g is not None}
    return seen


def _recorded(loaded: Loaded) -> tuple[torch.fx.GraphModule, list[Tensor], Any]:
    """The program's graph with the value of each node, and its results; it runs eagerly."""
    given = loaded.given()
    gm = torch.fx.symbolic_trace(loaded.space["forward"])
    with torch.set_grad_enabled(loaded.program.train):
        results = _Recorder(gm).run(*given)
    return gm, given, results


def check(
    program: Program, device: str, seed: int, compiled: str = "", bounded: bool = False
) -> str:
    """What is wrong with how the program is fused, or nothing.

    compiled: the inner compiler, with Dynamo; else without. bounded: on a CPU too, values may be
    off by the bound. Raises Illegal.
    """
    if compiled == "inductor" and "after(y):\n    return" not in program.source:
        raise Illegal("Inductor itself takes minutes for sixteen squarings")
    loaded = Loaded.of(program, device)
    try:
        if program.compiled or compiled:
            given = loaded.given()
            with torch.set_grad_enabled(program.train):
                results = loaded.space["forward"](*given)
        else:
            gm, given, results = _recorded(loaded)
        draw = random.Random(f"dy {seed}")
        style = draw.choice(("ordinary", "ordinary", "mixed"))
        y = results[0]
        dy = values(draw, y.shape, y.dtype, style, draw.randrange(3) == 0).to(device)
        eager = _seen(loaded, given, results, dy)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise Illegal(str(error)) from error
    given, start = loaded.given(), time.monotonic()
    if program.compiled or compiled:
        results, count = _through_dynamo(loaded, given, compiled or "aot_eager")
    else:
        options = Options.parse(None, _options(program, "eager"), _names())
        result = _result_of(gm)
        outcome = backend.fuse(gm, options, inputs=given)
        outcome.tell(strict=True)
        if time.monotonic() - start > SLOW_S and device == "cpu":
            return f"reading it took {time.monotonic() - start:.0f} s"
        count = len(outcome.matches)
        for match in outcome.matches if program.auto else ():
            _note_what_is_grown(program, match, options, result)
        with torch.set_grad_enabled(program.train):
            results = gm(*given)
    try:
        fused = _seen(loaded, given, results, dy)
    except RuntimeError as error:
        if (program.compiled or compiled) and _fails_unfused(loaded, compiled or "aot_eager", dy):
            raise Illegal(str(error)) from error
        raise
    program.fused = count
    wanted = program.expected
    fault = state_faults(eager, fused)
    if fault:
        return fault
    exact = device == "cpu" and compiled != "inductor" and not bounded
    if program.has_bias:
        return ""
    if program.auto and not program.whole:
        if wanted and not count:
            return "nothing is grown"
        norm = program.pattern.kind == "conv2d_batchnorm"
        same = exact and not norm and is_plain(program, loaded.inputs)
        return unfused_faults(eager, fused, program.apart) if same else ""
    if program.crowd:
        if wanted and not count and not _another_layout_wins(loaded, eager):
            return "0 sites of all patterns fused, expected 1 at least"
        same = exact and is_plain(program, loaded.inputs)
        return unfused_faults(eager, fused) if same else ""
    if wanted == 1 and not program.auto and _another_layout_wins(loaded, eager):
        # A part of the tail may fuse, with roundings of its own.
        same = exact and (not count or is_plain(program, loaded.inputs))
        return unfused_faults(eager, fused) if same else ""
    if wanted is not None and count != wanted:
        return f"{count} sites of {program.pattern.name} fused, expected {wanted}"
    if not count:
        return unfused_faults(eager, fused) if exact else ""
    return faults_of(program, loaded.space, loaded.inputs, dy, eager, fused, exact)


def _note_what_is_grown(program: Program, match: Match, options: Options, result: str) -> None:
    readers = match.view.readers
    apart = (n for n in readers if n.name in program.operands and set(readers[n]) - match.nodes)
    program.apart = frozenset(n.name for n in apart)
    bias = match.site.operands["bias"]
    program.has_bias = bias is not None and bias.name in program.operands
    program.whole = match.root.name == result
    program.acc = MatchCase(match, options).acc if program.whole else None


def _result_of(gm: torch.fx.GraphModule) -> str:
    """The name of the tail's last node; the graph that is rewritten is a copy."""
    (output,) = gm.graph.find_nodes(op="output")
    return str(output.args[0][0])  # type: ignore[index]


def _names() -> list[str]:
    return [p.name for p in fx_fuser.registered_patterns()]


def _through_dynamo(loaded: Loaded, given: Sequence[Tensor], inner: str) -> tuple[Any, int]:
    torch._dynamo.reset()
    if any(type(v) is Named for v in given):
        try:  # from torch 2.13 on AOTAutograd refuses most of these itself
            torch.compile(loaded.space["forward"], backend=inner)(*loaded.given())
        except TypeError as error:
            raise Illegal(str(error)) from error
        torch._dynamo.reset()
    counters.clear()
    options = _options(loaded.program, inner)
    forward = torch.compile(
        loaded.space["forward"], backend="fx_fuser", fullgraph=True, dynamic=False, options=options
    )
    with torch.set_grad_enabled(loaded.program.train):
        results = forward(*given)
    return results, sum(counters["fx_fuser"].values())


def _fails_unfused(loaded: Loaded, inner: str, dy: Tensor) -> bool:
    """Does the inner compiler's own backward raise? In torch 2.13 elu_backward has other strides
    than those that are traced, and a view after it fails.
    """
    torch._dynamo.reset()
    given = loaded.given()
    try:
        _seen(loaded, given, torch.compile(loaded.space["forward"], backend=inner)(*given), dy)
    except RuntimeError:
        return True
    return False


def _another_layout_wins(loaded: Loaded, eager: Seen) -> bool:
    """Then nothing is to fuse: the result would have other strides than in eager mode."""
    of_anchor = {n: v for n, v in loaded.inputs.items() if n not in loaded.program.operands}
    with torch.no_grad():
        z = loaded.space["anchor"](*(v.clone() for v in of_anchor.values()))
    wanted = z.stride() if z.shape == eager.y.shape else torch.empty(eager.y.shape).stride()
    sizes = zip(eager.y.shape, wanted, eager.y.stride())
    return any(size > 1 and mine != its for size, mine, its in sizes)


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

if __name__ == "__main__":  # with tests/ and the checkout on PYTHONPATH
    from value_patterns import registered

    # the pattern, after a {program.pattern.kind}: {program.pattern.epilogue}
    with registered(), torch.set_grad_enabled({program.train}):
        print("eager", forward(**inputs)[0])
        options = {_options(program, "aot_eager")}
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
    """Of one run. sites: those that fused. whole: tails that were grown to their end, of programs
    without Dynamo. illegal: seeds of programs that eager mode refuses."""

    programs: int = 0
    illegal: int = 0
    sites: int = 0
    whole: int = 0
    failures: dict[int, str] = field(default_factory=dict)
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

    def program(self, seed: int, patterns: Sequence[Pattern]) -> Program:
        patterns = [p for p in patterns if not self.only or p.name in self.only]
        structure = self.first + seed % self.structures if self.structures else seed
        return generate(structure, seed, patterns, self.train, self.dtype, self.device, self.auto)


def attempt(run: Run, seed: int, patterns: Sequence[Pattern]) -> tuple[Program, str]:
    """One program, and what is wrong with it. Raises NothingToWrite or Illegal."""
    program = run.program(seed, patterns)
    compiled = random.Random(f"compiled {seed}").random() < run.compiled
    try:
        return program, check(program, run.device, seed, run.inner if compiled else "", run.bounded)
    except Illegal:
        raise
    except Exception as error:
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
                program, message = attempt(run, seed, patterns)
            except (NothingToWrite, Illegal):
                tally.illegal += 1
                continue
            tally.programs += 1
            tally.sites += program.fused
            tally.whole += program.whole
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
            gm, *_ = _recorded(loaded)
        except Exception:  # no program: the run will tell
            continue
        view = View(gm.graph)
        chosen = _options(loaded.program, "eager")
        options = Options.parse(None, chosen, _names())
        active = [] if run.auto else [loaded.program.pattern]
        matches += reading.read_graph(view, active, options).matches
    if matches:
        plan.decide(matches, Options(plan="always", cpu_ops=True))


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
    parser.add_argument("--structures", type=int, help="default: 50 on cuda, else one a seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the programs, check nothing")
    given = parser.parse_args()
    structures = given.structures
    if structures is None:
        structures = 50 if given.device == "cuda" else 0
    run = Run(given.train, given.dtype, given.device, structures, given.compiled, given.inner,
              given.seconds, given.seed, given.bounded, tuple(given.only), given.auto)  # fmt: skip
    seeds = range(given.seed, given.seed + given.count)
    if given.show:
        with registered() as patterns:
            for seed in seeds:
                print(runnable(run.program(seed, patterns), seed, given.device, ""))
        return
    start = time.monotonic()
    tallies = list(_all_jobs(run, seeds, given.jobs))
    spent = time.monotonic() - start
    programs, sites = sum(t.programs for t in tallies), sum(t.sites for t in tallies)
    failures = sorted(seed for t in tallies for seed in t.failures)
    grown = f"{sum(t.whole for t in tallies)} tails grown to their end, " if run.auto else ""
    print(
        f"{programs} programs, {sites} sites fused, {grown}"
        f"{len(failures)} failures {failures[:20]}; "
        f"{'training' if run.train else 'eval'}, {run.device}, {run.dtype or 'all dtypes'}, "
        f"seeds from {given.seed} ({sum(t.illegal for t in tallies)} gave no legal program), "
        f"{programs / spent:.1f} a second"
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
