"""Gemms and convolutions as Python functions that launch one kernel: for benchmarks and tests.

The package launches them in its ops (`fx_fuser.ops.library`), which also copy if strides need it,
and use the library if a kernel does not take a call. The ops here are those of `kernels.h`, in
their own library, which is compiled at the first call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fx_fuser.native import binaries, compilers, limits, load, store
from fx_fuser.native.jobs import Job
from fx_fuser.native.kernel_spec import KernelSpec

HERE = Path(__file__).parent


@functools.cache
def _ops() -> Any:
    """Loads them next to the shim, whose sources they include and whose handles they take."""
    load.load_shim()
    host = compilers.of_shim()
    command = binaries.shim_command(host, [f"-I{HERE}", "-Wno-unused-function"])
    text, header = ((HERE / f"kernels.{suffix}").read_text() for suffix in ("cpp", "h"))
    parts = (header, text, *command, host.version, torch.__version__, binaries.shim_sources())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    torch.ops.load_library(store.ensure([Job(key, text, ".cpp", ".so", command)])[0])
    ops = torch.ops.fx_fuser_bench
    if torch.cuda.is_available():
        ops.use_driver.default(load.driver_address())
    return ops


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
    """out = epilogue(x weightᵀ + bias, operands, scalars) in float32, as exact as an fp32 gemm.

    x and weight are float32, or one of them has the dtype of the spec's first input, of 16 bits.

    No scales of an earlier weight are kept; replays of a CUDA graph read the tensors again. The
    only state between calls is the precision fallback: see `reset_fallback`.

    Args:
        spec: a kernel of the family LINEAR_SPLIT, see kernels_cu/linear/linear_split_sm90.cuh.
        x: [*, K] or, with batches, [*, M, K].
        weight: [N, K] or, with batches, [*, N, K] of x's leading sizes. TMA needs rows or columns
            that are 16-byte aligned: another weight is copied; so is x if the weight is split
            first.
        bias: [N], float32.
        out: [*, N] of the dtype that `spec` names. Shares memory with no other tensor here.
        z: [*, N], float32, receives x weightᵀ + bias. Shares memory with no other tensor here.
        operands: of the dtypes that `spec` names; each broadcasts to out's shape.
        scalars: as many as `spec` names.
        chunks: of K, or a few less; 0: as many as are fastest.
        first: the operand that a pre-pass splits, with exact scales; "": whichever is faster. A
            16-bit operand is always split first.
        exact: find the scales of the other operand's rows in a pass over it, too. Otherwise they
            are guessed from 64 values per row, and tiles whose guesses fail are redone.

    Strides: the tensors' leading dimensions must merge into three, the last of which are rows.

    Returns:
        False, with nothing done, if the kernel does not take this device, these strides or K = 0;
        the caller then uses the library.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, out)
    if handle == load.NO_KERNEL:
        return False
    return _ops().linear_split.default(
        handle, x, weight, bias, out, z, operands, scalars, chunks, first, exact
    )


# Capability, multiprocessors, kHz, and the memory's kHz and bits.
H200_FIGURES = (90, limits.H200.multiprocessors, 1_980_000, 3_201_000, 6144)


@dataclass(frozen=True)
class SplitChoice:
    """chunks: of K. weight_first: the pre-pass splits the weight, otherwise x."""

    chunks: int
    weight_first: bool
    ours: int  # nanoseconds, as modelled
    library: int


def linear_split_choice(
    batches: int, m: int, n: int, k: int, gpu: Sequence[int] = H200_FIGURES
) -> SplitChoice:
    """How `linear_split` multiplies x [batches, M, K] by a weight [..., N, K], 16-byte aligned.

    gpu: capability, multiprocessors, kHz, and the memory's kHz and bits, as the driver gives them.
    Needs no GPU.

    Raises:
        BuildError: the shim does not compile or load.
    """
    op = _ops().linear_split_choice.default
    capability, *figures = gpu
    rates = limits.split_rates(divmod(capability, 10), figures)
    chunks, weight_first, ours, library = op([batches, m, n, k], rates)
    return SplitChoice(chunks, bool(weight_first), ours, library)


def taken(op: str, spec: KernelSpec, out: Tensor, *arguments: Any) -> bool:
    """Does the kernel take the call?"""
    handle = load.handle_of(spec, out)
    if handle == load.NO_KERNEL:
        return False
    taken: bool = getattr(_ops(), op).default(handle, *arguments)
    return taken


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
    """Like `linear_split`, in bfloat16, float16 or, for float32 tensors, TF32.

    Args:
        spec: a kernel of the family LINEAR_DENSE, see kernels_cu/linear/linear_dense_sm90.cuh. Its
            first input is the dtype of x, weight, bias and z. The epilogue sees z in float32,
            unrounded.
        x: [*, K], rows 16-byte aligned, evenly spaced and not overlapping.
        weight: [N, K], rows 16-byte aligned.
        bias, out, z, operands, scalars: as `linear_split`'s.

    Returns, raises: as `linear_split`.
    """
    return taken("linear_dense", spec, out, x, weight, bias, out, z, operands, scalars)


def linear_unaligned(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """Like `linear_dense`, in bfloat16 or float16, for tensors with any alignment.

    Args:
        spec: a kernel of `fx_fuser.kernels.unaligned.unaligned`, see
            kernels_cu/linear/linear_unaligned.cuh. Its family says whether k or rows are adjacent.
        x: [*, K] or, with batches, [*, M, K]; its rows or its k are adjacent in memory.
        weight: [N, K] or, with batches, [*, N, K]; likewise.
        out, z: columns adjacent.
        bias, operands, scalars: as `linear_split`'s.

    Returns, raises: as `linear_split`.
    """
    return taken("linear_unaligned", spec, out, x, weight, bias, out, z, operands, scalars)


def linear_combs(
    spec: KernelSpec, x: Tensor, weight: Tensor, out: Tensor, scalars: Sequence[float]
) -> bool:
    """Like `linear_unaligned`, for matrices, without bias, z or operands.

    Args:
        spec: a kernel of `fx_fuser.kernels.unaligned.combs`, see
            kernels_cu/linear/linear_combs_sm90.cuh.
        x: [M, K], its rows or its k adjacent in memory; any pitch and address, unless k are
            adjacent in both operands: then 16-byte aligned.
        weight: [N, K], 16-byte aligned. Its rows are adjacent, or its k if x's are.
        out: [M, N], columns adjacent; 16-byte aligned, or any if k are adjacent in both operands.
        scalars: as `linear_split`'s.

    Returns, raises: as `linear_split`.
    """
    return taken("linear_combs", spec, out, x, weight, None, out, None, [], scalars)


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
        False, with nothing done, if the kernel does not take this device, these sizes
        (`conv_direct_cut`) or these strides; the caller then uses the library.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = load.handle_of(spec, out)
    if handle == load.NO_KERNEL:
        return False
    return _ops().conv_direct.default(handle, x, weight, padding, out, c, operands, scalars)


def conv_direct_statistics(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    mean: Tensor,
    variance: Tensor,
) -> bool:
    """Mean and biased variance [O] of conv2d(x, weight), which is not written. Deterministic.

    Args: as `conv_direct`'s, with any epilogue; the results are always float32.

    Returns, raises: as `conv_direct`.
    """
    handle = load.handle_of(spec, x)
    if handle == load.NO_KERNEL:
        return False
    batch_stats = load.prepare_batch_stats(x.device)
    return _ops().conv_direct_statistics.default(
        handle, batch_stats, x, weight, padding, mean, variance
    )


def depthwise(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    out: Tensor,
    c: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """Like `conv_direct`, for a convolution in which every channel has its own window.

    Args:
        spec: a kernel of a family `kernels.depthwise.depthwise`, see kernels_cu/conv/depthwise.cuh.
        x: [N, C, H, W], channels_last (of an even C) or contiguous; out and c are like x.
        weight: [C, 1, kh, kw], contiguous, of the family's window.
        padding, out, c, operands, scalars: as `conv_direct`'s.

    Returns, raises: as `conv_direct`.
    """
    handle = load.handle_of(spec, out)
    return _ops().depthwise.default(handle, x, weight, padding, out, c, operands, scalars)


def stem(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    out: Tensor | None,
    c: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """Like `conv_direct`, for a first layer's convolution; fp32 is multiplied in TF32.

    Args:
        spec: a kernel of a family `kernels.stem.stem`, see kernels_cu/conv/stem.cuh.
        x, weight: of the family's sizes, with any strides.
        stride: [down, across], which are equal.
        padding: [left, right, top, bottom], zeros.
        out, c: dense; in channels_last if x or the weight is. Either may be absent.
        operands: each a number, or one per channel.
        scalars: as many as `spec` names.

    Returns, raises: as `conv_direct`.
    """
    handle = load.handle_of(spec, x)
    return _ops().stem.default(handle, x, weight, stride, padding, out, c, operands, scalars)


def implicit(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out: Tensor,
    c: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
) -> bool:
    """Like `conv_direct`, for channels_last 16-bit tensors, with any stride and dilation.

    Args:
        spec: a kernel of a family `kernels.implicit.implicit`, see kernels_cu/conv/implicit.cuh.
        x: [N, C, H, W], C a multiple of 8; a pixel's channels are adjacent, and pixels begin at
            multiples of 16 bytes.
        weight: [O, C, kh, kw], dense in channels_last, or contiguous if 1 × 1.
        stride, dilation: [down, across].
        padding: [left, right, top, bottom], zeros.
        out, c: dense in channels_last.
        operands: the family's leaves are one number per channel; others broadcast to out's shape.
        scalars: as many as `spec` names.

    Returns, raises: as `conv_direct`.
    """
    handle = load.handle_of(spec, out)
    return _ops().implicit.default(
        handle, x, weight, stride, padding, dilation, out, c, operands, scalars
    )


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
        dx, dweight: receive the gradients, contiguous, of x's dtype and float32; None: not needed.
        dgamma, dbeta: [O], float32, receive the sums of dz times the normalised c, and of dz.
        operands: of the dtypes that `spec` names, each a number per channel: [O, 1, 1] or [].
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
    return _ops().conv_direct_backward.default(
        handle, dy, x, weight, padding, *of_norm, *results, operands, scalars
    )


def attention_split(
    spec: KernelSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> bool:
    """out = softmax(scale · q kᵀ) v, as exact as in float32 arithmetic; the softmax is over keys.

    Args:
        spec: a kernel of `fx_fuser.kernels.attention.spec_of`, see
            kernels_cu/attention/attention_split_sm90.cuh.
        q: [B, H, queries, D], float32, D a multiple of 8. Its elements are adjacent, its other
            strides multiples of 4, in any order, and so are those of all tensors here but lse.
        k, v: [B, heads, keys, D]; query head h reads head h // (H // heads).
        out: as q. Shares memory with no other tensor here.
        lse: [B, H, queries], contiguous, receives log(sum(exp(scale · q kᵀ))) over keys. It may
            have rows up to a multiple of 32, which receive infinity.
        scale: positive; None: 1 / sqrt(D).
        is_causal: query i sees keys 0...i.
        seed: one int64 number, from which `fx_fuser.ops.attention_dropout` computes which weights
            are dropped.
        dropout: the share of weights that is dropped, 0 if `spec` drops none.

    Returns, raises: as `linear_split`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = q, k, v, out, lse
    return taken("attention_split", spec, out, *tensors, scale, is_causal, seed, dropout)


def attention_backward(
    spec: KernelSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    to: Sequence[Tensor],
    scale: float | None = None,
    is_causal: bool = False,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> bool:
    """The gradients of `attention_split`'s out. Deterministic.

    Args:
        spec: a kernel of `fx_fuser.kernels.attention.backward_spec_of`, see
            kernels_cu/attention/attention_backward_sm90.cuh.
        q, k, v, out, lse, scale, is_causal, seed, dropout: the arguments and results of
            `attention_split`.
        d_out: the gradient of out, as q.
        to: receive the gradients: dq, as q; dk and dv of each query head, [B, H, keys, D]. Those of
            heads that share keys are to be added up.

    Returns, raises: as `linear_split`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batches, heads, queries, _ = q.shape
    padded = -(-queries // 128) * 128
    of_queries = torch.empty(batches, heads, padded, 4, device=q.device)  # kAttentionQueryFloats
    tensors = [q, k, v, out, lse, d_out, of_queries]
    given = scale, is_causal, seed, dropout
    return taken("attention_backward", spec, out, tensors, list(to), *given)
