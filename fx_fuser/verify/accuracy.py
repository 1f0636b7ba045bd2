"""How exact is exact enough: the bound that README promises, and the comparison against it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Bound:
    """error ≤ max(factor · eager's error, floor · size of the exact value), in each of the norms.

    factor, floor: by the dtype of the value. norms: orders of `torch.linalg.vector_norm`.
    strides: they must be eager's.
    """

    factor: Mapping[torch.dtype, float]
    floor: Mapping[torch.dtype, float]
    norms: tuple[float, ...] = (2,)
    strides: bool = True


# README's Accuracy. The floors of the 16-bit dtypes are one rounding of the result, which eager may
# have avoided by luck. float64 has nothing more exact to compare with: its floor is for sums taken
# in another order.
PROMISED = Bound(
    factor={torch.float32: 1.5, torch.float64: 2, torch.bfloat16: 2, torch.float16: 2},
    floor={torch.float32: 4e-7, torch.float64: 1e-12, **{d: e / 4 for d, e in _EPS.items()}},
)


@dataclass
class Observed:
    """The values of one run, by name.

    grads: of parameters and inputs that have one. state: buffers, and inputs afterwards.
    differentiable: for each output, whether it requires a gradient.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    differentiable: list[bool] = field(default_factory=list)

    def everything(self) -> dict[str, Tensor]:
        parts = (("output", self.outputs), ("gradient of", self.grads), ("state of", self.state))
        return {f"{kind} {name}": v for kind, part in parts for name, v in part.items()}


def compare(
    found: Observed,
    eager: Observed,
    exact: Observed,
    bound: Bound = PROMISED,
    peers: Sequence[Observed] = (),
) -> list[str]:
    """What is wrong with `found`: empty if every value is as near to `exact` as `eager` is.

    peers: other runs whose errors are as good a bound as eager's.
    """
    faults = []
    for part in ("outputs", "grads", "state"):
        mine, theirs = getattr(found, part).keys(), getattr(eager, part).keys()
        if mine != theirs:
            faults.append(f"{part}: {', '.join(mine) or 'none'}; eager {', '.join(theirs)}")
    if found.differentiable != eager.differentiable:
        faults.append(f"requires_grad of the outputs: {found.differentiable}, not as in eager")
    if faults:
        return faults
    whole = sum(_size(g, 2) ** 2 for g in exact.grads.values()) ** 0.5
    truth, others = exact.everything(), [p.everything() for p in (eager, *peers)]
    for name, value in found.everything().items():
        zero_up_to = 1e-9 * whole if name.startswith("gradient") else 0.0
        fault = _fault(value, [o[name] for o in others], truth[name], bound, zero_up_to)
        faults += [f"{name}: {fault}"] if fault else []
    return faults


def _fault(
    value: Tensor, others: Sequence[Tensor], exact: Tensor, bound: Bound, zero_up_to: float
) -> str:
    eager = others[0]
    if (value.dtype, value.shape) != (eager.dtype, eager.shape):
        return f"{value.dtype} {tuple(value.shape)}, in eager {eager.dtype} {tuple(eager.shape)}"
    if bound.strides and value.stride() != eager.stride():
        return f"strides {value.stride()}, in eager {eager.stride()}"
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return "" if torch.equal(value, eager) else "other integers than in eager"
    # Where eager overflows or divides by zero there is no bound, unless the exact value is not
    # finite either.
    odd, usable = ~torch.isfinite(exact), torch.isfinite(exact) & torch.isfinite(eager)
    if not torch.equal(value[odd].nan_to_num(nan=0.5), eager[odd].nan_to_num(nan=0.5)):
        return "other infinities or NaNs than in eager"
    value, exact, others = value[usable], exact[usable], [o[usable] for o in others]
    real = torch.empty((), dtype=value.dtype).real.dtype
    for norm in bound.norms:
        size = _size(exact, norm)
        if size < zero_up_to:  # zero in exact arithmetic: a bias under a training BatchNorm
            size = zero_up_to * 1e9
        eagers = max(_size(_wide(o) - exact, norm) for o in others)
        error = _size(_wide(value) - exact, norm)
        allowed = max(bound.factor[real] * eagers, bound.floor[real] * size)
        if not error <= allowed:
            of = f" of {size:.3g} in norm {norm}"
            return f"error {error:.3g}{of}, allowed {allowed:.3g} (eager's {eagers:.3g})"
    return ""


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_as_wide(tensor, torch.float64))


def _size(tensor: Tensor, norm: float) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor), norm)) if tensor.numel() else 0.0


# ---- the same again --------------------------------------------------------------------------


class Copier:
    """Copies a tensor, with its strides; one that is given twice is one copy."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.copies: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = self._copy(value)
        return self.copies[id(value)]

    def _copy(self, tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()  # keeps the strides of dense tensors
        if self.dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            copied = copied.to(_as_wide(copied, self.dtype))
        if copied.stride() != tensor.stride():
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((elements,), (1,), 0).clone().to(copied.dtype)
            copied = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return copied.requires_grad_(tensor.requires_grad)


def _as_wide(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype.to_complex() if tensor.is_complex() else dtype


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Puts the random state back, so that every run draws the same numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
