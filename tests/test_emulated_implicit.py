"""The implicit gemm on the CPU: its kernel and its host code on an emulated GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import emulator
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import conv_sm90, implicit
from benchmarks.conv_sm90 import HALVES
from fx_fuser.native.kernel_spec import KernelSpec

CPU = torch.device("cpu")
LAST = torch.channels_last
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))


def launch(
    spec: KernelSpec,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out: Tensor,
    c: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    capability: int = 90,
    settings: emulator.Settings | None = None,
) -> bool:
    """As kernels.implicit, on tensors beside pages that nobody may touch."""
    handle = emulator.load(spec, capability)
    (settings or emulator.Settings()).use()
    with emulator.memory():
        given = [emulator.guarded(v) for v in (x, weight, *operands)]
        made = [v if v is None else emulator.guarded(v) for v in (out, c)]
        geometry = (stride, padding, dilation)
        taken: bool = emulator.ops.implicit.default(
            handle, *given[:2], *geometry, *made, given[2:], scalars
        )
        for result, filled in zip((out, c), made):
            if result is not None and filled is not None:
                result.copy_(filled)
    return taken


SETTINGS = [
    emulator.Settings(order, copies, seed, guard_ahead)
    for order, copies, seed, guard_ahead in (
        ("forward", "late", 1, False),
        ("reverse", "at once", 1, True),
        ("random", "random", 2, False),
        ("random", "late", 3, True),
    )
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_random_sizes_and_operands(capability, seed) -> None:
    failures: list[str] = []
    how = functools.partial(launch, capability=capability, settings=SETTINGS[seed])
    implicit.sweep(6, 10 * capability + seed, failures, side=9, launch=how, device=CPU)
    assert not failures
