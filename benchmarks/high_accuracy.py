"""What fp16 planes lose compared with TF32, emulated on the CPU:

    python -m benchmarks.high_accuracy [--k 64 1024]

A *plane* is an fp32 matrix in fp16, scaled by powers of two, one for the tensor or one per row,
that bring the largest value into [2^14, 2^15). TF32 is emulated with round-to-nearest; products are
summed in float64, so only the operands' rounding differs. `ratio` is a plane's error over TF32's,
for the whole result and for its worst row; `flagged` are results that a kernel would not trust;
`rest` is the ratio if those are taken from TF32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import linear_sm90, sm90
from benchmarks.sm90 import normal, relative, spread, worst_row
from fx_fuser.kernels.planes import LEAST_NORMAL, TOP, doubted

ALLOWED = 1.05  # times TF32's error


def to_tf32(x: Tensor) -> Tensor:
    """Rounded to nearest, with ten fraction bits and fp32's exponents."""
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def scale_of(x: Tensor, dim: int | None = None) -> Tensor:
    """The power of two of a tensor, or of each line along `dim`; in float64."""
    values = x.double().abs()
    values = torch.where(values.isfinite(), values, 0.0)
    largest = values.max() if dim is None else values.amax(dim, keepdim=True)
    _, exponent = torch.frexp(largest)  # largest is in [2^(exponent - 1), 2^exponent)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), TOP + 1 - exponent), 1.0)


@dataclass(frozen=True)
class Plane:
    """values: fp16 in float64. lost: which of them fp16 holds with fewer bits than TF32."""

    values: Tensor
    scale: Tensor
    lost: Tensor

    @classmethod
    def of(cls, x: Tensor, by_row: bool) -> Plane:
        """x: [rows, k]. A row's scale is constant along the sum."""
        scale = scale_of(x, 1 if by_row else None)
        scaled = x.double() * scale
        values = scaled.float().half().double()  # powers of two: only fp16 rounds
        return cls(values, scale, (scaled != 0) & (scaled.abs() < LEAST_NORMAL))

    def exact(self) -> Tensor:
        return self.values / self.scale


@dataclass(frozen=True)
class Row:
    k: int
    data: str
    tf32: float
    tensor: float
    tensor_row: float
    row: float
    row_row: float
    flagged: float
    rest: float
    rest_row: float


def families(m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, x [m, k], weight [n, k]: the split gemm's data, and data that breaks this one."""
    yield from linear_sm90.families(m, n, k)
    for decades in (9, 10, 12):
        columns = spread(decades / 2, 1, k)
        yield f"columns over 1e{decades}", normal(m, k) * columns, normal(n, k) / columns
    yield "gelu", torch.nn.functional.gelu(3 * normal(m, k)), normal(n, k)
    yield "softmax of 8 normal", torch.softmax(8 * normal(m, k), 1), normal(n, k)
    yield "gradients, rows over 1e6", normal(m, k) * spread(3, m, 1) * 1e-7, normal(n, k)
    yield "below 2^-113", normal(m, k) * 2.0**-118, normal(n, k) * 2.0**20
    huge = normal(m, k)
    huge[3, 5] = 1e20
    yield "one huge value", huge, normal(n, k)
    rows = normal(m, k)
    rows[1:] = 0
    yield "one row, the others zero", rows, normal(n, k)


def flagged(x: Plane, weight: Plane, sums: Tensor) -> Tensor:
    """Which results the kernel does not trust, if something was lost."""
    if not bool(x.lost.any() or weight.lost.any()):
        return torch.zeros_like(sums, dtype=torch.bool)
    return doubted(sums * x.values.shape[1] ** -0.5)


def measured(k: int, name: str, x: Tensor, weight: Tensor) -> Row:
    exact = x.double() @ weight.double().T
    tf32 = to_tf32(x).double() @ to_tf32(weight).double().T
    by_tensor, by_row = ((Plane.of(x, r), Plane.of(weight, r)) for r in (False, True))
    sums = by_tensor[0].values @ by_tensor[1].values.T
    of_tensor = sums / by_tensor[0].scale / by_tensor[1].scale
    of_row = by_row[0].exact() @ by_row[1].exact().T
    away = flagged(*by_tensor, sums)
    rest = torch.where(away, tf32, of_tensor)

    def ratio(value: Tensor, of: object) -> float:
        return of(value, exact) / max(of(tf32, exact), 1e-30)  # type: ignore[operator]

    share = 100 * float(away.float().mean())
    a, b, c = ((ratio(v, relative), ratio(v, worst_row)) for v in (of_tensor, of_row, rest))
    return Row(k, name, relative(tf32, exact), *a, *b, share, *c)


HEADS = (
    *("K", "data", "TF32", "tensor", "its worst row", "row", "its worst row"),
    *("flagged, %", "rest", "its worst row"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.high_accuracy")
    parser.add_argument("--k", type=int, nargs="+", default=[64, 1024, 8192, 65536])
    parser.add_argument("--rows", type=int, default=256)
    given = parser.parse_args()
    for module in (sm90, linear_sm90):
        module.CUDA = torch.device("cpu")  # type: ignore[attr-defined]
    torch.manual_seed(0)
    rows = []
    for k in given.k:
        count = given.rows if k <= 8192 else given.rows // 2
        rows += [measured(k, *one) for one in families(count, count, k)]
    formats = ("", "", ".2e", *[".4g"] * (len(HEADS) - 3))
    print(tabulate(map(astuple, rows), HEADS, tablefmt="github", floatfmt=formats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
