"""The cross entropy of a Linear's rows where the logits stay until backward.

    fx_fuser::head_loss.kept(x, weight, bias, logits, labels, …) = cross_entropy(logits, labels)

That is where something else reads them as well, and where each row has a loss of its own, so that
forward does not know what its gradient is a multiple of. The Linear has written the logits once, in
its own dtype. Forward reads them for the losses, and keeps two numbers of each row. Backward makes
their gradient for a piece of rows at a time, and at once its part of the gradients of x, weight and
bias, as `fx_fuser.ops.head_loss` does in forward. So there is neither a copy of the logits in fp32
nor their gradient.

The gradients of the op bypass the logits. A gradient that reaches them from elsewhere takes its own
way through the Linear, and autograd adds the two.

AOTAutograd cannot be told that logits which a graph returns may see no gradient of their own: it
makes one, of zeros. So `fx_fuser.passes.head_loss` lets a graph return logits without a gradient,
beside what their Linear multiplies, and `attached` restores it outside: only a caller who sends a
gradient through them pays for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.ops import run
from fx_fuser.ops.head_loss import (
    OPERANDS,
    add_products,
    cut_off,
    padded,
    pieces_of,
    sums_of,
    width_of,
    write_gradient,
)
from fx_fuser.ops.once import differentiable_once

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


# ---- the functions of `fx_fuser.ops.run` ---------------------------------------------------------


def _losses(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss of each row, and what `_grads` wants of it."""
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        losses, sums = _losses_like(logits)
        if _runs_kernels(logits):
            given = _rows(logits), labels.contiguous(), losses, sums, ignore_index
            launch.head_loss_kept(spec_of(logits.dtype), *given)
        else:
            values, how = logits.float(), {"ignore_index": ignore_index, "reduction": "none"}
            losses.copy_(F.cross_entropy(values, labels, **how))  # type: ignore[arg-type]
            sums[:, 0] = values.amax(-1)
            sums[:, 1] = (values - sums[:, :1]).exp().sum(-1)
        return losses, sums


def _losses_like(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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
    ignore_index: int,
    wanted: Sequence[str],
) -> list[Tensor]:
    """Those of x and weight in their dtypes, that of a bias in fp32. scale: of each row's."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        rows, columns = logits.shape
        given = x, weight, _rows(logits), labels.contiguous(), sums, scale
        totals = _sums_over_pieces(*given, ignore_index, wanted)
        return cut_off(totals, rows, columns, {"x": x.dtype, "weight": weight.dtype})


def _sums_over_pieces(
    x: Tensor, weight: Tensor, logits: Tensor, labels: Tensor, sums: Tensor, scale: Tensor,
    ignore_index: int, wanted: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """The wanted gradients. The memory of a piece is free again when it returns."""
    (rows, columns), compute = logits.shape, logits.dtype
    pieces = pieces_of(rows, weight, compute, wanted)
    operand, totals = padded(weight, compute), sums_of(x, weight, wanted, pieces)
    buffer = x.new_empty((pieces.rows, width_of(columns)), dtype=compute)
    for first in range(0, rows, pieces.rows):
        part = x[first : first + pieces.rows].to(compute)
        piece, gradient = slice(first, first + part.shape[0]), buffer[: part.shape[0]]
        of_piece = logits[piece], sums[piece], labels[piece], scale[piece]
        _gradient(*of_piece, gradient, ignore_index)
        add_products(totals, piece, gradient, part, operand)
    return totals


def _grads_like(x: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    *_, wanted = rest
    bias = weight.new_empty(weight.shape[0], dtype=torch.float32)
    like = {"x": x.new_empty(x.shape), "weight": weight.new_empty(weight.shape), "bias": bias}
    return [like[name] for name in wanted]


run.define("head_losses", _losses, _losses_like)
run.define("head_grads", _grads, _grads_like)


def _runs_kernels(logits: Tensor) -> bool:
    return logits.device.type == "cuda"


def _rows(logits: Tensor) -> Tensor:
    """As the kernels read them."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _gradient(
    logits: Tensor, sums: Tensor, labels: Tensor, scale: Tensor, to: Tensor, ignored: int
) -> None:
    """Of the losses of rows, by their logits, times each row's scale; 0 behind the columns."""
    if _runs_kernels(logits):
        spec = spec_of(logits.dtype)
        launch.head_loss_gradient(spec, logits, sums, labels, scale, to, ignored)
        return
    shares = (logits.float() - sums[:, :1]).exp() / sums[:, 1:]
    write_gradient(to, shares, labels, scale, ignored)


# ---- autograd ------------------------------------------------------------------------------------


class _KeptLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, labels: Tensor,
        ignore_index: int,
    ) -> Tensor:  # fmt: skip
        needed = zip(OPERANDS, (x, weight, bias), ctx.needs_input_grad)
        ctx.wanted = {name: given.dtype for name, given, needs in needed if needs}  # type: ignore[union-attr]
        ctx.ignore_index = ignore_index
        losses, sums = _called("head_losses", logits, labels, ignore_index)
        ctx.save_for_backward(x, weight, logits, labels, sums)
        return losses

    @staticmethod
    @differentiable_once(lambda _: "head_loss")
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        given = *ctx.saved_tensors, scale.contiguous()
        made = _called("head_grads", *given, ctx.ignore_index, list(ctx.wanted))
        of = {name: grad.to(dtype) for (name, dtype), grad in zip(ctx.wanted.items(), made)}
        return *(of.get(name) for name in OPERANDS), *[None] * 3


def _called(name: str, *arguments: Any) -> list[Tensor]:
    made: list[Tensor] = run.IN_TORCH(*run.arguments(name, arguments))
    return made


def _composite(
    x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, labels: Tensor,
    out: torch.dtype, ignore_index: int, reduction: str,
) -> Tensor:  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        operands = x.reshape(-1, x.shape[-1]), weight, bias
        of_loss = logits.detach().reshape(-1, logits.shape[-1]), labels.reshape(-1)
        losses: Tensor = _KeptLoss.apply(*operands, *of_loss, ignore_index)
        if reduction != "none":
            losses = losses.sum()
        if reduction == "mean":
            losses = losses / (labels != ignore_index).sum()
        return losses.to(out)


# As `fx_fuser::head_loss`, of logits [*, V] that the Linear has made of x; its gradients are those
# of x, weight and bias. AOTAutograd sees through it.
_LIBRARY.define(
    "head_loss.kept(Tensor x, Tensor weight, Tensor? bias, Tensor logits, Tensor labels, "
    "ScalarType out, int ignore_index, str reduction) -> Tensor"
)
_LIBRARY.impl("head_loss.kept", _composite, "CompositeImplicitAutograd")
HEAD_LOSS_KEPT = torch.ops.fx_fuser.head_loss.kept


# ---- outside the graph ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Returned:
    """Logits that a graph returns without a gradient: at which place, at which x, weight and bias
    of their Linear, and the dtype in which that multiplies."""

    logits: int
    operands: tuple[int | None, ...]
    compute: torch.dtype


class _Logits(torch.autograd.Function):
    """The Linear, which has run already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, compute: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.compute, ctx.bias = compute, None if bias is None else bias.dtype
        return logits.detach()

    @staticmethod
    @differentiable_once(lambda _: "head_loss")
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Any, ...]:
        (x, weight), needed = ctx.saved_tensors, ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            rows = d_logits.reshape(-1, d_logits.shape[-1]).to(ctx.compute)
            d_x = d_weight = d_bias = None
            if needed[0]:
                d_x = (rows @ weight.to(ctx.compute)).reshape(x.shape).to(x.dtype)
            if needed[1]:
                of_x = x.reshape(-1, x.shape[-1]).to(ctx.compute)
                d_weight = (rows.t() @ of_x).to(weight.dtype)
            if needed[2]:
                d_bias = rows.sum(0).to(ctx.bias)
        return d_x, d_weight, d_bias, None, None


def attached(
    compiled: Callable[..., Sequence[Any]], returned: Sequence[Returned], as_written: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """The compiled graph, with the gradients of logits that it returns. as_written: the results of
    the user's graph, the first of those of the compiled one."""

    def call(*inputs: Any) -> tuple[Any, ...]:
        earlier = {one.grad_fn for one in inputs if isinstance(one, Tensor)}
        made = [*compiled(*inputs)]
        own = {one.grad_fn for one in made if isinstance(one, Tensor)} - earlier - {None}
        results = made[: len(as_written)]
        for one in returned:
            _raise_if_changed(own, made[one.logits])
            operands = (None if at is None else made[at] for at in one.operands)
            results[one.logits] = _Logits.apply(*operands, made[one.logits], one.compute)
        return tuple(results)

    return call


def _raise_if_changed(own: Collection[Any], logits: Tensor) -> None:
    """Let backward raise if the logits have been written to, as it does for a tensor that torch
    saves. AOTAutograd saves and returns Inductor's as two tensors, which count writes apart.

    own: nodes of autograd that the graph has made. An input that it returns is another's, whose
    backward does not read the logits.
    """
    watched = logits.detach()
    watched.data = logits.new_empty(0)  # counts the writes still, and does not hold the memory
    before = watched._version

    def check(_: Any) -> None:
        # Compiled autograd traces this with other tensors, which count anew.
        if not torch.compiler.is_compiling() and watched._version != before:
            raise RuntimeError(
                "logits that fx_fuser returned beside their loss have been modified by an inplace "
                "operation, and the loss needs them for its gradient; modify a copy"
            )

    for node in own:
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(check)
