"""The kernel of a head's loss on the CPU emulator, by the checks that it passes on a GPU."""

from __future__ import annotations

import emulator
import head_loss_checks
import pytest
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda

from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(getattr(request, "param", 80), multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, (head_loss_checks,))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [80, 90, 120], indirect=True)
def test_random_sizes_and_labels(gpu: EmulatedGpu) -> None:
    passes(head_loss_checks.sweep, 25, gpu.capability, (4, 3000))


@pytest.mark.slow
def test_rows_of_several_rounds() -> None:
    passes(head_loss_checks.sweep, 4, 1, (2, 20000))


@pytest.mark.slow
def test_special_values() -> None:
    passes(head_loss_checks.special_values, 51)


def test_refusals() -> None:
    passes(head_loss_checks.refusals)


@pytest.mark.parametrize("label", [-1, 24])
def test_a_label_that_is_no_column_stops_the_kernel(label: int) -> None:
    logits = torch.zeros(1, 24, dtype=torch.bfloat16)
    labels, losses = torch.tensor([label]), torch.zeros(1)
    with pytest.raises(RuntimeError, match="__trap"):
        launch.head_loss(spec_of(torch.bfloat16), logits, labels, losses, None, 24, -100)
