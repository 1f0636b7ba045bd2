"""Checks of the convolution along one dimension and of its gradients, on a GPU and on the CPU
emulator alike: benchmarks/conv1d.py times it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from checks import SENTINEL, agree_over_two_streams, captured
from torch import Tensor

from benchmarks import conv1d_kernels
from benchmarks.conv1d_kernels import convolution, gradient_of_weight
from benchmarks.sm90 import CUDA
from fx_fuser.kernels import conv1d
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

# What one rounding of the result may be off by, of the result; and what fp32 sums may be, of the
# sum of what is added without signs: 2^-24 a sum of a few hundred instructions, and room. One
# product that is missing is more.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUMS = 2.0**-16
TAPS = (1, 2, 3, 16, 17, 31, 32, 33, 127, 128, 129)
LENGTHS = (1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 249, 257)


class Sizes(NamedTuple):
    """channels: of a group, of x and of the result."""

    batch: int
    length: int
    groups: int
    channels: tuple[int, int]
    taps: int
    padding: int

    @property
    def out_length(self) -> int:
        return self.length + 2 * self.padding - self.taps + 1


def random_sizes(choose: random.Random, most: int, most_channels: int) -> Sizes:
    taps = choose.choice(TAPS) if choose.random() < 0.7 else choose.randint(1, 140)
    padding = choose.choice((0, taps // 2, taps // 2, taps - 1, choose.randint(0, taps)))
    shortest = max(1, taps - 2 * padding)
    known = [n for n in LENGTHS if shortest <= n <= most]
    length = choose.choice(known) if known and choose.random() < 0.6 else 0
    length = length or choose.randint(shortest, max(shortest, most))
    channels = tuple(8 * choose.randint(1, most_channels // 8) for _ in range(2))
    groups = choose.choice((1, 2, 2, 3))
    return Sizes(choose.choice((1, 1, 2, 3)), length, groups, channels, taps, padding)  # type: ignore[arg-type]


def frames(batch: int, length: int, channels: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """[batch, frame, channel], beside NaN that no result may have seen."""
    pitch = channels + gap
    memory = torch.full((8 + batch * length * pitch,), torch.nan, device=CUDA, dtype=dtype)
    made = memory[8:].view(batch, length, pitch)[..., :channels]
    return made.copy_(torch.randn(made.shape, device=CUDA))


def framed(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory of sentinels, and poison in it where a result goes."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + 16,), SENTINEL, device=CUDA, dtype=dtype)
    return memory, memory[8 : 8 + count].view(*shape).fill_(torch.nan)


def judge(
    failures: list[str], what: str, memory: Tensor, made: Tensor, exact: Tensor, unsigned: Tensor
) -> None:
    """Each element, and what lies around them."""
    smallest = torch.finfo(made.dtype).tiny  # below it roundings are as large as at it
    bound = ROUNDING[made.dtype] * exact.abs().clamp(min=smallest) + SUMS * unsigned
    off = (made.double() - exact).abs()
    if not bool((off <= bound).all()):
        wrong = int((~(off <= bound)).sum())
        worst = float((off / bound).nan_to_num(torch.inf).max())
        failures.append(f"{what}: {wrong} of {off.numel()} are off, by {worst:.3g} of the bound")
    made.fill_(SENTINEL)
    if not bool((memory == memory.new_tensor(SENTINEL)).all()):
        failures.append(f"{what}: wrote outside the result")


def forward_spec(sizes: Sizes, dtype: torch.dtype) -> KernelSpec:
    return conv1d.spec_of(sizes.channels[1], dtype)


def weight_spec(sizes: Sizes, dtype: torch.dtype) -> KernelSpec:
    return conv1d.weight_spec_of(sizes.channels[1], sizes.channels[0], dtype)


def operands(sizes: Sizes, dtype: torch.dtype, choose: random.Random) -> tuple[Tensor, Tensor]:
    """x, and the weight in taps."""
    into, out = sizes.channels
    gap = choose.choice((0, 0, 8, 24))
    x = frames(sizes.batch, sizes.length, sizes.groups * into, dtype, gap)
    weight = torch.randn(sizes.groups, sizes.taps, out, into, device=CUDA).to(dtype)
    return x, weight


def check_forward(
    failures: list[str], sizes: Sizes, dtype: torch.dtype, choose: random.Random
) -> None:
    x, weight = operands(sizes, dtype, choose)
    all_out = sizes.groups * sizes.channels[1]
    bias = torch.randn(all_out, device=CUDA).to(dtype) if choose.random() < 0.5 else None
    memory, z = framed((sizes.batch, sizes.out_length, all_out), dtype)
    what = f"{sizes} of {dtype}, strides {x.stride()}, {'with' if bias is not None else 'no'} bias"
    if not conv1d_kernels.conv1d(forward_spec(sizes, dtype), x, weight, bias, z, sizes.padding):
        failures.append(f"{what}: refused")
        return
    doubled = bias if bias is None else bias.double()
    exact = convolution(x.double(), weight.double(), doubled, sizes.padding)
    lone = None if doubled is None else doubled.abs()
    unsigned = convolution(x.double().abs(), weight.double().abs(), lone, sizes.padding)
    judge(failures, what, memory, z, exact, unsigned)


def check_weight(
    failures: list[str], sizes: Sizes, dtype: torch.dtype, choose: random.Random
) -> None:
    x, weight = operands(sizes, dtype, choose)
    out = sizes.groups * sizes.channels[1]
    dz = frames(sizes.batch, sizes.out_length, out, dtype, choose.choice((0, 0, 8)))
    memory, dw = framed(weight.shape, dtype)
    what = f"dw of {sizes} of {dtype}, strides {x.stride()} and {dz.stride()}"
    if not conv1d_kernels.conv1d_weight(weight_spec(sizes, dtype), x, dz, dw, sizes.padding):
        failures.append(f"{what}: refused")
        return
    given = sizes.groups, sizes.taps, sizes.padding
    exact = gradient_of_weight(x.double(), dz.double(), *given)
    unsigned = gradient_of_weight(x.double().abs(), dz.double().abs(), *given)
    judge(failures, what, memory, dw, exact, unsigned)


def sweep(
    failures: list[str], cases: int, seed: int, most: int = 400, most_channels: int = 128
) -> None:
    """Random sizes, strides and dtypes. most: frames."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    drawn = []
    for _ in range(cases):
        sizes = random_sizes(choose, most, most_channels)
        drawn.append((sizes, choose.choice(conv1d.DTYPES)))
    specs = dict.fromkeys(s(*one) for one in drawn for s in (forward_spec, weight_spec))
    load.prepare([*specs], CUDA)
    for sizes, dtype in drawn:
        check_forward(failures, sizes, dtype, choose)
        check_weight(failures, sizes, dtype, choose)


def gradient_by_x(failures: list[str], sizes: Sizes, dtype: torch.dtype) -> None:
    """It is the convolution by the taps in reverse, of other padding."""
    choose = random.Random(0)
    x, weight = operands(sizes, dtype, choose)
    dz = frames(sizes.batch, sizes.out_length, sizes.groups * sizes.channels[1], dtype)
    leaf = x.double().requires_grad_()
    convolution(leaf, weight.double(), None, sizes.padding).backward(dz.double())
    spec = conv1d.spec_of(sizes.channels[0], dtype)
    memory, dx = framed(x.shape, dtype)
    turned = conv1d_kernels.turned(weight)
    padding = sizes.taps - 1 - sizes.padding
    assert leaf.grad is not None
    if not conv1d_kernels.conv1d(spec, dz, turned, None, dx, padding):
        failures.append(f"dx of {sizes}: refused")
        return
    unsigned = convolution(dz.double().abs(), turned.double().abs(), None, padding)
    judge(failures, f"dx of {sizes} of {dtype}", memory, dx, leaf.grad, unsigned)


def not_numbers(failures: list[str], sizes: Sizes, dtype: torch.dtype) -> None:
    """Infinities and NaN of x reach what sees them, and nothing else."""
    x, weight = operands(sizes, dtype, random.Random(1))
    for frame, value in ((0, torch.inf), (sizes.length // 2, torch.nan), (-1, -torch.inf)):
        given = x.clone()
        given[0, frame, 0] = value
        _, z = framed((sizes.batch, sizes.out_length, sizes.groups * sizes.channels[1]), dtype)
        spec = forward_spec(sizes, dtype)
        assert conv1d_kernels.conv1d(spec, given, weight, None, z, sizes.padding)
        sees = torch.zeros(sizes.out_length, dtype=torch.bool, device=CUDA)
        at = frame % sizes.length + sizes.padding
        sees[max(0, at - sizes.taps + 1) : at + 1] = True
        hit = ~z[0, :, : sizes.channels[1]].isfinite()
        others = z[1:].isfinite().all() and z[0, :, sizes.channels[1] :].isfinite().all()
        if not torch.equal(hit, sees[:, None].expand(hit.shape)) or not others:
            failures.append(f"{value} at frame {frame} of {sizes}: elsewhere, or not everywhere")


def empty(failures: list[str]) -> None:
    """No batch: no result, and a gradient of zeros."""
    dtype = torch.bfloat16
    sizes = Sizes(0, 20, 2, (16, 24), 5, 2)
    x, weight = operands(sizes, dtype, random.Random(0))
    z = x.new_empty(0, sizes.out_length, 48)
    spec = forward_spec(sizes, dtype)
    if not conv1d_kernels.conv1d(spec, x, weight, None, z, sizes.padding):
        failures.append("no batch: refused")
    _, dw = framed(weight.shape, dtype)
    if not conv1d_kernels.conv1d_weight(weight_spec(sizes, dtype), x, z, dw, sizes.padding):
        failures.append("a gradient of no batch: refused")
    if not bool((dw == 0).all()):
        failures.append("a gradient of no batch is not zero")


def refusals(failures: list[str]) -> None:
    """What the kernels do not take they leave alone; what is wrong raises."""
    dtype, sizes = torch.bfloat16, Sizes(2, 30, 2, (16, 24), 5, 2)
    x, weight = operands(sizes, dtype, random.Random(0))
    spec, z = forward_spec(sizes, dtype), x.new_full((2, 30, 48), SENTINEL)
    memory = torch.zeros(2 * 30 * 40 + 1, device=CUDA, dtype=dtype)
    for what, given, of in (
        ("channels that are not adjacent", x.mT.contiguous().mT, weight),
        ("an address that is not aligned", memory[1 : 1 + x.numel()].view(x.shape), weight),
        ("rows that are not", memory.as_strided((2, 30, 32), (990, 33, 1)), weight),
        ("a batch that is not", memory.as_strided((2, 30, 32), (961, 32, 1)), weight),
        ("a weight in another order", x, weight.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        if conv1d_kernels.conv1d(spec, given, of, None, z, sizes.padding):
            failures.append(f"{what}: taken")
    if conv1d_kernels.conv1d(spec, x, weight, memory[: 2 * 48 : 2], z, sizes.padding):
        failures.append("a bias with gaps: taken")
    long = torch.zeros(2, 4001, 24, 16, device=CUDA, dtype=dtype)
    if conv1d_kernels.conv1d(spec, x, long, None, x.new_empty(2, 30, 48), 2000):
        failures.append("a window of which no tile fits: taken")
    of_weight, dw = weight_spec(sizes, dtype), torch.empty_like(weight)
    if conv1d_kernels.conv1d_weight(of_weight, x.mT.contiguous().mT, z, dw, sizes.padding):
        failures.append("a gradient of channels that are not adjacent: taken")
    for what, wrong in (
        ("another dtype", (spec, x.half(), weight, None, z, 2)),
        ("another result", (spec, x, weight, None, z, 1)),
        ("another bias", (spec, x, weight, z[0, 0, :5], z, 2)),
        ("other channels", (spec, x[..., :16], weight, None, z, 2)),
    ):
        try:
            conv1d_kernels.conv1d(*wrong)
        except RuntimeError as error:
            if "fx_fuser" not in str(error):
                failures.append(f"{what}: {error}")
        else:
            failures.append(f"{what}: taken")
    if not bool((z == z.new_tensor(SENTINEL)).all()):
        failures.append("a refused call wrote to the result")


def repeats(failures: list[str], times: int = 100) -> None:
    """Replays follow the tensors; launches, over two streams too, agree bit for bit."""
    dtype, sizes = torch.bfloat16, Sizes(8, 249, 16, (48, 48), 128, 64)
    x, weight = operands(sizes, dtype, random.Random(0))
    dz = frames(8, 250, 768, dtype)
    z, dw = x.new_empty(8, 250, 768), torch.empty_like(weight)

    def step() -> tuple[Tensor, Tensor]:
        made = torch.empty_like(z), torch.empty_like(dw)
        both(*made)
        return made

    def both(z: Tensor, dw: Tensor) -> None:
        assert conv1d_kernels.conv1d(forward_spec(sizes, dtype), x, weight, None, z, 64)
        assert conv1d_kernels.conv1d_weight(weight_spec(sizes, dtype), x, dz, dw, 64)

    both(z, dw)
    graph = captured(lambda: both(z, dw))
    x.normal_()
    graph.replay()
    if not all(map(torch.equal, (z, dw), step())):
        failures.append("a graph's replay differs")
    if not agree_over_two_streams(step, (z, dw), times):
        failures.append("launches over two streams differ")
