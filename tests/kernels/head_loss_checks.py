"""Checks of the kernel of a head's loss, on a GPU and on the CPU emulator."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from checks import SENTINEL
from torch import Tensor

from benchmarks.sm90 import CUDA
from fx_fuser.graph.read.heads import PLAIN, Tail
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.head_loss import width_of

IGNORED = -100
TAILS = (
    PLAIN,
    PLAIN,
    Tail(before=0.5),
    Tail(before=-1.25, smoothing=0.1),
    Tail(before=1 / 30, after=30.0),
    Tail(before=0.05, after=-20.0, smoothing=0.3),
    Tail(smoothing=0.1),
)
INF = torch.inf
# The error of a loss or a gradient of size 1 from exp, log and a sum of V terms in fp32: 2^-22 of
# exp, 2^-17 of its argument (a difference of logits below 2^7), 2^-24 / n of adding the n-th term.
LOSS = 2.0**-16


def logits_of(rows: int, columns: int, dtype: torch.dtype, size: float = 2.0) -> Tensor:
    """Random logits, in rows of the op's pitch; NaN after the columns, which must not be read."""
    made = torch.full((rows, width_of(columns)), torch.nan, device=CUDA, dtype=dtype)
    made[:, :columns] = torch.randn(rows, columns, device=CUDA) * size
    return made


def labels_of(rows: int, columns: int, choose: random.Random) -> Tensor:
    """Labels, including the first and last columns, and some that are ignored."""
    taken = (0, columns - 1, IGNORED, choose.randrange(columns), choose.randrange(columns))
    return torch.tensor([choose.choice(taken) for _ in range(rows)], device=CUDA)


def _exact(
    logits: Tensor, labels: Tensor, columns: int, scale: float, tail: Tail
) -> tuple[Tensor, Tensor]:
    """Losses and gradients by torch's autograd, in float64."""
    leaf = logits[:, :columns].double().requires_grad_()
    values = leaf * tail.before
    values = values.tanh() * tail.after if tail.after else values
    how: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": tail.smoothing}
    losses = F.cross_entropy(values, labels, reduction="none", **how)
    (gradient,) = torch.autograd.grad(losses, leaf, torch.full_like(losses, scale))
    return losses.detach(), F.pad(gradient, (0, logits.shape[1] - columns))


def _compare(
    failures: list[str], what: str, logits: Tensor, labels: Tensor, columns: int, scale: float,
    tail: Tail = PLAIN,
) -> None:  # fmt: skip
    """Against float64, from the logits as rounded to their dtype."""
    dtype = logits.dtype
    exact, gradient = _exact(logits, labels, columns, scale, tail)
    made, losses = logits.clone(), torch.full(labels.shape, SENTINEL, device=CUDA)
    given = None if not scale else torch.tensor(scale, device=CUDA)
    spec = spec_of(dtype, tail)
    launch.head_loss(spec, made, labels, losses, given, columns, IGNORED, tail)
    _compare_losses(failures, what, losses, exact)
    if not scale:
        if not torch.equal(made.view(torch.uint8), logits.view(torch.uint8)):
            failures.append(f"{what}: the logits are written to")
        return
    _compare_gradients(failures, what, made, gradient, scale, tail)


def _compare_losses(failures: list[str], what: str, losses: Tensor, exact: Tensor) -> None:
    off = (losses - exact).abs() / exact.abs().clamp(min=1.0)
    if not _is_within(off, losses, exact, LOSS):
        failures.append(f"{what}: losses {losses.tolist()}, not {exact.tolist()}")


def _compare_gradients(
    failures: list[str], what: str, made: Tensor, exact: Tensor, scale: float, tail: Tail
) -> None:
    # The result's rounding, and the errors of exp and the sum (LOSS): in fp32, of terms of at most
    # 1, times the largest slope of the tail.
    most = scale * abs(tail.before) * max(abs(tail.after), 1.0)
    off = (made - exact).abs() / (torch.finfo(made.dtype).eps * exact.abs() + most * LOSS)
    if not _is_within(off, made, exact, 1.0):
        failures.append(f"{what}: gradients are off by {float(off.nan_to_num(INF).max())} of it")


def _kept(logits: Tensor, columns: int, pitch: int, begin: int) -> Tensor:
    """The same logits with this pitch, from this element of a memory of NaN on."""
    rows = logits.shape[0]
    memory = torch.full((begin + rows * pitch,), torch.nan, device=CUDA, dtype=logits.dtype)
    made = memory[begin:].view(rows, pitch)[:, :columns]
    return made.copy_(logits[:, :columns])


def _compare_kept(
    failures: list[str], what: str, logits: Tensor, labels: Tensor, columns: int, scale: float,
    tail: Tail = PLAIN,
) -> None:  # fmt: skip
    """The kernels that keep the logits, reading vectors and elements, against float64."""
    exact, gradient = _exact(logits, labels, columns, scale, tail)
    spec, pitch = spec_of(logits.dtype, tail), logits.shape[1]
    for form in ((pitch, 0), (pitch, 1), (columns, 0), (columns + 3, 5)):
        kept, said = _kept(logits, columns, *form), f"{what}, pitch and begin {form}"
        before = kept.clone()
        losses = torch.full(labels.shape, SENTINEL, device=CUDA)
        sums = torch.full((*labels.shape, 2), SENTINEL, device=CUDA)
        launch.head_loss_kept(spec, kept, labels, losses, sums, IGNORED, tail)
        _compare_losses(failures, said, losses, exact)
        made = torch.full_like(logits, SENTINEL)
        given = torch.where(labels == IGNORED, 0.0, scale)
        launch.head_loss_gradient(spec, kept, sums, labels, given, -given, made, IGNORED, tail)
        _compare_gradients(failures, said, made, gradient, scale, tail)
        if not bool(((kept == before) | before.isnan()).all()):
            failures.append(f"{said}: the logits are written to")


def _compare_parts(
    failures: list[str], what: str, logits: Tensor, labels: Tensor, columns: int, tail: Tail
) -> None:
    """The gradient, given those of log-sum-exp and of losses, also of rows without a label."""
    counts = labels != IGNORED
    of_lse, of_loss = (torch.randn(labels.shape, device=CUDA) for _ in range(2))
    of_loss = torch.where(counts, of_loss, 0.0)
    _, gradient = _exact(logits, labels, columns, 1.0, tail)
    leaf = logits[:, :columns].double().requires_grad_()
    values = leaf * tail.before
    values = values.tanh() * tail.after if tail.after else values
    (plain,) = torch.autograd.grad(values.logsumexp(-1), leaf, of_lse.double())
    exact = gradient * of_loss[:, None].double()
    exact[:, :columns] += plain
    spec, losses = spec_of(logits.dtype, tail), torch.empty(labels.shape, device=CUDA)
    sums, made = torch.empty(*labels.shape, 2, device=CUDA), torch.full_like(logits, SENTINEL)
    kept = _kept(logits, columns, columns, 0)
    launch.head_loss_kept(spec, kept, labels, losses, sums, IGNORED, tail)
    given = labels, of_lse + of_loss, -of_loss, made, IGNORED, tail
    launch.head_loss_gradient(spec, kept, sums, *given)
    _compare_gradients(failures, f"parts of {what}", made, exact, 8.0, tail)
    in_place = logits.clone()
    given = labels, of_lse + of_loss, -of_loss, in_place, IGNORED, tail
    launch.head_loss_gradient(spec, in_place[:, :columns], sums, *given)
    if not torch.equal(in_place.view(torch.uint8), made.view(torch.uint8)):
        failures.append(f"parts of {what}: other gradients in the logits' place")


def _is_within(off: Tensor, made: Tensor, exact: Tensor, most: float) -> bool:
    """Within `most` (infinities and NaN where the exact values have them)."""
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
        tail = choose.choice(TAILS)
        what = f"[{rows}, {columns}] of {dtype}, scale {scale}, {tail}"
        given = logits, labels_of(rows, columns, choose), columns
        _compare(failures, what, *given, scale, tail)
        _compare_kept(failures, what, *given, scale or 1.0, tail)
        _compare_parts(failures, what, *given, tail)


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
        for tail in TAILS:
            for compare in (_compare, _compare_kept):
                what = f"special values of {dtype}, {tail}"
                compare(failures, what, logits, labels, columns, 1.0, tail)
    logits = logits_of(2, columns, torch.bfloat16)
    logits[0, 1] = -INF
    _compare(failures, "a label of -inf", logits, torch.tensor([1, 1], device=CUDA), columns, 1.0)


def refusals(failures: list[str]) -> None:
    labels, losses = torch.zeros(2, dtype=torch.long, device=CUDA), torch.zeros(2, device=CUDA)
    scale = torch.ones((), device=CUDA)
    logits = torch.zeros(2, 24, dtype=torch.bfloat16, device=CUDA)
    for what, given in {
        "rows that are not aligned": (
            logits.flatten()[:42].view(2, 21),
            labels,
            losses,
            scale,
            21,
            IGNORED,
        ),
        "rows with a gap": (logits[:, :16], labels, losses, scale, 16, IGNORED),
        "more columns than there are": (logits, labels, losses, scale, 25, IGNORED),
        "another dtype": (logits.half(), labels, losses, scale, 24, IGNORED),
        "fewer labels": (logits, labels[:1], losses, scale, 24, IGNORED),
        "labels of int32": (logits, labels.int(), losses, scale, 24, IGNORED),
        "losses of float64": (logits, labels, losses.double(), scale, 24, IGNORED),
        "a scale of float64": (logits, labels, losses, scale.double(), 24, IGNORED),
        "a scale per row": (logits, labels, losses, losses, 24, IGNORED),
    }.items():
        _is_refused(failures, what, launch.head_loss, given)
    for tail in (Tail(before=2.0), Tail(after=2.0), Tail(smoothing=0.1)):
        with_tail = logits, labels, losses, scale, 24, IGNORED, tail
        _is_refused(failures, f"{tail} of a kernel without", launch.head_loss, with_tail)
    with_tail = logits, labels, losses, scale, 24, IGNORED, Tail(smoothing=1.0)
    spec = spec_of(torch.bfloat16, Tail(smoothing=0.1))
    _is_refused(failures, "a smoothing of 1", launch.head_loss, with_tail, spec)
    sums, made = torch.zeros(2, 2, device=CUDA), torch.zeros_like(logits)
    kept = {"logits": logits, "labels": labels, "losses": losses, "sums": sums}
    gradient = {"logits": logits, "sums": sums, "labels": labels, "scale": losses, "hot": losses}
    gradient["gradient"] = made
    for call, right, wrong in (
        (launch.head_loss_kept, kept, {"logits": logits.t()}),
        (launch.head_loss_kept, kept, {"logits": logits.half()}),
        (launch.head_loss_kept, kept, {"labels": labels[:1]}),
        (launch.head_loss_kept, kept, {"losses": losses.double()}),
        (launch.head_loss_kept, kept, {"sums": losses}),
        (launch.head_loss_gradient, gradient, {"logits": logits[:, ::2]}),
        (launch.head_loss_gradient, gradient, {"sums": sums.double()}),
        (launch.head_loss_gradient, gradient, {"labels": labels.int()}),
        (launch.head_loss_gradient, gradient, {"scale": scale}),
        (launch.head_loss_gradient, gradient, {"hot": scale}),
        (launch.head_loss_gradient, gradient, {"gradient": made[:1]}),
        (launch.head_loss_gradient, gradient, {"gradient": made[:, :16]}),
        (launch.head_loss_gradient, gradient, {"gradient": made.flatten()[:42].view(2, 21)}),
    ):
        named: dict[str, Any] = {**right, "ignore_index": IGNORED, **wrong}
        _is_refused(failures, f"{call.__name__} of {wrong}", functools.partial(call, **named), ())


def _is_refused(
    failures: list[str], what: str, call: Callable[..., None], given: Iterable[Any],
    spec: KernelSpec | None = None,
) -> None:  # fmt: skip
    try:
        call(spec or spec_of(torch.bfloat16), *given)
    except RuntimeError as error:
        if "fx_fuser" not in str(error):
            failures.append(f"{what}: {error}")
    else:
        failures.append(f"{what}: taken")
