"""Times of 16-bit gemms whose rows are not multiples of 16 bytes, and of many small ones:

    python -m benchmarks.unaligned [--only WORD] [--out FILE] [--shapes 0 1 ...]

GPU time in ms: medians, measured in turns, with the L2 cache cleared before each call, on random
data; each result is compared with float64's. `ours`: linear_unaligned.cuh, with the chosen tile,
and by tile. `combs`: linear_combs_sm90.cuh, with the chosen shape, and by shape. `library`: torch's
gemm of the same operands. `aligned`: of the nearest larger sizes that are multiples of 8. `padded`:
that gemm with copies that pad both dimensions if one is odd. `bytes`: reading and writing
everything once. `goal`: the faster kernel's time over that of what it is compared with, and the
most that is allowed. `python -m pytest tests/kernels/test_unaligned.py
tests/kernels/test_combs.py` checks the kernels.
kernels.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks import kernels, measure, results
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels import unaligned
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import KernelSpec


@dataclass(frozen=True)
class Gemm:
    """left [batches, m, k] @ right [batches, k, n]; 1 batch: matrices. transposed: are the factor's
    rows adjacent in memory, not its columns?"""

    name: str
    batches: int
    m: int
    k: int
    n: int
    left_transposed: bool = False
    right_transposed: bool = False
    goal: tuple[str, float] | None = None

    def factor(self, rows: int, columns: int, transposed: bool, unit: int) -> Tensor:
        rows, columns = (-(-size // unit) * unit for size in (rows, columns))
        sizes = (columns, rows) if transposed else (rows, columns)
        values = torch.randn(*([self.batches] if self.batches > 1 else []), *sizes, device=CUDA)
        made = values.mul_(self.k**-0.5).bfloat16()
        return made.mT if transposed else made

    def factors(self, unit: int = 1) -> tuple[Tensor, Tensor]:
        """unit: all sizes are multiples of it."""
        left = self.factor(self.m, self.k, self.left_transposed, unit)
        return left, self.factor(self.k, self.n, self.right_transposed, unit)

    def specs(self) -> dict[int, KernelSpec]:
        """By tile, the chosen one first."""
        with FakeTensorMode():
            left, right = self.factors()
        family = unaligned.family_of(left, right.mT)
        assert family is not None
        taken, *others = family.sizes
        rivals = [t for t, tile in enumerate(unaligned.TILES) if tile == unaligned.TILES[taken]]
        if max(self.m, self.n) > 64:
            rivals += [t for t, tile in enumerate(unaligned.TILES) if min(tile) >= 64]
        families = {t: unaligned.unaligned(t, *others) for t in dict.fromkeys([taken, *rivals])}
        return {t: unaligned.gemm_of(f, torch.bfloat16) for t, f in families.items()}

    def comb_specs(self, shapes: Sequence[int]) -> dict[int, KernelSpec]:
        """By shape, the chosen one first; empty for gemms that combs do not take."""
        with FakeTensorMode():
            left, right = self.factors()
        forms = [unaligned.form_of(f.shape, f.stride()) for f in (left, right.mT)]
        sizes: tuple[Any, ...] = (self.m, self.n, self.k, *forms)
        taken = unaligned.comb_family(limits.of(CUDA).multiprocessors, *sizes)
        if taken is None or self.batches > 1:
            return {}
        first, *form = taken.sizes
        able = (shape for shape in shapes if unaligned.comb_takes(shape, form[0]))
        families = {shape: unaligned.combs(shape, *form) for shape in (first, *able)}
        return {i: unaligned.gemm_of(f, torch.bfloat16) for i, f in families.items()}

    @property
    def bytes(self) -> int:
        return 2 * self.batches * (self.m * self.k + self.k * self.n + self.m * self.n)


_OF_ALIGNED, _OF_LIBRARY = ("aligned", 1.25), ("library", 0.7)
GEMMS = (
    Gemm("head, forward", 1, 8192, 768, 50257, right_transposed=True, goal=_OF_ALIGNED),
    Gemm("head, dgrad", 1, 8192, 50257, 768, goal=_OF_ALIGNED),
    Gemm("head, wgrad", 1, 50257, 8192, 768, left_transposed=True, goal=_OF_ALIGNED),
    Gemm("aligned head, forward", 1, 8192, 768, 50264, right_transposed=True),
    Gemm("aligned head, dgrad", 1, 8192, 50264, 768),
    Gemm("aligned head, wgrad", 1, 50264, 8192, 768, left_transposed=True),
    Gemm("wide head, forward", 1, 8192, 4096, 50257, right_transposed=True, goal=_OF_ALIGNED),
    Gemm("wide head, dgrad", 1, 8192, 50257, 4096, goal=_OF_ALIGNED),
    Gemm("wide head, wgrad", 1, 50257, 8192, 4096, left_transposed=True, goal=_OF_ALIGNED),
    Gemm("interaction", 32768, 27, 64, 27, right_transposed=True, goal=_OF_LIBRARY),
    Gemm("interaction, dgrad", 32768, 27, 27, 64),
    Gemm("window scores", 12288, 49, 32, 49, right_transposed=True, goal=_OF_LIBRARY),
    Gemm("window values", 12288, 49, 49, 32),
    Gemm("window, dv", 12288, 49, 49, 32, left_transposed=True),
    Gemm("197 scores", 768, 197, 64, 197, right_transposed=True, goal=_OF_LIBRARY),
    Gemm("197 values", 768, 197, 197, 64, goal=_OF_LIBRARY),
    Gemm("197, dv", 768, 197, 197, 64, left_transposed=True),
    Gemm("415 columns", 1, 32768, 415, 512, right_transposed=True),
    Gemm("415 columns, dgrad", 1, 32768, 512, 415),
    Gemm("415 columns, wgrad", 1, 512, 32768, 415, left_transposed=True),
    Gemm("aligned, 64 × 64", 4096, 64, 64, 64, right_transposed=True),
)


def ours(spec: KernelSpec, left: Tensor, right: Tensor, out: Tensor) -> None:
    assert kernels.linear_unaligned(spec, left, right.mT, None, out, None, [], [])


def by_combs(spec: KernelSpec, left: Tensor, right: Tensor, out: Tensor) -> None:
    assert kernels.linear_combs(spec, left, right.mT, out, [])


def padded(left: Tensor, right: Tensor) -> Tensor:
    def whole(value: Tensor) -> Tensor:
        short = [-size % 8 for size in value.shape[-2:]]
        if not any(short):
            return value
        if value.stride(-1) != 1:
            return F.pad(value.mT, (0, short[0], 0, short[1])).mT
        return F.pad(value, (0, short[1], 0, short[0]))

    made: Tensor = whole(left) @ whole(right)
    return made[..., : left.shape[-2], : right.shape[-1]]


def _median(call: Callable[[], object]) -> float:
    return measure.median_ms(call, [], CUDA, 3, 20)


def timed(gemm: Gemm, shapes: Sequence[int]) -> dict[str, Any]:
    left, right = gemm.factors()
    out = torch.full_like(left @ right, float("nan"))
    few = torch.arange(
        min(256, len(left)), device=CUDA
    )  # of batches, or of rows: the first and the last ones
    if gemm.batches == 1:
        few = torch.cat((few, len(left) - 1 - few))
    part = (left[few], right[few]) if gemm.batches > 1 else (left[few], right)
    exact = part[0].double() @ part[1].double()
    theirs = relative((left @ right)[few], exact)
    specs = gemm.specs()
    for spec in [*specs.values()][::-1]:  # the chosen one last
        ours(spec, left, right, out.fill_(float("nan")))
        error = relative(out[few], exact)
        assert error <= max(2 * theirs, 4e-3), (gemm, spec, error, theirs)
    comb_specs = {}
    for shape, spec in gemm.comb_specs(shapes).items():
        by_combs(spec, left, right, out.fill_(float("nan")))
        comb_error = relative(out[few], exact)
        if comb_error <= max(2 * theirs, 4e-3) and bool(out.isfinite().all()):
            comb_specs[shape] = spec
        else:
            print(f"{gemm.name}, combs, shape {shape}: error {comb_error:.2e}, not timed")
    whole = gemm.factors(8)
    calls: dict[str, Callable[[], object]] = {
        "library": lambda: left @ right,
        "aligned": lambda: whole[0] @ whole[1],
        "padded": lambda: padded(left, right),
    }
    for tile, spec in specs.items():
        calls[f"tile {tile}"] = functools.partial(ours, spec, left, right, out)
    for shape, spec in comb_specs.items():
        calls[f"comb {shape}"] = functools.partial(by_combs, spec, left, right, out)
    timers = {name: functools.partial(_median, call) for name, call in calls.items()}
    ms = measure.interleaved(timers, 3)
    ms["ours"] = ms[f"tile {next(iter(specs))}"]
    ms["combs"] = ms[f"comb {next(iter(comb_specs))}"] if comb_specs else float("nan")
    limit = 1e3 * gemm.bytes / limits.of(CUDA).bandwidth
    return {"gemm": gemm.name, "sizes": [gemm.batches, gemm.m, gemm.k, gemm.n], **ms,
            "bytes": limit, "error": error, "library_error": theirs}  # fmt: skip


def share(gemm: Gemm, row: dict[str, Any]) -> str:
    """The share of the time that it is compared with, and the goal."""
    if gemm.goal is None:
        return ""
    rival, most = gemm.goal
    took = min(row["ours"], row["combs"]) / row[rival]
    return f"{took:.2f} {'≤' if took <= most else '> !'} {most} {rival}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    known = range(len(unaligned.COMB_TILES))
    parser.add_argument("--shapes", type=int, nargs="*", default=known, help="of combs, to compare")
    options = parser.parse_args()
    gemms = [gemm for gemm in GEMMS if options.only in gemm.name]
    specs = [[*gemm.specs().values(), *gemm.comb_specs(options.shapes).values()] for gemm in gemms]
    load.prepare([spec for of_gemm in specs for spec in of_gemm], CUDA)
    rows = [timed(gemm, options.shapes) for gemm in gemms]
    columns = ("ours", "combs", "library", "aligned", "padded", "bytes")
    shown = [
        [row["gemm"], *(f"{row[n]:.4f}" for n in columns),
         f"{row['library'] / row['ours']:.2f}×", f"{row['ours'] / row['aligned']:.2f}",
         f"{row['combs'] / row['aligned']:.2f}",
         share(gemm, row),
         *(" ".join(f"{n[5:]}: {row[n]:.4f}" for n in row if n.startswith(kind))
           for kind in ("tile", "comb "))]
        for gemm, row in zip(gemms, rows, strict=True)
    ]  # fmt: skip
    head = [
        "",
        *columns,
        "library/ours",
        "ours/aligned",
        "combs/aligned",
        "goal",
        "by tile",
        "by shape of combs",
    ]
    print(tabulate(shown, head))
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
