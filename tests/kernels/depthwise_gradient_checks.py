"""Checks of the depthwise convolution in training and of its gradients, on a GPU and on the CPU
emulator alike: benchmarks/depthwise_training.py times it."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

import torch
from checks import SENTINEL, agree_over_two_streams, captured
from torch import Tensor

from benchmarks import depthwise_kernels
from benchmarks.depthwise_kernels import convolution, gradients
from benchmarks.sm90 import CUDA
from fx_fuser.kernels.depthwise import training
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

LAST = torch.channels_last
# What one rounding of the result may be off by, of the result; and what fp32 sums may be, of the
# sum of what is added without signs: 2^-24 for each of some hundred that a thread adds up one after
# the other. One product that is missing is more.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUMS = 2.0**-16


class Sizes(NamedTuple):
    """image: height and width of x."""

    samples: int
    channels: int
    image: tuple[int, int]
    window: tuple[int, int]
    padding: tuple[int, int]
    stride: int

    @property
    def out(self) -> tuple[int, int]:
        sides = zip(self.image, self.window, self.padding)
        high, wide = ((n + 2 * p - k) // self.stride + 1 for n, k, p in sides)
        return high, wide


def random_sizes(choose: random.Random, side: int, windows: list[tuple[int, int]]) -> Sizes:
    window = choose.choice(windows)
    # A stride of 1 has no gradient of padding that is wider than the window.
    padding = tuple(choose.choice((k // 2, k // 2, 0, choose.randint(0, k - 1))) for k in window)
    image = tuple(
        max(k - 2 * p, choose.choice((7, 14, choose.randint(1, side))))
        for k, p in zip(window, padding)
    )
    channels = 2 * choose.choice((1, 3, 8, choose.randint(1, 40), 16, 17, 33, 48))
    samples = choose.randint(1, 5)
    return Sizes(samples, channels, image, window, padding, choose.choice(training.STRIDES))  # type: ignore[arg-type]


def specs_of(sizes: Sizes, dtype: torch.dtype) -> list[KernelSpec]:
    given = sizes.window, sizes.stride, dtype
    kinds = training.spec_of, training.input_spec_of, training.weight_spec_of
    return [kind(*given) for kind in kinds]


def image(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In channels_last, beside NaN that no result may have seen."""
    n, c, h, w = shape
    memory = torch.full((n * c * h * w + 16,), torch.nan, device=CUDA, dtype=dtype)
    made = memory[8:-8].view(n, h, w, c).permute(0, 3, 1, 2)
    return made.copy_(torch.randn(made.shape, device=CUDA))


def framed(shape: tuple[int, ...], dtype: torch.dtype, is_image: bool) -> tuple[Tensor, Tensor]:
    """Memory of sentinels, and poison in it where a result goes."""
    n, c, h, w = shape
    memory = torch.full((n * c * h * w + 16,), SENTINEL, device=CUDA, dtype=dtype)
    inside = memory[8:-8].fill_(torch.nan)
    return memory, inside.view(n, h, w, c).permute(0, 3, 1, 2) if is_image else inside.view(shape)


def operands(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, dz and the weight."""
    x = image((sizes.samples, sizes.channels, *sizes.image), dtype)
    dz = image((sizes.samples, sizes.channels, *sizes.out), dtype)
    weight = torch.randn(sizes.channels, 1, *sizes.window, device=CUDA).to(dtype)
    return x, dz, weight


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


def run(
    sizes: Sizes, dtype: torch.dtype, x: Tensor, dz: Tensor, weight: Tensor, to: list[Tensor]
) -> list[bool]:
    """Was it taken?  to: z, dx, dw."""
    forward, by_input, by_weight = specs_of(sizes, dtype)
    z, dx, dw = to
    padding, stride = sizes.padding, sizes.stride
    return [
        depthwise_kernels.forward(forward, x, weight, padding, z),
        depthwise_kernels.by_input(by_input, dz, weight, padding, stride, dx),
        depthwise_kernels.by_weight(by_weight, x, dz, padding, dw),
    ]


def check(failures: list[str], sizes: Sizes, dtype: torch.dtype) -> None:
    x, dz, weight = operands(sizes, dtype)
    results = [framed(t.shape, dtype, is_image=t is not weight) for t in (dz, x, weight)]
    taken = run(sizes, dtype, x, dz, weight, [made for _, made in results])
    numbers = sizes.padding, sizes.stride

    def all_of(x: Tensor, dz: Tensor, weight: Tensor) -> list[Tensor]:
        made = gradients(dz, x, weight, *numbers, (True, True))
        return [convolution(x, weight, *numbers), *made]

    doubled = x.double(), dz.double(), weight.double()
    wanted, unsigned = all_of(*doubled), all_of(*(t.abs() for t in doubled))
    for name, is_taken, (memory, made), exact, most in zip(
        ("z", "dx", "dw"), taken, results, wanted, unsigned
    ):
        what = f"{name} of {sizes} of {dtype}"
        if is_taken:
            judge(failures, what, memory, made, exact, most)
        else:
            failures.append(f"{what}: refused")


def sweep(
    failures: list[str],
    cases: int,
    seed: int,
    side: int = 60,
    windows: list[tuple[int, int]] = training.WINDOWS,
) -> None:
    """Random sizes and dtypes. side: the most of an image's."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    drawn = [
        (random_sizes(choose, side, windows), choose.choice(training.DTYPES)) for _ in range(cases)
    ]
    load.prepare([*dict.fromkeys(spec for one in drawn for spec in specs_of(*one))], CUDA)
    for one in drawn:
        check(failures, *one)


def not_numbers(failures: list[str]) -> None:
    """Infinities and NaN of x and dz reach what sees them in their channel, and no other."""
    sizes = Sizes(2, 70, (15, 17), (7, 7), (3, 3), 1)
    dtype = training.DTYPES[0]
    for value in (torch.inf, torch.nan):
        x, dz, weight = operands(sizes, dtype)
        x[1, 5, 7, 8] = dz[1, 5, 7, 8] = value
        made = [torch.empty_like(t, memory_format=torch.preserve_format) for t in (dz, x, weight)]
        assert all(run(sizes, dtype, x, dz, weight, made))
        for name, t, dim in zip(("z", "dx", "dw"), made, (1, 1, 0)):
            hit = ~t.isfinite()
            where = hit.sum(tuple(d for d in range(4) if d != dim)).nonzero().flatten().tolist()
            if where != [5] or int(hit.sum()) != 49:
                failures.append(f"{value}: {int(hit.sum())} of {name}, in channels {where}")


def refusals(failures: list[str]) -> None:
    """What the kernels do not take they leave alone; what is wrong raises."""
    dtype, sizes = training.DTYPES[0], Sizes(2, 6, (9, 9), (5, 5), (2, 2), 2)
    x, dz, weight = operands(sizes, dtype)
    specs = specs_of(sizes, dtype)
    dw = torch.full_like(weight, SENTINEL)
    dx = torch.full_like(x, SENTINEL, memory_format=torch.preserve_format)
    padding = sizes.padding
    memory = torch.zeros(2 * 81 * 6 + 1, device=CUDA, dtype=dtype)
    odd = memory[1:].view(2, 9, 9, 6).permute(0, 3, 1, 2)
    for what, given, of in (
        ("contiguous images", x.contiguous(), dz.contiguous()),
        ("x in another layout", x.contiguous(), dz),
        ("an address that is not aligned", odd, dz),
        ("an odd number of channels", image((2, 5, 9, 9), dtype), image((2, 5, 5, 5), dtype)),
    ):
        channels = given.shape[1]
        if depthwise_kernels.by_weight(specs[2], given, of, padding, dw[:channels]):
            failures.append(f"dw of {what}: taken")
    if depthwise_kernels.by_input(specs[1], dz.contiguous(), weight, padding, 2, dx):
        failures.append("dx of contiguous images: taken")
    turned = weight.mT.contiguous().mT
    if depthwise_kernels.by_input(specs[1], dz, turned, padding, 2, dx):
        failures.append("dx of a weight in another order: taken")
    for what, wrong in (
        ("another dtype", (specs[2], x.half(), dz, padding, dw)),
        ("another size", (specs[2], x, dz[..., :4], padding, dw)),
        ("another window", (specs[2], x, dz, padding, dw[..., :3, :3])),
    ):
        try:
            depthwise_kernels.by_weight(*wrong)
        except RuntimeError as error:
            if "fx_fuser" not in str(error):
                failures.append(f"{what}: {error}")
        else:
            failures.append(f"{what}: taken")
    if not all(bool((t == t.new_tensor(SENTINEL)).all()) for t in (dx, dw)):
        failures.append("a refused call wrote to the result")


def made(sizes: Sizes, dtype: torch.dtype, x: Tensor, dz: Tensor, weight: Tensor) -> list[Tensor]:
    """z, dx, dw."""
    to = [torch.empty_like(t) for t in (dz, x, weight)]
    assert all(run(sizes, dtype, x, dz, weight, to))
    return to


def repeats(failures: list[str], times: int = 100) -> None:
    """Replays follow the tensors; launches, over two streams too, agree bit for bit."""
    dtype = training.DTYPES[0]
    for sizes in (
        Sizes(8, 96, (28, 28), (7, 7), (3, 3), 1),
        Sizes(8, 72, (28, 28), (5, 5), (2, 2), 2),
    ):
        given = operands(sizes, dtype)
        step = functools.partial(made, sizes, dtype, *given)
        first = step()
        graph = captured(functools.partial(run, sizes, dtype, *given, first))
        given[0].normal_()
        graph.replay()
        if not all(map(torch.equal, first, step())):
            failures.append(f"a graph's replay of {sizes} differs")
        if not agree_over_two_streams(step, first, times):
            failures.append(f"launches of {sizes} over two streams differ")
