"""Times of gathers along rows, and of their gradient, beside Inductor's and torch's:

    python -m benchmarks.gathers [--dtype bf16] [--out FILE]

GPU time in ms, medians, by turns, at DeBERTa-v2's sizes: `x[b, i, index[i, j]]` of 192 heads, 384
tokens, 1024 places of relative positions, alone or transposed; and DeBERTa-v3's, whose 512 tokens
share 512 places by buckets. `both`: forward with backward. `inductor`: `torch.compile` of the
gather alone, which in a net it fuses with softmax. `torch`: its operations. GB/s: of all that the
kernels must read and write. `python -m pytest tests/kernels/test_gather_rows.py` checks them.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import measure, results
from benchmarks.attention_bias import DTYPES
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA
from fx_fuser.kernels.attention import gathered
from fx_fuser.native import load
from fx_fuser.ops.attention_bias.gathered import GATHER_ROWS

SYSTEMS = ("ours", "inductor", "torch")


@dataclass(frozen=True)
class Size:
    name: str
    heads: int
    tokens: int
    places: int
    buckets: int = 0
    transposed: bool = False

    def index(self) -> Tensor:
        """As DeBERTa has it: log_2 of far positions."""
        ids = torch.arange(self.tokens, device=CUDA)
        at = ids[:, None] - ids
        if self.buckets:
            far = at.abs().clamp(min=1).div(self.buckets / 2).log2().mul(self.buckets / 4)
            far = (far + self.buckets / 2).long() * at.sign()
            at = torch.where(at.abs() < self.buckets / 2, at, far)
        return (at + self.places // 2).clamp(0, self.places - 1)


SIZES = (
    Size("v2, of queries", 192, 384, 1024),
    Size("v2, of keys", 192, 384, 1024, transposed=True),
    Size("v3, of queries", 192, 512, 512, 256),
    Size("v3, of keys", 192, 512, 512, 256, True),
)


def gather(size: Size, x: Tensor, index: Tensor) -> Tensor:
    found = torch.gather(x, -1, index.expand(x.shape[0], -1, -1))
    return found.mT.contiguous() if size.transposed else found * 1.0


def ours(size: Size, x: Tensor, index: Tensor) -> Tensor:
    return GATHER_ROWS(x, index, size.transposed)


def timed(size: Size, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.randn(size.heads, size.tokens, size.places, device=CUDA).to(dtype).requires_grad_()
    index = size.index()
    d_out = torch.randn(size.heads, size.tokens, size.tokens, device=CUDA).to(dtype)
    torch._dynamo.reset()
    plain = functools.partial(gather, size)
    calls: dict[str, Callable[..., Tensor]] = {
        "ours": torch.compile(functools.partial(ours, size)),
        "inductor": torch.compile(plain),
        "torch": plain,
    }

    def forward(call: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return call(x, index)

    def both(call: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(call(x, index), x, d_out)

    steps: dict[str, Callable[[], object]] = {
        name + suffix: functools.partial(step, call)
        for suffix, step in (("", forward), (", both", both))
        for name, call in calls.items()
    }
    for step in steps.values():
        step()
    ms = measure.gpu_ms(steps, [x], CUDA)
    out, whole = (n * x.element_size() for n in (d_out.numel(), x.numel()))
    moved = 2 * out / ms["ours"], (3 * out + whole) / ms["ours, both"]
    return {"size": size.name, **ms, "gb_s": [one / 1e6 for one in moved]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    load.prepare(gathered.offered(), CUDA)
    rows = [timed(size, DTYPES[options.dtype]) for size in SIZES]
    names = [name + suffix for suffix in ("", ", both") for name in SYSTEMS]
    shown = [
        [row["size"], *(f"{row[n]:.4f}" for n in names), " ".join(f"{g:.0f}" for g in row["gb_s"])]
        for row in rows
    ]
    print(tabulate(shown, ["", *names, "GB/s"]))
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
