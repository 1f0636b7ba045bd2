"""Checks of planes and products from them: benchmarks/high_accuracy.py emulates these in torch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from checks import agree_over_two_streams, as_ieee
from torch import Tensor

from benchmarks.high_accuracy import ALLOWED, families, scale_of, to_tf32
from benchmarks.high_accuracy import Plane as Emulated
from benchmarks.planes import Plane, fresh, product
from benchmarks.sm90 import CUDA, relative, worst_row
from fx_fuser.kernels.planes import WIDTH, order_of, plane_strides

INF, NAN = float("inf"), float("nan")
FORMS = ((True, True), (True, False), (False, False), (False, True))  # a, b: rows adjacent?
SMALL = 1e-3  # errors that always pass: of operands rounded to ten bits


def tensors(choose: random.Random) -> Iterator[tuple[str, Tensor]]:
    """Of every order, with gaps between lines, and values of every size."""
    for m, n in ((1, 1), (3, 8), (17, 36), (130, 97), (2, 5000), (64, 256)):
        x = torch.randn(m, n, device=CUDA)
        yield f"{m} x {n}", x
        pitch = n + choose.choice((1, 4, 8))
        rows = torch.full((m, pitch), NAN, device=CUDA)[:, :n].copy_(x)
        yield f"{m} x {n}, rows {pitch} apart", rows
        yield f"{m} x {n}, columns adjacent", rows.mT
    batch = torch.randn(3, 10, 36, device=CUDA)
    yield "a batch", batch
    yield "a batch of columns", batch.mT
    yield "a batch between rows", batch.transpose(0, 1)
    yield "a batch of heads", batch.transpose(0, 2)
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
    """The bits of torch's rounding of the tensor times the power of two, in the tensor's order.
    Whether the largest values are known or looked for, and if they are many."""
    for what, tensor in tensors(random.Random(0)):
        order = order_of(tensor)
        assert order is not None, what
        finite = torch.where(tensor.isfinite(), tensor, 0).abs()
        known = finite.amax(order[0]).flatten().contiguous()
        many = torch.cat([known.new_zeros(5000), known])
        for largest in (None, known, many):
            plane = Plane.of(tensor, largest)
            scale = scale_of(tensor)
            scaled = tensor.double() * scale
            wanted = scaled.float().half()
            same = torch.equal(plane.values.nan_to_num(7), wanted.nan_to_num(7))
            if not same or not torch.equal(plane.values.isnan(), wanted.isnan()):
                failures.append(f"{what}: other values")
            if 2.0**plane.exponent != float(scale):
                failures.append(f"{what}: 2^{plane.exponent} in place of {float(scale)}")
            lost = bool(((scaled != 0) & (scaled.abs() < 2.0**-14)).any())
            if plane.has_lost != lost:
                failures.append(f"{what}: lost {plane.has_lost}")
            if list(plane.values.stride()) != plane_strides(tensor, order):
                failures.append(f"{what}: strides {plane.values.stride()}")
            if any(s % WIDTH for s in plane.values.stride() if s != 1):
                failures.append(f"{what}: lines of {plane.values.stride()} are no whole vectors")


# ---- products ------------------------------------------------------------------------------------


def laid(tensor: Tensor, rows: bool) -> Tensor:
    return tensor if rows else tensor.mT.contiguous().mT


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return product(Plane.of(a), Plane.of(b), fresh(CUDA))


def products(failures: list[str], m: int, n: int, k: int) -> None:
    """The products of the emulated planes, in every form, of matrices and of batches."""
    for batch in ((), (3,)):
        x = torch.randn(*batch, m, k, device=CUDA)
        weight = torch.randn(*batch, k, n, device=CUDA)
        wanted = Emulated.of(x, False).exact() @ Emulated.of(weight, False).exact()
        exact = x.double() @ weight.double()
        tf32 = relative(to_tf32(x).double() @ to_tf32(weight).double(), exact)
        for form in FORMS:
            found = multiply(laid(x, form[0]), laid(weight, form[1]))
            what = f"{form}: error"
            if not relative(found, wanted) <= 1e-6:
                failures.append(f"{what} {relative(found, wanted):.1e} to the planes' product")
            if not relative(found, exact) <= ALLOWED * tf32:
                failures.append(f"{what} {relative(found, exact):.2e}, TF32's {tf32:.2e}")
            if not relative(found, exact) > 1e-5:
                failures.append(f"{what} {relative(found, exact):.2e}: that is fp32")


def errors_of(value: Tensor, tf32: Tensor, exact: Tensor) -> list[float]:
    """Ours to TF32's by round-to-nearest, over the result and in its worst row."""
    return [of(value, exact) / max(of(tf32, exact), 1e-30) for of in (relative, worst_row)]


def contract(failures: list[str], m: int, n: int, k: int) -> None:
    """On all families of data, those that break planes among them: at most ALLOWED times the error
    of TF32 by round-to-nearest or by the library, in every form and in the worst row too."""
    for name, x, weight in families(m, n, k):
        exact = x.double() @ weight.double().T
        tf32 = to_tf32(x).double() @ to_tf32(weight).double().T
        library = x @ weight.T
        for form in FORMS:
            found = multiply(laid(x, form[0]), laid(weight, form[1]).T)
            both = (errors_of(found, of, exact) for of in (tf32, library))
            ratios = [min(one) for one in zip(*both)]
            if not max(ratios) <= ALLOWED:
                failures.append(f"{name}, K = {k}, {form}: {ratios} of TF32's error")


def repairs(failures: list[str]) -> None:
    """Results that are computed again go where they should, of each matrix of a batch; columns that
    are no whole strips; rows of zeros stay."""
    torch.manual_seed(0)
    for batch, m, n, k in (((), 150, 200, 100), ((3,), 10, 600, 70)):
        x = torch.randn(*batch, m, k, device=CUDA)
        weight = torch.randn(*batch, n, k, device=CUDA)
        x[..., 5:9, :] *= 1e-12
        x[..., 3, :] = 0
        weight[..., 70:76, :] *= 1e-13
        b = weight.mT
        exact = x.double() @ b.double()
        near = to_tf32(x).double() @ to_tf32(b).double()
        for form in FORMS:
            found = multiply(laid(x, form[0]), laid(b, form[1]))
            for i, value in enumerate(found.view(-1, m, n)):
                for what, turn in (("rows", Tensor.clone), ("columns", Tensor.t)):
                    of = (turn(v.view(-1, m, n)[i]) for v in (near, exact))
                    ratios = errors_of(turn(value), *of)
                    if not max(ratios) <= ALLOWED:
                        failures.append(f"{batch}, {form}, {what}: {ratios} of TF32's error")
            if found[..., 3, :].count_nonzero():
                failures.append(f"{batch}, {form}: a row of zeros has values")


def special_values(failures: list[str]) -> None:
    """Infinities and NaN are where an exact gemm has them; extreme scales."""
    for form in FORMS:
        x, weight = (torch.randn(n, 200, device=CUDA) for n in (150, 90))
        x[3, 7], x[149, 199], weight[5, 8], weight[89, 0] = INF, -INF, INF, NAN
        exact = (x.double() @ weight.double().T).float()
        as_ieee(f"{form}", multiply(laid(x, form[0]), laid(weight.T, form[1])), exact, SMALL,
                failures)  # fmt: skip
    x, weight = torch.randn(105, 64, device=CUDA), torch.randn(30, 64, device=CUDA)
    if multiply(x * 0, weight.T).count_nonzero():
        failures.append("zeros do not give zeros")
    for exponent in (-140, -120, 100, 125):
        scaled = x * 2.0 ** (exponent / 2) * 2.0 ** (exponent - exponent / 2)
        exact = (scaled.double() @ weight.double().T).float()
        most = SMALL if exponent > -120 else 1e-2  # results are then subnormal
        as_ieee(f"2^{exponent}", multiply(scaled, weight.T), exact, most, failures)
    large, tiny = x * 2.0**120, weight * 2.0**-118
    exact = (large.double() @ tiny.double().T).float()
    as_ieee("2^120 by 2^-118", multiply(large, tiny.T), exact, SMALL, failures)


def repeats(failures: list[str]) -> None:
    for m, n, k in ((300, 500, 1000), (1000, 2500, 1000)):
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(k, n, device=CUDA)
        x[4] *= 1e-12

        def step() -> tuple[Tensor]:
            return (product(Plane.of(x), Plane.of(weight)),)  # noqa: B023

        if not agree_over_two_streams(step, step(), 100):
            failures.append(f"{m} x {n} x {k}: launches over two streams differ")
