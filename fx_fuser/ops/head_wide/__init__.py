"""A Linear in fp32 and its loss, of operands that were cast up from 16 bits, without the logits.

    fx_fuser::head_loss.wide(x, weight, …) = cross_entropy(tail(x.float() weight.float()ᵀ + bias))
    fx_fuser::head_loss.wide_parts(…) = its losses of rows, their logsumexp, and tail(…)[labels]

Trainers write heads so whose log-probabilities have to agree with those of another program, as in
reinforcement learning. Logits and their gradient are fp32 and stay it: nothing is rounded to 16
bits but the gradients of x and weight, once, as autograd's casts round them.

Forward makes the logits of a piece of rows, and keeps two numbers of each row. Backward makes them
once more, of a block of columns, then in place their gradient, of which it adds to that of x and
has that of the block's weight whole. So there is neither a tensor of all logits nor a sum of the
weight's gradient in fp32, whatever the loss, its reduction, and what runs forward again.

Products of two 16-bit values are exact in fp32, so the logits are one gemm of the operands as they
lie, and those of the gradient with one of them two. The kernels are those of
`fx_fuser.passes.provenance`. Where torch is asked for TF32 the library multiplies: logits of the
16-bit operands, the others with a block of the weight in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.graph.read.heads import Tail
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.split import MIXED_GEMMS
from fx_fuser.ops import run
from fx_fuser.ops.head_kept import (
    log_sum_exp,
    losses_like,
    picked,
    reduced,
    row_gradient,
    row_losses,
    row_scales,
)
from fx_fuser.ops.head_loss import OPERANDS, TILE, height_of, padded
from fx_fuser.ops.once import differentiable_once

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
# Of the logits that exist at a time: 512 rows of 128256, or 16384 columns of 4096 rows, of which
# the gemms fill a GPU, and the sum of x's gradient is read and written seldom enough.
_BYTES = 256 << 20
_NO_LABEL = -1  # of a block of columns


def piece_of(count: int, other: int) -> int:
    """Of so many rows or columns, how many exist at a time. other: of the other ones."""
    most = _BYTES // (4 * max(other, 1)) // TILE * TILE
    return height_of(count, max(most, TILE))


# ---- the functions of `fx_fuser.ops.run` ---------------------------------------------------------


def _losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, narrow: torch.dtype,
    by_library: bool, ignore_index: int, tail: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of each row the loss, what `_grads` wants, and the label's value."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        (losses, sums, values), rows = _losses_like(x), x.shape[0]
        operand = weight.to(narrow).contiguous()
        height = piece_of(rows, weight.shape[0])
        for first in range(0, rows, height):
            piece = slice(first, first + height)
            logits = _logits(x[piece].to(narrow), operand, bias, by_library)
            losses[piece], sums[piece] = row_losses(logits, labels[piece], ignore_index, tail)
            values[piece] = picked(logits, labels[piece], ignore_index, Tail(*tail))
            del logits  # before the next piece's
        return losses, sums, values


def _losses_like(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    losses, sums = losses_like(x)
    return losses, sums, torch.empty_like(losses)


def _grads(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, sums: Tensor, scale: Tensor,
    hot: Tensor, narrow: torch.dtype, by_library: bool, tail: Sequence[float],
    wanted: Sequence[str],
) -> list[Tensor]:  # fmt: skip
    """Those of x and weight in their dtypes, that of a bias in fp32. scale: of each row's softmax,
    hot: what the label's value has beside it."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        made = {n: v for n, v in zip(wanted, _grads_like(x, weight, wanted)) if n != "x"}
        d_x: Tensor | None = None
        operand, columns = x.to(narrow).contiguous(), weight.shape[0]
        width = piece_of(columns, x.shape[0])
        for first in range(0, columns, width):
            block = slice(first, min(first + width, columns))
            part, count = padded(weight[block], narrow), block.stop - first
            of_block = None if bias is None else padded(bias[block], torch.float32)
            logits = _logits(operand, part, of_block, by_library)
            is_here = (labels >= first) & (labels < block.stop)  # where none counts, hot is 0
            here = torch.where(is_here, labels - first, _NO_LABEL)
            own, of_label = _in_block(Tail(*tail), hot, count / columns)
            given = logits[:, :count], sums, here, scale, of_label, logits
            row_gradient(*given, _NO_LABEL, own)  # in the logits' place
            if "x" in wanted:
                d_x = _added(d_x, logits, part, by_library)
            if "weight" in made:
                made["weight"][block] = _product(logits.t(), operand.t(), by_library)[:count]
            if "bias" in made:
                made["bias"][block] = logits.sum(0)[:count]
            del logits
        return [d_x.to(x.dtype) if d_x is not None and n == "x" else made[n] for n in wanted]


def _grads_like(x: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    *_, wanted = rest
    bias = weight.new_empty(weight.shape[0], dtype=torch.float32)
    like = {"x": x.new_empty(x.shape), "weight": weight.new_empty(weight.shape), "bias": bias}
    return [like[name] for name in wanted]


run.define("head_wide_losses", _losses, _losses_like)
run.define("head_wide_grads", _grads, _grads_like)


def _in_block(tail: Tail, hot: Tensor, share: float) -> tuple[Tail, Tensor]:
    """For gradients of some columns, a share of all, as if there were no others: smoothing gives
    each as much as it has of all."""
    if not tail.smoothing:
        return tail, hot
    ratio = tail.smoothing / (1 - tail.smoothing) * share
    own = tail._replace(smoothing=ratio / (1 + ratio))
    return own, hot * ((1 - tail.smoothing) / (1 - own.smoothing))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, by_library: bool) -> Tensor:
    """In fp32, of 16-bit x and weight."""
    if by_library and x.device.type == "cuda":
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        kernel = EXACT_GEMMS[x.dtype].name
        logits = torch.ops.fx_fuser.exact_product.default(x.contiguous(), weight, kernel)
    return logits if bias is None else logits.add_(bias)


def _product(gradient: Tensor, other: Tensor, by_library: bool) -> Tensor:
    """gradient otherᵀ in fp32. other: of 16 bits."""
    if by_library:
        return F.linear(gradient, other.float())
    kernel = MIXED_GEMMS[other.dtype].name
    made: Tensor = torch.ops.fx_fuser.split_product.default(gradient, other, kernel)
    return made


def _added(d_x: Tensor | None, gradient: Tensor, weight: Tensor, by_library: bool) -> Tensor:
    """d_x + gradient weight. It writes to d_x."""
    if d_x is None:
        return _product(gradient, weight.t(), by_library)
    if by_library:
        return d_x.addmm_(gradient, weight.float())
    return d_x.add_(_product(gradient, weight.t(), by_library))


# ---- autograd ------------------------------------------------------------------------------------


class _WideLoss(torch.autograd.Function):
    """The losses of rows; and with `parts`, log-sum-exp and the label's value of each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
        narrow: torch.dtype, by_library: bool, ignore_index: int, tail: Sequence[float],
        parts: bool,
    ) -> Any:  # fmt: skip
        needed = zip(OPERANDS, (x, weight, bias), ctx.needs_input_grad)
        ctx.wanted = {name: given.dtype for name, given, needs in needed if needs}  # type: ignore[union-attr]
        ctx.ignore_index, ctx.how = ignore_index, (narrow, by_library, tail)
        given = x, weight, bias, labels, narrow, by_library, ignore_index, tail
        losses, sums, values = _called("head_wide_losses", *given)
        ctx.save_for_backward(x, weight, bias, labels, sums)
        return (losses, log_sum_exp(sums), values) if parts else losses

    @staticmethod
    @differentiable_once(lambda _: "head_loss")
    def backward(ctx: Any, d_losses: Tensor, *d_parts: Tensor) -> tuple[Any, ...]:
        *operands, labels, sums = ctx.saved_tensors
        of_rows = labels, sums, *row_scales(labels, ctx.ignore_index, d_losses, *d_parts)
        made = _called("head_wide_grads", *operands, *of_rows, *ctx.how, list(ctx.wanted))
        of = {name: grad.to(dtype) for (name, dtype), grad in zip(ctx.wanted.items(), made)}
        return *(of.get(name) for name in OPERANDS), *[None] * 6


def _called(name: str, *arguments: Any) -> list[Tensor]:
    made: list[Tensor] = run.IN_TORCH(*run.arguments(name, arguments))
    return made


def _rows_of(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> Any:
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        return _WideLoss.apply(rows, weight, bias, labels.reshape(-1), *rest)


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, narrow: torch.dtype,
    by_library: bool, out: torch.dtype, ignore_index: int, reduction: str, tail: Sequence[float],
) -> Tensor:  # fmt: skip
    how = narrow, by_library, ignore_index, tail
    losses = _rows_of(x, weight, bias, labels, *how, False)
    return reduced(losses, labels, out, ignore_index, reduction)


def _parts(*given: Any) -> Any:
    return _rows_of(*given, True)


# As `fx_fuser::head_loss`. x, weight: of `narrow`, a 16-bit dtype, or cast up from it. by_library:
# where torch is asked for TF32. AOTAutograd sees through them.
_LIBRARY.define(
    "head_loss.wide(Tensor x, Tensor weight, Tensor? bias, Tensor labels, ScalarType narrow, "
    "bool by_library, ScalarType out, int ignore_index, str reduction, float[] tail) -> Tensor"
)
_LIBRARY.define(
    "head_loss.wide_parts(Tensor x, Tensor weight, Tensor? bias, Tensor labels, "
    "ScalarType narrow, bool by_library, int ignore_index, float[] tail) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("head_loss.wide", _composite, "CompositeImplicitAutograd")
_LIBRARY.impl("head_loss.wide_parts", _parts, "CompositeImplicitAutograd")
HEAD_LOSS_WIDE = torch.ops.fx_fuser.head_loss.wide
HEAD_LOSS_WIDE_PARTS = torch.ops.fx_fuser.head_loss.wide_parts
