"""Attention whose mask adds numbers, on a CUDA device: torch's fused kernels run, and are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attending import BF16, by_formula, check, compiled, sdpa, tensors
from test_attention_bias import LEAST, Bias
from torch import Tensor
from torch._dynamo.utils import counters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, H, L, D = 2, 4, 100, 64
QKV = [(B, H, L, D)] * 3
inf = math.inf
FUSED = {f"aten::_scaled_dot_product_{name}_attention" for name in ("efficient", "cudnn", "flash")}
BACKWARD = {f"{name}_backward" for name in FUSED}
FORMULA = {"aten::bmm", "aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data"}
ON_GPU: dict[str, Any] = {"cpu_ops": False}


def calls(run: Any) -> set[str]:
    """The operations of ATen that a second run calls."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key for event in profile.key_averages()}


def check_on_kernels(attend: Any, inputs: list[Tensor], **options: Any) -> None:
    """A 16-bit kernel rounds probabilities, which the formula does not."""
    run = compiled(attend, **ON_GPU, **options)
    check(by_formula(attend), inputs, run, factor=4)
    assert counters["fx_fuser_masks"]["form"]
    trained = [v for v in inputs if v.requires_grad]

    def step() -> None:
        y = run(*inputs)
        if y.requires_grad:
            torch.autograd.grad(y.float().sum(), trained)

    found = calls(step)
    assert found & FUSED and not found & FORMULA
    assert bool(found & BACKWARD) == run(*inputs).requires_grad


def other_side(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return sdpa(q, k, v, m.permute(2, 0, 1)[None])


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("length", [96, 99, 100])
def test_a_learned_bias(length: int, trains: bool, dtype: torch.dtype) -> None:
    """Also of rows that are not a multiple of 16 bytes."""
    shapes = [*[(B, H, length, D)] * 3, (length, length, H)]
    with torch.set_grad_enabled(trains):
        check_on_kernels(other_side, tensors(*shapes, dtype=dtype, device="cuda"))


def rows_of(fill: float, dtype: torch.dtype) -> Tensor:
    """[1, H, L, S], the last two exchanged in memory: rows that are `fill`, and parts of them."""
    torch.manual_seed(2)
    mask = torch.randn(1, H, L, L)
    mask[:, :, 1::7] = mask[:, :, 3, : L // 2] = fill
    mask[:, 1, 4] = fill
    return mask.to("cuda", dtype).mT.contiguous().mT


FILLS = [-inf, LEAST, -1e20, -1e9, -1e4, -700.0, 3e4, -LEAST, math.nan, inf]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("fill", FILLS)
def test_rows_that_a_kernel_is_not_asked_for(fill: float, trains: bool) -> None:
    """In training heads are twice as large, but the values' are not."""
    inputs = [*tensors(*QKV, device="cuda"), rows_of(fill, BF16)]
    with torch.set_grad_enabled(trains):
        check_on_kernels(lambda q, k, v, m: sdpa(q, k, v, m), inputs)


@pytest.mark.parametrize("fill", [-inf, -65504.0, 3e4])
@pytest.mark.parametrize("trains", [True, False])
def test_rows_in_fp16(fill: float, trains: bool) -> None:
    dtype = torch.float16
    inputs = [*tensors(*QKV, dtype=dtype, device="cuda"), rows_of(fill, dtype)]
    with torch.set_grad_enabled(trains):
        check_on_kernels(lambda q, k, v, m: sdpa(q, k, v, m), inputs)


@pytest.mark.parametrize("head", [128, 160])
def test_large_heads_whose_rows_may_absorb_scores(head: int) -> None:
    """Twice as large, cuDNN does not take them."""
    inputs = [*tensors(*[(B, H, L, head)] * 3, device="cuda"), rows_of(LEAST, BF16)]
    check_on_kernels(lambda q, k, v, m: sdpa(q, k, v, m), inputs)


def test_a_slice_that_is_not_aligned() -> None:
    shapes = [*[(B, H, L, 80)] * 3, (1, H, L, L)]
    check_on_kernels(
        lambda q, k, v, m: sdpa(q[..., 4:68], k[..., 4:68], v[..., 4:68], m.mT),
        tensors(*shapes, device="cuda"),
    )


@pytest.mark.parametrize("trains", [True, False])
def test_t5s_bias_by_inductor(trains: bool) -> None:
    """In AMP, its table in fp32."""
    torch.manual_seed(0)
    net = Bias().cuda()
    x = torch.randn(64, 6, 16, device="cuda")

    def run(of: Any) -> Tensor:
        with torch.autocast("cuda", BF16), torch.set_grad_enabled(trains):
            made: Tensor = of(x)
        return made

    fused = compiled(net, inner="inductor", **ON_GPU)
    mine, theirs = run(fused), run(by_formula(net))
    assert counters["fx_fuser_masks"] == {"form": 1}
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    if trains:
        of = [
            torch.autograd.grad(y.float().sin().sum(), [*net.parameters()]) for y in (mine, theirs)
        ]
        for a, b in zip(*of, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm()
    assert calls(lambda: run(fused)) & FUSED


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("removed", [True, False])
def test_after_a_backward_whose_gradient_had_other_strides(removed: bool, inner: str) -> None:
    """torch 2.11 keeps cuDNN's backward for the sizes and strides of q, k and v, with the strides
    of the first gradient. Here eager mode has the first; H100, wav2vec2: wrong gradients."""

    def attend(x: Tensor, m: Tensor) -> Tensor:
        q, k, v = (t.view(B, L, H, D).transpose(1, 2) for t in x.chunk(3, -1))
        shown = torch.ones(L, L, dtype=torch.bool, device=x.device)
        return sdpa(q, k, v, shown if removed else (m > -100).expand(B, 1, L, L))

    def first(x: Tensor) -> Tensor:
        q, k, v = (t.view(B, L, H, D).transpose(1, 2) for t in x.chunk(3, -1))
        return sdpa(q, k, v).transpose(1, 2).reshape(B, L, H * D)

    x, m = tensors((B, L, 3 * H * D), (B, 1, L, 1), device="cuda")
    m.requires_grad_(False)
    y = first(x)
    torch.autograd.grad(y, x, torch.randn_like(y))
    run = compiled(attend, **ON_GPU, inner=inner)
    check(by_formula(attend), [x, m], lambda *given: run(*given).contiguous(), factor=4)
    assert counters["fx_fuser_masks"] == {"open" if removed else "form": 1}
