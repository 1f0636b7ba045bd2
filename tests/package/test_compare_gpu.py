"""`compare` on a GPU: each verdict on a net that earns it, and the model untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fx_fuser
from fx_fuser import Comparison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def mlp(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
    return made.to(CUDA, dtype)


def compared(model: Any, *inputs: Any, **given: Any) -> Comparison:
    """Says that the model's parameters, gradients and the random states are as before."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [(p.detach().clone(), p.grad) for p in parameters]
    state = torch.cuda.get_rng_state()
    found = fx_fuser.compare(model, *inputs, seconds=2.0, progress=False, **given)
    for parameter, (value, grad) in zip(parameters, before):
        assert torch.equal(parameter, value) and parameter.grad is grad
    assert torch.equal(torch.cuda.get_rng_state(), state)
    return found


@pytest.fixture
def small_memory() -> Iterator[int]:
    """Bytes that this process may take from now on."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(CUDA).total_memory
    held = torch.cuda.memory_reserved(CUDA)
    torch.cuda.set_per_process_memory_fraction((held + 2**32) / whole)
    yield 2**32
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the split gemm gains this on Hopper",
)
@pytest.mark.parametrize("train", [False, True])
def test_fp32_gemms_are_worth_it(train: bool) -> None:
    found = compared(mlp(2048), torch.randn(4096, 2048, device=CUDA), train=train)
    assert found.judged.word == "USE IT" and found.use and not found.launch_bound, str(found)
    assert list(found.columns) == ["eager", "inductor", "fx_fuser", "inductor_tf32"]
    assert all(column.ran for column in found.columns.values())
    mine, tf32 = found.columns["fx_fuser"], found.columns["inductor_tf32"]
    assert mine.gpu_ms and mine.peak_mib and mine.first_s and mine.faults == []
    assert mine.kinds["fx_fuser"] > 0.5 * mine.gpu_ms
    assert (tf32.error or 0) > 10 * (mine.error or 1)  # it did run in TF32


def test_a_small_net_is_launch_bound() -> None:
    layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.SiLU())]
    x = torch.randn(8, 64, device=CUDA)
    found = compared(nn.Sequential(*layers).to(CUDA), x, train=False, reduce_overhead=True)
    assert found.launch_bound, str(found)
    assert found.columns["fx_fuser_reduce_overhead"].ran
    assert found.columns["inductor_reduce_overhead"].ran


def test_16_bit_linears_gain_nothing() -> None:
    x = torch.randn(8192, 2048, device=CUDA, dtype=torch.bfloat16)
    found = compared(mlp(2048, torch.bfloat16), x, train=False)
    assert found.judged.word == "NO GAIN" and not found.use, str(found)
    assert list(found.columns) == ["eager", "inductor", "fx_fuser"]


def test_out_of_memory_in_eager_mode_alone(small_memory: int) -> None:
    """The inputs and their copy take 44 %, what eager mode keeps another 66."""

    def three(x: Tensor) -> Tensor:
        a, b, c = x + 1, x + 2, x + 3
        return (a * b * c).sum()

    x = torch.randn(small_memory * 22 // 100 // 4, device=CUDA)
    found = compared(three, x)
    assert found.columns["eager"].out_of_memory, str(found)
    assert found.columns["inductor"].ran and found.columns["fx_fuser"].ran
    assert found.judged.word in ("NO GAIN", "USE IT") and found.columns["fx_fuser"].faults is None
