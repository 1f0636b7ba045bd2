"""Checks of the comb gemm (unaligned operands by TMA); benchmarks/unaligned.py times it."""

from __future__ import annotations

import functools
import random

import torch
from checks import SENTINEL, agree_over_two_streams, judge
from torch import Tensor

from benchmarks import kernels
from benchmarks.linear_dense_sm90 import IDENTITY, SWISH, Example
from benchmarks.sm90 import CUDA
from fx_fuser.kernels import unaligned
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

DTYPES = (torch.bfloat16, torch.float16)
SMALL = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # errors that always pass: one rounding
FORMS = ((1, 1), (1, 0), (0, 0))  # are k adjacent in x, in the weight


def matrix(
    rows: int, columns: int, along: int, dtype: torch.dtype, pitch: int, ahead: int
) -> Tensor:
    """[rows, columns] amid NaN; columns are adjacent if `along`, else rows. pitch: extra elements
    per line."""
    lines, length = (rows, columns) if along else (columns, rows)
    storage = torch.full((ahead + lines * (length + pitch) - pitch,), float("nan"), dtype=dtype)
    made = storage.to(CUDA).as_strided((lines, length), (length + pitch, 1), ahead)
    made.copy_(torch.randn(made.shape, device=CUDA))
    return made if along else made.mT


def size(choose: random.Random, least: int, most: int) -> int:
    usual = (8, 9, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 197, 255, 256, 257, 384, 515)
    known = [n for n in usual if least <= n <= most]
    return choose.choice(known) if choose.random() < 0.5 else choose.randint(least, most)


def palette(choose: random.Random, shapes: tuple[int, ...]) -> list[tuple[Example, KernelSpec]]:
    found: list[tuple[Example, KernelSpec]] = []
    for i, shape in enumerate(shapes):
        for form in FORMS:
            if not unaligned.comb_takes(shape, form[0]):
                continue
            example = choose.choice((IDENTITY, IDENTITY, SWISH))
            dtype = DTYPES[(i + len(found)) % 2]
            found.append((example, example.spec(dtype, unaligned.combs(shape, *form))))
    load.prepare([spec for _, spec in found], CUDA)
    return found


def sweep(
    failures: list[str],
    cases: int,
    seed: int,
    shapes: tuple[int, ...] = tuple(range(len(unaligned.COMB_TILES))),
    most: int = 600,
    most_k: int = 600,
    more_rows: int = 0,
) -> None:
    """Random sizes, pitches and addresses."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    known = palette(choose, shapes)
    for case in range(cases):
        example, spec = known[case % len(known)]
        dtype, (_, *form) = spec.inputs[0], spec.family.sizes
        m, n, k = size(choose, 8, most), size(choose, 1, most), size(choose, 8, most_k)
        m += more_rows
        if not form[0]:
            n = -(-n // 8) * 8
        pitch, ahead = choose.choice((0, 0, 1, 2, 3, 4, 8)), choose.randint(0, 8)
        if form[1]:
            pitch, ahead = -k % 8, 8
        x = matrix(m, k, form[0], dtype, pitch, ahead)
        length = k if form[1] else n
        weight = matrix(n, k, form[1], dtype, -length % 8 + choose.choice((0, 8)), 8)
        left, right = choose.randint(0, 8), choose.choice((0, 5, 8))
        if not form[1]:
            left, right = 8, 8 + -n % 8
        frame = torch.full((m + 2, left + n + right), SENTINEL, device=CUDA, dtype=dtype)
        out = frame[1:-1, left : left + n].fill_(float("nan"))
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        what = f"case {case}: {m} x {n} x {k}, {x.stride()}, {', '.join(spec.signature)}"
        if not kernels.linear_combs(spec, x, weight, out, scalars):
            failures.append(f"{what}: refused")
            continue
        exact = x.double() @ weight.double().mT
        expected = example.reference(x.float() @ weight.float().mT, [], scalars).to(dtype)
        judge(failures, what, [(out, example.reference(exact, [], scalars), expected, "out")],
              SMALL[dtype])  # fmt: skip
        outside = frame.clone()
        outside[1:-1, left : left + n] = SENTINEL
        if not bool((outside == torch.tensor(SENTINEL, dtype=dtype, device=CUDA)).all()):
            failures.append(f"{what}: wrote outside the result")


def run(
    x: Tensor, weight: Tensor, form: tuple[int, int], shape: int = 0, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = x.new_full((len(x), len(weight)), float("nan"))
    spec = IDENTITY.spec(x.dtype, unaligned.combs(shape, *form))
    assert kernels.linear_combs(spec, x, weight, out, [])
    return out


def special_values(failures: list[str]) -> None:
    """Infinities and NaN are exactly where an exact gemm has them."""
    for form in FORMS:
        dtype = torch.bfloat16
        n = 45 if form[1] else 48
        k = 136 if form[1] else 131
        x = matrix(67, k, form[0], dtype, 0, 8 if form[1] else 3)
        weight = matrix(n, k, form[1], dtype, -(k if form[1] else n) % 8, 8)
        x[3, 7], x[60, k - 1], weight[5, 8], weight[44, 0] = (
            *(float("inf"), float("-inf"), float("inf"), float("nan")),
        )
        exact = (x.double() @ weight.double().T).to(dtype)
        ours = run(x, weight, form)
        usual = exact.isfinite()
        same = torch.equal(ours.isfinite(), usual) and torch.equal(
            ours[~usual].nan_to_num(7), exact[~usual].nan_to_num(7)
        )
        if not same:
            failures.append(f"{form}: other infinities or NaN than IEEE's")


def repeats(failures: list[str], times: int = 100) -> None:
    """Launches, over two streams too, agree bit for bit."""
    for shape in range(len(unaligned.COMB_TILES)):
        for form in FORMS:
            if not unaligned.comb_takes(shape, form[0]):
                continue
            k, n = (2000, 1031) if form[1] else (1999, 1032)
            x = matrix(2001, k, form[0], torch.bfloat16, 0, 0)
            weight = matrix(n, k, form[1], torch.bfloat16, 0, 0)
            step = functools.partial(run, x, weight, form, shape)
            if not agree_over_two_streams(lambda: (step(),), (step(),), times):  # noqa: B023
                failures.append(f"{shape}, {form}: launches over two streams differ")


def last_lines(failures: list[str], count: int, length: int, few: int = 16) -> None:
    """The last lines of a large matrix, the result or x, give the same as they do alone. With small
    integers sums are exact. few: a multiple of 8, so that lines are in the same combs."""

    def integers(*size: int) -> Tensor:
        return torch.randint(-2, 3, size, device=CUDA).bfloat16()

    for form in FORMS:
        lines = integers(few, 64 if form[1] else length)
        x = lines.new_zeros(count, lines.shape[1])
        x[-few:] = lines
        if form[0]:
            weight = integers(length, 64)
            both = [(rows, weight if form[1] else weight.mT) for rows in (x, x[-few:])]
        else:
            weight = integers(count, 64)
            both = [(x.mT, weight.mT), (x[-few:].mT, weight[-few:].mT)]
        all_lines, alone = (run(*pair, form) for pair in both)
        if not torch.equal(all_lines[-few:] if form[0] else all_lines, alone):
            failures.append(f"{form}: other results for the last lines of {count} of {length}")


def refusals(failures: list[str]) -> None:
    dtype = torch.float16
    x, weight = matrix(16, 40, 1, dtype, 0, 0), matrix(24, 40, 1, dtype, 0, 0)
    of_rows = matrix(16, 40, 0, dtype, 1, 1)
    lines = matrix(24, 40, 0, dtype, 0, 0)
    odd = torch.empty(16, 25, device=CUDA, dtype=dtype)[:, :24]
    out = torch.empty(16, 24, device=CUDA, dtype=dtype)
    part = lines[:23], torch.empty(16, 24, device=CUDA, dtype=dtype)[:, :23]
    for what, form, a, b, to in (
        ("rows adjacent, not k", (1, 1), of_rows, weight, out),
        ("k adjacent, not rows", (0, 0), x, lines, out),
        ("a weight that is not aligned", (1, 1), x, matrix(24, 40, 1, dtype, 1, 0), out),
        ("an unaligned result of lines that are k", (0, 0), of_rows, lines, odd),
        ("a result that has a part of a vector, of lines that are k", (0, 0), of_rows, *part),
        ("both unaligned, k adjacent", (1, 0), x, lines, odd),
        ("k adjacent in an unaligned x, too", (1, 1), matrix(16, 40, 1, dtype, 1, 0), weight, out),
        ("seven lines", (1, 1), x[:7], weight, out[:7]),
        ("lines on each other", (1, 1), x[:1].expand(16, 40), weight, out),
        ("k = 0", (1, 1), x[:, :0], weight[:, :0], out),
    ):
        spec = IDENTITY.spec(dtype, unaligned.combs(0, *form))
        if kernels.linear_combs(spec, a, b, to, []):
            failures.append(f"{what} was not refused")
