"""The ways to run a model that `compare` knows, a column each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fx_fuser.backend import fx_fuser
from fx_fuser.compare.untouched import tf32_allowed
from fx_fuser.options import Options

Call = Callable[..., Any]
NAMES = (
    "eager",
    "inductor",
    "fx_fuser",
    "inductor_tf32",
    "inductor_reduce_overhead",
    "fx_fuser_reduce_overhead",
)
_GRAPHS = "reduce-overhead"


@dataclass(frozen=True)
class Variant:
    """settings: torch's, while it is compiled and while it runs. mode: as in `Column`."""

    title: str
    compile: Callable[[Any], Call]
    mode: str = ""
    settings: Callable[[], AbstractContextManager[None]] = nullcontext


def variants_of(
    names: Sequence[str], options: Options, given: Mapping[str, Any] | None
) -> dict[str, Variant]:
    """Those of NAMES. options: as parsed; given: as the user gave them."""
    mode = options.mode or ""
    suffix = f", {mode}" if mode else ""
    inner = "Inductor" if options.inner == "inductor" else f"inner={options.inner}"
    inductor = partial(_compile_inner, options)
    own = dict(given or {})
    every = {
        "eager": Variant("eager", lambda model: model),
        "inductor": Variant(inner + suffix, inductor, mode),
        "fx_fuser": Variant("fx_fuser" + suffix, partial(_compile_fused, own), mode),
        "inductor_tf32": Variant(f"{inner}{suffix}, TF32", inductor, mode, tf32_allowed),
        "inductor_reduce_overhead": Variant(
            f"{inner}, reduce-overhead",
            partial(_compile_inner, replace(options, mode=_GRAPHS)),
            _GRAPHS,
        ),
        "fx_fuser_reduce_overhead": Variant(
            "fx_fuser, reduce-overhead", partial(_compile_fused, own | {"mode": _GRAPHS}), _GRAPHS
        ),
    }
    return {name: every[name] for name in NAMES if name in names}


def _compile_inner(options: Options, model: Any) -> Call:
    """Compiles as fx_fuser's column does, without fx_fuser."""
    if options.inner != "inductor":
        made: Call = torch.compile(model, backend=options.inner)
        return made
    of_mode = torch._inductor.list_mode_options(options.mode) if options.mode else {}
    settings = {**of_mode, **options.inductor}
    made = torch.compile(model, options=settings) if settings else torch.compile(model)
    return made


def _compile_fused(options: Mapping[str, Any], model: Any) -> Call:
    made: Call = torch.compile(model, backend=fx_fuser, options=dict(options) or None)
    return made
