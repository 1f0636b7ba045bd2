"""Option "save": what a fused site keeps for its backward, and that its gradients are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import CONV, CPU_OPS, MUL_MUL, assert_same_as_eager, fresh  # noqa: F401
from helpers import slow_but
from sm90 import gpu
from torch import Tensor, nn

import fx_fuser
from benchmarks.measure import float32_settings
from fx_fuser.testing import assert_equivalent

M, N, K = 12, 40, 6


class Gate(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N, bias)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z * torch.sigmoid(z) * 2.0


class Block(nn.Module):
    def __init__(self, train: bool = True) -> None:
        super().__init__()
        # More channels than the direct convolution takes, whose backward keeps no product anyway.
        self.conv, self.norm = nn.Conv2d(9, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.norm.train(train)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) * 0.5


CASES = {
    "linear": (Gate, (M, K), M * N),
    "linear without bias": (lambda: Gate(False), (M, K), M * N),
    "conv and BatchNorm": (Block, (2, 9, 9, 7), 2 * 16 * 9 * 7),
    "conv and frozen BatchNorm": (lambda: Block(False), (2, 9, 9, 7), 2 * 16 * 9 * 7),
}
cases = pytest.mark.parametrize("make, shape, product", CASES.values(), ids=CASES.keys())


def saved_elements(model: nn.Module, x: Tensor, options: dict[str, Any]) -> int:
    """The largest tensor that the compiled forward keeps for backward."""
    y = torch.compile(model, backend="fx_fuser", options=options)(x)
    assert y.grad_fn is not None
    return max(t.numel() for t in y.grad_fn.saved_tensors if t is not None)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.each_once
@cases
@pytest.mark.parametrize("inner", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_memory_keeps_no_product(make: Any, shape: Any, product: int, inner: str) -> None:
    kept = {}
    for save in ("auto", "speed", "memory"):
        torch._dynamo.reset()
        x = torch.randn(shape, requires_grad=True)
        kept[save] = saved_elements(make(), x, {**CPU_OPS, "save": save, "inner": inner})
    assert kept["auto"] == kept["speed"] == product
    assert kept["memory"] < product


@pytest.mark.one_in(2)
@cases
@pytest.mark.parametrize("save", ["speed", "memory"])
def test_gradients(make: Any, shape: Any, product: int, save: str) -> None:
    model, x = make(), torch.randn(shape, requires_grad=True)
    pattern = MUL_MUL if len(shape) == 2 else CONV
    in_training = pattern == CONV and model.norm.training
    no_bound = ("grad conv.bias",) if in_training else ()
    assert_same_as_eager(model, (x,), {pattern: 1}, no_bound=no_bound, save=save)


@cases
def test_explain_says_how_much(make: Any, shape: Any, product: int) -> None:
    kept = {}
    for save in ("speed", "memory"):
        x = torch.randn(shape, requires_grad=True)
        model = make()
        report = fx_fuser.explain(model, x, options={**CPU_OPS, "save": save})
        (site,) = report.fused
        kept[save] = site.bytes_kept
        assert "Kept for the backward pass: " in str(report)
    is_frozen = isinstance(model, Block) and not model.norm.training
    vectors = 4 * 2 * 16 if is_frozen else 0  # the running statistics
    assert kept["memory"] == 4 * x.numel() + vectors
    assert kept["speed"] == kept["memory"] + 4 * product


def test_under_autocast_the_casts_are_kept() -> None:
    x = torch.randn(M, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        report = fx_fuser.explain(Gate(), x, options={**CPU_OPS, "save": "speed"})
    (site,) = report.fused
    assert site.bytes_kept == 2 * (M * K + N * K + M * N)  # x, weight and the product


def test_a_tensor_that_two_sites_keep_is_one() -> None:
    first, second = Gate(), Gate()
    x = torch.randn(M, K, requires_grad=True)
    report = fx_fuser.explain(lambda x: first(x) * second(x), x, options=CPU_OPS)
    assert len(report.fused) == 2
    elements = M * K + 2 * M * N
    assert report.keeping == f"Kept for the backward pass: {4 * elements / 1000:.3g} kB"


def test_nothing_is_kept_without_a_backward() -> None:
    report = fx_fuser.explain(Gate(), torch.randn(M, K), train=False, options={"cpu_ops": True})
    (site,) = report.fused
    assert site.bytes_kept == 0
    assert "kept for" not in str(report)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@cases
def test_gradients_on_a_gpu(make: Any, shape: Any, product: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    model = make().cuda().to(dtype)
    options = {"inner": "aot_eager", "strict": True, "plan": "always", "save": "memory"}
    with float32_settings("fp32", cudnn_tf32=False):
        assert_equivalent(model, (x,), True, options)
        assert saved_elements(model, x, options) < product
