"""One program of `value_fuzz`, run as the user wrote it and fused, and what is wrong."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from value_numbers import values
from value_oracle import faults_of
from value_programs import Fused, Named, Program
from value_seen import Seen, state_faults, stride_faults, unfused_faults
from value_shares import Shares
from value_tail import Uncounted

import fx_fuser
from fx_fuser import backend
from fx_fuser.graph.match.pattern import Match
from fx_fuser.options import Options
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


def chosen_options(program: Program, inner: str) -> dict[str, Any]:
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


def recorded(loaded: Loaded) -> tuple[GraphModule, list[Tensor], Any]:
    """The program's graph with the value of each node, and its results; it runs eagerly."""
    given = loaded.given()
    gm = torch.fx.symbolic_trace(loaded.space["forward"])
    with torch.set_grad_enabled(loaded.program.train):
        results = _Recorder(gm).run(*given)
    return gm, given, results


def check(
    program: Program,
    device: str,
    seed: int,
    compiled: str = "",
    bounded: bool = False,
    shares: Shares | None = None,
) -> str:
    """What is wrong with how the program is fused, or nothing.

    compiled: the inner compiler, with Dynamo; else without. bounded: on a CPU too, values may be
    off by the bound. Raises Illegal.
    """
    if compiled == "inductor" and "after(y):\n    return" not in program.source:
        raise Illegal("Inductor itself takes minutes for sixteen squarings")
    loaded = Loaded.of(program, device)
    through = (compiled or "aot_eager") if program.compiled or compiled else ""
    is_read = not (program.compiled or (through and _has_named(loaded)))
    try:
        if not is_read:
            given = loaded.given()
            with torch.set_grad_enabled(program.train):
                results = loaded.space["forward"](*given)
        else:
            gm, given, results = recorded(loaded)
        dy = _dy(program, seed, results[0], device)
        eager = _seen(loaded, given, results, dy)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise Illegal(str(error)) from error
    start, reading = time.process_time(), None
    if is_read:
        reading = _fused(loaded, gm)
        if time.process_time() - start > SLOW_S and device == "cpu" and not through:
            return f"reading it took {time.process_time() - start:.0f} s"
    given = loaded.given()
    if through:
        results, count = _through_dynamo(loaded, given, through)
    else:
        count = reading.count if reading else 0
        with torch.set_grad_enabled(program.train):
            results = gm(*given)
    try:
        fused = _seen(loaded, given, results, dy)
    except RuntimeError as error:
        if through and _fails_unfused(loaded, through, dy):
            raise Illegal(str(error)) from error
        raise
    program.fused = count
    if reading is not None and reading.count != count:
        return f"{count} sites fused through Dynamo, {reading.count} without it"
    fault = state_faults(eager, fused) or stride_faults(eager, fused)
    if fault and through and fused.y.stride() == _traced_strides(loaded):
        fault = state_faults(eager, fused)
    fault = fault or _missed(loaded, eager, count, reading)
    if fault:
        return fault
    if not count:
        return "" if through == "inductor" else unfused_faults(eager, fused, None)
    if reading is None and program.crowd:
        program.uncompared = "what Dynamo's graph fused is not known"
        return ""
    exact = device == "cpu" and through != "inductor" and not bounded
    compared = functools.partial(faults_of, program, loaded.space, loaded.inputs, dy, eager, fused)
    try:
        return compared(exact, shares)
    except Uncounted as error:
        program.uncompared = str(error)
        return ""


def _traced_strides(loaded: Loaded) -> tuple[int, ...]:
    """Of the result, as Dynamo traces it. torch's fake log_sigmoid keeps a layout in which its own
    kernel for a CPU returns a contiguous tensor (torch 2.15)."""
    with FakeTensorMode() as mode, torch.set_grad_enabled(loaded.program.train):
        given = [mode.from_tensor(value) for value in loaded.given()]
        strides: tuple[int, ...] = loaded.space["forward"](*given)[0].stride()
    return strides


def _has_named(loaded: Loaded) -> bool:
    return any(type(v) is Named for v in loaded.inputs.values())


def _dy(program: Program, seed: int, y: Tensor, device: str) -> Tensor:
    draw = random.Random(f"dy {seed}")
    style = draw.choice(("ordinary", "ordinary", "mixed"))
    odd = draw.randrange(3) == 0
    return values(draw, y.shape, y.dtype, style, odd, program.extreme).to(device)


@dataclass
class Reading:
    """How many sites were fused without Dynamo; was it too much to compare with all patterns?"""

    count: int
    is_too_much: bool


def _fused(loaded: Loaded, gm: GraphModule) -> Reading:
    """Fuse the graph, and note in the program what is fused."""
    program = loaded.program
    options = Options.parse(None, chosen_options(program, "eager"), names())
    nodes = _calls(gm)
    ahead = len(_calls(torch.fx.symbolic_trace(loaded.space["anchor"])))
    behind = len(_calls(torch.fx.symbolic_trace(loaded.space["after"]))) + program.train  # detach
    tail = nodes[ahead : len(nodes) - behind]
    (output,) = gm.graph.find_nodes(op="output")
    outcome = backend.fuse(gm, options, inputs=loaded.given())
    outcome.tell(strict=True)
    for match in outcome.matches:
        _note(program, match, options, tail, str(output.args[0][0]))  # type: ignore[index]
    called = (n for n in gm.graph.nodes if str(n.target).startswith("fx_fuser"))
    program.folded = any("folded" in node.args for node in called)
    too_much = "matching what follows takes more than" in str(outcome.report)
    return Reading(len(outcome.matches), too_much)


def _calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]


def _note(
    program: Program, match: Match, options: Options, tail: Sequence[Node], result: str
) -> None:
    """result: the name of the tail's last node; the graph that is rewritten is a copy."""
    program.whole = match.root.name == result
    at = {n.name: i for i, n in enumerate(tail)}
    bias = match.site.operands.get("bias")
    made = bias is not None and bias.name in at  # of the tail's operands
    if bias is not None and (made or bias.name in program.operands):
        program.bias = bias.meta["example_value"].detach()
    own = program.whole and not (program.crowd or made)
    if not own:
        inside = {n.name for n in match.nodes}
        dtype = match.root.meta["example_value"].dtype
        calls = frozenset(i for name, i in at.items() if name in inside)
        program.part = Fused(calls, at.get(match.root.name, -1), dtype, len(tail))
    if program.auto or not own:
        readers = match.view.readers
        apart = (n for n in readers if n.name in program.operands and set(readers[n]) - match.nodes)
        program.apart = frozenset(n.name for n in apart)
        program.acc = MatchCase(match, options).acc


def _missed(loaded: Loaded, eager: Seen, count: int, reading: Reading | None) -> str:
    """Is something not fused that must be?"""
    program, wanted = loaded.program, loaded.program.expected
    if wanted is None:
        return ""
    if program.auto:
        return "nothing is grown" if wanted and not count else ""
    if wanted and _another_layout_wins(loaded, eager):
        return ""  # a part of the tail may fuse
    if program.crowd:
        if count or not wanted or (reading and reading.is_too_much):
            return ""
        return "0 sites of all patterns fused, expected 1 at least"
    if count != wanted:
        return f"{count} sites of {program.pattern.name} fused, expected {wanted}"
    return ""


def names() -> list[str]:
    return [p.name for p in fx_fuser.registered_patterns()]


def _through_dynamo(loaded: Loaded, given: Sequence[Tensor], inner: str) -> tuple[Any, int]:
    torch._dynamo.reset()
    whole = {"fullgraph": True, "dynamic": False}
    if _has_named(loaded):
        # From torch 2.13 on AOTAutograd refuses most of these itself, and Dynamo `z ** 0.5`.
        try:
            torch.compile(loaded.space["forward"], backend=inner, **whole)(*loaded.given())
        except (TypeError, torch._dynamo.exc.Unsupported) as error:
            raise Illegal(str(error)) from error
        torch._dynamo.reset()
    counters.clear()
    options = chosen_options(loaded.program, inner)
    forward = torch.compile(loaded.space["forward"], backend="fx_fuser", options=options, **whole)
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
