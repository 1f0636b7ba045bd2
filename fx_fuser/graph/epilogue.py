"""The pointwise tail of a match: steps over the anchor's value z, tensors t0… and numbers s0….

    v0 = sigmoid(z)
    v1 = mul(v0, t0)
    v2 = mul(v1, s0)

Each step makes one value; a value that is read twice is computed once. The result is the last
step, or z without steps. Steps are the user's own operations in the user's order. Nothing is
folded, distributed or reassociated, since floating point has no such algebra
(`fx_fuser.graph.match.bind`).

The text above, with "; " for line ends, is an argument of the ops, so nothing below the matcher
knows a pattern. `fx_fuser.graph.read.operations` says what each operation is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx_fuser.graph.read.expr import Arg
from fx_fuser.graph.read.operations import ALL_OPS, OPS
from fx_fuser.native.kernel_spec import POINTWISE, Family, KernelSpec

Z = Arg("z")
ANCHOR_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_STEPS = 64  # of an epilogue: bounds a kernel's registers and compile time


# ---- the steps ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation. args: names of values, or None for an optional one left out."""

    op: str
    args: tuple[str | None, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        said = [*(a or "none" for a in self.args), *(f"{k}={_said(v)}" for k, v in self.attrs)]
        return f"{self.op}({', '.join(said)})"


def _said(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _attribute(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name == "dtype":
        if not isinstance(getattr(torch, value, None), torch.dtype):
            raise ValueError(f"{value!r} is not a torch dtype")
        return name, getattr(torch, value)
    return name, value if name == "approximate" else float(value)


def _check_arity(step: Step) -> None:
    op, found = OPS[step.op], len(step.args)
    if found not in op.takes:
        expected = " or ".join(map(str, op.takes))
        raise ValueError(f"{step.op} takes {expected} values, but {str(step)!r} gives it {found}")
    names = tuple(name for name, _ in step.attrs)
    if names != op.attrs:
        expected, given = (", ".join(n) or "none" for n in (op.attrs, names))
        raise ValueError(f"{step.op} has the attributes {expected}, but {str(step)!r} {given}")


_STEP = re.compile(r"v(\d+) = (\w+)\((.*)\)")
_VALUE = re.compile(r"none|z|[ts]\d+|v(\d+)")


@dataclass(frozen=True)
class Epilogue:
    """Step i computes the value `v<i>`. start: the result if there are no steps."""

    steps: tuple[Step, ...] = ()
    start: str = "z"

    @functools.cached_property
    def text(self) -> str:
        return "; ".join(f"v{i} = {step}" for i, step in enumerate(self.steps))

    @property
    def result(self) -> str:
        return f"v{len(self.steps) - 1}" if self.steps else self.start

    @functools.cached_property
    def leaves(self) -> frozenset[str]:
        """Names of values that are read and that no step computes."""
        read = {a for step in self.steps for a in step.args if a is not None} | {self.result}
        return frozenset(read - {f"v{i}" for i in range(len(self.steps))})

    def after(self, z: Epilogue) -> Epilogue:
        """This epilogue after another one, which computes z from other leaves."""
        made = {f"v{i}": f"v{i + len(z.steps)}" for i in range(len(self.steps))} | {"z": z.result}
        moved = (
            Step(s.op, tuple(a and made.get(a, a) for a in s.args), s.attrs) for s in self.steps
        )
        return Epilogue((*z.steps, *moved), z.start)

    def as_computed(self, acc: torch.dtype) -> Epilogue:
        """Without the steps that do nothing in this dtype of the arithmetic, so that `x.float()` or
        dropout in eval mode does not need a kernel of its own."""
        names: dict[str, str] = {}
        kept: list[Step] = []
        for i, step in enumerate(self.steps):
            args = tuple(a and names.get(a, a) for a in step.args)
            if step.op == "identity" or (step.op, dict(step.attrs)) == ("cast", {"dtype": acc}):
                names[f"v{i}"] = args[0]  # type: ignore[assignment]
            else:
                names[f"v{i}"] = f"v{len(kept)}"
                kept.append(Step(step.op, args, step.attrs))
        result = names.get(self.result, self.result)
        found = Epilogue(tuple(kept), self.start if kept else result)
        return found if found.result == result else self  # otherwise nothing reads the last steps


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Epilogue:
    """The epilogue whose `text` this is.

    Raises:
        ValueError: the text is not an epilogue's.
    """
    steps: list[Step] = []
    for i, line in enumerate(text.split("; ") if text else ()):
        found = _STEP.fullmatch(line)
        if found is None or int(found[1]) != i or found[2] not in OPS:
            raise ValueError(f"{line!r} is not an epilogue step such as `v{i} = sigmoid(z)`")
        parts = found[3].split(", ")
        for name in (a for a in parts if "=" not in a):
            value = _VALUE.fullmatch(name)
            if value is None or int(value[1] or -1) >= i:
                raise ValueError(f"{name!r} in {line!r} is not a value known there")
        args = tuple(None if a == "none" else a for a in parts if "=" not in a)
        steps.append(Step(found[2], args, tuple(_attribute(a) for a in parts if "=" in a)))
        _check_arity(steps[-1])
    return Epilogue(tuple(steps))


def accumulation_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype an epilogue is computed in: float64 if anything is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def casts_of(epilogue: Epilogue) -> list[torch.dtype]:
    """The dtypes that its steps cast to: a cast to float64 needs float64 arithmetic."""
    return [v for step in epilogue.steps for k, v in step.attrs if k == "dtype"]


def evaluate(epilogue: Epilogue, values: Mapping[str, Any]) -> Any:
    """The epilogue in torch ops; `values` gives each leaf a tensor or a number."""
    known = dict(values)
    for i, step in enumerate(epilogue.steps):
        args = (None if a is None else known[a] for a in step.args)
        known[f"v{i}"] = ALL_OPS[step.op].torch(*args, **dict(step.attrs))
    return known[epilogue.result]


# ---- derivatives ----------------------------------------------------------------------------


def wanted_leaves(needs: Mapping[str, bool], needs_t: Sequence[bool]) -> frozenset[str]:
    """z, if an operand of the anchor needs a gradient, and those of t0… that need one."""
    wanted = [f"t{i}" for i, need in enumerate(needs_t) if need]
    return frozenset([*wanted, "z"] if any(needs.values()) else wanted)


def read_by_derivative(epilogue: Epilogue, wanted: frozenset[str]) -> frozenset[str]:
    """The leaves on whose values the gradients of the wanted leaves depend."""
    read = _read_values(epilogue, wanted)
    return frozenset().union(*(leaves for _, _, leaves in read))


def read_anew_by_derivative(epilogue: Epilogue, wanted: frozenset[str]) -> frozenset[str]:
    """Those for which eager mode saves another value: gelu(z + t) saves the sum, not t."""
    return frozenset().union(
        *(
            leaves
            for op, value, leaves in _read_values(epilogue, wanted)
            if not OPS[op].saves_arguments or value not in epilogue.leaves
        )
    )


def _read_values(
    epilogue: Epilogue, wanted: frozenset[str]
) -> Iterator[tuple[str, str, frozenset[str]]]:
    """What the derivative of a step reads: (the op, the value, the leaves that it is made of)."""
    carries = set(wanted)
    made_of: dict[str, frozenset[str]] = {leaf: frozenset((leaf,)) for leaf in epilogue.leaves}
    for i, step in enumerate(epilogue.steps):
        values = [a for a in step.args if a is not None]
        made_of[f"v{i}"] = frozenset().union(*(made_of[a] for a in values))
        for place, name in enumerate(step.args):
            if name in carries:
                carries.add(f"v{i}")
                for j in OPS[step.op].reads(place, len(step.args)):
                    value = step.args[j]
                    if value is not None:
                        yield step.op, value, made_of[value]


def linear_backward(epilogue: Epilogue) -> Epilogue | None:
    """The epilogue that computes dz from dy, which it calls z: autograd's steps, last to first.

    None unless z goes through one chain of factors and terms: otherwise the derivative depends on
    z, or is a sum.
    """
    chain: dict[str, tuple[Step, int]] = {}  # value that depends on z → its step, and where it does
    made: list[Step] = []
    moved = {leaf: leaf for leaf in epilogue.leaves}

    def add(op: str, *args: str | None, attrs: tuple[tuple[str, Any], ...] = ()) -> str:
        made.append(Step(op, args, attrs))
        return f"v{len(made) - 1}"

    holding = epilogue.start
    for i, step in enumerate(epilogue.steps):
        places = [place for place, a in enumerate(step.args) if a == holding]
        if any(a in chain or a == epilogue.start for a in step.args if a != holding):
            return None
        if not places:
            moved[f"v{i}"] = add(step.op, *(a and moved[a] for a in step.args), attrs=step.attrs)
            continue
        if len(places) > 1:
            return None
        holding = f"v{i}"
        chain[holding] = (step, places[0])
    dy = "z"
    for step, place in reversed(chain.values()):
        args = [a if a is None else moved.get(a, a) for a in step.args]
        slope = OPS[step.op].slope
        before = None if slope is None else slope(add, dy, place, args, step.attrs)
        if before is None:
            return None
        dy = before
    return _live(made, dy)


def _live(steps: Sequence[Step], result: str) -> Epilogue:
    """The steps that the result needs."""
    needed = {result}
    for i in reversed(range(len(steps))):
        if f"v{i}" in needed:
            needed.update(a for a in steps[i].args if a is not None)
    names: dict[str, str] = {}
    kept: list[Step] = []
    for i, step in enumerate(steps):
        if f"v{i}" in needed:
            args = tuple(a if a is None else names.get(a, a) for a in step.args)
            names[f"v{i}"] = f"v{len(kept)}"
            kept.append(Step(step.op, args, step.attrs))
    return Epilogue(tuple(kept))


# ---- the kernel -----------------------------------------------------------------------------


def kernel_spec(
    epilogue: Epilogue,
    tensors: Mapping[str, torch.dtype],
    numbers: Sequence[str],
    out: torch.dtype,
    family: Family = POINTWISE,
    acc: torch.dtype = torch.float32,
) -> KernelSpec:
    """The kernel of one epilogue.

    tensors: leaf → dtype, in the order the kernel takes them, the anchor's value first.
    numbers: leaves that are numbers at call time, in the order they are passed. acc: dtype of the
    arithmetic. The functor contract is that of `kernels_cu/pointwise/pointwise.cuh`.
    """
    epilogue = epilogue.as_computed(acc)
    names = {name: f"in[{i}]" for i, name in enumerate(tensors)}
    names |= {name: f"scalar[{i}]" for i, name in enumerate(numbers)}
    lines = []
    for i, step in enumerate(epilogue.steps):
        args = (None if a is None else names[a] for a in step.args)
        names[f"v{i}"] = f"v{i}"
        text = ALL_OPS[step.op].cuda(*args, **dict(step.attrs))
        lines.append(f"    const Acc v{i} = {text};\n")
    definition = f"""\
// {epilogue.text or "the product itself"}
// in: {", ".join(tensors)}{"; scalar: " + ", ".join(numbers) if numbers else ""}
namespace fx_fuser {{
struct Epilogue {{
  template <class Acc>
  __device__ __forceinline__ Acc operator()(const Acc (&in)[{len(tensors)}],
                                            const Acc (&scalar)[{max(len(numbers), 1)}]) const {{
{"".join(lines)}    return {names[epilogue.result]};
  }}
}};
}}  // namespace fx_fuser
"""
    inputs = tuple(tensors.values())
    return KernelSpec(family, "fx_fuser::Epilogue", definition, len(numbers), acc, out, inputs)
