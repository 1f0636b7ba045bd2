"""Checks of planes: benchmarks/high_accuracy.py emulates them in torch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.high_accuracy import scale_of
from benchmarks.kernels import Plane
from benchmarks.sm90 import CUDA
from fx_fuser.kernels.planes import MAKE_PLANE

INF, NAN = float("inf"), float("nan")


def made(matrix: Tensor) -> Plane:
    plane = Plane.room(matrix)
    plane.values.fill_(NAN)
    plane.facts.fill_(-1)
    assert kernels.make_plane(MAKE_PLANE, plane), f"{tuple(matrix.shape)} was refused"
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
