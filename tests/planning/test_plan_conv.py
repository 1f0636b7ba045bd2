"""Which convolutions run on kernels of their own, by made-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_cases import (
    BOTH_WAYS,
    CONV,
    DIRECT,
    LIBRARY,
    decide,
    half_norm,
    linear_tensors,
    scaled_norm,
    swish,
)
from torch import Tensor

from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.kernels.direct import CONV_DIRECT_BACKWARD
from fx_fuser.native.kernel_spec import CUDA_TYPES, KernelSpec
from fx_fuser.ops import apply, calls, run
from fx_fuser.planning import bench_ops, case
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.timing import Timing


@pytest.mark.slow
def test_the_librarys_convolution_is_left(match_of: Any, on_gpu: Any, cudnn_precision: Any) -> None:
    """The inner compiler calls it, too, in the same precision."""
    exact = match_of(scaled_norm, torch.randn(2, 9, 8, 8), torch.randn(4, 9, 3, 3))
    double = match_of(scaled_norm, *(torch.randn(2, 3, 3, 3).double() for _ in range(2)))
    for precision in ("tf32", "ieee"):
        cudnn_precision(precision)
        for match in (half_norm(match_of), exact, double):
            decision = decide(match)
            assert isinstance(decision, Refusal) and "calls the library's" in decision.reason
            assert ("'fp32': 'split'" in decision.help) == (match is exact and precision == "tf32")
            assert decide(match, plan="always") == Plan(True, CONV, "library")
            assert decide(match, inner="aot_eager").choices == CONV  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", ["follow", "ieee"])  # which is about fp32
@pytest.mark.parametrize(
    "times, product",
    [
        ([2.0, 0.9, 1.0], "direct"),
        ([0.5, 0.4, 1.0], "direct"),
        ([0.5, 0.6, 1.0], None),
        ([2.0, 0.99, 1.0], None),
    ],
)
def test_the_direct_convolution_in_16_bits(
    match_of: Any, on_gpu: Any, times: list[float], product: str | None, option: str, dtype: Any
) -> None:
    """Its baseline is the library in channels_last, too, for which Inductor turns whole graphs."""
    match = half_norm(match_of, channels=3, dtype=dtype)
    on_gpu(*times)
    decision = decide(match, fp32=option)
    assert getattr(decision, "choices", {"product": None})["product"] == product
    assert "library {:g} ms, direct {:g} ms, in channels_last {:g} ms".format(*times) in str(
        decision
    )


@pytest.fixture
def cudnn_precision() -> Iterator[Callable[[str], None]]:
    conv: Any = torch.backends.cudnn.conv
    setting = conv.fp32_precision
    yield lambda precision: setattr(conv, "fp32_precision", precision)
    conv.fp32_precision = setting


@pytest.mark.parametrize(
    "fp32, torchs, fused",
    [
        *(("split", "tf32", True), ("ieee", "tf32", True), ("tf32", "ieee", False)),
        *(("split", "ieee", False), ("ieee", "ieee", False), ("tf32", "tf32", False)),
    ],
)
def test_exactness_that_torchs_settings_would_not_give_is_fused_always(
    match_of: Any, on_gpu: Any, cudnn_precision: Any, fp32: str, torchs: str, fused: bool
) -> None:
    cudnn_precision(torchs)
    match = match_of(scaled_norm, torch.randn(2, 9, 8, 8), torch.randn(4, 9, 3, 3))
    decision = decide(match, fp32=fp32)
    assert getattr(decision, "choices", None) == (CONV if fused else None)
    assert isinstance(decide(half_norm(match_of), fp32=fp32), Refusal)


@pytest.mark.parametrize(
    "lying, channels_last, product", [(0.5, 0.99, None), (0.99, 0.5, None), (0.99, 0.99, "direct")]
)
def test_where_cudnn_may_take_tf32_that_is_a_baseline(
    match_of: Any, on_gpu: Any, lying: float, channels_last: float, product: str | None
) -> None:
    """It is the default, and what the untouched model runs in."""
    on_gpu(1.0, 0.9, lying, channels_last)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    decision = decide(match)
    assert getattr(decision, "choices", {"product": None})["product"] == product
    assert product or "'fp32': 'split'" in decision.help
    note = "library 1 ms, direct 0.9 ms, in TF32 {:g} ms, in TF32 and channels_last {:g} ms"
    assert note.format(lying, channels_last) in str(decision)


@pytest.mark.parametrize("mode, fused", [(None, False), ("reduce-overhead", True)])
def test_the_hosts_time_counts_against_our_kernels(
    match_of: Any, on_gpu: Any, mode: str | None, fused: bool
) -> None:
    """But not where a CUDA graph is replayed."""
    on_gpu(1.0, Timing(0.5, 1.0), 2.0, 2.0)
    direct = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    for match in (direct, match_of(swish, *linear_tensors())):
        decision = decide(match, mode=mode)
        assert isinstance(decision, Plan) == fused
        assert ("mode='reduce-overhead'" in str(decision)) != fused
    on_gpu(1.0, Timing(0.5, 0.8), 2.0, 2.0)
    decision = decide(direct)
    assert isinstance(decision, Plan) and "direct 0.8 ms of the host" in decision.note
    on_gpu(1.0, Timing(1.5, 2.0), 2.0, 2.0)  # the GPU's time, too
    assert "reduce-overhead" not in str(decide(direct))


@pytest.mark.parametrize(
    "library, mode, fused",
    [(0.15, None, False), (0.15, "reduce-overhead", True), (0.3, None, True)],
)
def test_a_training_step_that_the_host_limits_is_left(
    match_of: Any, on_gpu: Any, library: float, mode: str | None, fused: bool
) -> None:
    """The host's part of a step is ten calls of ours, here 0.25 ms."""
    on_gpu(library, Timing(0.5 * library, 0.025), 0.05, 0.05)
    x, weight, bias = linear_tensors()
    decision = decide(match_of(swish, x, weight.requires_grad_(), bias), mode=mode)
    assert isinstance(decision, Plan) == fused
    assert ("mode='reduce-overhead'" in str(decision)) != fused
    on_gpu(library, Timing(0.5 * library, 0.025))
    assert isinstance(decide(match_of(swish, x, weight.detach(), bias), mode=mode), Plan)


@pytest.mark.parametrize("direct, product", [(0.4, "direct"), (0.5, None), (2.0, None)])
def test_the_direct_convolution_has_the_same_baselines(
    match_of: Any, on_gpu: Any, direct: float, product: str | None
) -> None:
    on_gpu(1.0, direct, 0.9, 0.5)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    choices = getattr(decide(match), "choices", {"product": None})
    assert choices["product"] == product


@pytest.mark.parametrize("direct, choices", [(0.9, DIRECT), (0.99, CONV), (2.0, CONV)])
def test_the_direct_convolution_is_taken_where_it_is_faster(
    match_of: Any, on_gpu: Any, direct: float, choices: Any
) -> None:
    on_gpu(1.0, direct)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    note = f"library 1 ms, direct {direct:g} ms"
    assert decide(match, fp32="split") == Plan(True, choices, note)


@pytest.mark.parametrize(
    "times, choices",
    [
        ([1.0, 0.9, 0.8], BOTH_WAYS),
        ([1.0, 0.8, 0.9], DIRECT),
        ([1.0, 1.1, 0.8], BOTH_WAYS),
        ([1.0, 1.1, 0.99], None),
    ],
)
def test_in_training_forward_and_backward_are_judged_together(
    match_of: Any, on_gpu: Any, times: list[float], choices: Any
) -> None:
    on_gpu(*times)
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), weight)
    note = "library {:g} ms, direct {:g} ms, direct in both directions {:g} ms".format(*times)
    decision = decide(match)
    assert getattr(decision, "choices", None) == choices and note in str(decision)


@pytest.mark.parametrize(
    "times, auto, speed, memory",
    [
        ([1.0, 0.8, 0.81], BOTH_WAYS, DIRECT, BOTH_WAYS),
        ([1.0, 0.8, 0.9], DIRECT, DIRECT, BOTH_WAYS),
        ([1.0, 0.97, 0.985], BOTH_WAYS, DIRECT, BOTH_WAYS),  # the faster decides whether it gains
        ([1.0, 1.1, 1.2], None, None, BOTH_WAYS),
    ],
)
def test_what_is_kept_decides_between_direct_kernels(
    match_of: Any, on_gpu: Any, times: list[float], auto: Any, speed: Any, memory: Any
) -> None:
    on_gpu(*times)
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), weight)
    for save, choices in (("auto", auto), ("speed", speed)):
        assert getattr(decide(match, save=save), "choices", None) == choices
    assert decide(match, save="memory").choices == {**memory, "again": True}  # type: ignore[union-attr]


@pytest.mark.parametrize("trains", [False, True])
def test_memory_fuses_what_has_a_backward(match_of: Any, on_gpu: Any, trains: bool) -> None:
    on_gpu(1.0, 2.0, 1.0, 1.0)
    x, weight, bias = linear_tensors()
    match = match_of(swish, x, weight.requires_grad_(trains), bias)
    decision = decide(match, save="memory")
    expected = {**LIBRARY, "again": True} if trains else None
    assert getattr(decision, "choices", None) == expected
    assert not isinstance(decide(match), Plan)


def test_the_bench_of_a_convolutions_training(match_of: Any) -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), weight)
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        baseline = bench_ops.Baseline("in channels_last", CONV, channels_last=True)
        ways = bench_ops.convolutions(match, [CONV, BOTH_WAYS], forms, [baseline])
        library, own, channels_last = (way() for way in ways)
    for way in (library, own):
        assert [v.shape for v in way] == [(2, 4, 6, 6), (4, 3, 3, 3)]  # type: ignore[union-attr]
    torch.testing.assert_close(own[0], library[0])  # type: ignore[index]
    torch.testing.assert_close(channels_last, library, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("grads", [False, True], ids=["no_grad", "grad"])
def test_a_factor_alone_that_learns(match_of: Any, grads: bool) -> None:
    """Its gradient is asked for with none of the convolution's, and under no_grad not at all."""

    def norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight), None, None, training=True) * scale

    tensors = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4, 1, 1)
    with torch.set_grad_enabled(grads):
        match = match_of(norm, *tensors[:2], tensors[2].requires_grad_())
    assert calls.gradients_of_tensors(match) == [grads]
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        baseline = bench_ops.Baseline("in channels_last", CONV, channels_last=True)
        for way in bench_ops.convolutions(match, [CONV, DIRECT], forms, [baseline]):
            assert way()[0].shape == (2, 4, 6, 6)  # type: ignore[index]


def test_a_bench_compares_each_gradient_with_its_own(match_of: Any) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        mean, var = torch.zeros(4), torch.ones(4)
        return F.batch_norm(F.conv2d(x, weight, bias), mean, var, gamma, beta) * 2.0

    vectors = [torch.randn(4, requires_grad=True) for _ in range(3)]
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    match = match_of(norm, x.requires_grad_(), weight.requires_grad_(), *vectors)
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        ways = bench_ops.convolutions(match, [CONV, BOTH_WAYS], forms, [])
        _, own = (way() for way in ways)
    shapes = [(2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3), (4,), (4,), (4,)]
    assert [v.shape for v in own] == shapes  # type: ignore[union-attr]


def backward_spec(match: Match) -> KernelSpec | None:
    bound, y = match.bound, match.root.meta["example_value"]
    found = calls.fake_tensors(match), bound.numbers, y.dtype
    return apply.backward_spec(CONV_DIRECT_BACKWARD, bound.epilogue, *found)


@pytest.mark.parametrize("factor", [(4, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (6, 6), "learned"])
def test_whose_gradients_need_no_library(match_of: Any, on_gpu: Any, factor: Any) -> None:
    """Those of an epilogue that multiplies by a number per channel, of which none is asked for."""
    learned = factor == "learned"
    scale = torch.randn((4, 1, 1) if learned else factor, requires_grad=learned)

    def norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight), None, None, training=True) * scale

    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    match = match_of(norm, torch.randn(2, 3, 8, 8), weight, scale)
    per_channel = factor in ((4, 1, 1), (1, 4, 1, 1))
    assert (backward_spec(match) is not None) == (per_channel or learned)
    assert calls.may_have_fused_backward(match, "direct") == per_channel
    on_gpu(1.0, 0.9, 0.8)
    decision = decide(match, fp32="split")
    assert ("in both directions" in decision.note) == per_channel  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("result", ["narrow", "wide"])
def test_in_16_bits_the_gradients_need_no_library_either(
    match_of: Any, on_gpu: Any, dtype: torch.dtype, result: str
) -> None:
    """With a BatchNorm's vectors in float32, as under autocast; dy must be of x's dtype."""
    scale = torch.randn(4, 1, 1, dtype=dtype if result == "narrow" else torch.float32)
    mean, var = torch.zeros(4), torch.ones(4)

    def norm(x: Tensor, weight: Tensor, gamma: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight), mean, var, gamma, training=True) * scale

    weight = torch.randn(4, 3, 3, 3, dtype=dtype, requires_grad=True)
    gamma = torch.randn(4, requires_grad=True)
    match = match_of(norm, torch.randn(2, 3, 8, 8, dtype=dtype), weight, gamma, scale)
    assert calls.may_have_fused_backward(match, "direct") == (result == "narrow")
    spec = backward_spec(match)
    if result == "narrow":
        assert spec is not None
        assert f"float, {CUDA_TYPES[dtype]}, {CUDA_TYPES[dtype]}" in spec.text
    on_gpu(1.0, 0.9, 0.8, 1.0)
    note = str(decide(match))
    assert ("in both directions" in note) == (result == "narrow")


@pytest.mark.parametrize(
    "times, product",
    [
        ([0.5, 0.4, 1.0], "direct"),
        ([2.0, 0.4, 1.0], "direct"),
        ([0.5, 0.6, 1.0], None),
        ([2.0, 1.5, 1.0], None),
    ],
)
def test_the_direct_convolution_beside_tf32(
    match_of: Any, on_gpu: Any, times: list[float], product: str | None
) -> None:
    on_gpu(*times)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    decision = decide(match, fp32="tf32")
    choices = getattr(decision, "choices", {"product": None})
    assert choices["product"] == product
    assert "library {:g} ms, direct {:g} ms, in channels_last {:g} ms".format(*times) in str(
        decision
    )


@pytest.mark.parametrize(
    "x, weight, geometry",
    [
        ((2, 9, 8, 8), (4, 9, 3, 3), {}),
        ((2, 4, 8, 8), (4, 2, 3, 3), {"groups": 2}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"stride": 2}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"dilation": (1, 2)}),
        ((2, 3, 8, 8), (4, 3, 5, 5), {}),
    ],
)
def test_other_convolutions_have_no_direct_kernel(
    match_of: Any, on_gpu: Any, x: Any, weight: Any, geometry: Any
) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight, **geometry), None, None, training=True) * 2.0

    match = match_of(norm, torch.randn(x), torch.randn(weight))
    assert decide(match, plan="always") == Plan(True, CONV, "library")


def test_neither_in_other_layouts_and_dtypes(match_of: Any, on_gpu: Any) -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    for a, b in (
        (x.to(memory_format=torch.channels_last), weight),
        (x, weight.to(memory_format=torch.channels_last)),
        (x.double(), weight.double()),
    ):
        match = match_of(scaled_norm, a, b)
        assert decide(match, fp32="split", plan="always") == Plan(True, CONV, "library")


def test_both_layouts_are_benched(match_of: Any) -> None:
    match = half_norm(match_of)
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    baseline = bench_ops.Baseline("in channels_last", CONV, channels_last=True)
    lying, channels_last = (
        way()[0] for way in bench_ops.convolutions(match, [CONV], forms, [baseline])
    )  # type: ignore[index]
    assert lying.is_contiguous() and channels_last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(lying, channels_last)


@pytest.mark.parametrize("grad", [False, True])
def test_the_hosts_time_is_that_of_the_op_that_a_graph_calls(match_of: Any, grad: bool) -> None:
    """In inference the op that returns y alone, else the one that returns all."""
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=grad)
    match = match_of(lambda x, w: F.conv2d(x, w).relu(), x, weight, options={"cpu_ops": True})
    tensors = bench_ops.tensors_of(match)
    assert tensors is not None
    bench = bench_ops._BenchOp(match, tensors)
    call: Any = bench.calls(bench.gradient_of_z() if grad else None, CONV)
    wanted = run.MANY if grad else run.ONE
    assert call.func is wanted


def test_times_are_of_cudnns_settings(match_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose among the library's convolutions, forward and backward."""
    match = half_norm(match_of)
    cudnn = torch.backends.cudnn

    def key() -> str:
        return repr(case.timing_key(match, [CONV], []))

    first = key()
    with monkeypatch.context() as patch:
        patch.setattr(cudnn, "version", lambda: 1)
        assert key() != first
    for flag in ("benchmark", "deterministic", "enabled"):
        setting = getattr(cudnn, flag)
        setattr(cudnn, flag, not setting)
        try:
            assert key() != first, flag
        finally:
            setattr(cudnn, flag, setting)
    setting = cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    cudnn.conv.fp32_precision = "tf32" if setting == "ieee" else "ieee"  # type: ignore[attr-defined]
    try:
        assert key() != first
    finally:
        cudnn.conv.fp32_precision = setting  # type: ignore[attr-defined]
    assert key() == first
