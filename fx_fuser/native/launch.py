"""The compiled kernels as Python functions. Nothing touches CUDA before the first call.

After a kernel's first use, which builds and loads it, a call is one dictionary lookup and one op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import (
    LINEAR_SPLIT_AUTO,
    LINEAR_SPLIT_MMA,
    KernelSpec,
    implicit_columns,
)

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


def reset_fallback(specs: Sequence[KernelSpec], device: torch.device) -> None:
    """End the precision fallback of the split gemms among these loaded kernels.

    After data that splits badly, the op uses the library for 1000 calls of the same sizes. After
    operands whose scales were often guessed wrong, a pass finds the scales ahead, for as many
    calls.
    """
    for spec in specs:
        handle = load.loaded(spec, device)
        is_split = spec.family in (LINEAR_SPLIT_AUTO, LINEAR_SPLIT_MMA)
        if is_split and handle != load.NO_KERNEL:
            _ops.reset_linear_split.default(handle)


def conv_direct_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    out_bytes: int,
    operands: int = 0,
    x_bytes: int = 4,
    multiprocessors: int = limits.H200.multiprocessors,
) -> list[int]:
    """How `conv_direct` divides a convolution of these sizes into units; empty if it refuses it.

    Needs no GPU. The numbers are explained in kernels_cu/host/conv_direct.h.

    Args:
        padding: [left, right, top, bottom].
        out_bytes: size of an element of the result; 0: `conv_direct_statistics`.
        operands: number of the epilogue's tensors.
        x_bytes: size of an element of x and weight.
        multiprocessors: of the GPU; the units of statistics and 16-bit results depend on it.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    cut_of = _ops.conv_direct_cut.default
    cut: list[int] = cut_of(sizes, x_bytes, out_bytes, operands, multiprocessors)
    return cut


def conv_direct_backward_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    with_input: bool,
    multiprocessors: int = limits.H200.multiprocessors,
    x_bytes: int = 4,
) -> list[int]:
    """How `conv_direct_backward` divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/conv_direct_backward.h.

    Args:
        padding: [left, right, top, bottom].
        with_input: is the input's gradient wanted?
        multiprocessors: of the GPU.
        x_bytes: size of an element of x and weight.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    op = _ops.conv_direct_backward_cut.default
    cut: list[int] = op(sizes, x_bytes, with_input, multiprocessors)
    return cut


def depthwise_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    stride: int,
    operands: int = 0,
    x_bytes: int = 4,
    channels_last: bool = True,
    multiprocessors: int = limits.H200.multiprocessors,
) -> list[int]:
    """How the depthwise convolution divides images of these sizes; empty if it refuses them.

    Needs no GPU. The numbers are explained in kernels_cu/host/depthwise.h.

    Args:
        weight: [C, 1, kh, kw].
        padding: [left, right, top, bottom].
        operands: number of the epilogue's tensors.
        x_bytes: size of an element of x and weight.
        channels_last: is x in channels_last? Else it is contiguous.
        multiprocessors: of the GPU.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    op = _ops.depthwise_cut.default
    cut: list[int] = op(sizes, stride, x_bytes, channels_last, operands, multiprocessors)
    return cut


def stem_cut(sizes: Sequence[int], x_bytes: int, operands: int = 0) -> list[int]:
    """How `stem` divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/stem.h.

    Args:
        sizes: input channels, the kernel's height and width, stride, output channels.
        x_bytes: size of an element of x and weight.
        operands: number of the epilogue's tensors.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    cut: list[int] = _ops.stem_cut.default(sizes, x_bytes, operands)
    return cut


def implicit_cut(
    x: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    leaves: int = 0,
    operands: int | None = None,
    held: int = 0,
    columns: int | None = None,
    multiprocessors: int = limits.H200.multiprocessors,
    shared_bytes: int = 227 << 10,
) -> list[int]:
    """How the implicit gemm divides a convolution; empty if it refuses it. Needs no GPU.

    The numbers are explained in kernels_cu/host/implicit.h.

    Args:
        stride, dilation: down and across.
        padding: [left, right, top, bottom].
        leaves: number of the epilogue's tensors that are one number a channel and staged.
        operands: number of all of them; by default there are no others.
        held: pieces of operands that are in the ring at once.
        columns: of a tile; by default those that suit the weight.
        shared_bytes: that a block may have on the GPU.

    Raises:
        BuildError: the shim does not compile or load.
    """
    load.load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    columns = columns or implicit_columns(weight[0])
    op = _ops.implicit_cut.default
    count = leaves if operands is None else operands
    gpu = (multiprocessors, shared_bytes)
    cut: list[int] = op(sizes, stride, dilation, columns, leaves, count, held, *gpu)
    return cut


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
