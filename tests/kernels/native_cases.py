"""Inputs and checks for the native kernels, shared by pytest and by `tests/kernels/sanitize.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fx_fuser.native import launch
from fx_fuser.native.kernel_spec import POINTWISE, KernelSpec

DEVICE = "cuda"
POISON = 97
GUARD = 64  # elements before and after out that must survive

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def weighted_sum(out: torch.dtype, *inputs: torch.dtype) -> KernelSpec:
    """sum((i + 1) * in[i]) + scalar: exact for small integers in every dtype."""
    acc = torch.float64 if torch.float64 in (out, *inputs) else torch.float32
    terms = " + ".join(f"Acc({i + 1}) * in[{i}]" for i in range(len(inputs)))
    definition = f"""
struct WeightedSum {{
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[{len(inputs)}], const Acc (&scalar)[1]) const {{
    return {terms} + scalar[0];
  }}
}};"""
    return KernelSpec(POINTWISE, "WeightedSum", definition, 1, acc, out, inputs)


def whole_numbers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype is torch.bool else (0, 4)
    values = torch.randint(low, high, tuple(shape), generator=generator)
    return values.to(dtype).to(DEVICE)


def guarded_like(values: Tensor, offset: int = 0) -> tuple[Tensor, Callable[[], None]]:
    """A tensor of NaN with `values`' layout, `offset` elements off alignment, and its check."""
    before = GUARD + offset
    buffer = values.new_full((before + values.numel() + GUARD,), POISON)
    out = buffer.as_strided(values.shape, values.stride(), before)

    def check_guards() -> None:
        assert (buffer[:before] == POISON).all(), "written before out"
        assert (buffer[before + values.numel() :] == POISON).all(), "written after out"

    return out, check_guards


def check_weighted_sum(out_like: Tensor, inputs: Sequence[Tensor], offset: int = 0) -> None:
    """Runs the kernel into a guarded buffer of out_like's layout and compares every element."""
    spec = weighted_sum(out_like.dtype, *(x.dtype for x in inputs))
    out, check_guards = guarded_like(out_like, offset)
    launch.pointwise(spec, out, inputs, [2.0])
    expected = torch.full_like(out, 2.0, dtype=torch.float64)
    for i, x in enumerate(inputs, 1):
        expected += i * x.double()
    wrong = out.double() != expected
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
    check_guards()


def layouts(shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Tensors that broadcast to `shape`, in every way a model may produce them."""
    rank = len(shape)
    yield "contiguous", whole_numbers(shape, dtype, 1)
    yield "scalar", whole_numbers([], dtype, 2)
    yield "one element", whole_numbers([1] * rank, dtype, 3)
    yield "last dimension", whole_numbers(shape[-1:], dtype, 4)
    yield "off alignment", whole_numbers([3 + _count(shape)], dtype, 5)[3:].view(tuple(shape))
    yield "every other element", whole_numbers([*shape, 2], dtype, 6)[..., 1]
    yield "cut from wider rows", whole_numbers([*shape[:-1], shape[-1] + 5], dtype, 7)[..., 2:-3]
    if rank >= 2:
        yield "all but last", whole_numbers([*shape[:-1], 1], dtype, 8)
        yield "transposed", whole_numbers([*reversed(shape)], dtype, 9).permute(*range(rank)[::-1])
        yield "first dimension", whole_numbers([shape[0], *[1] * (rank - 1)], dtype, 10)
    if rank >= 3:
        yield "channels", whole_numbers([shape[1], *[1] * (rank - 2)], dtype, 11)
        yield "middle only", whole_numbers([1, shape[1], *[1] * (rank - 2)], dtype, 12)
        yield "outer and inner", whole_numbers([shape[0], *[1] * (rank - 2), shape[-1]], dtype, 13)
    if rank == 4:
        nhwc = whole_numbers(shape, dtype, 14).to(memory_format=torch.channels_last)
        yield "channels last", nhwc


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def check_layouts(shape: Sequence[int], dtype: torch.dtype, operand: torch.dtype) -> None:
    """Every layout of an operand, and of the anchor, against every layout of out."""
    outs = [whole_numbers(shape, dtype)]
    if len(shape) == 4:
        outs.append(outs[0].to(memory_format=torch.channels_last))
    for out in outs:
        for offset in (0, 1):
            for name, tensor in layouts(shape, operand):
                try:
                    check_weighted_sum(out, [out, tensor], offset)
                except AssertionError as error:
                    raise AssertionError(f"{name}, offset {offset}: {error}") from error
        for name, tensor in layouts(shape, dtype):
            try:
                check_weighted_sum(out, [tensor, whole_numbers(shape, operand, 20)])
            except AssertionError as error:
                raise AssertionError(f"anchor {name}: {error}") from error


def check_in_place(shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> None:
    """out is the anchor's memory; other operands are per channel."""
    anchor = whole_numbers(shape, dtype)
    out, check_guards = guarded_like(anchor, offset)
    out.copy_(anchor)
    channels = whole_numbers([shape[1], *[1] * (len(shape) - 2)], dtype, 1)
    launch.pointwise(weighted_sum(dtype, dtype, dtype), out, [out, channels], [2.0])
    assert torch.equal(out, anchor + 2 * channels + 2)
    check_guards()


def stats_data(kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if kind == "large mean":
        x += 1e4
    elif kind == "outlier":
        x[0, 0].view(-1)[0] = 1e4
    elif kind == "constant":
        x.fill_(10000.1)
    return x.to(dtype).to(DEVICE)


def check_batch_stats(x: Tensor) -> None:
    """Against float64, within the rounding errors of count, mean and deviations."""
    mean, variance = launch.batch_stats(x)
    acc = torch.float64 if x.dtype is torch.float64 else torch.float32
    assert mean.dtype == variance.dtype == acc
    dims = [d for d in range(x.dim()) if d != 1]
    exact_var, exact_mean = torch.var_mean(x.double(), dims, correction=0)
    # Means are kept in Acc: each of the few merges may round by half an ulp of the largest
    # magnitude, and such an error e enters the variance as e^2 and as e * std.
    eps = torch.finfo(acc).eps
    scale = x.double().abs().amax(dims)
    assert ((mean - exact_mean).abs() <= 16 * eps * scale).all(), (mean, exact_mean)
    bound = 64 * eps * exact_var + (16 * eps * scale) ** 2 + 32 * eps * scale * exact_var.sqrt()
    assert ((variance - exact_var).abs() <= bound).all(), (variance, exact_var)
    again = launch.batch_stats(x)
    assert torch.equal(mean, again[0]) and torch.equal(variance, again[1])


STATS_SHAPES = (
    (2, 3, 5, 7),
    (1, 1, 1, 1),
    (4, 8, 1, 1),
    (3, 64, 14, 14),
    (16, 3, 31, 33),
    (2, 5, 126, 126),
    (1, 2, 1, 100_003),
    (300, 4, 2, 1),
    (2, 300, 3, 3),
    (2, 2100, 2, 2),
)

SMALL_CASES: tuple[Callable[[], None], ...] = (
    lambda: check_layouts([5], torch.float32, torch.float32),
    lambda: check_layouts([7, 33], torch.float32, torch.bfloat16),
    lambda: check_layouts([2, 3, 5, 7], torch.bfloat16, torch.float32),
    lambda: check_layouts([2, 8, 4, 8], torch.float32, torch.bool),
    lambda: check_in_place([3, 4, 5, 7], torch.float32),
    lambda: check_in_place([3, 4, 5, 7], torch.bfloat16, offset=1),
    lambda: check_batch_stats(stats_data("normal", [2, 3, 5, 7], torch.float32)),
    lambda: check_batch_stats(stats_data("normal", [3, 64, 14, 14], torch.bfloat16)),
    lambda: check_batch_stats(
        stats_data("normal", [3, 8, 7, 5], torch.float32).to(memory_format=torch.channels_last)
    ),
    lambda: check_batch_stats(
        stats_data("normal", [3, 3, 7, 5], torch.float16).to(memory_format=torch.channels_last)
    ),
)
