"""Times of fp32 attention with fp16 halves, compared with torch's:

    python -m benchmarks.attention [--only WORD] [--out FILE] [--shapes 0 1 ...]

GPU time in ms: medians, measured in turns, with the L2 cache cleared before each call, on random
data. `ours`: attention_split_sm90.cuh, with the fastest of its shapes, and by shape. `torch`: its
scaled_dot_product_attention of the same fp32 tensors; `bf16`: of those in bf16. Errors are relative
to float64, of the first batch. `kill`: the ratio below which the kernel is given up (issue 43).
`python -m pytest tests/kernels/test_attention.py` checks the kernel.
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

from benchmarks import kernels, measure, results
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels import attention
from fx_fuser.native import load

KILL = {64: 4.0, 128: 3.3}  # by d
MOST = 1.5  # times torch's error


@dataclass(frozen=True)
class Size:
    name: str
    batches: int
    heads: int
    length: int
    d: int
    causal: bool

    def tensors(self) -> list[Tensor]:
        shape = self.batches, self.heads, self.length, self.d
        return [torch.randn(shape, device=CUDA) for _ in range(3)]

    def shapes(self, wanted: Sequence[int]) -> list[int]:
        return [shape for shape in wanted if attention.SHAPES[shape][0] == self.d]

    @property
    def operations(self) -> float:
        """Of an attention that computes only visible scores, as papers count them."""
        whole = 4 * self.batches * self.heads * self.length**2 * self.d
        return whole / 2 if self.causal else whole


SIZES = (
    Size("Llama, 1024 x 128", 4, 16, 1024, 128, True),
    Size("GPT-2, 1024 x 64", 4, 12, 1024, 64, True),
    Size("ViT, 197 x 64", 64, 12, 197, 64, False),
    Size("BERT, 512 x 64", 16, 12, 512, 64, False),
    Size("long, 4096 x 64", 2, 16, 4096, 64, False),
    Size("long, 4096 x 128", 2, 16, 4096, 128, False),
)


def ours(shape: int, tensors: Sequence[Tensor], out: Tensor, causal: bool) -> None:
    q, k, v = tensors
    assert kernels.attention_split(attention.spec_of(shape), q, k, v, out, is_causal=causal)


def torchs(tensors: Sequence[Tensor], causal: bool) -> Tensor:
    q, k, v = tensors
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def median(call: Callable[[], object]) -> float:
    return measure.median_ms(call, [], CUDA, 3, 20)


def timed(size: Size, shapes: Sequence[int]) -> dict[str, Any]:
    tensors = size.tensors()
    out = torch.empty_like(tensors[0])
    exact = torchs([t[:1].double() for t in tensors], size.causal)
    theirs = relative(torchs([t[:1] for t in tensors], size.causal), exact)
    errors: dict[int, float] = {}
    for shape in size.shapes(shapes):
        ours(shape, tensors, out.fill_(float("nan")), size.causal)
        errors[shape] = relative(out[:1], exact)
        if not errors[shape] <= MOST * theirs or not bool(out.isfinite().all()):
            print(f"{size.name}, shape {shape}: error {errors[shape]:.2e}, torch's {theirs:.2e}")
    del exact
    narrow = [t.bfloat16() for t in tensors]
    calls: dict[str, Callable[[], object]] = {
        "torch": functools.partial(torchs, tensors, size.causal),
        "bf16": functools.partial(torchs, narrow, size.causal),
    }
    for shape in errors:
        calls[f"shape {shape}"] = functools.partial(ours, shape, tensors, out, size.causal)
    ms = measure.interleaved({n: functools.partial(median, c) for n, c in calls.items()}, 3)
    best = min(errors, key=lambda shape: ms[f"shape {shape}"])
    return {"size": size.name, **ms, "ours": ms[f"shape {best}"], "best": best,
            "tflops": size.operations / ms[f"shape {best}"] / 1e9, "kill": KILL[size.d],
            "errors": errors, "error": errors[best], "torch_error": theirs}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    known = range(len(attention.SHAPES))
    parser.add_argument("--shapes", type=int, nargs="*", default=known)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = [s for s in SIZES if options.only in s.name and s.shapes(options.shapes)]
    load.prepare([attention.spec_of(shape) for shape in options.shapes], CUDA)
    rows = [timed(size, options.shapes) for size in sizes]
    shown = [
        [row["size"], *(f"{row[n]:.4f}" for n in ("ours", "torch", "bf16")),
         f"{row['torch'] / row['ours']:.2f}×", f"{row['kill']:.1f}×", f"{row['tflops']:.0f}",
         f"{row['error']:.1e}", f"{row['torch_error']:.1e}",
         " ".join(f"{n[6:]}: {row[n]:.4f}" for n in row if n.startswith("shape "))]
        for row in rows
    ]  # fmt: skip
    head = ["", "ours", "torch", "bf16", "torch/ours", "kill", "TFLOP/s", "error", "torch's"]
    print(tabulate(shown, [*head, "by shape"]))
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
