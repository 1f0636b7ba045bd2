"""What the kernel of a head's loss is checked for, on a GPU and on the CPU emulator alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from checks import SENTINEL
from torch import Tensor

from benchmarks.sm90 import CUDA
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.ops.head_loss import width_of

IGNORED = -100
INF = torch.inf
# What exp, log and a sum of V terms in fp32 are off by, of a loss or a gradient of size 1: exp by
# 2^-22 and, of a difference of logits below 2^7, by 2^-17, an n-th term's rounding by 2^-24 / n.
LOSS = 2.0**-16


def logits_of(rows: int, columns: int, dtype: torch.dtype, size: float = 2.0) -> Tensor:
    """Random, in rows as the op has them; what lies behind the columns nobody may read."""
    made = torch.full((rows, width_of(columns)), torch.nan, device=CUDA, dtype=dtype)
    made[:, :columns] = torch.randn(rows, columns, device=CUDA) * size
    return made


def labels_of(rows: int, columns: int, choose: random.Random) -> Tensor:
    """At the ends, too, and some that do not count."""
    taken = (0, columns - 1, IGNORED, choose.randrange(columns), choose.randrange(columns))
    return torch.tensor([choose.choice(taken) for _ in range(rows)], device=CUDA)


def _exact(logits: Tensor, labels: Tensor, columns: int, scale: float) -> tuple[Tensor, Tensor]:
    """Losses and gradients by torch's autograd, in float64."""
    leaf = logits[:, :columns].double().requires_grad_()
    losses = F.cross_entropy(leaf, labels, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(losses, leaf, torch.full_like(losses, scale))
    return losses.detach(), F.pad(gradient, (0, logits.shape[1] - columns))


def _compare(
    failures: list[str], what: str, logits: Tensor, labels: Tensor, columns: int, scale: float
) -> None:
    """Against float64, of the logits as they are."""
    dtype = logits.dtype
    exact, gradient = _exact(logits, labels, columns, scale)
    made, losses = logits.clone(), torch.full(labels.shape, SENTINEL, device=CUDA)
    given = None if not scale else torch.tensor(scale, device=CUDA)
    launch.head_loss(spec_of(dtype), made, labels, losses, given, columns, IGNORED)
    off = (losses - exact).abs() / exact.abs().clamp(min=1.0)
    if not _is_within(off, losses, exact, LOSS):
        failures.append(f"{what}: losses {losses.tolist()}, not {exact.tolist()}")
    if not scale:
        if not torch.equal(made.view(torch.uint8), logits.view(torch.uint8)):
            failures.append(f"{what}: the logits are written to")
        return
    # One rounding of the result, and those of exp, of a difference of logits below 2^7, and of the
    # sum: in fp32, of terms of at most 1.
    off = (made - gradient).abs() / (torch.finfo(dtype).eps * gradient.abs() + scale * LOSS)
    if not _is_within(off, made, gradient, 1.0):
        failures.append(f"{what}: gradients are off by {float(off.nan_to_num(INF).max())} of it")


def _is_within(off: Tensor, made: Tensor, exact: Tensor, most: float) -> bool:
    """Infinities and NaN where the exact values have them."""
    alike = (made.isnan() & exact.isnan()) | (made == exact)
    return bool((alike | (off <= most)).all())


def sweep(failures: list[str], count: int, seed: int, largest: Sequence[int]) -> None:
    """Random numbers of rows and columns, dtypes and labels. largest: rows, columns."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(count):
        rows, columns = (choose.randint(1, most) for most in largest)
        dtype = choose.choice((torch.float32, torch.float16, torch.bfloat16))
        scale = choose.choice((0.0, 1.0, 2.0**14 if dtype is torch.float16 else 1.0))
        logits = logits_of(rows, columns, dtype, choose.choice((0.1, 2.0, 40.0)))
        what = f"[{rows}, {columns}] of {dtype}, scale {scale}"
        _compare(failures, what, logits, labels_of(rows, columns, choose), columns, scale)


def special_values(failures: list[str], columns: int) -> None:
    """Rows with an infinity, with NaN, with -inf alone, of large logits: with a label that counts,
    and with one that does not."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits = logits_of(10, columns, dtype).nan_to_num(0.0)
        logits[0, 0] = INF
        logits[1, columns - 1] = torch.nan
        logits[2, :columns] = -INF
        logits[3, 1:columns] = -INF
        logits[4, :columns] *= 2e3  # fp16 has numbers to 65504
        for i in range(5):
            logits[5 + i] = logits[i]
        labels = torch.tensor([1, 0, 2, 0, columns - 1, *[IGNORED] * 5], device=CUDA)
        _compare(failures, f"special values of {dtype}", logits, labels, columns, 1.0)
    logits = logits_of(2, columns, torch.bfloat16)
    logits[0, 1] = -INF
    _compare(failures, "a label of -inf", logits, torch.tensor([1, 1], device=CUDA), columns, 1.0)


def refusals(failures: list[str]) -> None:
    spec = spec_of(torch.bfloat16)
    labels, losses = torch.zeros(2, dtype=torch.long, device=CUDA), torch.zeros(2, device=CUDA)
    scale = torch.ones((), device=CUDA)
    logits = torch.zeros(2, 24, dtype=torch.bfloat16, device=CUDA)
    for what, given in {
        "rows that are not aligned": (logits.flatten()[:42].view(2, 21), labels, losses, scale, 21),
        "rows with a gap": (logits[:, :16], labels, losses, scale, 16),
        "more columns than there are": (logits, labels, losses, scale, 25),
        "another dtype": (logits.half(), labels, losses, scale, 24),
        "fewer labels": (logits, labels[:1], losses, scale, 24),
        "labels of int32": (logits, labels.int(), losses, scale, 24),
        "losses of float64": (logits, labels, losses.double(), scale, 24),
        "a scale of float64": (logits, labels, losses, scale.double(), 24),
        "a scale a row": (logits, labels, losses, losses, 24),
    }.items():
        try:
            launch.head_loss(spec, *given, IGNORED)
        except RuntimeError as error:
            if "fx_fuser" not in str(error):
                failures.append(f"{what}: {error}")
        else:
            failures.append(f"{what}: taken")
