"""Checks of the dense gemm: benchmarks/linear_dense_sm90.py calls and times it."""

from __future__ import annotations

import functools
import random

import torch
import torch.nn.functional as F
from checks import (
    SENTINEL,
    Sizes,
    agree_over_two_streams,
    captured,
    judge,
    random_operand,
    strided,
)
from torch import Tensor

from benchmarks import kernels
from benchmarks.linear_dense_sm90 import (
    IDENTITY,
    OPERANDS,
    RESIDUAL,
    SILU_MUL,
    SWISH,
    Example,
    run,
)
from benchmarks.sm90 import CUDA

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Errors that always pass: of rounding to the dtype or, with TF32, the operands. cuBLAS computes
# some small fp32 gemms without TF32.
SMALL = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-3}
TO_FLOAT = Example("Identity", lambda z, t, s: z.float(), out=torch.float32)
TO_HALF = Example("Swish", lambda z, t, s: (F.silu(z) * s[0]).half(), 1, out=torch.float16)
EXAMPLES = (IDENTITY, SWISH, RESIDUAL, SILU_MUL, OPERANDS, TO_FLOAT, TO_HALF)


def sizes(choose: random.Random) -> tuple[int, int, int]:
    """Sizes such that each kernel is chosen for some."""
    kind = choose.choice(("few", "any", "any", "wide", "large"))
    if kind == "few":
        return choose.choice((1, 2, 16, 17)), choose.randint(1, 9000), choose.randint(1, 3000)
    if kind == "any":
        return choose.randint(1, 700), choose.randint(1, 700), choose.randint(1, 3000)
    if kind == "wide":
        return choose.randint(65, 128), choose.randint(9000, 20000), choose.randint(1, 500)
    return choose.randint(900, 3000), choose.randint(900, 3000), choose.randint(1, 700)


def sweep(failures: list[str], cases: int, seed: int, sizes: Sizes = sizes) -> None:
    """Random sizes, strides, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example, dtype = choose.choice(EXAMPLES), choose.choice(DTYPES)
        m, n, k = sizes(choose)
        x, weight = strided(m, k, dtype, choose), strided(n, k, dtype, choose).div_(k**0.5)
        bias = torch.randn(n, device=CUDA, dtype=dtype) if choose.random() < 0.5 else None
        operands = [random_operand(m, n, t or dtype, choose) for t in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        # NaN where the results go, sentinels around them.
        left = choose.choice((3, 8))
        frame = torch.full((m + 2, n + 16), SENTINEL, device=CUDA, dtype=example.out or dtype)
        if choose.random() < 0.5:
            frame = F.pad(frame, (0, -frame.shape[1] % 8), value=SENTINEL)
        out = frame[1:-1, left : left + n].fill_(float("nan"))
        z = torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)
        z_taken = z if choose.random() < 0.5 else None
        run(example, x, weight, bias, operands, scalars, out, z_taken)

        exact_z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch_z = F.linear(x, weight, bias)
        checked = [
            (out, example.reference(exact_z, operands, scalars),
             example.reference(torch_z, operands, scalars), "out"),
        ]  # fmt: skip
        if z_taken is not None:
            checked.append((z, exact_z, torch_z, "z"))
        outside = frame.clone()
        outside[1:-1, left : left + n] = SENTINEL
        sentinel = torch.tensor(SENTINEL, dtype=frame.dtype, device=CUDA)
        what = f"case {case}: {m} x {n} x {k}, {', '.join(example.spec(dtype).signature)}"
        if not bool((outside == sentinel).all()):
            failures.append(f"{what}: wrote outside the result")
        judge(failures, what, checked, SMALL[dtype])


def special_values(failures: list[str]) -> None:
    """Infinities and NaN are where an exact gemm has them; leading dimensions; M = 0."""
    for dtype in DTYPES:
        x = torch.randn(200, 504, device=CUDA).to(dtype)
        weight = torch.randn(300, 504, device=CUDA).to(dtype)
        x[3, 7], x[150, 499], weight[5, 8], weight[299, 0] = (
            *(float("inf"), float("-inf"), float("inf"), float("nan")),
        )
        exact = (x.double() @ weight.double().T).to(dtype)
        ours = run(IDENTITY, x, weight)
        same = torch.equal(ours.isnan(), exact.isnan()) and torch.equal(
            ours[ours.isinf()], exact[exact.isinf()]
        )
        if not same:
            failures.append(f"{dtype}: other infinities or NaN than IEEE's")
        x, weight = torch.randn(3, 5, 7, 64, device=CUDA).to(dtype), weight[6:200, 1:65].clone()
        flat = run(IDENTITY, x.view(105, 64), weight)
        if not torch.equal(run(IDENTITY, x, weight).view(105, 194), flat):
            failures.append(f"{dtype}: leading dimensions matter")
        run(IDENTITY, x[:0], weight)


def graphs_and_repeats(failures: list[str]) -> None:
    """Replays follow the tensors; launches, also on two streams, agree bit for bit."""
    for m, n, k in ((300, 500, 1000), (1000, 2500, 1000), (100, 17000, 512), (5, 500, 1000)):
        x = torch.randn(m, k, device=CUDA).bfloat16()
        weight = torch.randn(n, k, device=CUDA).bfloat16()
        out = run(SWISH, x, weight)
        graph = captured(lambda: run(SWISH, x, weight, out=out))  # noqa: B023
        weight.normal_()
        graph.replay()
        if not torch.equal(out, run(SWISH, x, weight)):
            failures.append(f"{m} x {n} x {k}: graph replay differs")
        step = functools.partial(run, SWISH, x, weight)
        if not agree_over_two_streams(lambda: (step(),), (out,), 100):  # noqa: B023
            failures.append(f"{m} x {n} x {k}: launches over two streams differ")


def refusals(failures: list[str]) -> None:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA).bfloat16()

    x, weight, out = values(8, 36), values(16, 36), values(8, 16)
    for what, a, b in (
        ("K = 36", x, weight),
        ("unaligned x", values(8 * 32 + 1)[1:].view(8, 32), weight[:, :32].contiguous()),
        ("x with one row for all", values(1, 64).expand(8, 64), values(16, 64)),
        ("K = 0", x[:, :0], weight[:, :0]),
    ):
        if kernels.linear_dense(IDENTITY.spec(x.dtype), a, b, None, out, None, [], []):
            failures.append(f"{what} was not refused")
