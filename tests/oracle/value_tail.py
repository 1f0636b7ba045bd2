"""A tail's own source, run by torch in the accumulation dtype, and what its roundings change.

For `value_oracle`. By how much a rounding shows is found by trying: the tail is run again with one
operation's result, and the gradient through it, moved by that much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from value_programs import Fused
from value_sets import Possible, around, same

from fx_fuser.verify.accuracy import Copier

_ROUNDINGS = {  # of a CUDA function, at most; arithmetic is exact but for a contraction
    **dict.fromkeys(("sigmoid", "silu", "tanh", "exp", "log", "erf", "rsqrt", "expit"), 6),
    **dict.fromkeys(("exp2", "expm1", "log1p", "log2", "sin", "cos", "erfc"), 6),
    **dict.fromkeys(("gelu", "softplus", "pow", "__pow__", "__rpow__", "square"), 10),
    **dict.fromkeys(("mish", "elu", "log_sigmoid", "hardswish", "hardsigmoid"), 10),
}
# Functions whose derivative is a difference: off by roundings of 1, not of its own size.
_SATURATING = ("sigmoid", "silu", "tanh", "erf", "expit", "gelu", "softplus",
               "mish", "log_sigmoid", "hardswish")  # fmt: skip
# torch on CUDA multiplies by 1.0f / 6.0f, in float64 too (aten ActivationHardswishKernel.cu): there
# the oracle is the one that is off.
_OF_A_FLOAT_SIXTH = ("hardswish", "hardsigmoid")
# Their results are one of what they are given, or its negative: nothing is rounded.
_EXACT = ("maximum", "minimum", "max", "min", "relu", "abs", "neg", "negative")
_SUMS = ("add", "sub", "rsub", "addcmul", "addcdiv", "lerp", "add_", "subtract")


class Uncounted(Exception):
    """The tail, run, has other calls than its graph."""


@dataclass
class Ran:
    """y, dz and the operands' gradients in the accumulation dtype. terms: of an operand that is
    read apart, what its gradient is the sum of, without signs."""

    y: Tensor
    dz: Tensor | None
    grads: dict[str, Tensor]
    terms: dict[str, Tensor] = field(default_factory=dict)

    def parts(self) -> dict[str, Tensor]:
        found = {"y": self.y, **self.grads}
        return found if self.dz is None else {**found, "dz": self.dz}


class _Nudged(torch.autograd.Function):
    """A result and the gradient through it, moved; x is what it was made of."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, x: Tensor, delta: float, saturating: bool) -> Tensor:
        ctx.delta, ctx.saturating, ctx.shape = delta, saturating, x.shape
        return made + made * delta + delta * torch.finfo(made.dtype).tiny  # and subnormal steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,) = grads
        extra = (g * ctx.delta).sum_to_size(ctx.shape) if ctx.saturating else None
        return g + g * ctx.delta, extra, None, None


class Wide(TorchFunctionMode):
    """Every floating result in the accumulation dtype; the result of operation `at` moved.

    apart: but for what is made of operands alone, which no grown tail takes in. part: only those
    calls of the tail that are fused, the last of which is rounded. first: the first result is
    rounded to this dtype.
    """

    def __init__(
        self,
        acc: torch.dtype,
        at: int = -1,
        sign: int = 0,
        *,
        apart: bool = False,
        part: Fused | None = None,
        first: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.acc, self.at, self.sign, self.count, self.first = acc, at, sign, 0, first
        self.apart, self.part, self.of_z = apart or part is not None, part, dict[int, Tensor]()
        self.calls, self.rounded = 0, dict[int, Tensor]()
        self.widened: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.terms: dict[int, Tensor] = {}  # of an operand's gradient, without signs

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        call, self.calls = self.calls, self.calls + 1
        if self.apart:
            if not self._is_fused(call, (args, kwargs)):
                return func(*tree_map_only(Tensor, self._read, args), **kwargs)
            args, kwargs = tree_map_only(Tensor, self._widened, (args, kwargs))
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor) or not made.is_floating_point():
            return made
        made = made.to(self.acc)
        if self.count == 0 and self.first is not None:
            made = made.to(self.first).to(self.acc)
        exact = self._is_exact(func.__name__, args, kwargs)
        if self.count == self.at:
            moved = self._moved(made, func.__name__, args)
            made = torch.where(made.isfinite(), made, moved) if exact else moved
        self.count += 1
        if self.part is not None and call == self.part.last:
            return made.to(self.part.dtype)
        self.of_z[id(made)] = made
        if not exact or any(id(a) in self.rounded for a in args):
            self.rounded[id(made)] = made
        return made

    def _is_exact(self, name: str, args: Sequence[Any], kwargs: Any) -> bool:
        """Is the result the same whoever computes it? A sum is, unless one of what it adds is a
        product, which an fma does not round."""
        products = bool(kwargs) or any(id(a) in self.rounded for a in args)
        return name in _EXACT or (name in ("add", "sub", "subtract") and not products)

    def _is_fused(self, call: int, given: Any) -> bool:
        if self.part is not None:
            return call in self.part.calls
        return any(id(t) in self.of_z for t in tree_leaves(given))

    def _widened(self, tensor: Tensor) -> Tensor:
        """One for all readers, so that its gradients add up before they are rounded."""
        if id(tensor) in self.of_z or not tensor.is_floating_point():
            return tensor
        known = self.widened.get((id(tensor), tensor._version))
        if known is None:
            known = tensor, self._read(tensor).to(self.acc)
            self.widened[id(tensor), tensor._version] = known
        return known[1]

    def _read(self, tensor: Tensor) -> Tensor:
        """One reader's own, where an operand has several, and what it adds to the gradient."""
        if id(tensor) not in self.terms:
            return tensor
        own = tensor.view_as(tensor)

        def add(grad: Tensor) -> None:
            self.terms[id(tensor)] += grad.double().abs()

        if own.requires_grad:
            own.register_hook(add)
        return own

    def _moved(self, made: Tensor, name: str, args: Sequence[Any]) -> Tensor:
        delta = self.sign * _ROUNDINGS.get(name, 1) * torch.finfo(self.acc).eps
        if made.is_cuda and name in _OF_A_FLOAT_SIXTH:
            delta = self.sign * max(abs(delta), torch.finfo(torch.float32).eps / 2)
        x = next(a for a in args if isinstance(a, Tensor) and a.is_floating_point())
        moved: Tensor = _Nudged.apply(made, x, delta, name in _SATURATING)
        if name == "gelu":
            moved = moved + (delta * x).detach()
        if name in _SUMS and len(args) > 1:  # with a factor it may be an fma
            other = (made - x).detach()
            moved = moved + torch.where(other.isfinite(), delta * other, 0.0)
        return moved


def evaluated(
    tail: Callable[..., Tensor],
    z: Tensor,
    operands: dict[str, Tensor],
    dy: Tensor | None,
    mode: Wide,
) -> Ran:
    z = z.detach().to(mode.acc).requires_grad_(dy is not None)
    mode.of_z[id(z)] = z
    own = {n: v.detach() for n, v in operands.items()}
    if mode.apart:
        # torch's kernels for CPUs round otherwise where elements are not adjacent.
        with_strides = Copier()
        own = {n: with_strides(v) if v.is_floating_point() else v for n, v in own.items()}
    else:
        own = {n: v.to(mode.acc) if v.is_floating_point() else v for n, v in own.items()}
    wanted = [n for n, v in operands.items() if v.requires_grad and dy is not None]
    for name in wanted:
        own[name].requires_grad_()
        if mode.apart:
            mode.terms[id(own[name])] = torch.zeros_like(own[name], dtype=torch.float64)
    with torch.set_grad_enabled(dy is not None):
        given = z
        if mode.part is not None and mode.part.last < 0:  # none of the tail's operations is fused
            given = z.to(mode.part.dtype)
        with mode:
            y = tail(given, *own.values())
    if mode.part is not None and mode.calls != mode.part.count:
        raise Uncounted(f"{mode.calls} calls of the tail, {mode.part.count} in its graph")
    if dy is None:
        return Ran(y, None, {})
    leaves = [z, *(own[n] for n in wanted)]
    dz, *grads = torch.autograd.grad(y, leaves, dy.to(y.dtype), materialize_grads=True)
    terms = {n: mode.terms[id(own[n])] for n in wanted if mode.apart}
    return Ran(y.detach(), dz, dict(zip(wanted, grads)), terms)


def in_other_layouts(
    tail: Callable[..., Tensor], z: Tensor, operands: dict[str, Tensor], dy: Tensor | None,
    y: Tensor, mode: Callable[[], Wide]
) -> list[Ran]:  # fmt: skip
    """The same on the same values, all of them dense, row by row and as y is. Of numbers that lie
    side by side torch's vectorized function is taken, whose last bit may be another."""
    given = [v for v in (z, dy, *operands.values()) if v is not None]
    if y.is_contiguous() and all(v.is_contiguous() for v in given):
        return []

    def laid(v: Tensor, dense: Tensor) -> Tensor:
        made = torch.empty_like(dense, dtype=v.dtype) if v.shape == dense.shape else None
        made = v.detach().contiguous() if made is None else made.copy_(v.detach())
        return made.requires_grad_(v.requires_grad)

    found = []
    for like in (torch.empty(y.shape), torch.empty_like(y)):
        own = {n: laid(v, like) for n, v in operands.items()}
        of_y = None if dy is None else laid(dy, like)
        found.append(evaluated(tail, laid(z, like), own, of_y, mode()))
    return found


@dataclass
class Bounded:
    """What y, dz and the operands' gradients may be, each before its last rounding. Those of
    operands are not summed up yet."""

    y: Possible
    dz: Possible | None
    grads: dict[str, Possible]


def bounded(
    tail: Callable[..., Tensor],
    z: Tensor,
    others: Sequence[tuple[Tensor, Tensor]],
    operands: dict[str, Tensor],
    dy: Tensor | None,
    shape: torch.Size,
    mode: Callable[..., Wide],
    first: torch.dtype | None = None,
) -> Bounded:
    """others: pairs of what z may be beside z. Operands are spread over the result first, so that
    what is summed is seen.

    Not where a column is spread to a larger result: some operations then come before that.
    """
    acc = mode().acc
    z, spread = z.to(acc), dict(operands)
    for name, v in operands.items() if z.shape == shape else ():
        if v.ndim == 0 and not v.requires_grad:
            continue  # with a dimension its dtype would count in promotions
        wide = v.detach().to(z.device).expand(shape)
        spread[name] = wide.requires_grad_(v.requires_grad) if v.requires_grad else wide
    run = functools.partial(evaluated, tail, operands=spread, dy=dy)
    counted = mode()
    exact = run(z, mode=counted)
    pairs = [
        (run(z, mode=mode(at=at, sign=1)), run(z, mode=mode(at=at, sign=-1)))
        for at in range(counted.count)
    ]
    turned = torch.where(z == 0, -z, z)  # signs of zeros need not agree
    pairs.append((run(turned, mode=mode()),) * 2)
    pairs += [(run(a, mode=mode()), run(b, mode=mode())) for a, b in others]
    if first is not None:
        pairs.append((run(z, mode=mode(first=first)),) * 2)
    tried = [(up.parts(), down.parts()) for up, down in pairs]
    found = {
        name: around(value, [(up[name], down[name]) for up, down in tried])
        for name, value in exact.parts().items()
    }
    return Bounded(found["y"], found.get("dz"), {n: found[n] for n in exact.grads})


# ---- tails that are linear in z, whose factors the direct convolution multiplies first -----------


def of_linear_tail(
    tail: Callable[..., Tensor], z: Tensor, operands: dict[str, Tensor], dy: Tensor | None,
    dz: Tensor, apart: bool = False, part: Fused | None = None
) -> Tensor | None:  # fmt: skip
    """dz in float64, of a tail that is linear in z; of others None."""

    def of(z: Tensor, acc: torch.dtype) -> Tensor:
        found = evaluated(tail, z, operands, dy, Wide(acc, apart=apart, part=part)).dz
        assert found is not None
        return found

    is_linear = same(of(z, dz.dtype), of(1 - z, dz.dtype)).all()
    return of(z, torch.float64) if is_linear else None


def left_range(exact: Tensor | None, dz: Tensor) -> Tensor:
    """Where factors one after the other leave dz's range, and their product times dy does not."""
    if exact is None:
        return torch.zeros_like(dz, dtype=torch.bool)
    ends = torch.finfo(dz.dtype)
    held = (exact.abs() >= ends.tiny) & (exact.abs() <= ends.max)
    return held & ~((dz.abs() >= ends.tiny) & (dz.abs() <= ends.max))


def met_zero(exact: Tensor | None, dz: Tensor) -> Tensor:
    """Where dz is 0, and autograd has NaN of it: an infinity met a factor of 0."""
    if exact is None:
        return torch.zeros_like(dz, dtype=torch.bool)
    return (exact == 0) & ~dz.isfinite()
