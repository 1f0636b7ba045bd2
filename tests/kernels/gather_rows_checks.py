"""Checks of gathers along rows and of their gradient."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.sm90 import CUDA
from fx_fuser.kernels.attention import gathered
from fx_fuser.ops.attention_bias.gathered import BACKWARD, FORWARD, ORDER

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100)
Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Sizes:
    batches: int
    rows: int
    places: int
    columns: int


def operands(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, the end of longer rows, and out's gradient; NaN lies around x."""
    whole = torch.full((sizes.batches, sizes.rows + 1, sizes.places + 3), torch.nan, dtype=dtype)
    x = whole.to(CUDA)[:, 1:, 3:]
    x.copy_(torch.randn(x.shape))
    return x, torch.randn(sizes.batches, sizes.rows, sizes.columns).to(dtype).to(CUDA)


def relative(sizes: Sizes, span: int) -> Tensor:
    """DeBERTa's index: places of i - j, those beyond the span at the ends."""
    rows, columns = torch.arange(sizes.rows), torch.arange(sizes.columns)
    return (rows[:, None] - columns + span).clamp(0, sizes.places - 1)


def gradient(call: Run, d_out: Tensor, index: Tensor, places: int) -> Tensor:
    kernel = gathered.spec_of(d_out.dtype).name
    order, starts = call(ORDER, index, kernel, places)
    (d_x,) = call(BACKWARD, d_out, index, order, starts, kernel, places)
    return d_x


def judge(
    failures: list[str], what: str, call: Run, given: tuple[Tensor, Tensor], index: Tensor
) -> None:
    """Forward copies, bit for bit. A gradient is a sum in fp32, in an order that is told, rounded
    once."""
    x, d_out = given
    index = index.to(CUDA)
    kernel = gathered.spec_of(x.dtype).name
    wanted = x.gather(-1, index.expand(x.shape[0], -1, -1))
    for transposed in (False, True):
        (out,) = call(FORWARD, x, index, kernel, transposed)
        if not torch.equal(out, wanted.mT if transposed else wanted):
            failures.append(f"{what}: out, transposed {transposed}, differs")
    d_x = gradient(call, d_out, index, x.shape[2])
    order, starts = call(ORDER, index, kernel, x.shape[2])
    found, sorted_columns = index.sort(dim=-1, stable=True)
    each = torch.arange(x.shape[2] + 1, device=x.device).repeat(len(index), 1)
    begins = torch.searchsorted(found.contiguous(), each)
    if not torch.equal(order.long(), sorted_columns) or not torch.equal(starts.long(), begins):
        failures.append(f"{what}: the order differs")
    sums = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    whole = index.expand(x.shape[0], -1, -1)
    sums.scatter_add_(-1, whole, d_out.double())
    sizes = torch.zeros_like(sums).scatter_add_(-1, whole, d_out.double().abs())
    # What fp32 loses of a sum, and a rounding to 16 bits.
    most = sizes * 2.0**-23 * d_out.shape[2] + sums.abs() * torch.finfo(x.dtype).eps
    if not bool(((d_x.double() - sums).abs() <= most).all()):
        failures.append(f"{what}: the gradient is off")


def sweep(failures: list[str], call: Run, seed: int, count: int) -> None:
    """Random sizes; places that many columns read, or none."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(count):
        dtype = choose.choice((torch.bfloat16, torch.float16))
        sizes = Sizes(
            choose.choice((1, 2, 5, 16, 17, 35)), choose.choice(LENGTHS),
            choose.choice((*LENGTHS, 256, 300)), choose.choice(LENGTHS),
        )  # fmt: skip
        index = choose.choice(
            (
                torch.randint(sizes.places, (sizes.rows, sizes.columns)),
                torch.randint(sizes.places, (sizes.columns, sizes.rows)).T,
                relative(sizes, sizes.places // 2),
                torch.zeros(sizes.rows, sizes.columns, dtype=torch.int64),
            )
        )
        judge(failures, f"{sizes}, {dtype}", call, operands(sizes, dtype), index)


def in_order(failures: list[str], call: Run) -> None:
    """The columns of a place are added in their order: here any other order gives another sum."""
    columns = 70
    d_out = torch.ones(1, 1, columns, dtype=torch.float16, device=CUDA)
    d_out[0, 0, ::2] = 2.0**-14
    d_out[0, 0, 1], d_out[0, 0, 68] = 60000.0, -60000.0
    index = torch.zeros(1, columns, dtype=torch.int64, device=CUDA)
    d_x = gradient(call, d_out, index, 3)
    wanted = torch.zeros(())
    for value in d_out.flatten().float().cpu():
        wanted = wanted + value
    if d_x.flatten().tolist() != [float(wanted.half()), 0, 0]:
        failures.append(f"{d_x.flatten().tolist()}, not {float(wanted.half())}")


def deberta(failures: list[str], call: Run) -> None:
    """As DeBERTa-v2 has it, 384 tokens and 512 positions."""
    torch.manual_seed(0)
    sizes = Sizes(24, 384, 1024, 384)
    judge(failures, "DeBERTa", call, operands(sizes, torch.bfloat16), relative(sizes, 512))
