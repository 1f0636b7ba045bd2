"""Which kernels are offered at a site, whatever each of them takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_cases import GPU, linear_tensors, swish
from toolchains import needs_compilers
from torch import Tensor

from fx_fuser import kernels
from fx_fuser.kernels import KERNELS
from fx_fuser.options import Options
from fx_fuser.planning.case import MatchCase

LAST = torch.channels_last


def offered(match: Any, **options: Any) -> list[str]:
    return [
        choices["product"] for choices in kernels.candidates(MatchCase(match, Options(**options)))
    ]


def relu_of_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.hardswish(F.conv2d(x, weight, bias))


def images(train: bool) -> list[Tensor]:
    x = torch.randn(2, 16, 14, 14, dtype=torch.bfloat16).to(memory_format=LAST)
    weight = torch.randn(8, 16, 1, 1, dtype=torch.bfloat16)
    return [x, weight.requires_grad_(train), torch.zeros(8, dtype=torch.bfloat16)]


def test_a_kernel_stands_under_its_name() -> None:
    assert all(name == kernel.name and kernel.sites for name, kernel in KERNELS.items())
    assert all(kernel.examples("sm_90a") for kernel in KERNELS.values())


def test_the_library_is_offered_first_and_once(match_of: Any, on_gpu: Any) -> None:
    assert offered(match_of(swish, *linear_tensors())) == ["library", "split"]
    assert offered(match_of(swish, *linear_tensors()), fp32="tf32") == ["library", "dense"]
    assert offered(match_of(swish, *linear_tensors()), fp32="ieee") == ["library"]


@needs_compilers  # the launcher says which convolutions kernels take
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("plan", ["measure", "always"])
def test_where_times_decide_a_kernel_for_inference_is_not_offered_in_training(
    match_of: Any, on_gpu: Any, train: bool, plan: str
) -> None:
    """What is gained there is not measured: the inner compiler's passes are others."""
    assert KERNELS["implicit"].for_inference
    match = match_of(relu_of_conv, *images(train), options={"plan": "always"})
    assert ("implicit" in offered(match, plan=plan)) == (not train or plan == "always")


def test_a_kernel_of_another_gpu_is_not_offered(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert offered(match_of(swish, *linear_tensors()), fp32="tf32") == ["library"]
    assert offered(match_of(swish, *linear_tensors())) == ["library", "split"]


def test_on_a_cpu_no_kernel_is_offered(match_of: Any) -> None:
    assert offered(match_of(swish, *linear_tensors())) == ["library"]
    assert GPU.type == "cuda" and KERNELS["folded"].needs_cuda is False
