"""The compiled kernels as Python functions. Nothing touches CUDA before the first call.

After a kernel's first use, which builds and loads it, a call is one dictionary lookup and one op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fx_fuser.native import load
from fx_fuser.native.kernel_spec import LINEAR_SPLIT, KernelSpec

_MULTIPROCESSORS = 132  # of an H200
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


def linear_split(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    chunks: int = 0,
    first: Literal["", "x", "weight"] = "",
    exact: bool = False,
) -> bool:
    """out = epilogue(x weightᵀ + bias, operands, scalars) in float32, as exact as an fp32 product.

    x and weight are float32, or one of them is of the dtype of the spec's first input, of 16 bits.

    No scales of an earlier weight are kept; replays of a CUDA graph read the tensors anew. Of data
    that splits hold badly the kernel remembers only that it met them: see `reset_fallback`.

    Args:
        spec: a kernel of the family LINEAR_SPLIT, see kernels_cu/linear/linear_split_sm90.cuh.
        x: [*, K] or, with batches, [*, M, K].
        weight: [N, K] or, with batches, [*, N, K] of x's leading sizes. One that the copy engine
            does not take (it takes rows or columns that are 16-byte aligned) is copied; so is x
            where the weight is split first.
        bias: [N], float32.
        out: [*, N] of the dtype that `spec` names. Shares memory with no other tensor here.
        z: [*, N], float32, receives x weightᵀ + bias. Shares memory with no other tensor here.
        operands: of the dtypes that `spec` names; each broadcasts to out's shape.
        scalars: as many as `spec` names.
        chunks: into which K is divided, or a few less; 0: as many as pay.
        first: the operand that is split ahead of the product's kernel, with exact scales; "": the
            one with which the product is faster. One of 16 bits is, whatever is said here.
        exact: find the scales of the other operand's rows by a pass over it, too. Else they are
            guessed, from 64 values a row, and the tiles of guesses that fail are made again.

    Strides are any with which the tensors' leading dimensions merge into three, the last of which
    are rows.

    Returns:
        False, with nothing done, where the kernel does not take this device, these strides or
        K = 0; the caller then goes another way.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, out)
    if handle == load.NO_KERNEL:
        return False
    return _ops.linear_split.default(
        handle, x, weight, bias, out, z, operands, scalars, chunks, first, exact
    )


@dataclass(frozen=True)
class SplitChoice:
    """chunks: of K. weight_first: the weight is split ahead of the product's kernel, else x."""

    chunks: int
    weight_first: bool


def linear_split_choice(
    batches: int, m: int, n: int, k: int, multiprocessors: int = _MULTIPROCESSORS
) -> SplitChoice:
    """How `linear_split` multiplies x [batches, M, K] by a weight [..., N, K], 16-byte aligned.

    Needs no GPU.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    op = _ops.linear_split_choice.default
    chunks, weight_first = op([batches, m, n, k], multiprocessors)
    return SplitChoice(chunks, bool(weight_first))


def reset_fallback(specs: Sequence[KernelSpec], device: torch.device) -> None:
    """Let the ops take the split products among these loaded kernels again, at once.

    After data that they hold badly they take the library's for 1000 calls of the same sizes, and
    after operands whose scales were often guessed wrong they find them ahead for as many.
    """
    for spec in specs:
        handle = load.loaded(spec, device)
        if spec.family == LINEAR_SPLIT and handle != load.NO_KERNEL:
            _ops.reset_linear_split.default(handle)


def linear_dense(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """As `linear_split`, in bfloat16, float16 or, for float32 tensors, with TF32 products.

    Args:
        spec: a kernel of the family LINEAR_DENSE, see kernels_cu/linear/linear_dense_sm90.cuh. Its
            first input is the dtype of x, weight, bias and z. The epilogue sees z in float32,
            unrounded.
        x: [*, K], rows 16-byte aligned, evenly spaced and not overlapping.
        weight: [N, K], rows 16-byte aligned.
        bias, out, z, operands, scalars: as `linear_split`'s.

    Returns, raises: as `linear_split`.
    """
    handle = load.handle_of(spec, out)
    if handle == load.NO_KERNEL:
        return False
    return _ops.linear_dense.default(handle, x, weight, bias, out, z, operands, scalars)


def conv_direct_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    out_bytes: int,
    operands: int = 0,
    x_bytes: int = 4,
    multiprocessors: int = _MULTIPROCESSORS,
) -> list[int]:
    """How `conv_direct` cuts a convolution of these sizes into units; empty if it does not take it.

    Needs no GPU. Of the numbers see kernels_cu/host/conv_direct.h.

    Args:
        padding: [left, right, top, bottom].
        out_bytes: of an element of the result; 0: `conv_direct_statistics`.
        operands: of the epilogue.
        x_bytes: of an element of x and weight.
        multiprocessors: of the GPU; how statistics and 16-bit results are cut depends on it.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    cut_of = _ops.conv_direct_cut.default
    cut: list[int] = cut_of(sizes, x_bytes, out_bytes, operands, multiprocessors)
    return cut


def conv_direct(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    out: Tensor,
    c: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """out = epilogue(conv2d(x, weight), operands, scalars), as exact as an fp32 convolution.

    In bfloat16 and float16 too, where the epilogue sees the convolution in float32, unrounded.

    Args:
        spec: a kernel of the family CONV_DIRECT, see kernels_cu/conv/conv_direct_sm90.cuh. Its
            first input is the dtype of x, weight and c: float32, bfloat16 or float16.
        x: [N, C, H, W].
        weight: [O, C, kh, kw]. Stride and dilation are 1, there is one group.
        padding: [left, right, top, bottom], zeros.
        out: contiguous, of the dtype that `spec` names. Shares memory with no other tensor here.
        c: contiguous, receives the convolution. Shares memory with no other tensor here.
        operands: of the dtypes that `spec` names; each broadcasts to out's shape.
        scalars: as many as `spec` names.

    Returns:
        False, with nothing done, where the kernel does not take this device, these sizes
        (`conv_direct_cut`) or these strides; the caller then goes another way.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, out)
    if handle == load.NO_KERNEL:
        return False
    return _ops.conv_direct.default(handle, x, weight, padding, out, c, operands, scalars)


def conv_direct_statistics(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    mean: Tensor,
    variance: Tensor,
) -> bool:
    """Mean and biased variance [O] of conv2d(x, weight), which is not written. Deterministic.

    Args: as `conv_direct`'s, with any epilogue; the results are float32 always.

    Returns, raises: as `conv_direct`.
    """
    handle = load.handle_of(spec, x)
    if handle == load.NO_KERNEL:
        return False
    batch_stats = load.prepare_batch_stats(x.device)
    return _ops.conv_direct_statistics.default(
        handle, batch_stats, x, weight, padding, mean, variance
    )


def conv_direct_backward_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    with_input: bool,
    multiprocessors: int = _MULTIPROCESSORS,
    x_bytes: int = 4,
) -> list[int]:
    """How `conv_direct_backward` cuts a convolution; empty if it does not take it. Needs no GPU.

    Of the numbers see kernels_cu/host/conv_direct_backward.h.

    Args:
        padding: [left, right, top, bottom].
        with_input: is the input's gradient wanted?
        multiprocessors: of the GPU.
        x_bytes: of an element of x and weight.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    op = _ops.conv_direct_backward_cut.default
    cut: list[int] = op(sizes, x_bytes, with_input, multiprocessors)
    return cut


@dataclass(frozen=True)
class Normalisation:
    """z = gamma (c + bias - mean) / sqrt(variance + eps) + beta, in float32.

    training: mean and variance are those of c, and depend on it; there is no bias then.
    """

    mean: Tensor
    variance: Tensor
    gamma: Tensor | None
    bias: Tensor | None
    eps: float
    training: bool


def conv_direct_backward(
    spec: KernelSpec,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    norm: Normalisation | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dgamma: Tensor,
    dbeta: Tensor,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """The gradients of y = epilogue(z), z = norm(conv2d(x, weight)). Deterministic.

    The epilogue is linear in z; what it adds to that does not matter.

    Args:
        spec: a kernel of the family CONV_DIRECT_BACKWARD, see
            kernels_cu/conv/conv_direct_backward_sm90.cuh, with that epilogue.
        dy: contiguous, of x's dtype.
        x, weight, padding: as `conv_direct`'s.
        norm: None: z is the convolution.
        dx, dweight: receive the gradients, contiguous, of x's dtype and float32; None: not wanted.
        dgamma, dbeta: [O], float32, receive the sums of dz times the normalised c, and of dz.
        operands: of the dtypes that `spec` names, each a number a channel: [O, 1, 1] or [].
        scalars: as many as `spec` names.

    Returns, raises: as `conv_direct`.
    """
    handle = load.handle_of(spec, dy)
    if handle == load.NO_KERNEL:
        return False
    of_norm = (
        (norm.mean, norm.variance, norm.gamma, norm.bias, norm.eps, norm.training)
        if norm
        else (None, None, None, None, 0.0, False)
    )
    results = (dx, dweight, dgamma, dbeta)
    return _ops.conv_direct_backward.default(
        handle, dy, x, weight, padding, *of_norm, *results, operands, scalars
    )


def operands_of(spec: KernelSpec) -> int:
    """How many tensors the kernel reads besides the anchor's value."""
    return len(spec.inputs) - 1


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
