"""Checks of planes: benchmarks/high_accuracy.py emulates them in torch."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from checks import (
    Sizes,
    agree_over_two_streams,
    as_ieee,
    framed_matrix,
    is_untouched,
    judge,
    random_operand,
)
from torch import Tensor

from benchmarks import planes as launched
from benchmarks.high_accuracy import ALLOWED, families, scale_of, to_tf32
from benchmarks.high_accuracy import Plane as Emulated
from benchmarks.linear_dense_sm90 import IDENTITY, OPERANDS, SILU_MUL, SWISH, Example
from benchmarks.planes import Plane
from benchmarks.sm90 import CUDA, relative, worst_row
from fx_fuser.kernels.planes import MAKE_PLANE, linear_planes
from fx_fuser.native import load

INF, NAN = float("inf"), float("nan")
FORMS = ((True, True), (True, False), (False, False), (False, True))  # x, weight: k adjacent?
SMALL = 1e-3  # errors that always pass: of operands rounded to ten bits


def made(matrix: Tensor) -> Plane:
    plane = Plane.room(matrix)
    plane.values.fill_(NAN)
    plane.facts.fill_(-1)
    assert launched.make_plane(MAKE_PLANE, plane), f"{tuple(matrix.shape)} was refused"
    return plane


def matrices(choose: random.Random) -> Iterator[tuple[str, Tensor]]:
    """Of every order, with gaps between lines, and values of every size."""
    for m, n in ((1, 1), (3, 8), (17, 36), (130, 97), (2, 5000), (64, 256)):
        x = torch.randn(m, n, device=CUDA)
        yield f"{m} x {n}", x
        pitch = n + choose.choice((1, 4, 8))
        rows = torch.full((m, pitch), NAN, device=CUDA)[:, :n].copy_(x)
        yield f"{m} x {n}, rows {pitch} apart", rows
        yield f"{m} x {n}, columns adjacent", rows.mT
    x = torch.randn(40, 64, device=CUDA)
    for exponent in (-148, -140, -126, -118, -100, -60, 60, 100, 124):
        yield f"about 2^{exponent}", x * 2.0 ** (exponent / 2) * 2.0 ** (exponent - exponent / 2)
    yield "zeros", x * 0
    yield "a value that is lost", x.index_fill(0, torch.tensor([3], device=CUDA), 1e-12)
    for what, value in (("infinity", INF), ("minus infinity", -INF), ("NaN", NAN)):
        with_one = x.clone()
        with_one[7, 9] = value
        yield what, with_one
    yield "nothing finite", x * 0 + INF
    yield "the largest float", x.clone().fill_(torch.finfo(torch.float32).max)


def planes(failures: list[str]) -> None:
    """The bits of torch's rounding of the matrix times the power of two, zeros behind lines."""
    for what, matrix in matrices(random.Random(0)):
        plane = made(matrix)
        scale = scale_of(matrix)
        scaled = matrix.double() * scale
        wanted = scaled.float().half()
        same = torch.equal(plane.fp16().nan_to_num(7), wanted.nan_to_num(7))
        if not same or not torch.equal(plane.fp16().isnan(), wanted.isnan()):
            failures.append(f"{what}: other values")
        if 2.0**plane.exponent != float(scale):
            failures.append(f"{what}: 2^{plane.exponent} in place of {float(scale)}")
        lost = bool(((scaled != 0) & (scaled.abs() < 2.0**-14)).any())
        if plane.has_lost != lost:
            failures.append(f"{what}: lost {plane.has_lost}")
        lines = plane.fp16() if plane.matrix.stride(1) == 1 else plane.fp16().mT
        if plane.values[:, lines.shape[1] :].count_nonzero():
            failures.append(f"{what}: no zeros behind the lines")


# ---- the gemm ------------------------------------------------------------------------------------

TO_HALF = Example("Swish", lambda z, t, s: (F.silu(z) * s[0]).half(), 1, out=torch.float16)
EXAMPLES = (IDENTITY, SWISH, SILU_MUL, OPERANDS, TO_HALF)


def laid(rows: int, columns: int, along: bool, choose: random.Random) -> Tensor:
    """Random values, columns adjacent if `along`, else rows; any pitch, NaN between lines."""
    lines, length = (rows, columns) if along else (columns, rows)
    pitch = length + choose.choice((0, 0, 1, 4, 5))
    made = torch.full((lines, pitch), NAN, device=CUDA)[:, :length]
    made.copy_(torch.randn(lines, length, device=CUDA))
    return made if along else made.mT


def run(
    example: Example,
    x: Tensor,
    weight: Tensor,
    form: tuple[bool, bool],
    bias: Tensor | None = None,
    operands: list[Tensor] | None = None,
    scalars: list[float] | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    chunks: int = 0,
) -> Tensor:
    if out is None:
        out = x.new_full((*x.shape[:-1], len(weight)), NAN, dtype=example.out)
    scalars = [2.0] * example.scalars if scalars is None else scalars
    spec = example.spec(torch.float32, linear_planes(*form))
    given = x, weight, bias, out, z, operands or [], scalars, chunks
    taken = launched.linear_planes(spec, *given)
    assert taken, f"{x.shape} {x.stride()} by {weight.shape} {weight.stride()} was refused"
    return out


def sizes(choose: random.Random) -> tuple[int, int, int]:
    kind = choose.choice(("any", "any", "wide", "large"))
    if kind == "any":
        return choose.randint(1, 700), choose.randint(1, 700), choose.randint(1, 3000)
    if kind == "wide":
        return choose.randint(65, 128), choose.randint(9000, 20000), choose.randint(1, 500)
    return choose.randint(900, 3000), choose.randint(900, 3000), choose.randint(1, 700)


def sweep(
    failures: list[str],
    cases: int,
    seed: int,
    sizes: Sizes = sizes,
    examples: tuple[Example, ...] = EXAMPLES,
    forms: tuple[tuple[bool, bool], ...] = FORMS,
) -> None:
    """Random sizes, orders, pitches, operands and outputs; nothing beside the result is written."""
    load.prepare([e.spec(torch.float32, linear_planes(*f)) for e in examples for f in forms], CUDA)
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example, form = choose.choice(examples), forms[case % len(forms)]
        m, n, k = sizes(choose)
        x, weight = laid(m, k, form[0], choose), laid(n, k, form[1], choose)
        x.mul_(2.0 ** choose.choice((-60, 0, 40)))
        weight.mul_(2.0 ** choose.choice((-20, 0, 10)) * k**-0.5)
        unit = float(x.std()) * float(weight.std()) * k**0.5 if x.numel() > 1 else 1.0
        weight.div_(unit or 1.0)  # results of one
        bias = torch.randn(n, device=CUDA) if choose.random() < 0.5 else None
        operands = [random_operand(m, n, t or torch.float32, choose) for t in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        frame, out = framed_matrix((m, n), example.out or torch.float32)
        z = torch.full((m, n), NAN, device=CUDA) if choose.random() < 0.5 else None
        chunks = choose.choice((0, 0, 1, 2, 3))
        run(example, x, weight, form, bias, operands, scalars, out, z, chunks)

        exact_z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tf32_z = F.linear(
            to_tf32(x).double(), to_tf32(weight).double(), None if bias is None else bias.double()
        ).float()
        checked = [
            (out, example.reference(exact_z, operands, scalars),
             example.reference(tf32_z, operands, scalars), "out"),
        ]  # fmt: skip
        if z is not None:
            checked.append((z, exact_z, tf32_z, "z"))
        what = f"case {case}: {m} x {n} x {k}, {example.name}, {form}, {x.stride()}, {chunks}"
        judge(failures, what, checked, SMALL)
        if not is_untouched(frame, out):
            failures.append(f"{what}: wrote outside the result")


def products(failures: list[str], m: int, n: int, k: int) -> None:
    """The products of the emulated planes, in every form, but for the order of sums."""
    x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
    wanted = Emulated.of(x, False).exact() @ Emulated.of(weight, False).exact().T
    exact = x.double() @ weight.double().T
    tf32 = relative(to_tf32(x).double() @ to_tf32(weight).double().T, exact)
    for form in FORMS:
        a = x if form[0] else x.mT.contiguous().mT
        b = weight if form[1] else weight.mT.contiguous().mT
        for chunks in (1, 2):
            found = run(IDENTITY, a, b, form, chunks=chunks)
            what = f"{form}, {chunks} chunks: error"
            if not relative(found, wanted) <= 1e-6:
                failures.append(f"{what} {relative(found, wanted):.1e} to the planes' product")
            if not relative(found, exact) <= ALLOWED * tf32:
                failures.append(f"{what} {relative(found, exact):.2e}, TF32's {tf32:.2e}")


def errors_of(value: Tensor, tf32: Tensor, exact: Tensor) -> list[float]:
    """Ours to TF32's by round-to-nearest, over the result and in its worst row."""
    return [of(value, exact) / max(of(tf32, exact), 1e-30) for of in (relative, worst_row)]


def contract(failures: list[str], m: int, n: int, k: int) -> None:
    """On all families of data, those that break planes among them: at most ALLOWED times the error
    of TF32 by round-to-nearest, in every form and in the worst row too. With chunks and without."""
    for name, x, weight in families(m, n, k):
        exact = x.double() @ weight.double().T
        tf32 = to_tf32(x).double() @ to_tf32(weight).double().T
        for i, form in enumerate(FORMS):
            a = x if form[0] else x.mT.contiguous().mT
            b = weight if form[1] else weight.mT.contiguous().mT
            found = run(IDENTITY, a, b, form, chunks=1 + i % 2)
            ratios = errors_of(found, tf32, exact)
            if not max(ratios) <= ALLOWED:
                failures.append(f"{name}, K = {k}, {form}: {ratios} of TF32's error")


def repairs(failures: list[str]) -> None:
    """Results that are computed again get their bias and operands, and go where they should."""
    torch.manual_seed(0)
    m, n, k = 150, 200, 100
    x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
    x[5:9] *= 1e-12
    x[20] = 0
    weight[70:76] *= 1e-13
    bias = torch.randn(n, device=CUDA)
    for example in EXAMPLES:
        operands = [torch.randn(m, n, device=CUDA).to(t or torch.float32) for t in example.operands]
        frame, out = framed_matrix((m, n), example.out or torch.float32)
        z = torch.full((m, n), NAN, device=CUDA)
        for given in (None, bias):
            exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
            near = F.linear(to_tf32(x).double(), to_tf32(weight).double(),
                            None if given is None else given.double())  # fmt: skip
            out.fill_(NAN)
            run(example, x, weight, (True, True), given, operands, None, out, z)
            ratios = errors_of(z, near, exact)
            if not max(ratios) <= ALLOWED:
                failures.append(f"{example.name}: z {ratios} of TF32's error")
            scalars = [2.0] * example.scalars
            wanted = example.reference(exact, operands, scalars)
            of_tf32 = example.reference(near, operands, scalars)
            judge(failures, example.name, [(out, wanted, of_tf32, "out")], SMALL)
        if not is_untouched(frame, out):
            failures.append(f"{example.name}: wrote outside the result")


def special_values(failures: list[str]) -> None:
    """Infinities and NaN are where an exact gemm has them; leading dimensions; M = 0."""
    for form in FORMS:
        x, weight = (torch.randn(n, 200, device=CUDA) for n in (150, 90))
        x[3, 7], x[149, 199], weight[5, 8], weight[89, 0] = INF, -INF, INF, NAN
        a = x if form[0] else x.mT.contiguous().mT
        b = weight if form[1] else weight.mT.contiguous().mT
        exact = (x.double() @ weight.double().T).float()
        as_ieee(f"{form}", run(IDENTITY, a, b, form), exact, SMALL, failures)
    x, weight = torch.randn(3, 5, 7, 64, device=CUDA), torch.randn(30, 64, device=CUDA)
    form = (True, True)
    flat = run(IDENTITY, x.view(105, 64), weight, form)
    if not torch.equal(run(IDENTITY, x, weight, form).view(105, 30), flat):
        failures.append("leading dimensions matter")
    run(IDENTITY, x[:0], weight, form)
    zeros = run(IDENTITY, x * 0, weight, form)
    if zeros.count_nonzero():
        failures.append("zeros do not give zeros")
    for exponent in (-140, -120, 100, 125):
        scaled = x * 2.0 ** (exponent / 2) * 2.0 ** (exponent - exponent / 2)
        found = run(IDENTITY, scaled, weight, form)
        exact = scaled.double().view(105, 64) @ weight.double().T
        most = SMALL if exponent > -120 else 1e-2  # results are then subnormal
        as_ieee(f"2^{exponent}", found.view(105, 30), exact.float(), most, failures)


def repeats(failures: list[str]) -> None:
    for m, n, k in ((300, 500, 1000), (1000, 2500, 1000)):
        for form in FORMS:
            choose = random.Random(0)
            x, weight = laid(m, k, form[0], choose), laid(n, k, form[1], choose)
            step = functools.partial(run, IDENTITY, x, weight, form)
            if not agree_over_two_streams(lambda: (step(),), (step(),), 100):  # noqa: B023
                failures.append(f"{m} x {n} x {k}, {form}: launches over two streams differ")
