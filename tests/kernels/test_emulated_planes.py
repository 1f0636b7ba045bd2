"""Planes on the CPU emulator, by the checks that are written for a GPU."""

from __future__ import annotations

import functools
import random

import checks
import emulator
import planes_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from torch import Tensor

from benchmarks import high_accuracy, linear_sm90, sm90
from benchmarks.sm90 import relative
from fx_fuser.kernels.planes import (
    MAKE_PLANE,
    PLANES_GEMMS,
    has_plane,
    is_along,
    plane_elements,
)

EMULATED = torch._C.DispatchKey.PrivateUse1  # the shim's host code of the emulated device

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=4)
    in_place_of_cuda(made, monkeypatch, (checks, linear_sm90, planes_checks, sm90))
    return made


def test_planes() -> None:
    passes(planes_checks.planes)


def small(choose: random.Random) -> tuple[int, int, int]:
    return choose.randint(1, 300), choose.randint(1, 300), choose.randint(1, 200)


@pytest.mark.slow
def test_products_of_planes() -> None:
    passes(planes_checks.products, 70, 90, 200)


@pytest.mark.slow
@pytest.mark.parametrize("form", planes_checks.FORMS)
def test_random_sizes_and_epilogues(form: tuple[bool, bool]) -> None:
    passes(planes_checks.sweep, 12, 0, small, planes_checks.EXAMPLES, (form,))


@pytest.mark.slow
def test_several_tiles_of_a_block() -> None:
    passes(planes_checks.sweep, 4, 1, lambda choose: (choose.randint(500, 700), 530, 40))


@pytest.mark.slow
def test_the_contract_on_data_that_breaks_planes() -> None:
    passes(planes_checks.contract, 40, 48, 64)


@pytest.mark.slow
def test_the_contract_on_more_k() -> None:
    passes(planes_checks.contract, 40, 48, 1024)


@pytest.mark.slow
def test_repairs() -> None:
    passes(planes_checks.repairs)


@pytest.mark.slow
def test_special_values() -> None:
    passes(planes_checks.special_values)


@pytest.mark.slow
def test_ops_that_share_a_plane(gpu: EmulatedGpu) -> None:
    """Forward and both gradients, of three planes; strides that have none are the library's."""
    x, weight, dz = torch.randn(50, 72), torch.randn(30, 72), torch.randn(50, 30)
    for spec in (MAKE_PLANE, *PLANES_GEMMS.values()):
        gpu.handle_of(spec)
    ops = torch.ops.fx_fuser
    plane_of = functools.partial(ops.plane.default._op_dk, EMULATED)

    def product(a: Tensor, b: Tensor, *planes: Tensor) -> Tensor:
        name = PLANES_GEMMS[is_along(a), is_along(b)].name
        return ops.planes_product.default._op_dk(EMULATED, a, b, *planes, name)

    before = emulator.ops.launches.default()
    with emulator.memory():
        px, pw, pz = (plane_of(t, MAKE_PLANE.name) for t in (x, weight, dz))
        assert px.numel() == plane_elements(x)
        for a, b, *planes in (
            (x, weight, px, pw),
            (dz, weight.t(), pz, pw),
            (dz.t(), x.t(), pz, px),
        ):
            found, exact = product(a, b, *planes), a.double() @ b.double().t()
            near = high_accuracy.to_tf32(a).double() @ high_accuracy.to_tf32(b).double().t()
            assert relative(found, exact) <= high_accuracy.ALLOWED * relative(near, exact)
            assert relative(found, exact) > 1e-5  # not the library's fp32
        assert emulator.ops.launches.default() - before == 3 * 2 + 3 * 2
        spread = torch.randn(50, 144)[:, ::2]
        assert not has_plane(spread)
        found = product(spread, weight, plane_of(spread, MAKE_PLANE.name), pw)
        assert relative(found, spread.double() @ weight.double().t()) < 1e-6
