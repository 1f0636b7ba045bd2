"""The kernels that go with any main loop, as Python functions.

Nothing touches CUDA before the first call.

After a kernel's first use, which builds and loads it, a call is one dictionary lookup and one op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

PLAIN = (1.0, 0.0, 0.0)  # `fx_fuser.graph.read.heads.PLAIN`, which this package does not import

_ops = torch.ops.fx_fuser_native


def pointwise(
    spec: KernelSpec, out: Tensor, inputs: Sequence[Tensor], scalars: Sequence[float]
) -> None:
    """out = epilogue(inputs, scalars), elementwise; the inputs broadcast to out's shape.

    Args:
        spec: a kernel of the family POINTWISE, see kernels_cu/pointwise/pointwise.cuh.
        out: a dense CUDA tensor of the dtype that `spec` names. May be `inputs[0]` itself.
        inputs: the anchor's value first, then the operands; on out's device, of the dtypes that
            `spec` names, with any strides.
        scalars: as many as `spec` names.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, out)
    _ops.pointwise.default(handle, out, inputs, scalars)


def batch_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of x [N, C, ...], each [C].

    Both are float32, or float64 if x is. Deterministic bit for bit.

    Raises:
        BuildError: the kernels do not compile or load.
        RuntimeError: x is not a CUDA tensor of a float dtype with at least two dimensions.
    """
    handle = load.prepare_batch_stats(x.device)
    if not x.is_contiguous() and not x.movedim(1, -1).is_contiguous():
        x = x.contiguous()
    mean, variance = _ops.batch_stats.default(handle, x)
    return mean, variance


def head_loss(
    spec: KernelSpec,
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    scale: Tensor | None,
    columns: int,
    ignore_index: int,
    tail: Sequence[float] = PLAIN,
) -> None:
    """losses[i] = logsumexp(logits[i]) - logits[i, labels[i]], 0 where that is `ignore_index`; and
    with a scale, logits[i] = scale times the gradient of that by logits[i]. Deterministic. They
    are those of the values that the tail makes of logits.

    A label that is no column stops the kernel, as it does torch's.

    Args:
        spec: a kernel of `fx_fuser.kernels.head_loss.spec_of`, see kernels_cu/loss/head_loss.cuh.
        logits: [rows, pitch] of CUDA, of the dtype that `spec` names; rows adjacent, each aligned
            to 16 bytes. Those from `columns` on are not read, and become 0 with a scale.
        labels: [rows], int64, contiguous.
        losses: [rows], float32, contiguous.
        scale: one number, float32.
        tail: `fx_fuser.graph.read.heads.Tail`, which `spec` must have, too.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, logits)
    _ops.head_loss.default(handle, logits, labels, losses, scale, columns, ignore_index, *tail)


def head_loss_kept(
    spec: KernelSpec,
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    sums: Tensor,
    ignore_index: int,
    tail: Sequence[float] = PLAIN,
) -> None:
    """The losses of `head_loss`, and what `head_loss_gradient` wants of each row. Logits stay.

    Args:
        spec: as of `head_loss`, and so are labels, losses and tail.
        logits: [rows, columns] of CUDA, of the dtype that `spec` names; of a row adjacent.
        sums: [rows, 2], float32, contiguous: becomes the largest value, and the sum of
            exp(value - largest).

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, logits)
    _ops.head_loss_kept.default(handle, logits, labels, losses, sums, ignore_index, *tail)


def head_loss_gradient(
    spec: KernelSpec,
    logits: Tensor,
    sums: Tensor,
    labels: Tensor,
    scale: Tensor,
    hot: Tensor,
    gradient: Tensor,
    ignore_index: int,
    tail: Sequence[float] = PLAIN,
) -> None:
    """gradient[i], by logits[i]: scale[i] times softmax, at the label hot[i] more, of which
    smoothing gives each column its share; 0 behind them. Of the loss of row i both are 1 and -1.

    Args:
        spec: as of `head_loss`, and so are labels and tail.
        scale, hot: [rows], float32, contiguous; of all rows, also those whose label is ignored.
        logits, sums: of `head_loss_kept`.
        gradient: [rows, pitch], of the logits' dtype; rows adjacent, each aligned to 16 bytes. It
            may be the logits' memory, element on element.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, logits)
    given = logits, sums, labels, scale, hot, gradient, ignore_index
    _ops.head_loss_gradient.default(handle, *given, *tail)
