"""On a GPU: fp32 gemms of fx_fuser's own, and the plan that takes or leaves them."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_gpu import ConvNorm, assert_as_exact_as_eager, relative_error
from torch import Tensor
from torch._dynamo.utils import counters

import fx_fuser
from benchmarks import measure
from benchmarks.measure import float32_settings
from benchmarks.problems import PROBLEMS
from fx_fuser.kernels.split import SPLIT_GEMM
from fx_fuser.native import load, store
from fx_fuser.planning import timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    load.prepare([SPLIT_GEMM], "cuda")
    kernel = SPLIT_GEMM.name
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
    assert len(store.timings(store.cache_dir())) == 2

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
