"""Linear and cross entropy in one: a model's head and its loss, without the logits.

    fx_fuser::head_loss(x, weight, bias, labels, …) = cross_entropy(x weightᵀ + bias, labels)

The logits of a vocabulary of 50,000 are most of the memory of a training step, and softmax's passes
over them are slow. Here they exist for a piece of rows at a time, in one buffer. Forward makes, of
each piece, the logits, then in place their gradient, and of it at once its part of the gradients of
x, weight and bias. So backward only multiplies these by its own gradient, a scalar. The gemms are
those that eager runs, cut by rows.

Rounding is eager's: logits and their gradient have the dtype that autocast gives the Linear,
softmax and loss are computed in fp32. The gradient of a logit is at most 1 in magnitude and often
below 2^-24, which fp16 rounds to 0: it is made `_SCALE` times as large, and the products of it are
kept in fp32 until they are divided again. The sums over pieces are in fp32. The number of labels
that count, by which a mean divides, stays on the device: nothing waits for it.

Where a mean's count is 0, all gradients are 0, as eager's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.ops import run
from fx_fuser.ops.once import differentiable_once

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LANES = 8  # what a row of logits has a multiple of: the library has fast 16-bit gemms of these
_PIECE = 256 << 20  # bytes of logits that exist at a time, at most
_ROWS = 128  # what a piece has a multiple of: a gemm's tile
_SCALE = {torch.float16: 2.0**14}  # of the gradients of logits, by their dtype; else 1
OPERANDS = ("x", "weight", "bias")


def width_of(columns: int) -> int:
    """Of a row of logits in memory."""
    return -(-columns // _LANES) * _LANES


def rows_of_piece(rows: int, columns: int, itemsize: int) -> int:
    """How many rows of logits exist at a time: pieces of about one size."""
    whole = rows * width_of(columns) * itemsize
    pieces = max(-(-whole // _PIECE), 1)
    per_piece = -(-rows // pieces)
    return min(max(-(-per_piece // _ROWS) * _ROWS, 1), max(rows, 1))


def bytes_of_piece(rows: int, columns: int, itemsize: int) -> int:
    return rows_of_piece(rows, columns, itemsize) * width_of(columns) * itemsize


# ---- the function of `fx_fuser.ops.run` ----------------------------------------------------------


def _head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    compute: torch.dtype,
    ignore_index: int,
    mean: bool,
    wanted: Sequence[str],
) -> list[Tensor]:
    """The loss; what gradients are still to be multiplied by; the wanted gradients in the order of
    `OPERANDS`: in fp32, or finished but for backward's own gradient (`_is_finished`)."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows, columns = x.shape[0], weight.shape[0]
        operands = _padded(weight, compute), None if bias is None else _padded(bias, compute)
        losses = x.new_empty(rows, dtype=torch.float32)
        sums = _sums(x, operands[0], wanted)
        height = rows_of_piece(rows, columns, compute.itemsize)
        buffer = x.new_empty((height, width_of(columns)), dtype=compute)
        scale = _SCALE.get(compute, 1.0)
        for first in range(0, rows, height):
            part = x[first : first + height].to(compute)
            logits = buffer[: part.shape[0]]
            _linear(part, *operands, logits)
            of_piece = slice(first, first + part.shape[0])
            given = labels[of_piece], losses[of_piece], columns, ignore_index
            _rows(logits, *given, scale if wanted else 0.0)
            _add_products(sums, of_piece, logits, part, operands[0])
        count = (labels != ignore_index).sum() if mean else labels.new_ones(())
        # Of no label all gradients are 0, of which this number may not make NaN.
        factor = (count.clamp(min=1) * scale).to(torch.float32).reciprocal()
        made = {name: _cut(total, columns, name) for name, total in sums.items()}
        if "weight" in made and _is_finished(weight):
            made["weight"] = (made["weight"] * factor).to(weight.dtype)
        return [losses.sum() / count, factor, *(made[name] for name in wanted)]


def _like(x: Tensor, weight: Tensor, bias: Any, labels: Any, *rest: Any) -> list[Tensor]:
    dtypes = {"weight": weight.dtype if _is_finished(weight) else torch.float32}
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    numbers = [x.new_empty((), dtype=torch.float32) for _ in range(2)]
    return [
        *numbers,
        *(x.new_empty(shapes[n], dtype=dtypes.get(n, torch.float32)) for n in rest[-1]),
    ]


run.define("head_loss", _head_loss, _like)


def _is_finished(weight: Tensor) -> bool:
    """Is its gradient, of the size of the vocabulary, kept for backward in 16 bits?  The range of
    fp16 is too small for a gradient that a GradScaler is yet to scale."""
    return weight.dtype is torch.bfloat16


def _padded(tensor: Tensor, compute: torch.dtype) -> Tensor:
    """In the dtype, with as many zeros behind as rows of logits have."""
    count, width = tensor.shape[0], width_of(tensor.shape[0])
    if tensor.dtype is compute and count == width and tensor.is_contiguous():
        return tensor
    made = tensor.new_empty((width, *tensor.shape[1:]), dtype=compute)
    made[:count].copy_(tensor)
    made[count:].zero_()
    return made


def _sums(x: Tensor, weight: Tensor, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Room for the gradients. weight: padded."""
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    # Each row of x is written once; the others are summed over pieces.
    return {
        name: (x.new_empty if name == "x" else x.new_zeros)(shapes[name], dtype=torch.float32)
        for name in wanted
    }


def _cut(total: Tensor, columns: int, name: str) -> Tensor:
    return total if name == "x" else total[:columns]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=logits)
    else:
        torch.addmm(bias, x, weight.t(), out=logits)


def _rows(
    logits: Tensor, labels: Tensor, losses: Tensor, columns: int, ignore_index: int, scale: float
) -> None:
    """The losses of rows, and if scale is not 0, in place, the gradients of these by the logits,
    times the scale; 0 behind the columns."""
    if logits.device.type == "cuda":
        spec = spec_of(logits.dtype)
        launch.head_loss(spec, logits, labels.contiguous(), losses, columns, ignore_index, scale)
    else:
        rows_in_torch(logits, labels, losses, columns, ignore_index, scale)


def rows_in_torch(
    logits: Tensor, labels: Tensor, losses: Tensor, columns: int, ignore_index: int, scale: float
) -> None:
    """What the kernel computes (kernels_cu/loss/head_loss.cuh)."""
    values = logits[:, :columns].float()
    losses.copy_(F.cross_entropy(values, labels, ignore_index=ignore_index, reduction="none"))
    if not scale:
        return
    counts = labels != ignore_index
    gradient = values.softmax(-1)
    at = torch.where(counts, labels, 0)[:, None]
    gradient.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
    # A product, not a choice: what is NaN stays NaN where the label does not count, as in eager.
    logits[:, :columns] = gradient * (counts[:, None] * scale)
    logits[:, columns:] = 0.0


def _add_products(
    sums: dict[str, Tensor], rows: slice, gradient: Tensor, x: Tensor, weight: Tensor
) -> None:
    """gradient: of the logits of these rows, x: the rows."""
    if "x" in sums:
        _multiply(gradient, weight, sums["x"][rows], 0)
    if "weight" in sums:
        _multiply(gradient.t(), x, sums["weight"], 1)
    if "bias" in sums:
        sums["bias"] += gradient.sum(0, dtype=torch.float32)


def _multiply(a: Tensor, b: Tensor, total: Tensor, beta: int) -> None:
    """total = beta total + a b, of which total is in fp32, a and b in 16 bits."""
    if a.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, beta=beta, out=total)
    elif beta:
        total.addmm_(a.float(), b.float())
    else:
        torch.mm(a.float(), b.float(), out=total)


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
        by_number = {torch.float32: d_loss * factor}
        of_name = dict(zip(ctx.wanted, made))
        grads = {
            name: (of_name[name] * by_number.get(of_name[name].dtype, d_loss)).to(dtype)
            for name, dtype in ctx.wanted.items()
        }
        return *(grads.get(name) for name in OPERANDS), *[None] * 4


def _called(*arguments: Any) -> list[Tensor]:
    made: list[Tensor] = run.IN_TORCH(*run.arguments("head_loss", arguments))
    return made


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
    compute: torch.dtype, out: torch.dtype, ignore_index: int, mean: bool,
) -> Tensor:  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        operands = x.reshape(-1, x.shape[-1]), weight, bias
        given = *operands, labels.reshape(-1), compute, ignore_index, mean
        trains = any(v is not None and v.requires_grad for v in operands)
        if torch.is_grad_enabled() and trains:
            loss: Tensor = _HeadLoss.apply(*given)  # type: ignore[no-untyped-call]
        else:
            loss, _ = _called(*given, [])
        return loss.to(out)


# x [*, K], weight [V, K], labels as x without its last dimension. compute: of the logits, out: of
# the loss. AOTAutograd sees through it.
_LIBRARY.define(
    "head_loss(Tensor x, Tensor weight, Tensor? bias, Tensor labels, ScalarType compute, "
    "ScalarType out, int ignore_index, bool mean) -> Tensor"
)
_LIBRARY.impl("head_loss", _composite, "CompositeImplicitAutograd")
HEAD_LOSS = torch.ops.fx_fuser.head_loss.default
