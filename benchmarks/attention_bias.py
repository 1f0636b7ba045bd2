"""Times of 16-bit attention with a bias, compared with torch's memory-efficient kernel:

    python -m benchmarks.attention_bias [--only WORD] [--dtype bf16] [--dropout P] [--out FILE]

GPU time in ms: medians, measured in turns, with the L2 cache cleared before each call, on random
data, with a bias [1, H, L, L] that batches share, and its gradient, summed over them. `torch`:
`aten._scaled_dot_product_efficient_attention` and its backward, with the sum. `both`: forward and
backward; `alone`: without clusters of blocks. Errors are relative to float64: for out, of the first
batch; for the gradients the largest, of one head. `kill`: the ratio below which the kernels are
given up (issue 43). With dropout, at the sizes that have kernels, torch drops other weights, so its
errors are not shown.
`python -m pytest tests/kernels/test_attention_biased.py` checks the kernels.
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

from benchmarks import attention_kernels, measure, results
from benchmarks.attention import median
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA, relative
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.native import load
from fx_fuser.ops import attention_dropout

KILL = 1.3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOTH = "ours, both", "alone, both", "torch, both"
_aten = torch.ops.aten


@dataclass(frozen=True)
class Size:
    name: str
    batches: int
    heads: int
    length: int
    d: int

    @property
    def operations(self) -> float:
        """Of the forward, as papers count them."""
        return 4 * self.batches * self.heads * self.length**2 * self.d


SIZES = (
    Size("T5, 512 x 64", 16, 12, 512, 64),
    Size("1024 x 128", 4, 16, 1024, 128),
    Size("long, 4096 x 64", 2, 16, 4096, 64),
)


class Call:
    """One call's tensors; each call overwrites the results."""

    def __init__(self, size: Size, dtype: torch.dtype, dropout: float) -> None:
        outer = size.batches, size.heads, size.length

        def heads() -> Tensor:  # as a projection leaves them: rows before heads
            made = torch.randn(size.batches, size.length, size.heads, size.d, device=CUDA)
            return made.to(dtype).transpose(1, 2)

        self.size = size
        self.q, self.k, self.v = heads(), heads(), heads()
        learned = torch.randn(1, size.heads, size.length, size.length, device=CUDA).to(dtype)
        self.bias = learned.expand(size.batches, -1, -1, -1)
        self.dropout, self.seed = dropout, torch.tensor([7], device=CUDA) if dropout else None
        spec = attention_bias.spec_for(size.d, dtype, dropout=dropout)
        assert spec is not None
        backward = attention_bias.spec_for(size.d, dtype, True, dropout)
        assert backward is not None
        self.spec, self.backward_spec = spec, backward
        self.scale = size.d**-0.5
        self.out, self.d_out = torch.empty_like(self.q), heads()
        self.lse = torch.empty(outer, device=CUDA)
        self.to = [torch.empty_like(t) for t in (self.q, self.k, self.v, learned)]

    @property
    def drops(self) -> dict[str, Any]:
        return {"seed": self.seed, "dropout": self.dropout}

    def kept(self) -> Tensor | float:
        """The factors of the weights."""
        if self.seed is None:
            return 1.0
        size = self.size
        sizes = size.batches * size.heads, size.length, size.length
        made = attention_dropout.factors(self.seed, *sizes, self.dropout, self.q.dtype)
        return made.unflatten(0, (size.batches, size.heads)).double()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.bias]

    def ours(self, alone: bool = False) -> None:
        given = self.spec, self.tensors, self.out, self.lse
        assert attention_kernels.attention_bias(*given, alone=alone, **self.drops)

    def torchs(self) -> Any:
        run = _aten._scaled_dot_product_efficient_attention.default
        return run(self.q, self.k, self.v, self.bias, True, self.dropout, False, scale=self.scale)

    def backward(self, alone: bool = False) -> None:
        given = self.backward_spec, self.tensors, self.out, self.lse, self.d_out, self.to
        assert attention_kernels.attention_bias_backward(*given, alone=alone, **self.drops)

    def torchs_backward(self, saved: Any) -> list[Tensor]:
        run = _aten._scaled_dot_product_efficient_attention_backward.default
        asked = [True] * 4
        made = run(self.d_out, self.q, self.k, self.v, self.bias, *saved, self.dropout, asked,
                   False, scale=self.scale)  # fmt: skip
        return [*made[:3], made[3].sum(0, keepdim=True)]

    def exact(self, kept: Tensor | float) -> Tensor:
        """The exact result of the first batch."""
        q, k, v, bias = (t[:1].double() for t in self.tensors)
        kept = kept[:1] if isinstance(kept, Tensor) else kept
        return ((q @ k.mT * self.scale + bias).softmax(-1) * kept) @ v

    def exact_gradients(self, kept: Tensor | float) -> list[Tensor]:
        """The exact gradients of the first head."""
        q, k, v, bias = (t[:, :1].double() for t in self.tensors)
        leaves = [t.detach().requires_grad_() for t in (q, k, v, bias[:1])]
        weights = (leaves[0] @ leaves[1].mT * self.scale + leaves[3]).softmax(-1)
        out = (weights * (kept[:, :1] if isinstance(kept, Tensor) else kept)) @ leaves[2]
        return list(torch.autograd.grad(out, leaves, self.d_out[:, :1].double()))


def timed(size: Size, dtype: torch.dtype, dropout: float) -> dict[str, Any]:
    call = Call(size, dtype, dropout)
    call.ours()
    call.backward()
    saved = call.torchs()
    kept = call.kept()
    exact = call.exact(kept)
    errors = [[relative(out[:1], exact)] for out in (call.out, saved[0])]
    del exact
    exact_gradients = call.exact_gradients(kept)
    for error, made in zip(errors, (call.to, call.torchs_backward(saved))):
        error.append(max(relative(t[:, :1], g) for t, g in zip(made, exact_gradients)))
    del exact_gradients, kept
    if dropout:
        errors[1] = []

    def ours_both(alone: bool = False) -> None:
        call.ours(alone)
        call.backward(alone)

    calls: dict[str, Callable[[], object]] = {
        "ours": call.ours,
        "alone": functools.partial(call.ours, True),
        "torch": call.torchs,
        "ours, both": ours_both,
        "alone, both": functools.partial(ours_both, True),
        "torch, both": lambda: call.torchs_backward(call.torchs()),
    }
    ms = measure.interleaved({n: functools.partial(median, c) for n, c in calls.items()}, 3)
    return {"size": size.name, "dropout": dropout, **ms, "kill": KILL,
            "tflops": size.operations / ms["ours"] / 1e9,
            "errors": errors[0], "torch_errors": errors[1]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = DTYPES[options.dtype]
    sizes = [
        s for s in SIZES
        if options.only in s.name and attention_bias.spec_for(s.d, dtype, dropout=options.dropout)
    ]  # fmt: skip
    load.prepare(attention_bias.examples("sm_90a"), CUDA)
    rows = [timed(size, dtype, options.dropout) for size in sizes]
    shown = [
        [row["size"], *(f"{row[n]:.4f}" for n in ("ours", "alone", "torch")),
         f"{row['torch'] / row['ours']:.2f}×", *(f"{row[n]:.4f}" for n in BOTH),
         f"{row[BOTH[2]] / row[BOTH[0]]:.2f}×", f"{row['kill']:.1f}×", f"{row['tflops']:.0f}",
         *(" ".join(f"{one:.1e}" for one in row[n]) for n in ("errors", "torch_errors"))]
        for row in rows
    ]  # fmt: skip
    head = [
        "",
        "ours",
        "alone",
        "torch",
        "torch/ours",
        *BOTH,
        "torch/ours",
        "kill",
        "TFLOP/s",
        "errors",
    ]
    print(tabulate(shown, [*head, "torch's"]))
    if options.out:
        commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
        results.save(options.out, measure.machine(CUDA), commit, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
