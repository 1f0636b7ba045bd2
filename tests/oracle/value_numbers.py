"""Numbers for the value fuzz: ordinary ones and corners, and tensors of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

inf, nan = math.inf, math.nan
F32 = torch.finfo(torch.float32)
ORDINARY = (2.0, 0.5, 3, -1, -0.75, 1.7, -2, 0.1, 1, 10.0)
CORNERS = (
    0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, F32.tiny, 1e-30, -1e-30, 1e30, -1e30, 1e38, -1e38,
    3e38, F32.max, F32.min, 2.0**23, 1.5 * 2.0**23, 2.0**24 - 1, 2.0**24 + 1, 16777217, 255, True,
    1e10, 1e-10, 1e-20, 1e20, 88.0, -104.0, 65504.0, 1e-7, 1e308, 5e-324,
)  # fmt: skip
ODD = (inf, -inf, nan)
# Where activations go subnormal, saturate, or have a corner.
STEPS = (-104.0, -100.0, -90.0, -88.5, -87.5, 88.5, 89.0, -20.0, 20.0, 20.5, -3.0, 3.0, 6.0, 1.0,
         -1.0, 0.0, -0.0, 0.5, -17.0, 9.0, 5.5)  # fmt: skip


def is_ordinary(number: float) -> bool:
    """Of a magnitude that nets compute with."""
    return number == 0 or 1e-4 <= abs(number) <= 30


def values(
    value: random.Random,
    shape: Sequence[int],
    dtype: torch.dtype,
    style: str = "",
    odd: bool = True,
    extreme: bool = True,
) -> Tensor:
    """Of ordinary numbers and corners; odd: now and then of infinities and NaN too. Unless
    `extreme`, all are of ordinary magnitudes."""
    style = style or value.choice(("ordinary", "ordinary", "mixed", "mixed", "corners", "steps"))
    generator = torch.Generator().manual_seed(value.getrandbits(60))
    found = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    corners = [float(c) for c in (STEPS if style == "steps" else CORNERS)]
    corners = [c for c in corners if dtype == torch.float64 or abs(c) <= torch.finfo(dtype).max]
    if dtype == torch.float64:
        corners += [1e300, -1e300, 1e-310]
    ends = torch.finfo(dtype)
    corners += [ends.max, ends.min, ends.tiny, ends.tiny * ends.eps]
    if odd and value.randrange(8) == 0:
        corners += ODD
    if not extreme:
        corners = [c for c in (*corners, *ORDINARY) if is_ordinary(c)]
    table = torch.tensor(corners, dtype=torch.float64)
    chosen = table[torch.randint(len(corners), tuple(shape), generator=generator)]
    share = {"ordinary": 0.05, "mixed": 0.4}.get(style, 0.9)
    mask = torch.rand(tuple(shape), generator=generator) < share
    return torch.where(mask, chosen, found).to(dtype)
