"""A backward that cannot be differentiated says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_Backward = Callable[..., tuple[Any, ...]]


def differentiable_once(op_of: Callable[[Any], str]) -> Callable[[_Backward], _Backward]:
    """A backward that cannot be differentiated: differentiating its results raises.

    torch's `once_differentiable` looks only at dy. The gradient of `y.sum()` was then a constant,
    and a gradient penalty on it silently did nothing.

    op_of: a context → the name of its op.
    """

    def guarded_by(backward: _Backward) -> _Backward:
        @functools.wraps(backward)
        def guarded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():  # no create_graph=True
                return found
            message = (
                f"fx_fuser::{op_of(ctx)} has no double backward; to differentiate twice, "
                "leave it unfused with options={'patterns': []}"
            )
            present = [g.detach().requires_grad_() for g in found if g is not None]
            guards = torch._C._functions.DelayedError(message.encode(), len(present))(*present)
            results = iter(guards if isinstance(guards, tuple) else (guards,))
            return tuple(None if g is None else next(results) for g in found)

        return guarded

    return guarded_by
