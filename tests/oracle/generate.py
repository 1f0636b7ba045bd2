"""Generated programs, each against eager and float64; what fails is shrunk and printed.

    python tests/oracle/generate.py --count 2000 --seed 0 --train
    python tests/oracle/generate.py --seed 1234 --count 1 --show

Program n of a run has the seed `--seed` + n. On a GPU: `--device cuda --dtype bfloat16`. fx_fuser
must be installed, or on PYTHONPATH, as for a program that is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import linecache
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from generator import Program, generate
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map
from writer import Draw, NoSpelling

import fx_fuser
from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.testing import neighbour, observe
from fx_fuser.verify.accuracy import PROMISED, compare, errors_of

# Named patterns alone: what is expected says which of those fit.
OPTIONS = {
    "inner": "aot_eager",
    "cpu_ops": True,
    "strict": True,
    "plan": "always",
    "auto": False,
}
SHRINK_S = 20  # seconds spent on making a failing program smaller
SHRUNK = 5  # failures of a run that are
PEERS = 64  # of eager on inputs that differ by one rounding, if a value is out of bounds

# Of programs that have 16-bit values anywhere: those bound what a value of any dtype is worth.
_MIXED = dataclasses.replace(
    PROMISED,
    factor=dict.fromkeys(PROMISED.factor, 2.0),
    floor=dict.fromkeys(PROMISED.floor, torch.finfo(torch.bfloat16).eps / 4),
)


class Illegal(Exception):
    """Eager mode refuses the program, or Dynamo does not trace it."""


@dataclasses.dataclass
class Failure:
    """kind: what is wrong, for the shrinker, which must not turn one fault into another."""

    program: Program
    choices: list[int]
    kind: str
    message: str


def load(source: str) -> dict[str, Any]:
    """Execute a program's text, with its lines known to tracebacks and to `explain`."""
    name = f"<program {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    linecache.cache.pop(name) if len(linecache.cache) > 5000 else None
    return space


def check(program: Program, device: str = "cpu") -> tuple[str, str] | None:
    """What is wrong with how fx_fuser compiles the program: its kind and a message; or None."""
    torch.manual_seed(0)
    space = load(program.source)
    model = space["Model"]().to(device)
    inputs = tree_map(lambda t: _moved(t, device), space["inputs"]())
    train = program.train
    try:
        eager = observe(model, inputs, train)
        exact = observe(model, inputs, train, dtype=torch.float64, like=eager)
    except Exception as error:
        raise Illegal(str(error)) from error
    torch._dynamo.reset()
    counters.clear()
    try:
        found = observe(model, inputs, train, _compiled, like=eager)
    except Unsupported as error:
        raise Illegal(str(error)) from error
    except Exception as error:
        return f"raises {type(error).__name__}", f"{type(error).__name__}: {error}"
    fused = dict(counters["fx_fuser"])
    if fused != program.expected:
        report = fx_fuser.explain(model.train(train), *inputs)
        return "count", f"fused {fused}, expected {program.expected}\n{report}"
    narrow = any(d in program.source for d in ("bfloat16", "float16"))
    bound, eps = (_MIXED, torch.finfo(torch.bfloat16).eps) if narrow else (PROMISED, 0.0)
    faults = compare(found, eager, exact, bound)
    if faults and all(": error" in f for f in faults):
        generators = (torch.Generator().manual_seed(seed) for seed in range(PEERS))
        peers = (neighbour(model, inputs, train, eager, g, eps) for g in generators)
        faults = compare(found, eager, exact, bound, [errors_of(peer, exact) for peer in peers])
    return ("numbers", "\n".join(faults)) if faults else None


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="fx_fuser", fullgraph=True, options=OPTIONS)


def _moved(value: Any, device: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


# ---- shrinking -------------------------------------------------------------------------------


def attempt(
    draw: Draw, patterns: Sequence[Pattern], train: bool, dtype: str, device: str
) -> Failure | None:
    """Generate and check one program. Raises NoSpelling or Illegal where there is none."""
    program = generate(draw, patterns, train, dtype)
    wrong = check(program, device)
    return None if wrong is None else Failure(program, draw.made, *wrong)


def shrink(failure: Failure, patterns: Sequence[Pattern], dtype: str, device: str) -> Failure:
    """A smaller program that fails in the same way: choices are dropped and made simpler."""
    deadline = time.monotonic() + SHRINK_S

    def still(choices: list[int]) -> bool:
        nonlocal failure
        if time.monotonic() > deadline or choices == failure.choices:
            return False
        try:
            again = attempt(Draw(replay=choices), patterns, failure.program.train, dtype, device)
        except (NoSpelling, Illegal):
            return False
        simpler = again is not None and again.kind == failure.kind
        smaller = simpler and _weight(again.choices) < _weight(failure.choices)  # type: ignore[union-attr]
        if smaller:
            failure = again  # type: ignore[assignment]
        return smaller

    changed = True
    while changed:
        changed = False
        for size in (32, 8, 4, 2, 1):
            at = 0
            while at < len(failure.choices):
                rest = failure.choices[at + size :]
                zeroed = [*failure.choices[:at], *[0] * size, *rest]
                if still([*failure.choices[:at], *rest]) or still(zeroed):
                    changed = True
                else:
                    at += size
    return failure


def _weight(choices: Sequence[int]) -> tuple[int, int]:
    return len(choices), sum(choices)


def runnable(failure: Failure, seed: int, device: str) -> str:
    """The program as a script of its own that fails as it failed here."""
    program = failure.program
    return f"""\
# seed {seed}: {failure.kind}
# {"; ".join(program.labels)}
{program.source}

if __name__ == "__main__":
    from fx_fuser.testing import assert_equivalent, assert_fused

    options, train = {OPTIONS}, {program.train}
    torch.manual_seed(0)
    model, args = Model().to("{device}"), tuple(
        t.detach().to("{device}").requires_grad_(t.requires_grad) for t in inputs()
    )
    assert_fused(model, args, {program.expected}, train, options)
    assert_equivalent(model, args, train, options)
"""


# ---- many ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """Of one run. sites: those that fused. illegal: seeds that gave no legal program."""

    programs: int = 0
    illegal: int = 0
    sites: int = 0
    failures: dict[int, Failure] = dataclasses.field(default_factory=dict)


def run(
    seeds: Sequence[int],
    train: bool,
    dtype: str = "",
    device: str = "cpu",
    seconds: float = float("inf"),
    report: Callable[[int, Failure], None] = lambda seed, failure: None,
) -> Tally:
    """Check the programs of these seeds, until the time is up; report each failure at once."""
    patterns, tally = fx_fuser.registered_patterns(), Tally()
    start = time.monotonic()
    for seed in seeds:
        if time.monotonic() - start > seconds:
            break
        try:
            failure = attempt(Draw(seed), patterns, train, dtype, device)
        except (NoSpelling, Illegal):
            tally.illegal += 1
            continue
        tally.programs += 1
        tally.sites += sum(counters["fx_fuser"].values())
        if failure is not None:
            if len(tally.failures) < SHRUNK:
                failure = shrink(failure, patterns, dtype, device)
            tally.failures[seed] = failure
            report(seed, failure)
    return tally


def show(seeds: Sequence[int], train: bool, dtype: str) -> None:
    """Print the programs, without checking them."""
    for seed in seeds:
        try:
            program = generate(Draw(seed), fx_fuser.registered_patterns(), train, dtype)
        except NoSpelling as nothing:
            print(f"# seed {seed}: nothing ({nothing})")
            continue
        print(f"# seed {seed}: {program.labels}, expected {program.expected}\n{program.source}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generated programs against eager and float64.")
    parser.add_argument("--count", type=int, default=1000, help="seeds to try")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--train", action="store_true", help="with gradients")
    parser.add_argument("--dtype", default="", help="of parameters; default: random")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--show", action="store_true", help="print the programs, check nothing")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    if chosen.show:
        return show(seeds, chosen.train, chosen.dtype)

    def report(seed: int, failure: Failure) -> None:
        message = "\n".join(f"# {line}" for line in failure.message.splitlines())
        print(f"\n{message}\n{runnable(failure, seed, chosen.device)}", flush=True)

    start = time.monotonic()
    tally = run(seeds, chosen.train, chosen.dtype, chosen.device, chosen.seconds, report)
    spent = time.monotonic() - start
    tried = tally.programs + tally.illegal
    print(
        f"{tally.programs} programs, {tally.sites} sites fused, {len(tally.failures)} failures; "
        f"{'training' if chosen.train else 'eval'}, {chosen.device}, "
        f"{chosen.dtype or 'all dtypes'}, seeds {seeds[0]} to {seeds[0] + tried - 1} "
        f"({tally.illegal} gave no legal program), {tally.programs / spent:.1f} a second"
    )
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
