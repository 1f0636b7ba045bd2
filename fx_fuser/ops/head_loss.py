"""Linear and cross entropy in one: a model's head and its loss, without the logits.

    fx_fuser::head_loss(x, weight, bias, labels, …) = cross_entropy(tail(x weightᵀ + bias), labels)

The logits of a vocabulary of 50,000 are most of the memory of a training step, and softmax's passes
over them are slow. Here they exist for a piece of rows at a time, in one buffer. For each piece
forward computes the logits, then in place their gradient, and from it at once its part of the
gradients of x, weight and bias. So backward only multiplies these by its own gradient, a scalar.
The gemms are those that eager runs, cut by rows.

Rounding is eager's: logits and their gradient have the dtype that autocast gives the Linear, and
softmax and loss are computed in fp32. So are a scale and a soft cap, where eager may round each
step to 16 bits, and the sums over pieces, except for `_ADDED`. The divisor of a mean stays on the
device: nothing waits for it. The gradient of a logit is at most 1 in magnitude and often below
2^-24, which fp16 rounds to 0 unless a GradScaler is used. In fp16 it is computed 2^14 times as
large (`_fp16_scale`), whatever scales the loss, and its products are kept in fp32 until backward
divides them.

If no label counts, all gradients are 0, as eager's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.graph.read.heads import Tail
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.ops import run
from fx_fuser.ops.once import differentiable_once

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LANES = 8  # a row of logits has a multiple: for these the library has fast 16-bit gemms
TILE = 128  # a piece has a multiple of this many rows
# Most rows of a piece. Each piece reads and writes the sum of the weight's gradient: with 2048 rows
# that is a tenth of the time of its three gemms, with fewer more.
_ROWS = 2048
# So many pieces may add to a bf16 gradient that the result itself holds, if that takes less memory
# than a sum in fp32. Each piece rounds the sum once. Together, n roundings of sums of 1/n, 2/n … of
# the rows are sqrt((n + 1) / 2) times eager's one if the rows' parts have random signs, and
# sqrt((n + 1) (2 n + 1) / 6 n) times if they are all alike: 1.22 and 1.12 for 2. For 3 they are
# 1.41 and 1.25, and in tests, with the rounding of a loss that is scaled afterwards, up to 1.7:
# more than the 1.5 times eager's error that we allow.
_ADDED = 2
_FP16_EXPONENT = 14  # of the factor for a gradient of 1
OPERANDS = ("x", "weight", "bias")


def width_of(columns: int) -> int:
    """The length of a row of logits in memory."""
    return -(-columns // _LANES) * _LANES


class Pieces(NamedTuple):
    """rows: of each; the last may have fewer. sum: the dtype in which their parts of the weight's
    gradient are added."""

    rows: int
    sum: torch.dtype


def pieces_of(
    rows: int, weight: Tensor, compute: torch.dtype, wanted: Sequence[str] = OPERANDS
) -> Pieces:
    """How many rows of logits exist at a time: pieces of about one size.

    A bf16 gradient is summed over pieces in an extra fp32 tensor, or in its own memory by few
    pieces: whichever takes less memory.
    """
    height, kept = height_of(rows, _ROWS), kept_dtype(weight, compute)
    if "weight" not in wanted or kept is torch.float32:
        return Pieces(height, torch.float32)
    added = 1 if _sums_stay_wide() else _ADDED
    taller, k = height_of(rows, max(_ROWS, -(-rows // added))), weight.shape[1]
    # Bytes of a column: its logits and sum; with an fp32 sum also, later, the sum and result.
    narrow, wide = 2 * taller + 2 * k, max(2 * height + 4 * k, 6 * k)
    return Pieces(taller, kept) if narrow <= wide else Pieces(height, torch.float32)


def height_of(rows: int, most: int) -> int:
    pieces = max(-(-rows // most), 1)
    height = -(-rows // (pieces * TILE)) * TILE
    return max(min(height, rows), 1)


def _sums_stay_wide() -> bool:
    """Does torch's setting forbid gemms to round partial sums to bf16?"""
    return not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


# ---- the function of `fx_fuser.ops.run` ----------------------------------------------------------


def _head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    compute: torch.dtype,
    ignore_index: int,
    reduction: str,
    tail: Sequence[float],
    wanted: Sequence[str],
) -> list[Tensor]:
    """The loss, or without a reduction each row's; the gradients' common factor; and the wanted
    gradients without it, in the order of `OPERANDS`."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows, columns = x.shape[0], weight.shape[0]
        losses = x.new_empty(rows, dtype=torch.float32)
        is_mean = reduction == "mean"
        count = (labels != ignore_index).sum() if is_mean else labels.new_ones(())
        share = count.clamp(min=1).to(torch.float32).reciprocal()  # no NaN if there is no label
        is_fp16 = compute is torch.float16
        how = Tail(*tail)
        raised = _fp16_scale(how)
        scale = torch.full_like(share, raised) if is_fp16 else share
        given = x, weight, bias, labels, losses, scale, compute, ignore_index, how
        sums = _sums_over_pieces(*given, wanted)
        made = cut_off(sums, rows, columns, {"weight": kept_dtype(weight, compute)})
        factor = share / raised if is_fp16 else torch.ones_like(share)
        return [losses if reduction == "none" else losses.sum() / count, factor, *made]


def _fp16_scale(tail: Tail) -> float:
    """2^14 over the least power of two that no slope of the tail exceeds: a gradient with respect
    to a logit is then at most 2^14."""
    slope = abs(tail.before * (tail.after or 1.0))
    return 2.0 ** max(-60, min(60, _FP16_EXPONENT - math.ceil(math.log2(slope))))


def _sums_over_pieces(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, losses: Tensor, scale: Tensor,
    compute: torch.dtype, ignore_index: int, tail: Tail, wanted: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """The wanted gradients, times the scale; writes the losses. The logits' memory is free again on
    return."""
    rows, columns = x.shape[0], weight.shape[0]
    operands = padded(weight, compute), None if bias is None else padded(bias, compute)
    pieces = pieces_of(rows, weight, compute, wanted)
    sums = sums_of(x, weight, wanted, pieces)
    buffer = x.new_empty((pieces.rows, width_of(columns)), dtype=compute)
    for first in range(0, rows, pieces.rows):
        part = x[first : first + pieces.rows].to(compute)
        piece, logits = slice(first, first + part.shape[0]), buffer[: part.shape[0]]
        _linear(part, *operands, logits)
        scaled = scale if wanted else None
        _rows(logits, labels[piece], losses[piece], scaled, columns, ignore_index, tail)
        add_products(sums, piece, logits, part, operands[0])
    return sums


def _like(
    x: Tensor, weight: Tensor, bias: Any, labels: Any, compute: torch.dtype, *rest: Any
) -> list[Tensor]:
    *_, reduction, _, wanted = rest
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    kept = {"weight": kept_dtype(weight, compute)}
    shape = x.shape[:1] if reduction == "none" else ()
    numbers = [x.new_empty(of, dtype=torch.float32) for of in (shape, ())]
    grads = [x.new_empty(shapes[n], dtype=kept.get(n, torch.float32)) for n in wanted]
    return [*numbers, *grads]


run.define("head_loss", _head_loss, _like)


def kept_dtype(weight: Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype of the weight's gradient until backward multiplies it."""
    return torch.bfloat16 if {weight.dtype, compute} == {torch.bfloat16} else torch.float32


def padded(tensor: Tensor, compute: torch.dtype) -> Tensor:
    """In this dtype, with zeros appended up to the length of a row of logits."""
    count, width = tensor.shape[0], width_of(tensor.shape[0])
    if tensor.dtype is compute and count == width and tensor.is_contiguous():
        return tensor
    made = tensor.new_empty((width, *tensor.shape[1:]), dtype=compute)
    made[:count].copy_(tensor)
    made[count:].zero_()
    return made


def sums_of(x: Tensor, weight: Tensor, wanted: Sequence[str], pieces: Pieces) -> dict[str, Tensor]:
    """Room for the gradients, padded as the operands of their gemms are."""
    rows, (columns, k) = x.shape[0], weight.shape
    shapes = {"x": (rows, k), "weight": (width_of(columns), k), "bias": (width_of(columns),)}
    dtypes = {"weight": pieces.sum}
    make = x.new_empty if rows else x.new_zeros  # the first piece writes, if there is one
    return {n: make(shapes[n], dtype=dtypes.get(n, torch.float32)) for n in wanted}


def cut_off(
    sums: dict[str, Tensor], rows: int, columns: int, dtypes: Mapping[str, torch.dtype]
) -> list[Tensor]:
    """The gradients without their padding, in these dtypes or in fp32."""
    counts = {"x": rows}
    return [
        total[: counts.get(name, columns)].to(dtypes.get(name, torch.float32))
        for name, total in sums.items()
    ]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=logits)
    else:
        torch.addmm(bias, x, weight.t(), out=logits)


def _rows(
    logits: Tensor, labels: Tensor, losses: Tensor, scale: Tensor | None, columns: int,
    ignored: int, tail: Tail,
) -> None:  # fmt: skip
    """The losses of rows and, with a scale, in place of the logits their gradients times the scale;
    0 in the padding."""
    if logits.device.type == "cuda":
        spec = spec_of(logits.dtype, tail)
        launch.head_loss(spec, logits, labels.contiguous(), losses, scale, columns, ignored, tail)
        return
    of_columns = logits[:, :columns]
    values = values_of(of_columns, tail)
    losses.copy_(losses_of(values, labels, ignored, tail))
    if scale is not None:
        of_row = torch.where(labels != ignored, scale, 0.0)
        write_gradient(logits, of_columns, values.softmax(-1), labels, of_row, -of_row, tail)


def values_of(logits: Tensor, tail: Tail) -> Tensor:
    """In torch: the values whose softmax the kernel takes, in fp32."""
    values = logits.float()
    if tail.before != 1.0:
        values = values * tail.before
    return values.tanh() * tail.after if tail.after else values


def losses_of(values: Tensor, labels: Tensor, ignored: int, tail: Tail) -> Tensor:
    how: dict[str, Any] = {"ignore_index": ignored, "reduction": "none"}
    return F.cross_entropy(values, labels, **how, label_smoothing=tail.smoothing)


def write_gradient(
    to: Tensor, logits: Tensor, shares: Tensor, labels: Tensor, scale: Tensor, hot: Tensor,
    tail: Tail,
) -> None:  # fmt: skip
    """In torch: what the kernel writes. shares: softmax of the values in fp32; overwritten. scale,
    hot: of each row, 0 where it does not count."""
    columns = shares.shape[1]
    shares *= scale[:, None]  # NaN stays NaN where the label does not count, as in eager
    is_column = (labels >= 0) & (labels < columns)
    at, of_label = (torch.where(is_column, v, 0) for v in (labels, hot * (1 - tail.smoothing)))
    shares.scatter_add_(1, at[:, None], of_label[:, None])
    if tail.smoothing:
        shares += hot[:, None] * (tail.smoothing / columns)
    if tail.after:
        shares *= slope_of_cap(values_of(logits, tail), tail)
    elif tail.before != 1.0:
        shares *= tail.before
    to[:, :columns] = shares
    to[:, columns:] = 0.0


def slope_of_cap(values: Tensor, tail: Tail) -> Tensor:
    """The derivative of capped values with respect to the logits."""
    return (1 - (values / tail.after).square()) * (tail.before * tail.after)


def add_products(
    sums: dict[str, Tensor], piece: slice, gradient: Tensor, x: Tensor, weight: Tensor
) -> None:
    """Adds the products of a piece. gradient: of its logits. x: its rows. weight: padded."""
    beta = 1 if piece.start else 0
    if "x" in sums:
        _multiply(gradient, weight, sums["x"][piece], 0)
    if "weight" in sums:
        _multiply(gradient.t(), x, sums["weight"], beta)
    if "bias" in sums:
        of_piece = gradient.sum(0, dtype=torch.float32)
        sums["bias"].copy_(of_piece + sums["bias"] if beta else of_piece)


def _multiply(a: Tensor, b: Tensor, total: Tensor, beta: int) -> None:
    """total = beta total + a b, of 16-bit a and b, rounded once. total: in fp32 or in their
    dtype."""
    if total.dtype is a.dtype and not beta:
        torch.mm(a, b, out=total)
    elif a.device.type != "cuda":
        made = a.float() @ b.float()
        total.copy_(total + made if beta else made)
    elif total.dtype is a.dtype:
        total.addmm_(a, b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, beta=beta, out=total)


# ---- autograd ------------------------------------------------------------------------------------


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any
    ) -> Tensor:
        needed = zip(OPERANDS, (x, weight, bias), ctx.needs_input_grad)
        ctx.wanted = {name: given.dtype for name, given, needs in needed if needs}  # type: ignore[union-attr]
        loss, *kept = _called(x, weight, bias, labels, *rest, list(ctx.wanted))
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    @differentiable_once(lambda _: "head_loss")
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
        factor, *made = ctx.saved_tensors
        scale = d_loss * factor
        kept = zip(ctx.wanted.items(), made)
        grads = {name: (grad * scale).to(dtype) for (name, dtype), grad in kept}
        return *(grads.get(name) for name in OPERANDS), *[None] * 5


def _called(*arguments: Any) -> list[Tensor]:
    made: list[Tensor] = run.IN_TORCH(*run.arguments("head_loss", arguments))
    return made


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
    compute: torch.dtype, out: torch.dtype, ignore_index: int, reduction: str,
    tail: Sequence[float],
) -> Tensor:  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        operands = x.reshape(-1, x.shape[-1]), weight, bias
        given = *operands, labels.reshape(-1), compute, ignore_index, reduction, tail
        trains = any(v is not None and v.requires_grad for v in operands)
        if torch.is_grad_enabled() and trains:
            loss: Tensor = _HeadLoss.apply(*given)
        else:
            loss, _ = _called(*given, [])
        return loss.to(out)


# x [*, K], weight [V, K], labels like x without its last dimension. compute: dtype of the logits,
# out: of the loss. reduction: as in cross_entropy; "none" has no gradient. tail: the numbers of a
# `Tail`. AOTAutograd sees through it.
_LIBRARY.define(
    "head_loss(Tensor x, Tensor weight, Tensor? bias, Tensor labels, ScalarType compute, "
    "ScalarType out, int ignore_index, str reduction, float[] tail) -> Tensor"
)
_LIBRARY.impl("head_loss", _composite, "CompositeImplicitAutograd")
HEAD_LOSS = torch.ops.fx_fuser.head_loss.default
