"""The pointwise tail of a match: steps over the anchor's value z, tensors t0… and numbers s0….

    v0 = sigmoid(z)
    v1 = mul(v0, t0)
    v2 = mul(v1, s0)

One step a value; a value that is read twice is computed once. The last step is the result; without
steps, z is. Steps are the user's own operations in the user's order. Nothing is folded, distributed
or reassociated, since floating point has no such algebra (`fx_fuser.graph.match.bind`).

The text above, with "; " for line ends, is an argument of the ops, so nothing below the matcher
knows a pattern. The table `OPS` implements each op twice: in torch (the CPU kernel, the reference
of the tests and, by `torch.autograd.grad`, the pointwise backward) and as CUDA text
(`kernels_cu/common/epilogue_math.cuh`).
"""

from __future__ import annotations

import collections
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fx_fuser.graph.read.canonical import Arg
from fx_fuser.native.kernel_spec import CUDA_TYPES, POINTWISE, Family, KernelSpec

Z = Arg("z")
ANCHOR_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_STEPS = 64  # of an epilogue: bounds a kernel's registers and compile time


# ---- the ops --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """One op: `torch(*args, **attrs)` on tensors and numbers, `cuda(*texts, **attrs)` on text.

    reads: (place of an argument, count) → places of the arguments that its derivative reads.
    takes: how many arguments there may be. attrs: names of its attributes.
    """

    torch: Callable[..., Any]
    cuda: Callable[..., str]
    reads: Callable[[int, int], Sequence[int]] = lambda place, count: range(count)
    takes: tuple[int, ...] = (1,)
    attrs: tuple[str, ...] = ()


def _call(name: str) -> Callable[..., str]:
    return lambda *args, **attrs: _called(name, *args, *map(_literal, attrs.values()))


def _called(name: str, *args: str) -> str:
    return f"math::{name}({', '.join(args)})"


def _unary(name: str, *attrs: str) -> Op:
    """torch's and CUDA's function of this name; attributes are literals in the kernel's text."""
    return Op(getattr(torch if hasattr(torch, name) else F, name), _call(name), attrs=attrs)


def _none(place: int, count: int) -> Sequence[int]:
    return ()


def _factor_of(scaled: int) -> Callable[[int, int], Sequence[int]]:
    """x ± factor · y: the derivative by y, the argument at place `scaled`, reads the factor."""
    return lambda place, count: (2,) if place == scaled and count == 3 else ()


def _others(place: int, count: int) -> Sequence[int]:
    return [i for i in range(count) if i != place]


def _add(x: Any, y: Any, alpha: Any = None) -> Any:
    return x + y if alpha is None else torch.add(x, y, alpha=alpha)


def _sub(x: Any, y: Any, alpha: Any = None) -> Any:
    if alpha is None:
        return x - y
    if isinstance(x, torch.Tensor):
        return torch.sub(x, y, alpha=alpha)
    return torch.rsub(y, x, alpha=alpha)


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return torch.rsub(x, y, alpha=alpha)


def _div_text(x: str, y: str) -> str:
    """As ATen: a division by a host number is a multiplication by its reciprocal."""
    return f"math::{'div_by_number' if y.startswith('scalar[') else 'div'}({x}, {y})"


def _clamp_text(x: str, low: str | None, high: str | None) -> str:
    if low is not None:
        x = f"math::maximum({x}, {low})"
    return x if high is None else f"math::minimum({x}, {high})"


def _literal(value: float) -> str:
    """A number as a C++ literal; C++ has none for inf and nan."""
    if math.isfinite(value):
        return f"Acc({value!r})"
    return "Acc(NAN)" if math.isnan(value) else f"Acc({'-' if value < 0 else ''}INFINITY)"


_UNARY = (
    "sigmoid", "silu", "tanh", "relu", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt",
    "rsqrt", "abs", "erf", "erfc", "sin", "cos", "reciprocal", "hardswish", "hardsigmoid", "mish",
    "logsigmoid",
)  # fmt: skip
OPS: dict[str, Op] = {
    # What returns its input, such as dropout in eval mode.
    "identity": Op(lambda x: x, lambda x: x, _none),
    "add": Op(_add, _call("add"), _factor_of(1), (2, 3)),
    "sub": Op(_sub, _call("sub"), _factor_of(1), (2, 3)),
    # Not sub the other way around: gradients would add up in another order.
    "rsub": Op(_rsub, lambda x, y, *alpha: _called("sub", y, x, *alpha), _factor_of(0), (2, 3)),
    "mul": Op(operator.mul, _call("mul"), _others, (2,)),
    "div": Op(operator.truediv, _div_text, lambda place, count: (0, 1) if place else (1,), (2,)),
    # A number over a tensor: torch multiplies it by the tensor's reciprocal.
    "rdiv": Op(
        lambda y, number: number / y,
        lambda y, number: f"math::mul(math::div(Acc(1), {y}), {number})",
        takes=(2,),
    ),
    "neg": Op(operator.neg, _call("neg"), _none),
    "addcmul": Op(
        lambda x, a, b, value=1: torch.addcmul(x, a, b, value=value),
        lambda x, a, b, value="Acc(1)": f"math::addcmul({x}, {a}, {b}, {value})",
        lambda place, count: [i for i in range(1, count) if place and i != place],
        (3, 4),
    ),
    "addcdiv": Op(
        lambda x, a, b, value=1: torch.addcdiv(x, a, b, value=value),
        lambda x, a, b, value="Acc(1)": f"math::addcdiv({x}, {a}, {b}, {value})",
        lambda place, count: ((), range(2, count), range(1, count))[place],
        (3, 4),
    ),
    "lerp": Op(
        torch.lerp, _call("lerp"), lambda place, count: (0, 1) if place == 2 else (2,), (3,)
    ),
    **{name: _unary(name) for name in _UNARY},
    "sign": Op(torch.sign, _call("sign"), _none),
    "leaky_relu": _unary("leaky_relu", "negative_slope"),
    "elu": Op(torch.ops.aten.elu, _call("elu"), attrs=("alpha", "scale", "input_scale")),
    "threshold": _unary("threshold", "threshold", "value"),
    "hardshrink": _unary("hardshrink", "lambd"),
    "softshrink": _unary("softshrink", "lambd"),
    "softplus": _unary("softplus", "beta", "threshold"),
    "minimum": Op(torch.minimum, _call("minimum"), takes=(2,)),
    "maximum": Op(torch.maximum, _call("maximum"), takes=(2,)),
    "clamp": Op(torch.clamp, _clamp_text, takes=(3,)),
    "hardtanh": Op(F.hardtanh, _clamp_text, takes=(3,)),
    "where": Op(
        lambda c, x, y: torch.where(c != 0, x, y), _call("where"), lambda place, count: (0,), (3,)
    ),
    "cast": Op(
        lambda x, dtype: x.to(dtype).to(x.dtype),
        lambda x, dtype: f"math::round_to<{CUDA_TYPES[dtype]}>({x})",
        _none,
        attrs=("dtype",),
    ),
    "pow": Op(
        torch.pow, lambda x, exponent: _called("pow", x, _literal(exponent)), attrs=("exponent",)
    ),
    "gelu": Op(
        F.gelu,
        lambda x, approximate: f"math::{'gelu_tanh' if approximate == 'tanh' else 'gelu'}({x})",
        attrs=("approximate",),
    ),
}
# Those of an anchor's own z, too: torch's BatchNorm is one kernel, in which nvcc contracts.
_ALL_OPS = collections.ChainMap(OPS, {"fma": Op(lambda x, a, b: x * a + b, _call("fma"))})
# Exchanging the two operands of one of these is all that a canonical form may do.
COMMUTATIVE = ("add", "mul")


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
            raise ValueError(f"{value!r} is no dtype of torch")
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
        """Names of values that are read but computed by no step."""
        read = {a for step in self.steps for a in step.args if a is not None} | {self.result}
        return frozenset(read - {f"v{i}" for i in range(len(self.steps))})

    def after(self, z: Epilogue) -> Epilogue:
        """This epilogue behind another one, which computes z from other leaves."""
        made = {f"v{i}": f"v{i + len(z.steps)}" for i in range(len(self.steps))} | {"z": z.result}
        moved = (
            Step(s.op, tuple(a and made.get(a, a) for a in s.args), s.attrs) for s in self.steps
        )
        return Epilogue((*z.steps, *moved), z.start)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Epilogue:
    """The epilogue whose `text` this is.

    Raises:
        ValueError: it is no such text.
    """
    steps: list[Step] = []
    for i, line in enumerate(text.split("; ") if text else ()):
        found = _STEP.fullmatch(line)
        if found is None or int(found[1]) != i or found[2] not in OPS:
            raise ValueError(f"{line!r} is no step of an epilogue, such as `v{i} = sigmoid(z)`")
        parts = found[3].split(", ")
        for name in (a for a in parts if "=" not in a):
            value = _VALUE.fullmatch(name)
            if value is None or int(value[1] or -1) >= i:
                raise ValueError(f"{name!r} in {line!r} is no value that is known there")
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
        known[f"v{i}"] = _ALL_OPS[step.op].torch(*args, **dict(step.attrs))
    return known[epilogue.result]


# ---- derivatives ----------------------------------------------------------------------------


# Of the steps below autograd saves the arguments, not the result or something in between.
_SAVES_ARGUMENTS = frozenset(("mul", "div", "addcmul", "addcdiv"))


def wanted_leaves(needs: Mapping[str, bool], needs_t: Sequence[bool]) -> frozenset[str]:
    """z, if a gradient of the anchor's operands is asked for, and those of t0… with one."""
    wanted = [f"t{i}" for i, need in enumerate(needs_t) if need]
    return frozenset([*wanted, "z"] if any(needs.values()) else wanted)


def read_by_derivative(epilogue: Epilogue, wanted: frozenset[str]) -> frozenset[str]:
    """The leaves on whose values the gradients of the wanted leaves depend."""
    read = _read_values(epilogue, wanted)
    return frozenset().union(*(leaves for _, _, leaves in read))


def read_anew_by_derivative(epilogue: Epilogue, wanted: frozenset[str]) -> frozenset[str]:
    """Those of which eager mode saves something else: gelu(z + t) saves the sum, not t."""
    return frozenset().union(
        *(
            leaves
            for op, value, leaves in _read_values(epilogue, wanted)
            if op not in _SAVES_ARGUMENTS or value not in epilogue.leaves
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

    None unless z goes through one chain of factors and terms: else the derivative depends on z, or
    is a sum.
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
        before = _slope(dy, step, place, args, add)
        if before is None:
            return None
        dy = before
    return _live(made, dy)


def _slope(
    dy: str, step: Step, place: int, args: Sequence[str | None], add: Callable[..., str]
) -> str | None:
    """One step of the chain backward: its incoming gradient dy → the outgoing one."""
    if step.op == "identity":
        return dy
    if step.op in ("add", "sub", "rsub"):
        if place != (0 if step.op == "rsub" else 1):
            return dy
        if len(args) == 3:
            dy = add("mul", dy, args[2])
        return dy if step.op == "add" else add("neg", dy)
    if step.op == "mul":
        return add("mul", dy, args[1 - place])
    if step.op == "div" and place == 0:
        return add("div", dy, args[1])
    if step.op == "neg":
        return add("neg", dy)
    if step.op == "addcmul":
        if place == 0:
            return dy
        other = args[3 - place]
        return add("mul", dy, add("mul", other, args[3]) if len(args) == 4 else other)
    return add("cast", dy, attrs=step.attrs) if step.op == "cast" else None


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
    names = {name: f"in[{i}]" for i, name in enumerate(tensors)}
    names |= {name: f"scalar[{i}]" for i, name in enumerate(numbers)}
    lines = []
    for i, step in enumerate(epilogue.steps):
        args = (None if a is None else names[a] for a in step.args)
        names[f"v{i}"] = f"v{i}"
        text = _ALL_OPS[step.op].cuda(*args, **dict(step.attrs))
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
