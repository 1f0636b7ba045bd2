"""What exported programs call: a function for each anchor, say `linear_exported`, for inference.

Its arguments are the composite op's, without `native`. It runs in a process in which nothing was
compiled: on CUDA it builds and loads its kernels at its first call, from its own arguments. They
are the text of `fx_fuser.ops.run`, because AOTInductor's runtime changes some kinds of arguments:
torch 2.11 a dtype, and all torches from 2.11 to 2.15 an empty list of tensors, which arrives as
None, and an infinite number, which does not arrive at all.

The overload's name is for those who did not import fx_fuser: torch tells them that it could not
find `fx_fuser::run.import_fx_fuser`.
"""

from __future__ import annotations

import contextlib
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
from fx_fuser.ops import library, run
from fx_fuser.ops.library import FusedCall

Kernel = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Tensor]  # of operands and t

_kernels: dict[tuple[Any, ...], Kernel | None] = {}  # what a call depends on → the call


def arguments(composite: Sequence[Any], kind: str) -> run.Arguments:
    """The arguments of `run.EXPORTED`, from those of the composite op."""
    *front, s, compute, out, _ = composite
    return run.arguments(f"{kind}_exported", (*front, [*map(float, s)], compute, out))


def _run(anchor: Anchor, fake: bool, *args: Any) -> list[Tensor]:
    operands, config, (text, t, s, compute, out) = library.split_arguments(anchor, args)
    device = operands["x"].device.type
    is_cast = torch.is_autocast_enabled(device)  # around the program, as when it was exported
    with torch.autocast(device, enabled=False) if is_cast else contextlib.nullcontext():
        library.cast(anchor, operands, compute)
        tensors = anchor.kernel_operands(operands, config)
        if not fake and device == "cuda":
            kernel = _kernel(anchor, operands, config, text, t, s, out)
            if kernel is not None:
                return [kernel(tensors, t)]
        rest: tuple[Any, ...] = (*config.values(), text, t, s, [], out, False)
        return library.forward_in_torch(anchor, fake, *tensors, *rest)


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
    """A call of the kernel op, with its kernels loaded, that lacks only the tensors.

    None if no kernel can be loaded here; then one warning says so.
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
        if not all(load.runs_on(spec, device) for spec in specs):  # they are for another GPU
            call.config["product"] = LIBRARY
            specs = call.specs(operands, t)
        load.load_shim()  # a library gemm without a tail has no kernel
        load.prepare(specs, device)
    except BuildError as error:
        warnings.warn(
            f"fx_fuser runs {call.anchor.title} sites of an exported program as torch's own "
            f"operations, because no kernel can be loaded on {device}: {error}",
            stacklevel=2,
        )
        return None
    _, program = call.arguments(operands, t, save=False)

    def kernel(operands: Sequence[Tensor | None], t: Sequence[Tensor]) -> Tensor:
        result: Tensor = run.ONE([v for v in (*operands, *t) if v is not None], program)
        return result

    return kernel


# ---- definitions -------------------------------------------------------------------------------


def _no_gradient(*_: Any) -> None:
    raise FxFuserError(
        "fx_fuser::run.import_fx_fuser has no gradient: `fuse_exported` is for inference; run the "
        "program under torch.no_grad(), or train it with "
        'torch.compile(program.module(), backend="fx_fuser")'
    )


for _anchor in ANCHORS.values():
    library.define(f"{_anchor.kind}_exported", _run, _anchor)
torch.library.register_autograd("fx_fuser::run.import_fx_fuser", _no_gradient, lib=run._LIBRARY)
