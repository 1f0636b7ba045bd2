"""Planes on the CPU emulator, by the checks that are written for a GPU. The library's gemm of 16
bits with an fp32 result, which torch has on a GPU alone, sums in float64 here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import checks
import emulator
import planes_checks
import pytest
import torch
from checks import passes
from emulator.device import SCHEDULES, EmulatedGpu, in_place_of_cuda
from torch import Tensor

from benchmarks import linear_sm90, planes, sm90
from fx_fuser.kernels.planes import FACT_WORDS, PLANES

EMULATED = torch._C.DispatchKey.PrivateUse1  # the shim's host code of the emulated device

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


class Ops:
    """The shim's functions. remembers: after slow repairs the library may be taken; else kernels
    that nobody has called before do each call."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu = gpu
        self.remembers = False
        self.calls = 0
        self.kernel()

    def kernel(self) -> str:
        spec = PLANES if self.remembers else dataclasses.replace(PLANES, use=str(self.calls))
        self.calls += 1
        self.gpu.handle_of(spec)
        return spec.name

    def call(self, op: Any, *given: Any) -> list[Tensor]:
        """The same values by several schedules."""
        found: list[list[Tensor]] = []
        for settings in SCHEDULES[: 1 if self.remembers else 2]:
            settings.use()
            with emulator.memory():
                made = op._op_dk(EMULATED, *given[:-1], self.kernel())
                found.append([out_of_guarded(one) for one in made])
        for a, b in zip(*(found * 2)[:2]):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        return found[0]


def out_of_guarded(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.int32:  # facts: what is behind those of the blocks is not set
        tensor = tensor[: 2 + int(tensor[1])]
        return torch.cat([tensor, tensor.new_zeros(FACT_WORDS - len(tensor))])
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


@pytest.fixture(autouse=True)
def of_shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    made = EmulatedGpu(90, multiprocessors=4)
    in_place_of_cuda(made, monkeypatch, (checks, linear_sm90, planes_checks, sm90))
    own, ops = Ops(made), torch.ops.fx_fuser
    for name, op in (("make_plane", ops.plane), ("multiply_planes", ops.planes_product)):
        monkeypatch.setattr(planes, name, functools.partial(own.call, op.default))
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm.dtype", "bmm.dtype"):
        library.impl(name, lambda a, b, _: (a.double() @ b.double()).float(), "CPU")
    yield own
    library._destroy()


def test_planes() -> None:
    passes(planes_checks.planes)


def test_products_of_planes() -> None:
    passes(planes_checks.products, 70, 90, 200)


@pytest.mark.slow
def test_the_contract_on_data_that_breaks_planes() -> None:
    passes(planes_checks.contract, 40, 48, 64)


@pytest.mark.slow
def test_the_contract_on_more_k() -> None:
    passes(planes_checks.contract, 40, 48, 1024)


def test_repairs() -> None:
    passes(planes_checks.repairs)


def test_special_values() -> None:
    passes(planes_checks.special_values)


def test_data_that_planes_do_not_hold_go_to_the_library(of_shim: Ops) -> None:
    """After calls whose repairs took too long, the next ones are the library's fp32, for a while;
    those of other sizes are not."""
    of_shim.remembers = True
    x, weight = torch.randn(64, 128), torch.randn(128, 96)
    spread = torch.logspace(-6, 6, 128)
    broken = planes.Plane.of(x * spread), planes.Plane.of(weight / spread[:, None])
    sound = planes.Plane.of(x), planes.Plane.of(weight)
    for _ in range(40):
        _, factors = planes.scaled_product(*broken)
        if bool((factors == 1).all()):
            break
    else:
        pytest.fail("the library is never taken")
    assert torch.equal(planes.product(*broken), broken[0].tensor @ broken[1].tensor)
    other = planes.Plane.of(x[:40].contiguous())
    _, factors = planes.scaled_product(other, sound[1])
    assert not bool((factors == 1).all())


def test_torch_may_refuse_an_fp32_result() -> None:
    """As it does while fp16 sums are allowed: then the library's fp32 is taken."""
    x, weight = torch.randn(20, 30), torch.randn(30, 24)
    library = torch.library.Library("aten", "IMPL")

    def refuse(*_: Any) -> Tensor:
        raise RuntimeError("not with fp16 sums")

    library.impl("mm.dtype", refuse, "CPU", allow_override=True)
    found = planes_checks.multiply(x, weight)
    library._destroy()
    assert torch.equal(found, x @ weight)
