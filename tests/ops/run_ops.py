"""Toy ops of the schemas that one family of ops for all calls would have.

    run(Tensor[] t, str program, SymInt[]? sizes=None) -> Tensor
    run.many(Tensor[] t, str program, SymInt[]? sizes=None) -> Tensor[]
    run.out(Tensor[] t, str program, SymInt[]? sizes=None, *, Tensor(a!)[] out) -> ()

A program is Python here: statements with `;` between them, the last of which is the result, over
tensors t0… and sizes n0…. `undeclared` is `run.out` that does not say what it writes to. `linear`
is the composite op over an autograd.Function over them, as `fx_fuser.ops.library` has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Sizes = Sequence[int] | None
LIBRARY = torch.library.Library("fx_fuser_probe", "DEF")
_CALL = "Tensor[] t, str program, SymInt[]? sizes=None"
LIBRARY.define(f"run({_CALL}) -> Tensor")
LIBRARY.define(f"run.many({_CALL}) -> Tensor[]")
LIBRARY.define(f"run.out({_CALL}, *, Tensor(a!)[] out) -> ()")
LIBRARY.define(f"run.into({_CALL}, *, Tensor(a!)[] into) -> ()")
LIBRARY.define(f"undeclared({_CALL}, *, Tensor[] into) -> Tensor")
LIBRARY.define("linear(Tensor x, Tensor weight, Tensor bias, Tensor gate) -> Tensor")

RUN = torch.ops.fx_fuser_probe.run.default
MANY = torch.ops.fx_fuser_probe.run.many
OUT = torch.ops.fx_fuser_probe.run.out
INTO = torch.ops.fx_fuser_probe.run.into
UNDECLARED = torch.ops.fx_fuser_probe.undeclared.default
LINEAR = torch.ops.fx_fuser_probe.linear.default


def evaluated(t: Sequence[Tensor], program: str, sizes: Sizes = None) -> list[Tensor]:
    """The program's results, in memory of their own."""
    names: dict[str, Any] = {"torch": torch, "inf": math.inf}
    names |= {f"t{i}": tensor for i, tensor in enumerate(t)}
    names |= {f"n{i}": size for i, size in enumerate(sizes or ())}
    *steps, result = program.split(";")
    for step in steps:
        name, _, value = step.partition("=")
        names[name.strip()] = eval(value.strip(), names)
    found = eval(result.strip(), names)
    return [v.clone() for v in (found if isinstance(found, tuple) else (found,))]


def _run(t: Sequence[Tensor], program: str, sizes: Sizes = None) -> Tensor:
    return evaluated(t, program, sizes)[0]


def _out(t: Sequence[Tensor], program: str, sizes: Sizes = None, **buffers: Any) -> None:
    (into,) = buffers.values()
    for buffer, result in zip(into, evaluated(t, program, sizes)):
        buffer.copy_(result)


def _many(t: Sequence[Tensor], program: str, sizes: Sizes = None) -> list[Tensor]:
    return evaluated(t, program, sizes)


for _name, _in_torch in (("run", _run), ("run.many", _many)):
    LIBRARY.impl(_name, _in_torch, "CPU")
    torch.library.register_fake(f"fx_fuser_probe::{_name}", _in_torch, lib=LIBRARY)
for _name in ("run.out", "run.into"):
    LIBRARY.impl(_name, _out, "CPU")
    torch.library.register_fake(f"fx_fuser_probe::{_name}", lambda *_, **__: None, lib=LIBRARY)


def _undeclared(*call: Any, into: Sequence[Tensor]) -> Tensor:
    _out(*call, into=into)
    return _run(*call)


LIBRARY.impl("undeclared", _undeclared, "CPU")
torch.library.register_fake(
    "fx_fuser_probe::undeclared", lambda *call, into: _run(*call), lib=LIBRARY
)

FORWARD = "z = t0 @ t1.t() + t2; z.sigmoid() * t3"
SAVING = "z = t0 @ t1.t() + t2; (z.sigmoid() * t3, z)"
BACKWARD = (
    "s = t5.sigmoid(); dz = t4 * t3 * s * (1 - s); "
    "(dz @ t1, dz.t() @ t0, dz.sum(0), (t4 * s).sum_to_size(t3.shape))"
)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        y, z = MANY(list(tensors), SAVING)
        ctx.save_for_backward(*tensors, z)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        *tensors, z = ctx.saved_tensors
        return tuple(MANY([*tensors, dy, z], BACKWARD))


def _linear(*tensors: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(v.requires_grad for v in tensors):
        return _Fused.apply(*tensors)
    return RUN(list(tensors), FORWARD)


LIBRARY.impl("linear", _linear, "CompositeImplicitAutograd")
