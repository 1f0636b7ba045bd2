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
    """losses[i] = logsumexp(v[i]) - v[i, labels[i]], 0 if that label is `ignore_index`, where v are
    the values that the tail makes of logits. With a scale, logits[i] becomes scale times the
    gradient of losses[i] with respect to it. Deterministic.

    A label outside the columns stops the kernel, as it does torch's.

    Args:
        spec: a kernel of `fx_fuser.kernels.head_loss.spec_of`, see kernels_cu/loss/head_loss.cuh.
        logits: [rows, pitch] on CUDA, of the dtype that `spec` names; elements of a row adjacent,
            rows aligned to 16 bytes. Those from `columns` on are not read, and become 0 with a
            scale.
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
    """The losses of `head_loss`, and what `head_loss_gradient` needs of each row. Logits stay.

    Args:
        spec, labels, losses, tail: as in `head_loss`.
        logits: [rows, columns] on CUDA, of the dtype that `spec` names; elements of a row adjacent.
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
    """The gradient with respect to logits[i] is scale[i] times the softmax, plus hot[i] at the
    label, of which smoothing gives each column its share; in the padding it is 0. For the loss
    of row i these are 1 and -1.

    Args:
        spec, labels, tail: as in `head_loss`.
        scale, hot: [rows], float32, contiguous; of all rows, also those whose label is ignored.
        logits, sums: of `head_loss_kept`.
        gradient: [rows, pitch], of the logits' dtype; elements of a row adjacent, rows aligned to
            16 bytes. It may be the logits' own memory.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, logits)
    given = logits, sums, labels, scale, hot, gradient, ignore_index
    _ops.head_loss_gradient.default(handle, *given, *tail)
