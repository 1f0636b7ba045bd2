"""Take each check and condition out in turn, and show that the tests named for it fail.

    python tests/mutants/mutate.py               # all, some seconds each
    python tests/mutants/mutate.py regions       # those whose name contains "regions"
    python tests/mutants/mutate.py --share 2/6   # the second of six parts
    python tests/mutants/mutate.py --jobs 2      # two at a time

A mutant is a change of one place in a copy of the checkout. One whose tests pass survives: what it
took out is held by nothing, and the exit status says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / room) for room in ("", "graph", "oracle")]

import mutants_aoti
import mutants_aten
import mutants_attention
import mutants_attention_bias
import mutants_attention_split
import mutants_bmm
import mutants_by_hand
import mutants_cache
import mutants_conv1d
import mutants_depthwise
import mutants_extreme
import mutants_grouped
import mutants_halves
import mutants_heads
import mutants_install
import mutants_masks
import mutants_matching
import mutants_pixels
import mutants_provenance
import mutants_rest
import mutants_spellings
import mutants_tp
import mutants_values
import mutants_verify
import mutants_views
from forking_server import ForkingServer
from test_hazards import ELSEWHERE, TRAPS

from fx_fuser.ops import checks

COPIED = ("fx_fuser", "patterns", "kernels_cu", "tests", "benchmarks", "pyproject.toml")
HAZARDS, REFUSALS = "tests/graph/test_hazards.py", "tests/graph/test_refusals.py"
WRITES, REGIONS = "tests/graph/test_refused_writes.py", "tests/graph/test_refused_regions.py"
BETWEEN = f"{WRITES}::test_x_written_in_between"
BOUND = "tests/graph/test_bound.py"
UNTOUCHED = "tests/graph/test_untouched.py"


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in the file of fx_fuser, becomes `new`; tests: which must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _trap(name: str) -> str:
    assert name in TRAPS
    return f"{HAZARDS}::test_trap_is_refused[{name}]"


def check_mutants() -> Iterator[Mutant]:
    """Every entry of CHECKS, taken out of the list."""
    for check in (c.__name__ for c in checks.CHECKS):
        tests = tuple(_trap(name) for name, trap in TRAPS.items() if trap.check == check)
        if check in ELSEWHERE:
            tests = (f"{HAZARDS}::{ELSEWHERE[check]}",)
        yield Mutant(f"check {check}", "ops/checks.py", f"\n    {check},\n", "\n", tests)


CONDITIONS = (
    Mutant(
        "aliases: views share their base's memory", "graph/read/nodes.py",
        "found.add(tensor.untyped_storage()._cdata)", "found.add(id(node))",
        (_trap("x is written through a view"),),
    ),
    Mutant(
        "writes: methods that end in _", "graph/read/nodes.py",
        'changes = in_place_name(name) or name in ("__setitem__", "__delitem__")',
        "changes = False",
        (_trap("x is written"), f"{BETWEEN}[copy_-intermediate]"),
    ),
    Mutant(
        "writes: setitem", "graph/read/nodes.py",
        "changes = target in _IN_PLACE_OPERATORS or target in (operator.setitem, operator.delitem)",
        "changes = target in _IN_PLACE_OPERATORS",
        (_trap("a multiplier is written"), f"{BETWEEN}[setitem-intermediate]"),
    ),
    Mutant(
        "writes: operators such as +=", "graph/read/nodes.py",
        "changes = target in _IN_PLACE_OPERATORS or target in (operator.setitem, operator.delitem)",
        "changes = target in (operator.setitem, operator.delitem)",
        (f"{BETWEEN}[iadd-intermediate]",),
    ),
    Mutant(
        "writes: out=", "graph/read/nodes.py",
        'written = [node.kwargs.get("out")]', "written: list[Any] = []",
        (f"{BETWEEN}[out-intermediate]",),
    ),
    Mutant(
        "writes: torch functions that end in _, or have inplace", "graph/read/nodes.py",
        "    if called_in_place(node):\n        written +=", "    if False:\n        written +=",
        (f"{BETWEEN}[relu_-intermediate]", f"{BETWEEN}[torch_function-intermediate]"),
    ),
    Mutant(
        "writes: a schema says so", "graph/read/nodes.py",
        "names = [a.name for a in target._schema.arguments if a.is_write]",
        "names: list[str] = []",
        (f"{BETWEEN}[custom_op-intermediate]",),
    ),
    Mutant(
        "writes: unknown functions", "graph/read/nodes.py",
        "not _is_torch_function(target):\n        return None",
        "not _is_torch_function(target):\n        return ()",
        (f"{WRITES}::test_operand_written_by_unknown_function",),
    ),
    Mutant(
        "writes: bodies of higher-order operators", "graph/read/nodes.py",
        "return () if unwritten else None", "return ()",
        (f"{WRITES}::test_operand_given_to_higher_order_op",),
    ),
    Mutant(
        "writes: in the body of a checkpoint", "graph/read/nodes.py",
        "body is not None and not any(map(writes_of, body.graph.nodes))",
        "body is not None",
        (f"{UNTOUCHED}::test_a_checkpoint_within_a_match[True]",),
    ),
    Mutant(
        "aliases: an input that only the caller knows to be another", "ops/checks.py",
        "if not allowed and memory & match.view.graph_inputs:", "if False:",
        (f"{HAZARDS}::test_input_write_is_load_bearing_with_inner_eager",),
    ),
    Mutant(
        "regions: grad mode", "graph/read/view.py",
        'if name.startswith(("_set_", "set_")) and not inputs_of(node):', "if False:",
        (_trap("no_grad inside"),),
    ),
    Mutant(
        "regions: autocast", "graph/read/view.py",
        'if "_increment_nesting" in name or name.startswith(("_enter_", "_push_")):',
        'if "_increment_nesting" in name:',
        (f"{REGIONS}::test_regions[autocast_tail]",),
    ),
    Mutant(
        "regions: functorch levels", "ops/checks.py", "    if level is not None:", "    if False:",
        (_trap("inside vmap"), _trap("inside jvp")),
    ),
    Mutant(
        "regions: a checkpoint's policy", "graph/prepare/bodies.py",
        "if not isinstance(body, GraphModule) or _has_policy(body):",
        "if not isinstance(body, GraphModule):",
        (f"{UNTOUCHED}::test_selective_checkpoint_policy",),
    ),
    Mutant(
        "dtypes: of matched values", "ops/checks.py",
        "if tensor.dtype not in ANCHOR_DTYPES:", "if False:",
        (f"{REFUSALS}::test_integer_linear",),
    ),
    Mutant(
        "dtypes: of operands", "ops/checks.py",
        "if dtype not in CUDA_TYPES:", "if False:",
        (f"{REFUSALS}::test_operand_of_a_dtype_without_a_cuda_type",),
    ),
    Mutant(
        "dtypes: under autocast a sum is wider than its product", "graph/read/sites.py",
        "if isinstance(gemm, Node) and _dtype(gemm) != _dtype(node):", "if False:",
        ("tests/graph/test_operands.py::test_autocast_linear_spelled_as_product",),
    ),
    Mutant(
        "subclasses: tensors of the user's own classes", "backend.py",
        "    subclasses.mark(gm, inputs)\n", "",
        ("tests/graph/test_subclasses.py::test_input[x, 2-D-Named-train]",
         "tests/graph/test_subclasses.py::test_body_of_a_checkpoint"),
    ),
)  # fmt: skip


def survives(mutant: Mutant, server: ForkingServer) -> bool:
    """Does any of its tests pass?  One that fails to start is an error of this file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / name, symlinks=True, ignore=ignore)
            else:
                shutil.copy(source, copy / name)
        file = copy / "fx_fuser" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.old!r} stands {text.count(mutant.old)} times")
        file.write_text(text.replace(mutant.old, mutant.new))
        options = ("-q", "-p", "no:cacheprovider", "-m", "")
        status, said = server.pytest(copy, (*options, *mutant.tests))
    if status not in (0, 1):
        raise SystemExit(f"{mutant.name}: pytest did not run\n{said}")
    return f"{len(mutant.tests)} failed" not in said


def all_mutants() -> list[Mutant]:
    batches = (
        mutants_matching, mutants_aoti, mutants_aten, mutants_attention, mutants_attention_bias,
        mutants_attention_split, mutants_bmm, mutants_by_hand, mutants_cache, mutants_conv1d,
        mutants_depthwise, mutants_extreme, mutants_grouped, mutants_halves, mutants_heads,
        mutants_install, mutants_masks, mutants_pixels, mutants_provenance, mutants_rest,
        mutants_spellings, mutants_tp, mutants_values, mutants_verify, mutants_views,
    )  # fmt: skip
    listed = (parts for batch in batches for parts in batch.MUTANTS)
    return [*check_mutants(), *CONDITIONS, *(Mutant(*parts) for parts in listed)]


def in_share(mutants: list[Mutant], part: int, parts: int) -> list[Mutant]:
    """The part-th of so many parts, by the names."""
    return [m for m in mutants if zlib.crc32(m.name.encode()) % parts == part - 1]


def _timed(mutant: Mutant, idle: Queue[ForkingServer]) -> tuple[Mutant, bool, float]:
    start, server = time.monotonic(), idle.get()
    try:
        return mutant, survives(mutant, server), time.monotonic() - start
    finally:
        idle.put(server)


def main() -> None:
    # Whether a mutant survives is a fact of the commit: not of which programs a run draws.
    os.environ.pop("FX_FUSER_FUZZ_SEED", None)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("wanted", nargs="?", default="", help="a part of their names")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="the K-th of N parts")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    options = parser.parse_args()
    part, parts = map(int, options.share.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--share {options.share}: its first number is one of 1 to {parts}")
    mutants = [m for m in in_share(all_mutants(), part, parts) if options.wanted in m.name]
    surviving = []
    idle: Queue[ForkingServer] = Queue()
    with ThreadPoolExecutor(options.jobs) as pool, contextlib.ExitStack() as servers:
        for _ in range(options.jobs):
            idle.put(servers.enter_context(ForkingServer()))
        for mutant, alive, seconds in pool.map(lambda m: _timed(m, idle), mutants):
            surviving += [mutant.name] if alive else []
            verdict = "SURVIVES" if alive else f"caught by {len(mutant.tests)}"
            print(f"{seconds:5.1f} s  {verdict:12} {mutant.name}", flush=True)
    print(f"{len(mutants) - len(surviving)} of {len(mutants)} mutants caught")
    sys.exit(bool(surviving))


if __name__ == "__main__":
    main()
