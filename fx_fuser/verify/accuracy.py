"""How exact is exact enough: the bound that README promises, and the comparison against it.

What is compared, element by element, is |value − exact|. An infinity stands for every number that
rounds to it. Where the exact value is 65530, an infinity of float16 is right, and one of the other
sign is off by 131050; where it is 1, an infinity is off by 65519. A NaN is right only where the
exact value is NaN.

Where eager is no guide: if the exact value is finite and eager's is not, an operation of eager's
overflowed on the way. There a value may be eager's, an infinity of the exact value's sign, or near
the exact value. If the exact value is not finite, the value must be eager's or the exact one.
Neither case loosens the bound of any other element.

Gradients that are zero in exact arithmetic, such as that of a bias before a BatchNorm in training
or of the keys' bias before a softmax, are rounding noise in eager: no digit of them is right. They
are known by eager's error, which is `_NOISE` times the exact gradient or more. A small gradient
that eager does compute is held to eager's error like any other.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Bound:
    """What |error| may be, as a whole and in each element.

        whole    ‖error‖₂ ≤ max(factor · eager's, floor · ‖exact‖₂)
        element  |error| − 2 eps |exact| ≤ max(2 factor · eager's, peak · max |exact|)

    "eager's" is the same expression of eager's value: its norm, and its largest element.
    factor, floor, peak: by the dtype of the value. grad_strides: gradients must have eager's
    strides, as outputs and buffers must in any case.

    Where the bound of an element comes from. A few wrong elements of many do not show in the norm:
    ten zeros among 10⁶ bfloat16 numbers change it by less than their roundings do. An element of a
    right result is off by

    - roundings of itself, by half an ulp, so by eps / 2 of it, each: 2 eps |exact| is four of them;
    - what sums and rounded values before it lost. That is not relative to the element: a sum loses
      relative to its terms, a split gemm relative to the largest value of a row. Eager's sums lose
      it as well, and the largest of many errors is about the same in each run of a kind. The
      largest varies more than the norm: hence twice the factor;
    - `peak` of the largest element where eager was lucky. Errors that are together `floor` of the
      result are normally distributed, and of 10⁹ such numbers none is beyond 6 times their root
      mean square, which `floor` bounds by the largest element. The accumulators of the 16-bit
      dtypes are fp32, so their peak is fp32's.
    """

    factor: Mapping[torch.dtype, float]
    floor: Mapping[torch.dtype, float]
    peak: Mapping[torch.dtype, float]
    grad_strides: bool = True


# README's Accuracy. The floors of the 16-bit dtypes are one rounding of the result, which eager may
# have avoided by luck. float64 has nothing more exact to compare with: its floor is for sums taken
# in another order.
PROMISED = Bound(
    factor={torch.float32: 1.5, torch.float64: 2, torch.bfloat16: 2, torch.float16: 2},
    floor={torch.float32: 4e-7, torch.float64: 1e-12, **{d: e / 4 for d, e in _EPS.items()}},
    peak={torch.float64: 6e-12, **dict.fromkeys((torch.float32, *_EPS), 6 * 4e-7)},
)

# Eager's error, in multiples of the exact gradient, from which on it is noise alone. A gradient
# that is zero except for float64's rounding is 10⁹ times below float32's noise; of any other, eager
# has some digit right.
_NOISE = 1e3
# Another sum of the same terms may leave so many times eager's noise: its terms are as large, but
# rounded at other places.
_NOISE_FACTOR = 16.0
# An element's own roundings, in eps, where eager overflows and shows none.
_OVERFLOWED = 8.0
# From so many neighbours on, their errors are a sample, whose spread is known. Where few elements,
# or a large one, make up an error, the largest of 16 is soon exceeded, and a sum in another order
# may spread twice as much: 8 standard deviations are not reached. Where many elements do, all
# neighbours have about the same error, and the deviations are close to 0.
_SAMPLE, _DEVIATIONS = 8, 8.0
# Neighbours of eager, whose operands differ by a rounding, that are tried before anything is called
# wrong. Where terms cancel, or a tensor has few elements, eager's own error may be small by luck.
NEIGHBOURS = 16


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
        parts = (("output", self.outputs), (_GRADIENT, self.grads), ("state of", self.state))
        return {f"{kind} {name}": v for kind, part in parts for name, v in part.items()}


_GRADIENT = "gradient of"


class Error(NamedTuple):
    """whole, element: the left sides of `Bound`."""

    whole: float
    element: float


Errors = Mapping[str, Error]


def compare(
    found: Observed,
    eager: Observed,
    exact: Observed,
    bound: Bound = PROMISED,
    peers: Sequence[Errors] = (),
    neighbours: Sequence[Errors] = (),
) -> list[str]:
    """What is wrong with `found`: empty if every value is as near to `exact` as `eager` is.

    peers: `errors_of` other runs, as good a bound as eager's. neighbours: those of runs of one
    kind, a sample of its errors if there are `_SAMPLE` or more.
    """
    if others := _other_names(found, eager):
        return others
    own, truth = eager.everything(), exact.everything()
    rivals = [errors_of(eager, exact), *peers, *neighbours, *_sample(neighbours)]
    faults = []
    for name, value in found.everything().items():
        is_grad = name.startswith(_GRADIENT)
        errors = [r[name] for r in rivals if name in r]
        fault = _other_form(value, own[name]) or _other_strides(value, own[name], bound, is_grad)
        fault = fault or _fault(value, own[name], truth[name], errors, bound, is_grad)
        if fault:
            faults.append(f"{name}: {fault}")
    return faults


def remaining_faults(
    found: Observed,
    eager: Observed,
    exact: Observed,
    bound: Bound,
    peers: Iterable[Observed],
    neighbours: Iterable[Observed],
) -> list[str]:
    """The faults of `found` that remain with each of these runs as a bound, too: see `compare`. A
    run is made only where a fault remains, and only its errors are kept.
    """
    faults = compare(found, eager, exact, bound)
    known: tuple[list[Errors], list[Errors]] = ([], [])
    for kind, runs in zip(known, (peers, neighbours)):
        made = iter(runs)
        while faults and (run := next(made, None)) is not None:
            kind.append(errors_of(run, exact))
            before = {_name(fault) for fault in faults}
            faults = compare(found, eager, exact, bound, *known)
            faults = [fault for fault in faults if _name(fault) in before]
    return faults


def _name(fault: str) -> str:
    return fault.partition(":")[0]


def errors_of(run: Observed, exact: Observed) -> dict[str, Error]:
    """A rival's errors, kept instead of its values."""
    truth = exact.everything()
    found = {}
    for name, value in run.everything().items():
        if has_roundings(value):
            v, e = _reals(value), _reals(truth[name])
            distance = _distance(v, e, value.dtype)
            # A value that is not finite has an error without a size, or none.
            usable = torch.isfinite(v) & torch.isfinite(e)
            distance = torch.where(usable, distance, 0.0)
            found[name] = Error(
                _norm(distance[_in_range(e, value.dtype)]), _excess(distance, e, value.dtype)
            )
    return found


def _other_names(found: Observed, eager: Observed) -> list[str]:
    faults = []
    for part in ("outputs", "grads", "state"):
        mine, theirs = getattr(found, part).keys(), getattr(eager, part).keys()
        if mine != theirs:
            faults.append(f"{part}: {', '.join(mine) or 'none'}; eager {', '.join(theirs)}")
    if found.differentiable != eager.differentiable:
        faults.append(f"requires_grad of the outputs: {found.differentiable}, not as in eager")
    return faults


def _other_strides(value: Tensor, eager: Tensor, bound: Bound, is_grad: bool) -> str:
    """Inductor chooses its own for a gradient's dimensions of one element: they reach nothing."""
    if is_grad and not bound.grad_strides:
        return ""
    reaching = [i for i, size in enumerate(value.shape) if size != 1 or not is_grad]
    if all(value.stride(i) == eager.stride(i) for i in reaching):
        return ""
    return f"strides {value.stride()}, in eager {eager.stride()}"


def _other_form(value: Tensor, eager: Tensor) -> str:
    if (value.dtype, value.shape) != (eager.dtype, eager.shape):
        return f"{value.dtype} {tuple(value.shape)}, in eager {eager.dtype} {tuple(eager.shape)}"
    if not has_roundings(value) and not torch.equal(value, eager):
        return "other integers than in eager"
    return ""


def _fault(
    value: Tensor,
    eager: Tensor,
    exact: Tensor,
    rivals: Sequence[Error],
    bound: Bound,
    is_grad: bool,
) -> str:
    if not has_roundings(value):
        return ""
    dtype = value.dtype
    v, g, e = _reals(value), _reals(eager), _reals(exact)
    distance = _distance(v, e, dtype)
    overflowed = torch.isfinite(e) & ~torch.isfinite(g) & (_distance(g, e, dtype) > 0)
    is_eagers = (v == g) | (v.isnan() & g.isnan())
    right = is_eagers & (overflowed | ~torch.isfinite(e))
    right |= overflowed & v.isinf() & (v.sign() == e.sign())
    distance = torch.where(right, 0.0, distance)
    if distance.isinf().any():
        return "other infinities or NaNs than in eager"

    real = torch.empty((), dtype=dtype).real.dtype
    usable = _in_range(e, dtype)
    guided = usable & ~overflowed
    size, largest = _norm(e[guided]), _largest(e[guided])
    whole, element = map(max, zip(*rivals))
    noise = is_grad and rivals[0].whole > _NOISE * size
    factor = _NOISE_FACTOR if noise else bound.factor[real]
    least = torch.finfo(real).smallest_normal * torch.finfo(real).eps  # no two values are nearer
    most = max(2 * factor * element, bound.peak[real] * largest + least)
    # Where eager overflowed: as far off as elsewhere, relative to the largest value.
    growth = max(1.0, _largest(e[usable]) / largest) if largest else 1.0
    checks = (
        (
            "norm 2", _norm(distance[guided]), size, whole,
            max(factor * whole, bound.floor[real] * size + least * v.numel() ** 0.5),
        ),
        (
            "its worst element", _excess(distance[~overflowed], e[~overflowed], dtype), largest,
            element, most,
        ),
        (
            "the worst element where eager overflows",
            _excess(distance[overflowed], e[overflowed], dtype, _OVERFLOWED),
            _largest(e[overflowed]), element, most * growth,
        ),
    )  # fmt: skip
    for what, error, of, eagers, allowed in checks:
        if not error <= allowed:
            of_eager = f"(eager's {eagers:.3g})"
            return f"error {error:.3g} of {of:.3g} in {what}, allowed {allowed:.3g} {of_eager}"
    return ""


def _sample(runs: Sequence[Errors]) -> list[Errors]:
    """How large an error drawn like these may be; nothing if they are few."""
    if len(runs) < _SAMPLE:
        return []

    def upper(errors: Sequence[float]) -> float:
        return statistics.fmean(errors) + _DEVIATIONS * statistics.stdev(errors)

    return [{n: Error(*map(upper, zip(*(run[n] for run in runs)))) for n in runs[0]}]


# ---- element by element ----------------------------------------------------------------------


def has_roundings(tensor: Tensor) -> bool:
    """Are its elements floating-point numbers, real or complex?"""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _reals(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in float64, flat; a complex one has two per element."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double().flatten()


def _limit(dtype: torch.dtype) -> float:
    """The least number that rounds to infinity; in float64 the largest there is."""
    info = torch.finfo(dtype)
    half_an_ulp = math.ldexp(info.eps / 2, math.frexp(info.max)[1] - 1)
    return min(info.max + half_an_ulp, torch.finfo(torch.float64).max)


def _distance(value: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """|value − exact|, infinite where only one is NaN, or only the exact value is infinite."""
    limit = _limit(dtype)
    nearest = torch.where(value.isposinf(), exact.clamp(min=limit), value)
    nearest = torch.where(value.isneginf(), exact.clamp(max=-limit), nearest)
    same = (value == exact) | (value.isnan() & exact.isnan())
    apart = (nearest - exact).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where(same, 0.0, apart)


def _in_range(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Which exact values are in the dtype's range?  The others do not count for sizes."""
    return exact.abs() < _limit(dtype)


def _excess(distance: Tensor, exact: Tensor, dtype: torch.dtype, ulps: float = 2.0) -> float:
    """The largest distance beyond an element's own roundings."""
    own = ulps * torch.finfo(dtype).eps * exact.abs()
    return _largest((distance - own.nan_to_num(0.0, 0.0)).clamp(min=0.0))


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _norm(numbers: Tensor) -> float:
    """‖·‖₂; squares neither overflow nor underflow."""
    largest = _largest(numbers)
    if not 0.0 < largest < math.inf:
        return largest
    return largest * float(torch.linalg.vector_norm(numbers / largest))


# ---- copies ----------------------------------------------------------------------------------


class Copier:
    """Copies a tensor, with its strides; one that is given twice is copied once."""

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


def neighbour_of(tensor: Tensor, generator: torch.Generator, eps: float = 0.0) -> Tensor:
    """The tensor, off by at most half a unit in the last place of its dtype, or half of `eps`."""
    eps = max(torch.finfo(tensor.dtype).eps, eps)
    noise = torch.rand(
        tensor.shape, generator=generator, dtype=torch.float64, device=generator.device
    )
    wide = tensor.detach().to(_as_wide(tensor, torch.float64))
    return (wide * (1 + (noise.to(tensor.device) - 0.5) * eps)).to(tensor.dtype)


def _as_wide(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype.to_complex() if tensor.is_complex() else dtype


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Puts the random state back, so that every run draws the same numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
