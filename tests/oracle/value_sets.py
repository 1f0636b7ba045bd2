"""What a value may be: numbers within an interval, and which of both infinities and NaN.

For `value_oracle`. Sums and products of such sets are as IEEE arithmetic has them: an infinity
among the terms makes an infinity of its sign, opposite ones NaN, and what reaches no infinity is a
number. Nothing here knows a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # adds up the terms of each element of a sum
FLOOR = 1e-4  # what is held to within half of this is held, however small it is


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two are equal, NaN to NaN."""
    return (a == b) | (a.isnan() & b.isnan())


@dataclass(frozen=True)
class Possible:
    """Numbers from lo to hi in float64, none where lo > hi, and what else. size: of what was summed
    up, without signs and without what it may be off by."""

    lo: Tensor
    hi: Tensor
    pinf: Tensor
    ninf: Tensor
    nan: Tensor
    size: Tensor = field(repr=False)

    @classmethod
    def exactly(cls, value: Tensor, size: Tensor | None = None) -> Possible:
        wide, finite = value.double(), value.isfinite()
        lo, hi = torch.where(finite, wide, torch.inf), torch.where(finite, wide, -torch.inf)
        size = wide.abs().nan_to_num(0, 0, 0) if size is None else size
        return cls(lo, hi, value == torch.inf, value == -torch.inf, value.isnan(), size)

    @property
    def number(self) -> Tensor:
        return self.lo <= self.hi

    @property
    def reach(self) -> Tensor:
        """The largest number, without its sign."""
        return torch.where(self.number, torch.maximum(self.lo.abs(), self.hi.abs()), 0.0)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.lo, self.hi, self.pinf, self.ninf, self.nan, self.size)

    def map(self, move: Linear) -> Possible:
        """Of a change of shape."""
        return Possible(*map(move, self.parts()))

    def widened(self, room: Tensor | float) -> Possible:
        lo = torch.where(self.number, self.lo - room, self.lo)
        hi = torch.where(self.number, self.hi + room, self.hi)
        return Possible(lo, hi, self.pinf, self.ninf, self.nan, self.size)

    def joined(self, other: Possible, where: Tensor | bool = True) -> Possible:
        """And what the other may be."""
        at = torch.as_tensor(where, device=self.lo.device)
        lo = torch.where(at, torch.minimum(self.lo, other.lo), self.lo)
        hi = torch.where(at, torch.maximum(self.hi, other.hi), self.hi)
        flags = [a | (b & at) for a, b in zip(self.parts()[2:5], other.parts()[2:5])]
        return Possible(lo, hi, *flags, self.size)

    def rounded(self, dtype: torch.dtype) -> Possible:
        """Each to the nearest of the dtype, which may be an infinity."""
        most = torch.finfo(dtype).max
        lo, hi = (v.to(dtype).double() for v in (self.lo, self.hi))
        pinf = self.pinf | (self.number & (hi == torch.inf))
        ninf = self.ninf | (self.number & (lo == -torch.inf))
        none = ~self.number | (lo == torch.inf) | (hi == -torch.inf)
        lo = torch.where(none, torch.inf, lo.clamp(min=-most))
        hi = torch.where(none, -torch.inf, hi.clamp(max=most))
        return Possible(lo, hi, pinf, ninf, self.nan, self.size)

    def times(self, factor: Tensor) -> Possible:
        """With a factor in float64, which is known."""
        ends = (self.lo * factor, self.hi * factor)
        finite, number = factor.isfinite(), self.number
        held = number & finite
        low = torch.minimum(*ends).nan_to_num(0.0, torch.inf, -torch.inf)
        high = torch.maximum(*ends).nan_to_num(0.0, torch.inf, -torch.inf)
        up, down = factor > 0, factor < 0
        above, below = self.hi > 0, self.lo < 0
        pinf = (self.pinf & up) | (self.ninf & down)
        ninf = (self.pinf & down) | (self.ninf & up)
        beyond = factor.isinf() & number
        pinf = pinf | (beyond & ((up & above) | (down & below)))
        ninf = ninf | (beyond & ((up & below) | (down & above)))
        nan = self.nan | ((self.pinf | self.ninf) & (factor == 0)) | factor.isnan()
        nan = nan | (beyond & (self.lo <= 0) & (self.hi >= 0))
        lo, hi = torch.where(held, low, torch.inf), torch.where(held, high, -torch.inf)
        size = (self.size * factor.abs()).nan_to_num(0, 0, 0)
        return Possible(lo, hi, pinf, ninf, nan, size)

    def total(
        self,
        add: Linear,
        acc: torch.dtype,
        roundings: float,
        room: Tensor | float = 0.0,
        most: float | None = None,
    ) -> Possible:
        """A sum in acc in any order. A partial sum may overflow where its terms of one sign do.

        most: the largest partial sum, by default that of acc.
        """
        ends, number = torch.finfo(acc), self.number
        limit = 0.99 * (ends.max if most is None else most)
        lo, hi = (torch.where(number, v, 0.0) for v in (self.lo, self.hi))
        reach = add(self.reach)
        over = add(hi.clamp(min=0)) > limit
        under = add((-lo).clamp(min=0)) > limit

        def some(where: Tensor) -> Tensor:
            return add(where.double()) > 0.5

        up, down = some(self.pinf) | over, some(self.ninf) | under
        pinf, ninf = up & ~some(~(number | self.pinf)), down & ~some(~(number | self.ninf))
        nan = some(self.nan) | (up & down)
        none = some(~number)
        lo, hi = add(lo), add(hi)
        slack = roundings * ends.eps * reach + (roundings + 2) * ends.tiny * ends.eps + room
        lo = torch.where(none, torch.inf, lo - slack)
        hi = torch.where(none, -torch.inf, hi + slack)
        return Possible(lo, hi, pinf, ninf, nan, add(self.size))

    def accepts(self, found: Tensor) -> Tensor:
        lo, hi = self.lo.to(found.dtype), self.hi.to(found.dtype)
        within = self.number & (found >= lo) & (found <= hi)
        infinite = ((found == torch.inf) & self.pinf) | ((found == -torch.inf) & self.ninf)
        return within | infinite | (found.isnan() & self.nan)

    @property
    def value(self) -> Tensor:
        """One of them, to be shown."""
        middle = self.lo + (self.hi - self.lo) / 2
        odd = torch.where(self.pinf, torch.inf, torch.where(self.ninf, -torch.inf, torch.nan))
        return torch.where(self.number, middle, odd)

    def is_open(self) -> Tensor:
        """Where it says next to nothing: numbers within half of what is summed up, at best."""
        half = (self.hi - self.lo) / 2
        held = torch.maximum(self.value.abs(), self.size).nan_to_num(torch.inf).clamp(min=FLOOR)
        return self.number & ~(half < held / 2)


def around(exact: Tensor, tried: list[tuple[Tensor, Tensor]]) -> Possible:
    """What an operation's result may be. tried: results with one rounding up, and one down."""
    found, wide = Possible.exactly(exact), exact.double()
    slack = torch.zeros_like(wide)
    for pair in tried:
        moves = [(v.double() - wide).abs().nan_to_num(0, 0, 0) for v in pair]
        slack = slack + torch.maximum(*moves)
        for v in pair:
            odd = ~(v.isfinite() & exact.isfinite())
            found = found.joined(Possible.exactly(v), odd)
    eps = 64 * torch.finfo(exact.dtype).eps
    slack = torch.where(exact.isfinite(), slack, eps * found.reach)
    return found.widened(slack)
