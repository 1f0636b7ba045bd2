"""The pointwise kernel on the CPU emulator, by the checks that it passes on a GPU."""

from __future__ import annotations

import emulator
import native_cases
import pytest
import test_native_gpu as on_gpu
import torch
from emulator.device import EmulatedGpu, in_place_of_cuda

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(80, multiprocessors=3)
    in_place_of_cuda(made, monkeypatch, (native_cases, on_gpu))
    return made


@pytest.mark.slow
def test_layouts() -> None:
    native_cases.check_layouts([2, 3, 5, 7], torch.bfloat16, torch.float32)


def test_in_place() -> None:
    native_cases.check_in_place([3, 4, 5, 7], torch.bfloat16, offset=1)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", on_gpu.examples())
def test_values(name: str) -> None:
    on_gpu.test_values(name, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_of_two_zeros(name: str) -> None:
    on_gpu.test_of_two_zeros(name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", native_cases.FLOATS, ids=str)
@pytest.mark.parametrize("shape", [[5], [7, 33], [2, 8, 4, 8]], ids=str)
def test_every_layout(shape: list[int], dtype: torch.dtype) -> None:
    on_gpu.test_layouts(shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", on_gpu.examples())
@pytest.mark.parametrize("dtype", native_cases.FLOATS, ids=str)
def test_values_of_every_type(name: str, dtype: torch.dtype) -> None:
    on_gpu.test_values(name, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        on_gpu.test_nan_and_infinity,
        on_gpu.test_many_operands,
        on_gpu.test_more_dimensions_than_the_kernel_walks,
        on_gpu.test_transposed_out,
    ],
)
def test_more(check) -> None:
    check()
