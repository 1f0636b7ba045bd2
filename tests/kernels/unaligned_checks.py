"""Checks of the gemm of unaligned operands: benchmarks/unaligned.py times it."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from checks import SENTINEL, agree_over_two_streams, captured, error_of, judge, random_operand
from torch import Tensor

from benchmarks import kernels
from benchmarks.linear_dense_sm90 import IDENTITY, OPERANDS, SILU_MUL, SWISH, Example
from benchmarks.sm90 import CUDA
from fx_fuser.kernels import unaligned
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec

DTYPES = (torch.bfloat16, torch.float16)
SMALL = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # errors that always pass: one rounding
TO_FLOAT = Example("Identity", lambda z, t, s: z.float(), out=torch.float32)
EXAMPLES = (IDENTITY, IDENTITY, SWISH, SILU_MUL, OPERANDS, TO_FLOAT)


def size(choose: random.Random, most: int) -> int:
    usual = (1, 2, 7, 8, 9, 27, 31, 32, 33, 49, 63, 64, 65, 100, 127, 128, 129, 197, 257)
    known = [n for n in usual if n <= most]
    return choose.choice(known) if choose.random() < 0.6 else choose.randint(1, most)


def operand_of_form(
    sizes: Sequence[int], dtype: torch.dtype, choose: random.Random, form: int
) -> Tensor:
    """[*, rows, columns] of this form, amid NaN that must not reach a result; some are expanded
    over the batch."""
    *batches, rows, columns = sizes
    along_k = bool(form & unaligned.ALONG_K)
    lines, length = (rows, columns) if along_k else (columns, rows)
    if batches and choose.random() < 0.15:
        batches = [1] * len(batches)
    gap, ahead = choose.choice((0, 0, 1, 5, 8)), choose.choice((0, 0, 1, 3, 8))
    if form & unaligned.ALIGNED:
        gap, ahead = -length % 8 + choose.choice((0, 0, 8)), choose.choice((0, 8))
    pitch = length + gap
    count = math.prod(batches) * lines * pitch
    storage = torch.full((ahead + count - gap,), float("nan"), device=CUDA, dtype=dtype)
    strides = [math.prod(batches[d + 1 :]) * lines * pitch for d in range(len(batches))]
    made = storage.as_strided((*batches, lines, length), (*strides, pitch, 1), ahead)
    made.copy_(torch.randn(made.shape, device=CUDA))
    made = made if along_k else made.mT
    return made.expand(*sizes)


def palette(choose: random.Random, count: int) -> list[tuple[Example, KernelSpec]]:
    """Examples and their kernels, compiled: some of each tile, step of k and form."""
    found = []
    for i in range(count):
        shape = i % len(unaligned.TILES)
        step, *forms = choose.choice((32, 64, 64)), *choose.choices(range(4), k=2)
        example = choose.choice(EXAMPLES)
        spec = example.spec(choose.choice(DTYPES), unaligned.unaligned(shape, step, *forms))
        found.append((example, spec))
    load.prepare([spec for _, spec in found], CUDA)
    return found


def sweep(
    failures: list[str], cases: int, seed: int, kernels_of: int, most: int = 300, most_k: int = 600
) -> None:
    """Random sizes, strides, operands and results."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    known = palette(choose, kernels_of)
    for case in range(cases):
        example, spec = known[case % len(known)]
        dtype, (_, _, *forms) = spec.inputs[0], spec.family.sizes
        batches = choose.choice(((), (), (1,), (3,), (2, 3)))
        m, n, k = size(choose, most), size(choose, most), size(choose, most_k)
        x = operand_of_form((*batches, m, k), dtype, choose, forms[0])
        weight = operand_of_form((*batches, n, k), dtype, choose, forms[1])
        bias = torch.randn(n, device=CUDA, dtype=dtype) if choose.random() < 0.5 else None
        operands = [random_operand(m, n, t or dtype, choose) for t in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        left, right = choose.choice((0, 3, 8)), choose.choice((0, 5, 8))
        frame = torch.full(
            (*batches, m + 2, left + n + right), SENTINEL, device=CUDA, dtype=example.out or dtype
        )
        out = frame[..., 1:-1, left : left + n].fill_(float("nan"))
        z = torch.full((*batches, m, n), float("nan"), device=CUDA, dtype=dtype)
        z_taken = z if choose.random() < 0.5 else None
        what = f"case {case}: {batches} {m} x {n} x {k}, {x.stride()}, {', '.join(spec.signature)}"
        if not kernels.linear_unaligned(spec, x, weight, bias, out, z_taken, operands, scalars):
            failures.append(f"{what}: refused")
            continue
        exact_z = x.double() @ weight.double().mT + (0 if bias is None else bias.double())
        torch_z = x.float() @ weight.float().mT + (0 if bias is None else bias.float())
        expected = example.reference(torch_z, operands, scalars).to(out.dtype)
        checked = [(out, example.reference(exact_z, operands, scalars), expected, "out")]
        if z_taken is not None:
            checked.append((z, exact_z, torch_z.to(dtype), "z"))
        outside = frame.clone()
        outside[..., 1:-1, left : left + n] = SENTINEL
        if not bool((outside == torch.tensor(SENTINEL, dtype=frame.dtype, device=CUDA)).all()):
            failures.append(f"{what}: wrote outside the result")
        judge(failures, what, checked, SMALL[dtype])


def spec_of(example: Example, x: Tensor, weight: Tensor) -> KernelSpec:
    family = unaligned.family_of(x, weight)
    assert family is not None
    return example.spec(x.dtype, family)


def run(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = x.new_empty((*x.shape[:-1], weight.shape[-2]))
    spec = spec_of(IDENTITY, x, weight)
    assert kernels.linear_unaligned(spec, x, weight, None, out, None, [], [])
    return out


def special_values(failures: list[str]) -> None:
    """Infinities and NaN are where an exact gemm has them, and nowhere else."""
    for dtype in DTYPES:
        x = torch.randn(67, 131, device=CUDA).to(dtype)
        weight = torch.randn(45, 131, device=CUDA).to(dtype)
        x[3, 7], x[60, 130], weight[5, 8], weight[44, 0] = (
            *(float("inf"), float("-inf"), float("inf"), float("nan")),
        )
        exact = (x.double() @ weight.double().T).to(dtype)
        ours = run(x, weight)
        usual = exact.isfinite()
        same = torch.equal(ours.isfinite(), usual) and torch.equal(
            ours[~usual].nan_to_num(7), exact[~usual].nan_to_num(7)
        )
        if not same:
            failures.append(f"{dtype}: other infinities or NaN than IEEE's")
        run(x[:0], weight)


def long_sums(failures: list[str], most: int = 65536) -> None:
    """Errors do not grow with k beyond torch's own."""
    for k in (most // 8 - 1, most):
        for dtype in DTYPES:
            x = torch.randn(40, k, device=CUDA).to(dtype)
            weight = (torch.randn(k, 33, device=CUDA) * k**-0.5).to(dtype).T
            exact = x.double() @ weight.double().T
            error, torchs = error_of(run(x, weight), exact), error_of(F.linear(x, weight), exact)
            if not error <= max(2 * torchs, SMALL[dtype]):
                failures.append(f"k = {k}, {dtype}: error {error:.2e}, torch's {torchs:.2e}")


def graphs_and_repeats(failures: list[str], times: int = 100) -> None:
    """Replays follow the tensors; launches, also on two streams, agree bit for bit."""
    for batches, m, n, k in ((700, 27, 27, 64), (90, 49, 49, 33), (1, 1000, 501, 999)):
        x = torch.randn(batches, m, k, device=CUDA).bfloat16()
        weight = torch.randn(batches, n, k, device=CUDA).bfloat16()
        out = run(x, weight)
        graph = captured(lambda: run(x, weight, out=out))  # noqa: B023
        weight.normal_()
        graph.replay()
        if not torch.equal(out, run(x, weight)):
            failures.append(f"{batches} x {m} x {n} x {k}: graph replay differs")
        step = functools.partial(run, x, weight)
        if not agree_over_two_streams(lambda: (step(),), (out,), times):  # noqa: B023
            failures.append(f"{batches} x {m} x {n} x {k}: launches over two streams differ")


def refusals(failures: list[str]) -> None:
    x, weight = torch.randn(8, 36, device=CUDA).half(), torch.randn(16, 36, device=CUDA).half()
    spec = spec_of(IDENTITY, x, weight)
    aligned = operand_of_form(
        (8, 32), x.dtype, random.Random(0), unaligned.ALONG_K | unaligned.ALIGNED
    )
    memory = torch.randn(9 * 40, device=CUDA).half()
    other = torch.randn(16, 32, device=CUDA).half()
    of_aligned = spec_of(IDENTITY, aligned, other)
    batch = memory.as_strided((2, 4, 32), (132, 32, 1))
    for what, taken, a, b in (
        ("a pointer that is not aligned", of_aligned, memory[1:257].view(8, 32), other),
        ("a pitch that is not", of_aligned, memory.view(8, 45)[:, :32], other),
        ("a batch that is not", of_aligned, batch, other.expand(2, 16, 32)),
        ("rows adjacent, not k", spec, x.T.contiguous().T, weight),
        ("neither adjacent", spec, torch.randn(8, 72, device=CUDA).half()[:, ::2], weight),
        ("k = 0", spec, x[:, :0], weight[:, :0]),
    ):
        out = torch.empty(*a.shape[:-1], 16, device=CUDA, dtype=x.dtype)
        if kernels.linear_unaligned(taken, a, b, None, out, None, [], []):
            failures.append(f"{what} was not refused")
