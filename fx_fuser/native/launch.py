"""The compiled kernels as Python functions. Nothing touches CUDA before the first call.

Kernels are built and loaded once per spec and device; after that a call is one dictionary lookup
and one op.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fx_fuser.errors import BuildError
from fx_fuser.native import binaries, compilers, store
from fx_fuser.native.kernel_spec import LINEAR_SPLIT, KernelSpec

_lock = threading.RLock()
_pointwise: Callable[[int, Tensor, Sequence[Tensor], Sequence[float]], None]
_linear_split: Callable[..., bool]
_linear_dense: Callable[..., bool]
_conv_direct: Callable[..., bool]
_conv_direct_statistics: Callable[..., bool]
_conv_direct_backward: Callable[..., bool]
_kernels: dict[tuple[str, int], int] = {}  # (spec's name, device index) → handle
_batch_stats: dict[int, int] = {}  # device index → handle

_expected: Callable[[], Sequence[str]] | None = None
_NO_KERNEL = 0  # the handle where the device has no such kernel
_MULTIPROCESSORS = 132  # of an H200


def available(device: torch.device | str | int) -> str | None:
    """None if kernels can be built for and run on `device`, else the reason in words."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device} is not a CUDA device"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    if torch.version.hip is not None:
        return "this build of torch is for ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < binaries.LOWEST_CAPABILITY:
        lowest = ".".join(map(str, binaries.LOWEST_CAPABILITY))
        return f"compute capability {major}.{minor} is below {lowest}"
    try:
        compilers.of_kernels()
        if binaries.prebuilt_shim() is None:
            compilers.of_shim()
    except BuildError as error:
        return str(error)
    return None


def pointwise(
    spec: KernelSpec, out: Tensor, inputs: Sequence[Tensor], scalars: Sequence[float]
) -> None:
    """out = epilogue(inputs, scalars), elementwise; the inputs broadcast to out's shape.

    Args:
        spec: a kernel of the family POINTWISE, see kernels_cu/pointwise.cuh.
        out: a dense CUDA tensor of the dtype that `spec` names. May be `inputs[0]` itself.
        inputs: the anchor's value first, then the operands; on out's device, of the dtypes that
            `spec` names, with any strides.
        scalars: as many as `spec` names.

    Raises:
        BuildError: the kernel does not compile or load.
        RuntimeError: tensors do not fit the kernel or each other, or the launch fails.
    """
    handle = _handle_of(spec, out)
    _pointwise(handle, out, inputs, scalars)


def _handle_of(spec: KernelSpec, tensor: Tensor) -> int:
    """The kernel on the tensor's device; built and loaded at its first use."""
    handle = _kernels.get((spec.name, tensor.get_device()))
    if handle is None:
        prepare([spec], tensor.device)
        handle = _kernels[spec.name, tensor.get_device()]
    return handle


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
        spec: a kernel of the family LINEAR_SPLIT, see kernels_cu/linear_split_sm90.cuh.
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
    handle = _handle_of(spec, out)
    if handle == _NO_KERNEL:
        return False
    return _linear_split(handle, x, weight, bias, out, z, operands, scalars, chunks, first, exact)


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
    with _lock:
        _load_shim()
    op = torch.ops.fx_fuser_native.linear_split_choice.default
    chunks, weight_first = op([batches, m, n, k], multiprocessors)
    return SplitChoice(chunks, bool(weight_first))


def reset_fallback(specs: Sequence[KernelSpec], device: torch.device) -> None:
    """Let the ops take the split products among these loaded kernels again, at once.

    After data that they hold badly they take the library's for 1000 calls of the same sizes, and
    after operands whose scales were often guessed wrong they find them ahead for as many.
    """
    for spec in specs:
        handle = _kernels[spec.name, _index_of(device)]
        if spec.family == LINEAR_SPLIT and handle != _NO_KERNEL:
            torch.ops.fx_fuser_native.reset_linear_split.default(handle)


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
        spec: a kernel of the family LINEAR_DENSE, see kernels_cu/linear_dense_sm90.cuh. Its first
            input is the dtype of x, weight, bias and z. The epilogue sees z in float32, unrounded.
        x: [*, K], rows 16-byte aligned, evenly spaced and not overlapping.
        weight: [N, K], rows 16-byte aligned.
        bias, out, z, operands, scalars: as `linear_split`'s.

    Returns, raises: as `linear_split`.
    """
    handle = _handle_of(spec, out)
    if handle == _NO_KERNEL:
        return False
    return _linear_dense(handle, x, weight, bias, out, z, operands, scalars)


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

    Needs no GPU. Of the numbers see kernels_cu/shim_conv_direct.h.

    Args:
        padding: [left, right, top, bottom].
        out_bytes: of an element of the result; 0: `conv_direct_statistics`.
        operands: of the epilogue.
        x_bytes: of an element of x and weight.
        multiprocessors: of the GPU; how statistics and 16-bit results are cut depends on it.

    Raises:
        BuildError: the shim does not compile or load.
    """
    with _lock:
        _load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    cut_of = torch.ops.fx_fuser_native.conv_direct_cut.default
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
        spec: a kernel of the family CONV_DIRECT, see kernels_cu/conv_direct_sm90.cuh. Its first
            input is the dtype of x, weight and c: float32, bfloat16 or float16.
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
    handle = _handle_of(spec, out)
    if handle == _NO_KERNEL:
        return False
    return _conv_direct(handle, x, weight, padding, out, c, operands, scalars)


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
    handle = _handle_of(spec, x)
    if handle == _NO_KERNEL:
        return False
    batch_stats = _batch_stats.get(x.get_device())
    if batch_stats is None:
        batch_stats = prepare_batch_stats(x.device)
    return _conv_direct_statistics(handle, batch_stats, x, weight, padding, mean, variance)


def conv_direct_backward_cut(
    x: Sequence[int],
    weight: Sequence[int],
    padding: Sequence[int],
    with_input: bool,
    multiprocessors: int = _MULTIPROCESSORS,
    x_bytes: int = 4,
) -> list[int]:
    """How `conv_direct_backward` cuts a convolution; empty if it does not take it. Needs no GPU.

    Of the numbers see kernels_cu/shim_conv_direct_backward.h.

    Args:
        padding: [left, right, top, bottom].
        with_input: is the input's gradient wanted?
        multiprocessors: of the GPU.
        x_bytes: of an element of x and weight.

    Raises:
        BuildError: the shim does not compile or load.
    """
    with _lock:
        _load_shim()
    sizes = [*x, weight[0], *weight[2:], *padding]
    op = torch.ops.fx_fuser_native.conv_direct_backward_cut.default
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
            kernels_cu/conv_direct_backward_sm90.cuh, with that epilogue.
        dy: contiguous, of x's dtype.
        x, weight, padding: as `conv_direct`'s.
        norm: None: z is the convolution.
        dx, dweight: receive the gradients, contiguous, of x's dtype and float32; None: not wanted.
        dgamma, dbeta: [O], float32, receive the sums of dz times the normalised c, and of dz.
        operands: of the dtypes that `spec` names, each a number a channel: [O, 1, 1] or [].
        scalars: as many as `spec` names.

    Returns, raises: as `conv_direct`.
    """
    handle = _handle_of(spec, dy)
    if handle == _NO_KERNEL:
        return False
    of_norm = (
        (norm.mean, norm.variance, norm.gamma, norm.bias, norm.eps, norm.training)
        if norm
        else (None, None, None, None, 0.0, False)
    )
    results = (dx, dweight, dgamma, dbeta)
    return _conv_direct_backward(
        handle, dy, x, weight, padding, *of_norm, *results, operands, scalars
    )


def operands_of(spec: KernelSpec) -> int:
    """How many tensors the kernel reads besides the anchor's value."""
    return len(spec.inputs) - 1


def runs_on(spec: KernelSpec, device: torch.device | str | int) -> bool:
    """Is there such a kernel for the architecture of this device?"""
    return spec.family.arch in (None, binaries.arch_of(torch.device(device)))


def prepare(specs: Sequence[KernelSpec], device: torch.device | str | int) -> None:
    """Builds (in parallel) and loads the kernels ahead of their use.

    Raises:
        BuildError: a kernel does not compile or load, or the shim does not fit this Python code.
    """
    device = torch.device(device)
    index = _index_of(device)
    with _lock:
        missing = [s for s in dict.fromkeys(specs) if (s.name, index) not in _kernels]
        if not missing:
            return
        _load_shim()
        arch = binaries.arch_of(device)
        for spec in [s for s in missing if not runs_on(s, device)]:
            _kernels[spec.name, index] = _NO_KERNEL
            missing.remove(spec)
        paths = binaries.cubins([spec.text for spec in missing], arch)
        for spec, path in zip(missing, paths, strict=True):
            arguments = (spec.name, str(path), spec.signature, index)
            _kernels[spec.name, index] = _load(spec.family.loader, *arguments)


def expect(contract: Callable[[], Sequence[str]]) -> None:
    """What the shim's own `contract()` must say, line by line; it is compared when it is loaded."""
    global _expected
    _expected = contract


def batch_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of x [N, C, ...], each [C].

    Both are float32, or float64 if x is. Deterministic bit for bit.

    Raises:
        BuildError: the kernels do not compile or load.
        RuntimeError: x is not a CUDA tensor of a float dtype with at least two dimensions.
    """
    index = x.get_device()
    handle = _batch_stats.get(index)
    if handle is None:
        handle = prepare_batch_stats(x.device)
    if not x.is_contiguous() and not x.movedim(1, -1).is_contiguous():
        x = x.contiguous()
    mean, variance = torch.ops.fx_fuser_native.batch_stats.default(handle, x)
    return mean, variance


def prepare_batch_stats(device: torch.device) -> int:
    """Builds and loads the statistics kernels ahead of their use; returns their handle.

    Raises:
        BuildError: they do not compile or load.
    """
    index = _index_of(device)
    with _lock:
        if index not in _batch_stats:
            _load_shim()
            path = binaries.cubin(binaries.batch_stats_source(), binaries.arch_of(device))
            _batch_stats[index] = _load("load_batch_stats", str(path), index)
        return _batch_stats[index]


def _index_of(device: torch.device) -> int:
    if device.type != "cuda":
        raise BuildError(f"kernels run on CUDA devices, not on {device}; move the tensors")
    return torch.cuda.current_device() if device.index is None else device.index


def _load_shim() -> None:
    """Registers the ops, once per process: a second library with their namespace would abort it."""
    global _conv_direct, _conv_direct_backward, _conv_direct_statistics
    global _linear_dense, _linear_split, _pointwise
    if not hasattr(torch.ops.fx_fuser_native, "pointwise"):
        path = binaries.shim()
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise BuildError(f"cannot load {path} ({error}); does it fit this torch?") from error
    _check_contract()
    if torch.cuda.is_available():
        _load("use_driver", _get_proc_address())
    _pointwise = torch.ops.fx_fuser_native.pointwise.default
    _linear_split = torch.ops.fx_fuser_native.linear_split.default
    _linear_dense = torch.ops.fx_fuser_native.linear_dense.default
    _conv_direct = torch.ops.fx_fuser_native.conv_direct.default
    _conv_direct_statistics = torch.ops.fx_fuser_native.conv_direct_statistics.default
    _conv_direct_backward = torch.ops.fx_fuser_native.conv_direct_backward.default


def _get_proc_address() -> int:
    """Where the function of the CUDA driver is that finds its others; torch has it loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    return ctypes.cast(driver.cuGetProcAddress_v2, ctypes.c_void_p).value or 0


def _check_contract() -> None:
    """Compares what C++ assumes of Python with what Python says.

    The dispatcher does not: an op in C++ reads its arguments off a stack, by place.
    """
    if _expected is None:
        return
    found = torch.ops.fx_fuser_native.contract.default()
    cpp, python = ({_subject(line): line for line in lines} for lines in (found, _expected()))
    differences = [
        f"  {subject}\n    C++:    {cpp.get(subject, '(nothing)')}\n"
        f"    Python: {python.get(subject, '(nothing)')}"
        for subject in (cpp | python)
        if cpp.get(subject) != python.get(subject)
    ]
    if differences:
        raise BuildError(
            "the compiled shim and fx_fuser's Python code are of different versions:\n"
            + "\n".join(differences)
            + f"\nRemove the cache folder {store.cache_dir()} and start again; if they still "
            "differ, reinstall fx_fuser"
        )


def _subject(line: str) -> str:
    """What a line of a contract is about: `limit tensors`, `schema fx_fuser::conv2d_kernel`..."""
    kind, _, rest = line.partition(" ")
    return f"{kind} {rest.split('(')[0].split()[0]}" if kind in ("limit", "schema") else kind


def _load(op: str, *arguments: object) -> int:
    try:
        handle: int = getattr(torch.ops.fx_fuser_native, op).default(*arguments)
        return handle
    except RuntimeError as error:
        raise BuildError(str(error)) from error
