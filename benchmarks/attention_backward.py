"""Times of fp32 attention with fp16 halves, forward and backward, compared with torch's:

    python -m benchmarks.attention_backward [--only WORD] [--out FILE] [--shapes 0 1 ...]

GPU time in ms: medians, measured in turns, with the L2 cache cleared before each call, on random
data. `ours`: forward and backward, attention_split_sm90.cuh and attention_backward_sm90.cuh, with
the fastest of the backward's shapes; `backward`: only that part, and by shape. `torch`: its
scaled_dot_product_attention of the same fp32 tensors, with its backward. Errors are the largest of
dq, dk and dv, relative to float64, of the first batch. `kill`: the ratio below which the kernels
are given up (issue 43). `python -m pytest tests/kernels/test_attention_backward.py` checks them.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import kernels, measure, results
from benchmarks.attention import MOST, SIZES, Size, median, torchs
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels import attention
from fx_fuser.native import load

KILL = {64: 3.5, 128: 2.8}  # by d
FORWARD = {64: 0, 128: 1}  # of attention.SHAPES


def shapes_of(size: Size, wanted: Sequence[int]) -> list[int]:
    return [shape for shape in wanted if attention.BACKWARD_SHAPES[shape][0] == size.d]


class Ours:
    """One call's tensors; each call overwrites the results."""

    def __init__(self, size: Size, tensors: Sequence[Tensor], d_out: Tensor) -> None:
        self.size = size
        self.tensors = tensors
        self.d_out = d_out
        self.out = torch.empty_like(d_out)
        self.lse = torch.empty(d_out.shape[:3], device=CUDA)
        self.to = [torch.full_like(t, float("nan")) for t in tensors]

    def forward(self) -> None:
        q, k, v = self.tensors
        spec, causal = attention.spec_of(FORWARD[self.size.d]), self.size.causal
        assert kernels.attention_split(spec, q, k, v, self.out, self.lse, is_causal=causal)

    def backward(self, shape: int) -> None:
        q, k, v = self.tensors
        spec, causal = attention.backward_spec_of(shape), self.size.causal
        assert kernels.attention_backward(
            spec, q, k, v, self.out, self.lse, self.d_out, self.to, is_causal=causal
        )

    def both(self, shape: int) -> None:
        self.forward()
        self.backward(shape)


def torchs_gradients(tensors: Sequence[Tensor], d_out: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Forward and backward; tensors are detached ones."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(torchs(leaves, causal), leaves, d_out)


def worst(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(relative(value[:1], right) for value, right in zip(values, exact))


def timed(size: Size, shapes: Sequence[int]) -> dict[str, Any]:
    tensors = size.tensors()
    d_out = torch.randn_like(tensors[0])
    first = [t[:1] for t in tensors]
    exact = torchs_gradients([t.double() for t in first], d_out[:1].double(), size.causal)
    theirs = worst(torchs_gradients(first, d_out[:1], size.causal), exact)
    ours = Ours(size, tensors, d_out)
    errors: dict[int, float] = {}
    for shape in shapes_of(size, shapes):
        ours.both(shape)
        errors[shape] = worst(ours.to, exact)
        if not errors[shape] <= MOST * theirs or not all(bool(t.isfinite().all()) for t in ours.to):
            print(f"{size.name}, shape {shape}: error {errors[shape]:.2e}, torch's {theirs:.2e}")
    del exact
    calls: dict[str, Callable[[], object]] = {
        "torch": functools.partial(torchs_gradients, tensors, d_out, size.causal),
        "forward": ours.forward,
    }
    for shape in errors:
        calls[f"both {shape}"] = functools.partial(ours.both, shape)
        calls[f"shape {shape}"] = functools.partial(ours.backward, shape)
    ms = measure.interleaved({n: functools.partial(median, c) for n, c in calls.items()}, 3)
    best = min(errors, key=lambda shape: ms[f"both {shape}"])
    return {"size": size.name, **ms, "ours": ms[f"both {best}"], "best": best,
            "backward": ms[f"shape {best}"], "kill": KILL[size.d], "errors": errors,
            "error": errors[best], "torch_error": theirs}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    known = range(len(attention.BACKWARD_SHAPES))
    parser.add_argument("--shapes", type=int, nargs="*", default=known)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = [s for s in SIZES if options.only in s.name and shapes_of(s, options.shapes)]
    specs = [attention.backward_spec_of(shape) for shape in options.shapes]
    load.prepare([*specs, *map(attention.spec_of, FORWARD.values())], CUDA)
    rows = [timed(size, options.shapes) for size in sizes]
    shown = [
        [row["size"], *(f"{row[n]:.4f}" for n in ("ours", "backward", "torch")),
         f"{row['torch'] / row['ours']:.2f}×", f"{row['kill']:.1f}×",
         f"{row['error']:.1e}", f"{row['torch_error']:.1e}",
         " ".join(f"{n[6:]}: {row[n]:.4f}" for n in row if n.startswith("shape "))]
        for row in rows
    ]  # fmt: skip
    head = ["", "ours", "backward", "torch", "torch/ours", "kill", "error", "torch's"]
    print(tabulate(shown, [*head, "backward by shape"]))
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
