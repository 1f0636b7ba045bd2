"""The cross entropy of a Linear's rows if the logits stay until backward.

    fx_fuser::head_loss.kept(…, logits, labels, …) = cross_entropy(tail(logits), labels)
    fx_fuser::head_loss.parts(…) = the losses of rows, logsumexp(tail(logits)), tail(logits)[labels]

The logits stay if something else reads them as well, or if each row has its own loss or a
log-sum-exp, so that forward does not know by what the gradient is scaled. The Linear has written
the logits once, in its own dtype. Forward reads them for the losses, and keeps two numbers per row.
Backward makes their gradient for a piece of rows at a time, and at once its part of the gradients
of x, weight and bias, as `fx_fuser.ops.head_loss` does in forward. So neither an fp32 copy of the
logits nor their whole gradient exists.

The gradients of the op bypass the logits. A gradient that reaches them from elsewhere takes its own
way through the Linear, and autograd adds the two.

AOTAutograd cannot be told that logits which a graph returns may have no gradient of their own: it
makes one, of zeros. So `fx_fuser.passes.head_loss` lets a graph return logits without a gradient,
together with their Linear's operands, and `attached` restores the gradient outside: only a caller
who sends a gradient through the logits pays for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fx_fuser.graph.read.heads import PLAIN, Tail
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.ops import run
from fx_fuser.ops.head_loss import (
    OPERANDS,
    add_products,
    cut_off,
    losses_of,
    padded,
    pieces_of,
    slope_of_cap,
    sums_of,
    values_of,
    width_of,
    write_gradient,
)
from fx_fuser.ops.once import differentiable_once

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


# ---- the functions of `fx_fuser.ops.run` ---------------------------------------------------------


def row_losses(
    logits: Tensor, labels: Tensor, ignore_index: int, tail: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and what its gradient needs of it."""
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        (losses, sums), how = losses_like(logits), Tail(*tail)
        if _runs_kernels(logits):
            given = _rows(logits), labels.contiguous(), losses, sums, ignore_index, how
            launch.head_loss_kept(spec_of(logits.dtype, how), *given)
        else:
            values = values_of(logits, how)
            losses.copy_(losses_of(values, labels, ignore_index, how))
            sums[:, 0] = values.amax(-1)
            sums[:, 1] = (values - sums[:, :1]).exp().sum(-1)
        return losses, sums


def losses_like(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    losses = logits.new_empty(rows, dtype=torch.float32)
    return losses, logits.new_empty((rows, 2), dtype=torch.float32)


def _grads(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    labels: Tensor,
    sums: Tensor,
    scale: Tensor,
    hot: Tensor,
    ignore_index: int,
    tail: Sequence[float],
    wanted: Sequence[str],
) -> list[Tensor]:
    """Those of x and weight in their dtypes, that of a bias in fp32. scale: of each row's softmax,
    hot: what is added at the label."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows, columns = logits.shape
        given = x, weight, _rows(logits), labels.contiguous(), sums, scale, hot
        totals = _sums_over_pieces(*given, ignore_index, Tail(*tail), wanted)
        return cut_off(totals, rows, columns, {"x": x.dtype, "weight": weight.dtype})


def _sums_over_pieces(
    x: Tensor, weight: Tensor, logits: Tensor, labels: Tensor, sums: Tensor, scale: Tensor,
    hot: Tensor, ignore_index: int, tail: Tail, wanted: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """The wanted gradients. The memory of a piece is free again on return."""
    (rows, columns), compute = logits.shape, logits.dtype
    pieces = pieces_of(rows, weight, compute, wanted)
    operand, totals = padded(weight, compute), sums_of(x, weight, wanted, pieces)
    buffer = x.new_empty((pieces.rows, width_of(columns)), dtype=compute)
    for first in range(0, rows, pieces.rows):
        part = x[first : first + pieces.rows].to(compute)
        piece, gradient = slice(first, first + part.shape[0]), buffer[: part.shape[0]]
        of_piece = logits[piece], sums[piece], labels[piece], scale[piece], hot[piece]
        row_gradient(*of_piece, gradient, ignore_index, tail)
        add_products(totals, piece, gradient, part, operand)
    return totals


def _grads_like(x: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    *_, wanted = rest
    bias = weight.new_empty(weight.shape[0], dtype=torch.float32)
    like = {"x": x.new_empty(x.shape), "weight": weight.new_empty(weight.shape), "bias": bias}
    return [like[name] for name in wanted]


run.define("head_losses", row_losses, losses_like)
run.define("head_grads", _grads, _grads_like)


def _runs_kernels(logits: Tensor) -> bool:
    return logits.device.type == "cuda"


def _rows(logits: Tensor) -> Tensor:
    """In the layout that the kernels read."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def row_gradient(
    logits: Tensor, sums: Tensor, labels: Tensor, scale: Tensor, hot: Tensor, to: Tensor,
    ignored: int, tail: Tail,
) -> None:  # fmt: skip
    """The gradient of the rows' logits; 0 in the padding."""
    if _runs_kernels(logits):
        spec, given = spec_of(logits.dtype, tail), (sums, labels, scale, hot, to, ignored, tail)
        launch.head_loss_gradient(spec, logits, *given)
        return
    shares = (values_of(logits, tail) - sums[:, :1]).exp() / sums[:, 1:]
    write_gradient(to, logits, shares, labels, scale, hot, tail)


def log_sum_exp(sums: Tensor) -> Tensor:
    """Of each row, from its `row_losses`."""
    largest, total = sums.unbind(1)
    # Of an infinite logit the sum is NaN.
    return torch.where(largest.isinf(), largest, largest + total.log())


def picked(logits: Tensor, labels: Tensor, ignore_index: int, tail: Tail) -> Tensor:
    """The label's value of each row, any other's where the label does not count."""
    at = torch.where(labels == ignore_index, 0, labels)[:, None]
    return values_of(logits.gather(1, at), tail).squeeze(1)


def row_scales(
    labels: Tensor, ignore_index: int, d_losses: Tensor, *d_parts: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each row's softmax, and what the label's value has beside it. d_parts: the gradients by
    log-sum-exp and by the label's value."""
    scale = torch.where(labels != ignore_index, d_losses, 0.0)
    hot = -scale
    if d_parts:
        d_lse, d_picked = d_parts
        scale, hot = scale + d_lse, hot + d_picked
    return scale, hot


# ---- autograd ------------------------------------------------------------------------------------


class _KeptLoss(torch.autograd.Function):
    """The losses of rows; and with `parts`, log-sum-exp and the label's value of each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, labels: Tensor,
        ignore_index: int, tail: Sequence[float], parts: bool,
    ) -> Any:  # fmt: skip
        needed = zip(OPERANDS, (x, weight, bias), ctx.needs_input_grad)
        ctx.wanted = {name: given.dtype for name, given, needs in needed if needs}  # type: ignore[union-attr]
        ctx.ignore_index, ctx.tail = ignore_index, tail
        losses, sums = _called("head_losses", logits, labels, ignore_index, tail)
        ctx.save_for_backward(x, weight, logits, labels, sums)
        if not parts:
            return losses
        return losses, log_sum_exp(sums), picked(logits, labels, ignore_index, Tail(*tail))

    @staticmethod
    @differentiable_once(lambda _: "head_loss")
    def backward(ctx: Any, d_losses: Tensor, *d_parts: Tensor) -> tuple[Any, ...]:
        x, weight, logits, labels, sums = ctx.saved_tensors
        scale, hot = row_scales(labels, ctx.ignore_index, d_losses, *d_parts)
        given = x, weight, logits, labels, sums, scale, hot, ctx.ignore_index, ctx.tail
        made = _called("head_grads", *given, list(ctx.wanted))
        of = {name: grad.to(dtype) for (name, dtype), grad in zip(ctx.wanted.items(), made)}
        return *(of.get(name) for name in OPERANDS), *[None] * 5


def _called(name: str, *arguments: Any) -> list[Tensor]:
    made: list[Tensor] = run.IN_TORCH(*run.arguments(name, arguments))
    return made


def _rows_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, labels: Tensor, *rest: Any
) -> Any:
    with torch.autocast(x.device.type, enabled=False):
        operands = x.reshape(-1, x.shape[-1]), weight, bias
        of_loss = logits.detach().reshape(-1, logits.shape[-1]), labels.reshape(-1)
        return _KeptLoss.apply(*operands, *of_loss, *rest)


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, labels: Tensor,
    out: torch.dtype, ignore_index: int, reduction: str, tail: Sequence[float],
) -> Tensor:  # fmt: skip
    losses = _rows_of(x, weight, bias, logits, labels, ignore_index, tail, False)
    return reduced(losses, labels, out, ignore_index, reduction)


def _parts(*given: Any) -> Any:
    return _rows_of(*given, True)


def reduced(
    losses: Tensor, labels: Tensor, out: torch.dtype, ignore_index: int, reduction: str
) -> Tensor:
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (labels != ignore_index).sum()
    return losses.to(out)


# As `fx_fuser::head_loss`, for logits [*, V] that the Linear has computed from x; the gradients are
# those of x, weight and bias. AOTAutograd sees through them.
_LIBRARY.define(
    "head_loss.kept(Tensor x, Tensor weight, Tensor? bias, Tensor logits, Tensor labels, "
    "ScalarType out, int ignore_index, str reduction, float[] tail) -> Tensor"
)
_LIBRARY.define(
    "head_loss.parts(Tensor x, Tensor weight, Tensor? bias, Tensor logits, Tensor labels, "
    "int ignore_index, float[] tail) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "head_reduced(Tensor losses, Tensor labels, ScalarType out, int ignore_index, "
    "str reduction) -> Tensor"
)
_LIBRARY.impl("head_loss.kept", _composite, "CompositeImplicitAutograd")
_LIBRARY.impl("head_loss.parts", _parts, "CompositeImplicitAutograd")
_LIBRARY.impl("head_reduced", reduced, "CompositeImplicitAutograd")
HEAD_LOSS_KEPT = torch.ops.fx_fuser.head_loss.kept
HEAD_LOSS_PARTS = torch.ops.fx_fuser.head_loss.parts
HEAD_LOSS_REDUCED = torch.ops.fx_fuser.head_reduced.default


# ---- outside the graph ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Returned:
    """Logits that a graph returns without a gradient. logits: their place among the results;
    operands: the places of x, weight and bias of their Linear; compute: the dtype of its gemm;
    tail: what was applied to its result."""

    logits: int
    operands: tuple[int | None, ...]
    compute: torch.dtype
    tail: Tail = PLAIN


class _Logits(torch.autograd.Function):
    """The Linear, which has run already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, compute: Any,
        tail: Tail,
    ) -> Tensor:  # fmt: skip
        made = logits.detach()
        ctx.save_for_backward(x, weight, *([made] if tail.after else []))
        ctx.compute, ctx.bias, ctx.tail = compute, None if bias is None else bias.dtype, tail
        return made

    @staticmethod
    @differentiable_once(lambda _: "head_loss")
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Any, ...]:
        (x, weight, *capped), needed = ctx.saved_tensors, ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            if capped:
                d_logits = d_logits.float() * slope_of_cap(capped[0].float(), ctx.tail)
            elif not ctx.tail.is_plain:
                d_logits = d_logits.float() * ctx.tail.before
            rows = d_logits.reshape(-1, d_logits.shape[-1]).to(ctx.compute)
            d_x = d_weight = d_bias = None
            if needed[0]:
                d_x = (rows @ weight.to(ctx.compute)).reshape(x.shape).to(x.dtype)
            if needed[1]:
                of_x = x.reshape(-1, x.shape[-1]).to(ctx.compute)
                d_weight = (rows.t() @ of_x).to(weight.dtype)
            if needed[2]:
                d_bias = rows.sum(0).to(ctx.bias)
        return d_x, d_weight, d_bias, None, None, None


def attached(
    compiled: Callable[..., Sequence[Any]], returned: Sequence[Returned], as_written: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """The compiled graph, with the gradients of logits that it returns. as_written: the results of
    the user's graph, which come first in the compiled one's."""

    def call(*inputs: Any) -> tuple[Any, ...]:
        earlier = {one.grad_fn for one in inputs if isinstance(one, Tensor)}
        made = [*compiled(*inputs)]
        own = {one.grad_fn for one in made if isinstance(one, Tensor)} - earlier - {None}
        results = made[: len(as_written)]
        for one in returned:
            _raise_if_changed(own, made[one.logits])
            operands = (None if at is None else made[at] for at in one.operands)
            given = *operands, made[one.logits], one.compute, one.tail
            results[one.logits] = _Logits.apply(*given)
        return tuple(results)

    return call


def _raise_if_changed(own: Collection[Any], logits: Tensor) -> None:
    """Make backward raise if the logits have been written to, as it does for a tensor that torch
    saves. AOTAutograd saves and returns Inductor's result as two tensors, which count writes
    separately.

    own: nodes of autograd that the graph has made. An input that it returns belongs to another,
    whose backward does not read the logits.
    """
    watched = logits.detach()
    watched.data = logits.new_empty(0)  # still counts writes, but does not hold the memory
    before = watched._version

    def check(_: Any) -> None:
        # Compiled autograd traces this with other tensors, whose counts start again.
        if not torch.compiler.is_compiling() and watched._version != before:
            raise RuntimeError(
                "logits that fx_fuser returned with their loss have been modified by an inplace "
                "operation, and the loss needs them for its gradient; modify a copy"
            )

    for node in own:
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(check)
