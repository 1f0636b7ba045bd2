"""The ops that stand in exported programs: one an anchor, for inference.

`fx_fuser::<anchor>_exported` runs in a process in which nothing was compiled: on CUDA it builds and
loads its kernels at its first call, from its own arguments. These are of kinds that AOTInductor's
runtime passes on as they are. It changes some others: torch 2.11 a dtype, and all torches from 2.11
to 2.15 an empty list of tensors, which arrives as None, and a number that is infinite, which does
not arrive at all. So here

    t             is None if it is empty
    s             is the text of the numbers, as `repr` writes them, with commas between
    compute, out  are names of dtypes

and all else is as in `ops.library`. The overload's name is for those who did not import fx_fuser:
torch tells them that it could not find `fx_fuser::linear_exported.import_fx_fuser`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser import kernels
from fx_fuser.anchors import ANCHORS, Anchor
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.errors import BuildError, FxFuserError
from fx_fuser.graph.epilogue import parse
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.library import FusedCall, argument_names, forward_in_torch, split_arguments

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_SCHEMA = "str epilogue, Tensor[]? t, str s, str compute, str out"
_OVERLOAD = "import_fx_fuser"
Kernel = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Tensor]  # of operands and t

_kernels: dict[tuple[Any, ...], Kernel | None] = {}  # what a call depends on → the call


def op_of(kind: str) -> torch._ops.OpOverload:
    """The op of this anchor."""
    found: torch._ops.OpOverload = getattr(
        getattr(torch.ops.fx_fuser, f"{kind}_exported"), _OVERLOAD
    )
    return found


def arguments(composite: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """The arguments of the op, from those of the composite op."""
    anchored = composite[: len(argument_names(kind))]
    text, t, s, compute, out, _ = composite[len(anchored) :]
    numbers = ",".join(repr(float(number)) for number in s)
    return (*anchored, text, list(t) or None, numbers, _name_of(compute), _name_of(out))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(","))) if text else ()


def _run(anchor: Anchor, fake: bool, *args: Any) -> Tensor:
    operands, config, (text, t, s, compute, out) = split_arguments(anchor, args)
    t, numbers, dtype = list(t or ()), list(_numbers(s)), getattr(torch, out)
    with torch.autocast(operands["x"].device.type, enabled=False):
        for name in anchor.cast:  # an autocast around the program, as where it was exported
            if operands[name] is not None:
                operands[name] = operands[name].to(getattr(torch, compute))
        tensors = anchor.kernel_operands(operands, config)
        if not fake and operands["x"].device.type == "cuda":
            kernel = _kernel(anchor, operands, config, text, t, numbers, dtype)
            if kernel is not None:
                return kernel(tensors, t)
        rest: tuple[Any, ...] = (text, t, numbers, [], dtype, False)
        return forward_in_torch(anchor, fake, *tensors, *config.values(), *rest)[0]


# ---- on CUDA -----------------------------------------------------------------------------------


def _kernel(
    anchor: Anchor,
    operands: Mapping[str, Tensor | None],
    config: Mapping[str, Any],
    text: str,
    t: Sequence[Tensor],
    numbers: Sequence[float],
    out: torch.dtype,
) -> Kernel | None:
    """A call of the kernel op, its kernels loaded, that lacks the tensors alone.

    None if no kernel can be loaded here, which one warning tells.
    """
    forms = tuple(
        v if v is None else (v.dtype, v.device, v.ndim == 0) for v in (*operands.values(), *t)
    )
    settings = tuple(tuple(v) if isinstance(v, (list, tuple)) else v for v in config.values())
    families = kernels.families(operands, config)
    key = (anchor.kind, text, settings, tuple(numbers), out, forms, families)
    if key not in _kernels:
        call = FusedCall(anchor, dict(config), parse(text), list(numbers), out)
        _kernels[key] = _prepared(call, [*operands.values()], t)
    return _kernels[key]


def _prepared(
    call: FusedCall, operands: Sequence[Tensor | None], t: Sequence[Tensor]
) -> Kernel | None:
    device = next(v.device for v in operands if v is not None)
    try:
        if reason := kernels.unavailable(device):
            raise BuildError(reason)
        specs = call.specs(operands, t)
        if not all(load.runs_on(spec, device) for spec in specs):  # they are another GPU's
            call.config["product"] = LIBRARY
            specs = call.specs(operands, t)
        load.load_shim()  # for a library's gemm without a tail there is no kernel
        load.prepare(specs, device)
    except BuildError as error:
        warnings.warn(
            f"fx_fuser runs {call.anchor.title} sites of an exported program as torch's own "
            f"operations, since no kernel can be loaded on {device}: {error}",
            stacklevel=2,
        )
        return None
    _, program = call.arguments(operands, t, save=False)

    def kernel(operands: Sequence[Tensor | None], t: Sequence[Tensor]) -> Tensor:
        result: Tensor = run.ONE([v for v in (*operands, *t) if v is not None], program)
        return result

    return kernel


# ---- definitions -------------------------------------------------------------------------------


def _no_gradient(anchor: Anchor, *_: Any) -> None:
    raise FxFuserError(
        f"fx_fuser::{anchor.kind}_exported has no gradient: `fuse_exported` is for inference; run "
        "the program under torch.no_grad(), or train it with "
        'torch.compile(program.module(), backend="fx_fuser")'
    )


def _define(anchor: Anchor) -> None:
    name = f"{anchor.kind}_exported.{_OVERLOAD}"
    _LIBRARY.define(f"{name}({anchor.schema}, {_SCHEMA}) -> Tensor")
    _LIBRARY.impl(name, functools.partial(_run, anchor, False), "CompositeExplicitAutograd")
    fake = functools.partial(_run, anchor, True)
    torch.library.register_fake(f"fx_fuser::{name}", fake, lib=_LIBRARY)
    backward = functools.partial(_no_gradient, anchor)
    torch.library.register_autograd(f"fx_fuser::{name}", backward, lib=_LIBRARY)


for _anchor in ANCHORS.values():
    _define(_anchor)
