"""Heads with their loss and other ways to save their memory, in turns: time and peak of a step.

    python -m benchmarks.heads_rivals            # all heads
    python -m benchmarks.heads_rivals Llama      # those whose name contains "Llama"

Inductor; Inductor with `auto_chunker`, with its own number of chunks and with 8; torch's chunked
`linear_cross_entropy` in a rewritten model, if torch has it (2.15), eager and compiled; and
fx_fuser. Milliseconds are the median of steps run back to back, MiB the peak of a step beyond what
was allocated before it.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fx_fuser
from benchmarks.heads import BF16, Head
from fx_fuser.compare import turns

ROUNDS, STEPS = 9, 5
DEVICE = torch.device("cuda")
CASES: dict[str, tuple[int, int, int, torch.dtype | None]] = {
    "head of GPT-2, 8192 rows, AMP": (8192, 768, 50257, BF16),
    "head of a Llama, 4096 rows, weights of bf16": (4096, 2048, 128256, None),
    "head of a Llama, 16384 rows, weights of bf16": (16384, 2048, 128256, None),
}


class Rewritten(Head):
    """The head with torch's own op."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cuda", self.cast or BF16, enabled=self.cast is not None):
            call: Callable[..., Tensor] = F.linear_cross_entropy
            rows, options = x.flatten(0, -2), nn.LinearCrossEntropyOptions()
            return call(rows, self.head.weight, labels.flatten(), options=options)


def rivals(model: Head, rewritten: Head | None) -> Iterator[tuple[str, Callable[..., Any]]]:
    compiled = functools.partial(torch.compile, dynamic=False)
    yield "inductor", compiled(model)
    for chunks in (None, 8):
        options: dict[str, Any] = {"auto_chunker.enable": True}
        options |= {"auto_chunker.num_chunk": chunks} if chunks else {}
        yield f"auto_chunker, {chunks or 'its own'}", compiled(model, options=options)
    if rewritten is not None:
        yield "torch's op", rewritten
        yield "torch's op, compiled", compiled(rewritten)
    yield "fx_fuser", compiled(model, backend="fx_fuser")


def measured(rows: int, width: int, columns: int, cast: torch.dtype | None) -> list[list[Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(1, rows, width, device=DEVICE, dtype=torch.float32 if cast else BF16)
    labels = torch.randint(0, columns, (1, rows), device=DEVICE)
    x.requires_grad_()
    model = Head(width, columns, cast)
    rewritten = None
    if hasattr(F, "linear_cross_entropy"):
        rewritten = Rewritten(width, columns, cast)
        rewritten.head = model.head

    def step(call: Callable[..., Any]) -> None:
        x.grad = model.head.weight.grad = None
        call(x, labels).backward()

    steps: dict[str, Callable[[], None]] = {}
    failed: list[list[Any]] = []
    for name, call in rivals(model, rewritten):
        one = functools.partial(step, call)
        try:
            for _ in range(3):
                one()
        except Exception as error:
            failed.append([name, f"{type(error).__name__}: {error}"[:60]])
        else:
            steps[name] = one
    x.grad = model.head.weight.grad = None
    before = torch.cuda.memory_allocated()
    peaks = {name: turns.peak_mib(one, DEVICE) - before / 2**20 for name, one in steps.items()}
    timers = {
        name: functools.partial(turns.steady_ms, one, DEVICE, STEPS) for name, one in steps.items()
    }
    times = turns.interleaved_rounds(timers, ROUNDS)
    made = [[n, statistics.median(times[n]), round(peaks[n])] for n in steps]
    return made + failed


def main() -> None:
    print(
        torch.cuda.get_device_name(), "torch", torch.__version__, "fx_fuser", fx_fuser.__version__
    )
    for name, case in CASES.items():
        if not sys.argv[1:] or any(part in name for part in sys.argv[1:]):
            print(f"\n{name}\n{tabulate(measured(*case), headers=['', 'ms', 'MiB'])}", flush=True)


if __name__ == "__main__":
    main()
