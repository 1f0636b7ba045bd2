"""The whole path on a CUDA device: unmodified models, our kernels, against float64 and eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Relative Frobenius error that needs no excuse, whatever eager's own: the accuracy contract's for
# fp32 (README), some ulps for float64, one rounding of the result for the 16-bit types.
FLOOR = {
    torch.float32: 4e-7,
    torch.float64: 1e-15,
    torch.bfloat16: 2**-9,
    torch.float16: 2**-12,
}


class Swish(nn.Module):
    """#59's form; K, N odd, so that rows are unaligned."""

    def __init__(self, k: int = 72, n: int = 61) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z * torch.sigmoid(z) * 2.0


class Gate(nn.Module):
    """#70's form, with every operand a tensor."""

    def __init__(self, k: int = 72, n: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n, bias=False)
        self.scale = nn.Parameter(torch.randn(n))
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)) * self.scale + self.shift


class ConvNorm(nn.Module):
    def __init__(self, channels: int = 16, *, bias: bool = True, **conv: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, channels, 3, bias=bias, **conv)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(channels)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) * self.scale


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "swish": (Swish, (33, 72)),
    "swish 3-D": (Swish, (3, 5, 72)),
    "swish 1-D": (Swish, (72,)),
    "gate": (Gate, (2, 17, 72)),
    "conv": (ConvNorm, (5, 8, 13, 11)),
    "conv without bias": (lambda: ConvNorm(bias=False), (5, 8, 12, 12)),
    "conv strided": (lambda: ConvNorm(stride=2, padding=1, dilation=2), (4, 8, 15, 15)),
    "conv grouped": (lambda: ConvNorm(groups=4, padding="same"), (4, 8, 9, 9)),
}


def relative_error(value: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def run(model: nn.Module, call: Callable, x: Tensor, g: Tensor | None) -> list[Tensor]:
    x = x.detach().clone().requires_grad_(g is not None)
    y = call(x)
    found = [y.detach()]
    if g is not None:
        y.backward(g.to(y.dtype))
        found += [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
    return found + [b.clone() for b in model.buffers() if b.is_floating_point()]


def assert_as_exact_as_eager(
    model: nn.Module, x: Tensor, *, backward: bool, fused: int | None = 1, **compile_options: object
) -> None:
    """Outputs, gradients and buffers at most twice as far from float64 as eager's."""
    torch._dynamo.reset()
    counters.clear()
    ours, eager = copy.deepcopy(model), copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    defaults = {"strict": True, "plan": "always", "auto": False}
    options = {**defaults, **compile_options.pop("options", {})}  # type: ignore[dict-item]
    compiled = torch.compile(ours, backend="fx_fuser", options=options, **compile_options)
    g = torch.randn_like(model(x)) if backward else None
    with torch.set_grad_enabled(backward):
        found = run(ours, compiled, x, g)
        expected = run(eager, eager, x, g)
        reference = run(exact, exact, x.double(), g)
    assert fused in (None, sum(counters["fx_fuser"].values()))
    for value, other, truth in zip(found, expected, reference, strict=True):
        assert value.dtype == other.dtype and value.shape == other.shape
        # A bias before a training BatchNorm has gradient zero; what is computed is all rounding.
        if truth.norm() > 1e-6 * max(1.0, float(reference[0].norm())):
            bound = max(2 * relative_error(other, truth), FLOOR[x.dtype])
            assert relative_error(value, truth) <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", CASES)
def test_as_exact_as_eager(case: str, train: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    model = make().to("cuda", dtype).train(train)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    assert_as_exact_as_eager(model, x, backward=train, options={"inner": "aot_eager"})


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", ["swish", "gate", "conv"])
def test_through_inductor(case: str, train: bool) -> None:
    torch.manual_seed(1)
    make, shape = CASES[case]
    model = make().cuda().train(train)
    assert_as_exact_as_eager(model, torch.randn(shape, device="cuda"), backward=train)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_channels_last_in_channels_last_out(train: bool) -> None:
    torch.manual_seed(2)
    model = ConvNorm().cuda().to(memory_format=torch.channels_last).train(train)
    x = torch.randn(4, 8, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    assert_as_exact_as_eager(model, x, backward=train, options={"inner": "aot_eager"})
    compiled = torch.compile(model, backend="fx_fuser", options={"strict": True})
    assert compiled(x).is_contiguous(memory_format=torch.channels_last)


def test_cuda_graphs() -> None:
    """mode="reduce-overhead" captures the op; replays read the inputs of each call."""
    torch._dynamo.reset()
    model = Swish().cuda()
    compiled = torch.compile(
        model, backend="fx_fuser", options={"mode": "reduce-overhead", "plan": "always"}
    )
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            x = torch.randn(64, 72, device="cuda")
            torch.testing.assert_close(compiled(x).clone(), model(x))


def test_side_stream() -> None:
    torch._dynamo.reset()
    model = ConvNorm().cuda().train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fx_fuser", options={"inner": "aot_eager"})
    x = torch.randn(8, 8, 40, 40, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = compiled(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast(where: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)

    class Inside(Swish):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return super().forward(x)

    model = (Inside() if where == "inside" else Swish()).cuda()
    compiled = torch.compile(model, backend="fx_fuser", options={"strict": True, "plan": "always"})
    x = torch.randn(64, 72, device="cuda")
    g = torch.randn(64, 61, device="cuda", dtype=torch.bfloat16)

    def step(f: Callable) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=where == "around"):
            y = f(x)
        y.backward(g)
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return [y.detach(), *grads]

    exact = copy.deepcopy(model).double()
    y = F.silu(exact.linear(x.double())) * 2
    y.backward(g.double())
    truth = [y.detach(), *(p.grad for p in exact.parameters())]
    eager, ours = step(model), step(compiled)
    assert counters["fx_fuser"]["linear_sigmoid_mul_mul"] == 1
    for a, b, t in zip(ours, eager, truth, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, t) <= 2 * relative_error(b, t)


def test_scalar_on_the_cpu() -> None:
    """A 0-d CPU tensor beside CUDA tensors travels as a number, and has its gradient."""
    torch._dynamo.reset()
    counters.clear()
    linear = nn.Linear(16, 16).cuda()
    scale = torch.tensor(1.5, requires_grad=True)

    def f(x: Tensor, s: Tensor) -> Tensor:
        return F.silu(linear(x)) * s

    x = torch.randn(4, 16, device="cuda")
    compiled = torch.compile(f, backend="fx_fuser", options={"strict": True, "inner": "aot_eager"})
    compiled(x, scale).sum().backward()
    ours, scale.grad = scale.grad, None
    f(x, scale).sum().backward()
    assert counters["fx_fuser"]["linear_sigmoid_mul_mul"] == 1
    torch.testing.assert_close(ours, scale.grad)


def test_default_convolution_is_fp32_accurate() -> None:
    """cuDNN allows TF32 by default; a fused convolution does not take it unasked."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)).cuda().eval()
    x = torch.randn(8, 64, 32, 32, device="cuda")
    options = {"strict": True, "plan": "always"}
    compiled = torch.compile(lambda x: model(x) * 2.0, backend="fx_fuser", options=options)
    exact = copy.deepcopy(model).double()(x.double()) * 2
    setting = torch.backends.cudnn.conv.fp32_precision
    with torch.no_grad():
        error = relative_error(compiled(x), exact)
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        try:
            ieee = relative_error(model(x) * 2, exact)
        finally:
            torch.backends.cudnn.conv.fp32_precision = setting
    assert error <= max(1.5 * ieee, FLOOR[torch.float32])


@pytest.mark.slow
def test_more_than_2_31_elements() -> None:
    torch._dynamo.reset()
    n = 2**15
    linear = nn.Linear(8, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2**16 + 3, 8, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(
        lambda x: F.silu(linear(x)) * 2.0,
        backend="fx_fuser",
        options={"strict": True, "plan": "always"},
    )
    with torch.no_grad():
        y = compiled(x)
        for rows in (slice(0, 64), slice(-64, None)):
            torch.testing.assert_close(y[rows], F.silu(linear(x[rows])) * 2.0, rtol=2e-2, atol=1e-2)
