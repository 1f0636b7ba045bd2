"""The whole path on a CUDA device: unmodified models, our kernels, against float64 and eager."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import fx_fuser
from benchmarks import measure
from benchmarks.measure import float32_settings
from benchmarks.problems import PROBLEMS
from fx_fuser.anchors.linear import PRODUCT_ALONE
from fx_fuser.native import load
from fx_fuser.planning import timing

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


# ---- products of our own, and the plan that takes or leaves them ---------------------------------

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="the kernels are sm_90a's")


def launched(step: Callable[[], object]) -> set[str]:
    """Names of the kernels that a call launches."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


class Large(nn.Module):
    def __init__(self, k: int = 2048, n: int = 2048, form: str = "swish") -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(k, n), form
        self.scale = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return F.silu(z) * self.scale if self.form == "swish" else z + self.scale * torch.sigmoid(z)


@hopper
@pytest.mark.parametrize("form", ["swish", "residual"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_split_product(form: str, train: bool, inner: str) -> None:
    torch.manual_seed(5)
    model = Large(form=form).cuda()
    x = torch.randn(3, 344, 2048, device="cuda", requires_grad=train)
    assert_as_exact_as_eager(model, x, backward=train, options={"inner": inner})
    compiled = torch.compile(model, backend="fx_fuser", options={"plan": "always"})
    with torch.set_grad_enabled(train):
        kernels = launched(lambda: compiled(x).sum().backward() if train else compiled(x))
    assert "fx_fuser_linear_split" in kernels
    assert ("fx_fuser_linear_split_columns" in kernels) == train


@hopper
@pytest.mark.parametrize("scale", [1.0, 1e-10, 1e6])
@pytest.mark.parametrize("rows", [1032, 1023])  # 1023: rows of the transposed x are unaligned
def test_split_backward_keeps_small_gradients_exact(rows: int, scale: float) -> None:
    torch.manual_seed(6)
    model, x = Large().cuda(), torch.randn(rows, 2048, device="cuda", requires_grad=True)
    g = torch.randn(rows, 2048, device="cuda") * scale
    compiled = torch.compile(model, backend="fx_fuser", options={"plan": "always"})

    def gradients(call: Callable, x: Tensor, g: Tensor, model: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(call(x), [x, *model.parameters()], g))

    exact_model = copy.deepcopy(model).double()
    exact_x = x.detach().double().requires_grad_()
    exact = gradients(exact_model, exact_x, g.double(), exact_model)
    eager, ours = gradients(model, x, g, model), gradients(compiled, x, g, model)
    for mine, other, truth in zip(ours, eager, exact, strict=True):
        assert relative_error(mine, truth) <= max(2 * relative_error(other, truth), 6e-7)


def test_the_gpus_part_of_a_step_hides_the_hosts() -> None:
    x = torch.randn(4096, 4096, device="cuda")

    def slow_host() -> Tensor:
        time.sleep(2e-3)
        return x[0] + 1

    # At most 67 TFLOP/s: the product takes the GPU 2 ms, the sum some microseconds.
    steps = {"slow host": slow_host, "slow GPU": lambda: x @ x}
    found = measure.gpu_ms(steps, [], torch.device("cuda", 0))
    assert 0 < found["slow host"] < 0.5 < found["slow GPU"]
    assert measure.gpu_ms({}, [], torch.device("cuda", 0)) == {}


def test_a_host_that_slows_down_is_no_time_of_the_gpus() -> None:
    """The flushes are counted by the second call; from the third on the host takes 2 ms more."""
    x = torch.randn(4096, 4096, device="cuda")
    calls = itertools.count(1)

    def slowing() -> Tensor:
        if next(calls) > 2:
            time.sleep(2e-3)
        return x + 1

    ways = [timing.Candidate(slowing), timing.Candidate(lambda: x + 1)]
    slow, prompt = (took.gpu for took in timing.times_of(ways, torch.device("cuda", 0)))
    assert abs(slow - prompt) <= 0.3 * prompt + 5e-3


@hopper
def test_a_turned_product_is_made_in_parts() -> None:
    """Of rows that are split in little memory, the last part smaller than the others."""
    torch.manual_seed(7)
    dz, x = torch.randn(1024, 5000, device="cuda"), torch.randn(1024, 8192, device="cuda")
    load.prepare([PRODUCT_ALONE], "cuda")
    kernel = PRODUCT_ALONE.name
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.ops.fx_fuser.split_product.default(dz.t(), x.t(), kernel)
    extra = torch.cuda.max_memory_allocated() - before - found.nbytes
    assert 6 << 20 < extra < 12 << 20  # 20 for all rows at once, nothing by the library
    exact = dz.double().t() @ x.double()
    assert relative_error(found, exact) <= 4e-7
    assert relative_error(found[4500:], exact[4500:]) <= 4e-7


@hopper
@pytest.mark.parametrize("fp32, kernel", [("split", True), ("ieee", False), ("tf32", False)])
def test_option_fp32(fp32: str, kernel: bool) -> None:
    torch._dynamo.reset()
    model, x = Large().cuda(), torch.randn(1024, 2048, device="cuda")
    options = {"fp32": fp32, "plan": "always", "strict": True}
    compiled = torch.compile(model, backend="fx_fuser", options=options)
    with torch.no_grad():
        assert ("fx_fuser_linear_split" in launched(lambda: compiled(x))) == kernel
        exact = copy.deepcopy(model).double()(x.double())
        assert relative_error(compiled(x), exact) <= (1e-3 if fp32 == "tf32" else 1e-6)


@hopper
def test_the_plan_measures_takes_and_leaves(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large fp32 product is taken, a tiny one left to Inductor; both answers are remembered."""
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(timing, "_known", {})
    for k, n, fused in ((4096, 4096, 1), (64, 64, 0)):
        torch._dynamo.reset()
        counters.clear()
        model, x = Large(k, n).cuda(), torch.randn(1024, k, device="cuda")
        state = torch.cuda.get_rng_state()
        compiled = torch.compile(model, backend="fx_fuser", options={"strict": True})
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
            report = str(fx_fuser.explain(model, x))
        assert fused in (None, sum(counters["fx_fuser"].values()))
        assert sum(counters["fx_fuser_left"].values()) == 1 - fused
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert "split" in report and " ms" in report
    assert len(list((tmp_path / "plans").glob("*.json"))) == 2

    def measured(*_: object) -> None:
        raise AssertionError("it was known already")

    monkeypatch.setattr(timing, "_known", {})
    monkeypatch.setattr(timing, "_measure", measured)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="fx_fuser", options={"strict": True})(x)


@hopper
def test_a_dynamic_batch_falls_back_where_it_must() -> None:
    """One graph for all M: the split product where it pays, the library's where it does not."""
    torch._dynamo.reset()
    model = Large().cuda()
    options = {"strict": True, "plan": "always"}
    compiled = torch.compile(model, backend="fx_fuser", dynamic=True, options=options)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for m in (1024, 1, 7, 515, 0):
            x = torch.randn(m, 2048, device="cuda")
            value = compiled(x)
            assert value.shape == (m, 2048)
            if m:
                assert relative_error(value, exact(x.double())) <= 1e-6


@hopper
def test_a_weight_changed_behind_autograds_back() -> None:
    """Nothing of a weight outlives a call: `.data`, `copy_`, growing and shrinking."""
    torch._dynamo.reset()
    model, x = Large().cuda(), torch.randn(1024, 2048, device="cuda")
    compiled = torch.compile(model, backend="fx_fuser", options={"plan": "always"})
    with torch.no_grad():
        for factor in (1.0, 1e-6, 1e9, 1e-12, 1e3):
            model.linear.weight.data.mul_(factor)
            exact = copy.deepcopy(model).double()(x.double())
            assert relative_error(compiled(x), exact) <= 1e-6


@hopper
def test_data_that_splits_cannot_hold_goes_to_the_library() -> None:
    """Right from the first call on; from the second on the library makes the product."""

    class Masked(nn.Module):  # an epilogue that no other test has: their kernels are not to rest
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2048, 2048, bias=False)
            self.register_buffer("mask", torch.rand(2048) < 0.9)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.linear(x)) * self.mask

    torch._dynamo.reset()
    model, x = Masked().cuda(), torch.randn(1024, 2048, device="cuda")
    compiled = torch.compile(model, backend="fx_fuser", options={"plan": "always"})
    with torch.no_grad():
        assert "fx_fuser_linear_split" in launched(lambda: compiled(x))
        columns = 10.0 ** torch.linspace(-4, 4, 2048, device="cuda")
        model.linear.weight.div_(columns)
        exact = copy.deepcopy(model).double()((x * columns).double())
        for _ in range(3):
            assert relative_error(compiled(x * columns), exact) <= 1e-6
            torch.cuda.synchronize()
        assert "fx_fuser_linear_split" not in launched(lambda: compiled(x * columns))
        torch._dynamo.reset()  # what is compiled next is measured with the kernel awake
        again = torch.compile(model, backend="fx_fuser")
        assert "fx_fuser_linear_split" in launched(lambda: again(x))


@hopper
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["59", "70", "73"])
def test_the_seed_problems_are_close_to_eager(name: str, train: bool) -> None:
    """At full size, element by element, over five seeds."""
    torch._dynamo.reset()
    problem = PROBLEMS[name]
    device = torch.device("cuda")
    with device:
        model, x = problem.make(problem.full, device)
        eager, fused = model.train(train), copy.deepcopy(model)
        compiled = torch.compile(fused, backend="fx_fuser", options={"strict": True})
        with torch.no_grad(), float32_settings("fp32", cudnn_tf32=False):
            for seed in range(5):
                torch.manual_seed(seed)
                x = torch.randn_like(x)
                torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
    for mine, its in zip(fused.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_convolution_in_16_bits_is_settled_by_measurement(train: bool) -> None:
    """Fused, or left to Inductor, which then gives what it always gives."""
    torch._dynamo.reset()
    counters.clear()
    model = ConvNorm(64).to("cuda", torch.bfloat16).train(train)
    x = torch.randn(16, 8, 64, 64, device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    value = torch.compile(model, backend="fx_fuser", options={"strict": True})(x)
    assert sum(counters["fx_fuser"].values()) + sum(counters["fx_fuser_left"].values()) == 1
    exact = copy.deepcopy(twin).double()(x.double())
    assert relative_error(value, exact) <= 2 * relative_error(twin(x), exact)
