"""Times of 16-bit attention of windows with a bias beside what Inductor makes of it:

    python -m benchmarks.attention_window [--only WORD] [--batch 64] [--dtype bf16] [--out FILE]

GPU time in ms, medians, by turns, of Swin-T's stages: windows of 49 queries and keys, heads of 32,
a learned bias in fp32 and, shifted, a mask of each window. `inductor`: `torch.compile` of the
attention as torchvision writes it, from q, k and v that are contiguous already; `library`: what
`fx_fuser.passes.by_hand.clock.Windows` has the kernels beat, two gemms with a softmax between them
and four with its backward. `both`: forward with backward, with the bias's gradient. GB/s: of all
that the kernels must read and write. Errors are relative to float64: of out and of the largest of
the gradients. `kill`: the ratio to Inductor's below which the kernels are given up (issue 43).
`python -m pytest tests/kernels/test_attention_window.py` checks the kernels.
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
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels.attention import window
from fx_fuser.native import load
from fx_fuser.ops.attention_bias.window import ATTENTION_WINDOW
from fx_fuser.passes.by_hand import clock

KILL = 1.5
LENGTH, D = 49, 32
FORWARD, BOTH = ("ours", "inductor"), ("ours, both", "inductor, both")


@dataclass(frozen=True)
class Size:
    name: str
    windows: int  # of an image
    heads: int
    shifts: bool = False


SIZES = (
    Size("stage 1", 64, 3),
    Size("stage 1, shifted", 64, 3, True),
    Size("stage 2", 16, 6),
    Size("stage 3", 4, 12),
    Size("stage 4", 1, 24),
)


def attend(q: Tensor, k: Tensor, v: Tensor, learned: Tensor, mask: Tensor | None) -> Tensor:
    """As torchvision has it under autocast."""
    scores = q @ k.transpose(-2, -1) + learned
    if mask is not None:
        shape = scores.shape
        scores = (scores.unflatten(0, (-1, mask.shape[0])) + mask[:, None]).view(shape)
    out = scores.softmax(-1).to(v.dtype) @ v  # in fp32, as the bias is
    return out.transpose(1, 2).flatten(2)


def fused(q: Tensor, k: Tensor, v: Tensor, learned: Tensor, mask: Tensor | None) -> Tensor:
    bias = learned if mask is None else learned + mask[:, None]
    out = ATTENTION_WINDOW(q, k, v, bias, 1.0, q.dtype)
    return out.transpose(1, 2).flatten(2)


def timed(size: Size, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    shape = batch * size.windows, size.heads, LENGTH, D
    leaves = [torch.randn(shape, device=CUDA).to(dtype).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        leaves[0] *= D**-0.5
    learned = torch.randn(1, size.heads, LENGTH, LENGTH, device=CUDA).requires_grad_()
    mask = None
    if size.shifts:
        hides = torch.rand(size.windows, LENGTH, LENGTH, device=CUDA) < 0.3
        mask = torch.where(hides, -100.0, 0.0)
    leaves.append(learned)
    d_out = torch.randn(shape[0], LENGTH, size.heads * D, device=CUDA).to(dtype)
    torch._dynamo.reset()
    calls = {"ours": torch.compile(fused), "inductor": torch.compile(attend)}
    few = slice(0, 4 * size.windows)
    exact = _results(
        attend, [*(t[few].double() for t in leaves[:3]), learned.double()], mask, d_out
    )
    errors = {}
    for name, call in (("ours", fused), ("inductor", attend)):
        made = _results(call, [*(t[few] for t in leaves[:3]), learned], mask, d_out)
        found = [relative(a, b) for a, b in zip(made, exact)]
        errors[name] = [found[0], max(found[1:])]
    del exact, made

    def forward(call: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return call(*leaves, mask)

    def both(call: Callable[..., Tensor]) -> object:
        return call(*leaves, mask).backward(d_out)

    steps: dict[str, Callable[[], object]] = {
        name + suffix: functools.partial(step, call)
        for suffix, step in (("", forward), (", both", both))
        for name, call in calls.items()
    }
    bias = learned if mask is None else learned + mask[:, None]
    for trains, name in ((False, "library"), (True, "library, both")):
        race = clock.Windows.of(leaves[:3], bias, dtype, 1.0, False, trains)
        steps[name] = race.candidates()[0].run
    for step in steps.values():
        step()
    ms = measure.gpu_ms(steps, leaves, CUDA)
    tensors = leaves[0].numel() * leaves[0].element_size()
    return {"size": size.name, "batch": batch, **ms, "kill": KILL,
            "gb_s": [4 * tensors / ms["ours"] / 1e6, 11 * tensors / ms["ours, both"] / 1e6],
            "errors": errors["ours"], "inductor_errors": errors["inductor"]}  # fmt: skip


def _results(
    call: Callable[..., Tensor], given: list[Tensor], mask: Tensor | None, d_out: Tensor
) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in given]
    out = call(*leaves, mask)
    gradient = d_out[: out.shape[0]].to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    load.prepare(window.offered(), CUDA)
    sizes = [s for s in SIZES if options.only in s.name]
    rows = [timed(size, options.batch, DTYPES[options.dtype]) for size in sizes]
    shown = [
        [
            row["size"],
            *(f"{row[n]:.4f}" for n in (*FORWARD, "library")),
            f"{row[FORWARD[1]] / row[FORWARD[0]]:.2f}×",
            *(f"{row[n]:.4f}" for n in (*BOTH, "library, both")),
            f"{row[BOTH[1]] / row[BOTH[0]]:.2f}×",
            f"{row['kill']:.1f}×",
            " ".join(f"{one:.0f}" for one in row["gb_s"]),
            *(" ".join(f"{e:.1e}" for e in row[n]) for n in ("errors", "inductor_errors")),
        ]
        for row in rows
    ]
    ratio = "inductor/ours"
    head = ["", *FORWARD, "library", ratio, *BOTH, "library, both", ratio, "kill", "GB/s"]
    print(tabulate(shown, [*head, "errors", "inductor's"]))
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
