"""What is fused, what is left alone, and in which precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser.anchors.linear import Linear
from fx_fuser.errors import BuildError, OptionError
from fx_fuser.graph.match import Match, Refusal
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import CUDA_TYPES, LINEAR_SPLIT, KernelSpec
from fx_fuser.ops import apply, calls
from fx_fuser.ops import library as ops
from fx_fuser.options import Options
from fx_fuser.planning import plan, rehearse, timing
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.timing import Timing

GPU = torch.device("cuda", 0)
LIBRARY = {"product": "library", "backward": "library", "again": False}
SPLIT = {"product": "split", "backward": "split", "again": False}
DENSE = {"product": "dense", "backward": "library", "again": False}
CONV = {"tf32": False, "product": "library", "backward": "library", "again": False}
DIRECT = {**CONV, "product": "direct"}
BOTH_WAYS = {**DIRECT, "backward": "direct"}
BUILD_KERNELS = plan._build_kernels  # which `on_gpu` replaces


def swish(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    z = F.linear(x, weight, bias)
    return z * torch.sigmoid(z) * 2.0


def scaled_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = F.batch_norm(F.conv2d(x, weight), None, None, training=True)
    return y * 2.0


@pytest.fixture
def match_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Match]:
    def find(f: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Match:
        found: list[Match] = []

        def decide(matches: Sequence[Match], _: Options) -> list[Plan]:
            found.extend(matches)
            return [Plan(False, LIBRARY if m.site.kind == "linear" else CONV) for m in matches]

        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(plan, "decide", decide)
            torch.compile(f, backend="fx_fuser", **options)(*inputs)
        (match,) = found
        return match

    return find


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """As if the matches were on a Hopper GPU whose times are given."""
    times: list[list[Timing] | None] = [[Timing(1.0), Timing(0.5)]]
    monkeypatch.setattr(plan, "device_of", lambda match: GPU)
    monkeypatch.setattr(plan, "_build_kernels", lambda *_: None)
    monkeypatch.setattr(load, "runs_on", lambda *_: True)
    monkeypatch.setattr(timing, "medians", lambda *_: times[0])
    precision = torch.backends.cuda.matmul.fp32_precision

    def give(*found: float | Timing | None) -> None:
        """Milliseconds of the GPU; None: it had no memory."""
        made = [took if isinstance(took, Timing) else Timing(took) for took in found if took]
        times[0] = made or None

    yield give
    torch.backends.cuda.matmul.fp32_precision = precision


def linear_tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def decide(match: Match, **options: Any) -> Plan | Refusal:
    (decision,) = plan.decide([match], Options(**options))
    return decision


# ---- linears -------------------------------------------------------------------------------------


def test_on_a_cpu_the_inner_compiler_has_the_plain_ops(match_of: Any) -> None:
    match = match_of(swish, *linear_tensors())
    assert decide(match) == Plan(False, LIBRARY)
    assert decide(match, cpu_ops=True) == Plan(True, LIBRARY)


def test_a_faster_kernel_is_taken_and_says_by_how_much(match_of: Any, on_gpu: Any) -> None:
    on_gpu(2.0, 0.75)
    decision = decide(match_of(swish, *linear_tensors()))
    assert decision == Plan(True, {**SPLIT, "backward": "library"}, "library 2 ms, split 0.75 ms")


@pytest.mark.parametrize("split", [0.985, 1.0, 3.0])
def test_what_gains_nothing_is_left_to_inductor(match_of: Any, on_gpu: Any, split: float) -> None:
    on_gpu(1.0, split)
    match = match_of(swish, *linear_tensors())
    decision = decide(match)
    assert isinstance(decision, Refusal)
    assert f"library 1 ms, split {split:g} ms" in decision.reason
    # Other compilers would run the epilogue op by op.
    assert decide(match, inner="eager").choices == LIBRARY  # type: ignore[union-attr]
    assert decide(match, plan="always").choices == SPLIT  # type: ignore[union-attr]


@pytest.mark.parametrize("split, taken", [(0.0045, False), (0.0039, True)])
def test_what_the_clock_cannot_tell_apart_is_no_gain(
    match_of: Any, on_gpu: Any, split: float, taken: bool
) -> None:
    on_gpu(0.005, split)
    assert isinstance(decide(match_of(swish, *linear_tensors())), Plan) == taken


@pytest.mark.parametrize(
    "times, choices",
    [
        ([1.0, 0.5, 2.0, 1.0], SPLIT),
        ([1.0, 0.5, 2.0, 3.0], {**SPLIT, "backward": "library"}),
        ([1.0, 1.1, 2.0, 1.0], SPLIT),
        ([1.0, 0.97, 9.0, 9.0], None),
    ],
)
def test_training_is_judged_on_the_sum(
    match_of: Any, on_gpu: Any, times: list[float], choices: Any
) -> None:
    x, weight, bias = linear_tensors()
    match = match_of(swish, x, weight.requires_grad_(), bias)
    on_gpu(*times)
    decision = decide(match)
    assert getattr(decision, "choices", None) == choices


@pytest.mark.parametrize("why", ["no memory to time it", "sizes unknown"])
def test_what_was_not_rehearsed_is_not_taken(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Neither a kernel whose result nobody compared, nor a convolution that may be slower."""
    on_gpu(None)
    if why == "sizes unknown":
        monkeypatch.setattr(rehearse, "tensors_of", lambda match: None)
    for match in (match_of(swish, *linear_tensors()), half_norm(match_of, channels=3)):
        decision = decide(match)
        assert isinstance(decision, Refusal) and why in decision.reason


def keys_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    keys: list[str] = []
    monkeypatch.setattr(
        timing, "medians", lambda key, *_: keys.append(repr(key)) or [Timing(1.0), Timing(0.5)]
    )
    return keys


def test_a_time_is_of_one_geometry(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors alone do not tell it."""
    keys = keys_of(monkeypatch)
    x, weight = torch.randn(2, 4, 8, 8).bfloat16(), torch.randn(4, 4, 3, 3).bfloat16()
    for geometry in ({}, {"padding": 2}, {"padding": 1}, {"padding": (0, 1)}, {"padding": 1}):

        def f(x: Tensor, weight: Tensor, geometry: Any = geometry) -> Tensor:
            c = F.conv2d(x, weight, **geometry)
            return F.batch_norm(c, None, None, training=True) * 2.0

        decide(match_of(f, x, weight))
    assert len(keys) == 5 and len(set(keys)) == 4


def test_a_time_is_of_one_precision(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's product follows torch's setting, whatever ours is."""
    keys = keys_of(monkeypatch)
    match = match_of(swish, *linear_tensors())
    for precision in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = precision
        decide(match, fp32="split")
    assert len(set(keys)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(match_of: Any, on_gpu: Any, dtype: Any) -> None:
    match = match_of(swish, *linear_tensors(dtype))
    decision = decide(match)
    assert decision == Plan(True, DENSE, "library 1 ms, dense 0.5 ms")


def test_a_dtype_without_a_kernel_is_left_alone(match_of: Any, on_gpu: Any) -> None:
    match = match_of(swish, *linear_tensors(torch.float64))
    decision = decide(match)
    assert isinstance(decision, Refusal) and "no kernel of ours" in decision.reason
    assert decide(match, plan="always").choices == LIBRARY  # type: ignore[union-attr]


def test_a_double_operand_has_no_fp32_kernel(match_of: Any, on_gpu: Any) -> None:
    def f(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, weight)) * y * 2.0

    x, weight, _ = linear_tensors()
    match = match_of(f, x, weight, torch.randn(4, 8, dtype=torch.float64))
    assert isinstance(decide(match), Refusal)


@pytest.mark.parametrize(
    "precision, option, product",
    [
        ("ieee", "follow", SPLIT),
        ("tf32", "follow", DENSE),
        ("tf32", "split", SPLIT),
        ("ieee", "ieee", LIBRARY),
        ("ieee", "tf32", DENSE),
    ],
)
def test_option_fp32_on_a_linear(
    match_of: Any, on_gpu: Any, precision: str, option: str, product: Any
) -> None:
    match = match_of(swish, *linear_tensors())
    torch.backends.cuda.matmul.fp32_precision = precision
    decision = decide(match, fp32=option, plan="always")
    assert isinstance(decision, Plan) and decision.choices == product


def test_ieee_against_torchs_own_setting_is_an_error(match_of: Any, on_gpu: Any) -> None:
    match = match_of(swish, *linear_tensors())
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(OptionError, match=r"fp32_precision is 'tf32'.*set it to 'ieee'"):
        decide(match, fp32="ieee")


@pytest.mark.parametrize(
    "precision, option, tf32",
    [("ieee", "follow", False), ("tf32", "follow", True), ("tf32", "ieee", False),
     ("tf32", "split", False), ("ieee", "tf32", True)],
)  # fmt: skip
def test_option_fp32_on_a_convolution(
    match_of: Any, on_gpu: Any, precision: str, option: str, tf32: bool
) -> None:
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    torch.backends.cuda.matmul.fp32_precision = precision
    product = "library" if option == "ieee" else "direct"
    choices = {**CONV, "tf32": tf32, "product": product}
    assert decide(match, fp32=option, plan="always") == Plan(True, choices, product)


@pytest.mark.parametrize("strict", [False, True])
def test_a_product_that_does_not_compile_is_no_choice(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    def prepare(specs: Sequence[KernelSpec], device: torch.device) -> None:
        if any(spec.family is LINEAR_SPLIT for spec in specs):
            raise BuildError("it spills registers")

    match = match_of(swish, *linear_tensors())
    on_gpu(1.0, 0.1)
    monkeypatch.setattr(plan, "_build_kernels", BUILD_KERNELS)
    monkeypatch.setattr(load, "prepare", prepare)
    if strict:
        with pytest.raises(BuildError, match="it spills"):
            decide(match, strict=True)
        return
    with pytest.warns(UserWarning, match="it spills registers; please report"):
        decision = decide(match)
    assert isinstance(decision, Refusal)
    assert "no kernel of ours makes this product" in decision.reason

    def nothing_compiles(specs: Sequence[KernelSpec], device: torch.device) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(load, "prepare", nothing_compiles)
    with pytest.warns(UserWarning, match="no compiler; please report"):
        decision = decide(match)
    assert isinstance(decision, Refusal) and decision.failed
    assert decision.reason == "BuildError: no compiler"


# ---- convolutions --------------------------------------------------------------------------------


def half_norm(match_of: Any, channels: int = 9, dtype: torch.dtype = torch.bfloat16) -> Match:
    """By default of more channels than the direct kernel takes."""
    x, weight = torch.randn(2, channels, 8, 8), torch.randn(4, channels, 3, 3)
    found: Match = match_of(scaled_norm, x.to(dtype), weight.to(dtype))
    return found


def test_the_librarys_convolution_is_left(match_of: Any, on_gpu: Any, cudnn_precision: Any) -> None:
    """The inner compiler calls it, too, in the same precision."""
    exact = match_of(scaled_norm, torch.randn(2, 9, 8, 8), torch.randn(4, 9, 3, 3))
    double = match_of(scaled_norm, *(torch.randn(2, 3, 3, 3).double() for _ in range(2)))
    for precision in ("tf32", "ieee"):
        cudnn_precision(precision)
        for match in (half_norm(match_of), exact, double):
            decision = decide(match)
            assert isinstance(decision, Refusal) and "is the inner compiler's" in decision.reason
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
    """Its rival is the library in channels_last, too, for which Inductor turns whole graphs."""
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
def test_where_cudnn_may_take_tf32_that_is_a_rival(
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
        assert isinstance(decide(match, mode=mode), Plan) == fused
    on_gpu(1.0, Timing(0.5, 0.8), 2.0, 2.0)
    decision = decide(direct)
    assert isinstance(decision, Plan) and "direct 0.8 ms of the host" in decision.note


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
    on_gpu(library, Timing(0.5 * library, 0.025))
    assert isinstance(decide(match_of(swish, x, weight.detach(), bias), mode=mode), Plan)


@pytest.mark.parametrize("direct, product", [(0.4, "direct"), (0.5, None), (2.0, None)])
def test_the_direct_convolution_has_the_same_rivals(
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


def test_the_rehearsal_of_a_convolutions_training(match_of: Any) -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), weight)
    forms = rehearse.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        rival = rehearse.Rival("in channels_last", CONV, channels_last=True)
        ways = rehearse.convolutions(match, [CONV, BOTH_WAYS], forms, [rival])
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
    assert rehearse.gradients_of_tensors(match) == [grads]
    forms = rehearse.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        rival = rehearse.Rival("in channels_last", CONV, channels_last=True)
        for way in rehearse.convolutions(match, [CONV, DIRECT], forms, [rival]):
            assert way()[0].shape == (2, 4, 6, 6)  # type: ignore[index]


def test_a_rehearsal_compares_each_gradient_with_its_own(match_of: Any) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        mean, var = torch.zeros(4), torch.ones(4)
        return F.batch_norm(F.conv2d(x, weight, bias), mean, var, gamma, beta) * 2.0

    vectors = [torch.randn(4, requires_grad=True) for _ in range(3)]
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    match = match_of(norm, x.requires_grad_(), weight.requires_grad_(), *vectors)
    forms = rehearse.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        ways = rehearse.convolutions(match, [CONV, BOTH_WAYS], forms, [])
        _, own = (way() for way in ways)
    shapes = [(2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3), (4,), (4,), (4,)]
    assert [v.shape for v in own] == shapes  # type: ignore[union-attr]


def backward_spec(match: Match) -> KernelSpec | None:
    bound, y = match.bound, match.root.meta["example_value"]
    return apply.backward_spec(bound.epilogue, calls.fake_tensors(match), bound.numbers, y.dtype)


@pytest.mark.parametrize("factor", [(4, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (6, 6), "learned"])
def test_whose_gradients_need_no_library(match_of: Any, on_gpu: Any, factor: Any) -> None:
    """Those of an epilogue that multiplies by one number a channel, of which none is asked for."""
    learned = factor == "learned"
    scale = torch.randn((4, 1, 1) if learned else factor, requires_grad=learned)

    def norm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight), None, None, training=True) * scale

    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    match = match_of(norm, torch.randn(2, 3, 8, 8), weight, scale)
    per_channel = factor in ((4, 1, 1), (1, 4, 1, 1))
    assert (backward_spec(match) is not None) == (per_channel or learned)
    assert calls.may_have_own_backward(match) == per_channel
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
    assert calls.may_have_own_backward(match) == (result == "narrow")
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


def test_both_layouts_are_rehearsed(match_of: Any) -> None:
    match = half_norm(match_of)
    forms = rehearse.tensors_of(match)
    assert forms is not None
    rival = rehearse.Rival("in channels_last", CONV, channels_last=True)
    lying, channels_last = (
        way()[0] for way in rehearse.convolutions(match, [CONV], forms, [rival])
    )  # type: ignore[index]
    assert lying.is_contiguous() and channels_last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(lying, channels_last)


# ---- the tensors that are timed ------------------------------------------------------------------


def test_forms_have_the_sizes_strides_and_dtypes_of_the_trace(match_of: Any) -> None:
    _, weight, bias = linear_tensors()
    wide = torch.randn(4, 32)[:, ::2]
    forms = rehearse.tensors_of(match_of(swish, wide, weight, bias))
    assert forms is not None and None not in forms  # none of z itself, or of a number
    made = [form.random(torch.Generator().manual_seed(0)) for form in forms]
    assert [(m.shape, m.stride()) for m in made] == [
        (t.shape, t.stride()) for t in (wide, weight, bias)
    ]
    assert all(m.isfinite().all() and m.std() > 0.1 for m in made)


def test_dynamic_sizes_are_those_of_the_trace(match_of: Any) -> None:
    forms = rehearse.tensors_of(match_of(swish, *linear_tensors(), dynamic=True))
    assert forms is not None and forms[0] is not None and forms[0].size == (4, 16)


def test_the_rehearsal_is_the_op_that_runs(match_of: Any) -> None:
    match = match_of(swish, *linear_tensors())
    forms = rehearse.tensors_of(match)
    assert forms is not None
    ways = rehearse.rehearsals(match, [LIBRARY, SPLIT], forms)
    for y, saved in (way() for way in ways):  # type: ignore[misc]
        assert y.shape == (4, 8) and saved.numel() == 0


def test_the_rehearsal_of_training(match_of: Any) -> None:
    x, weight, bias = linear_tensors()
    match = match_of(swish, x, weight.requires_grad_(), bias)
    forms = rehearse.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        ways = rehearse.rehearsals(match, [LIBRARY, SPLIT], forms)
        *ahead, library, split = (way() for way in ways)
    assert all(saved.shape == (4, 8) for _, saved in ahead)  # type: ignore[misc]
    torch.testing.assert_close(library, split)
    assert [grad.shape for grad in library] == [weight.shape]  # type: ignore[union-attr]


@pytest.mark.parametrize("train", [False, True])
def test_a_kernel_that_is_wrong_is_not_used(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    """Forward or backward: the site is left to the inner compiler, and one warning says so."""
    x, weight, bias = linear_tensors()
    match = match_of(swish, x, weight.requires_grad_(train), bias)
    bound, backward = ops.FusedCall.bound, Linear.backward

    def wrong_ahead(self: Any, *args: Any, **kwargs: Any) -> Any:
        y, *others = bound(self, *args, **kwargs)()
        y[-1, -1] += 0.01 * (self.config["product"] == "split")
        return lambda: (y, *others)

    def wrong_back(self: Any, *args: Any) -> Any:
        found = backward(self, *args)
        found["weight"][-1, -1] += 0.01 * (args[2]["product"] == "split")
        return found

    if train:
        monkeypatch.setattr(Linear, "backward", wrong_back)
    else:
        monkeypatch.setattr(ops.FusedCall, "bound", wrong_ahead)
    monkeypatch.setattr(timing, "medians", lambda key, make_ways, device: make_ways())
    with pytest.warns(UserWarning, match=r"the split product .* from the library's; please report"):
        decision = decide(match)
    assert isinstance(decision, Refusal) and "from the library's" in decision.reason


def library_in_tf32() -> Callable[..., Any]:
    """`FusedCall.bound` with the library's results off by as much as TF32's are."""
    right = ops.FusedCall.bound

    def rounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        y, *others = right(self, *args, **kwargs)()
        found = (y * (1 + 3e-4 * (self.config["product"] == "library")), *others)
        return lambda: found

    return rounded


@pytest.mark.parametrize("precision, used", [("ieee", False), ("tf32", True)])
def test_a_library_in_tf32_is_no_measure_of_fp32(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, precision: str, used: bool
) -> None:
    """option "split" under `high`: what differs by TF32's rounding is as it should be."""
    match = match_of(swish, *linear_tensors())
    monkeypatch.setattr(ops.FusedCall, "bound", library_in_tf32())
    times = [Timing(1.0), Timing(0.5)]
    monkeypatch.setattr(timing, "medians", lambda key, make_ways, device: make_ways() and times)
    torch.backends.cuda.matmul.fp32_precision = precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decision = decide(match, fp32="split")
    assert isinstance(decision, Plan) == used


@pytest.mark.parametrize("fp32, precise", [("tf32", False), ("split", True)])
def test_nor_is_a_librarys_convolution_in_tf32(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, fp32: str, precise: bool
) -> None:
    """Asked of fx_fuser alone, with torch's own settings as they are."""
    match = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    monkeypatch.setattr(ops.FusedCall, "bound", library_in_tf32())
    times = [Timing(1.0), Timing(0.5), *([] if precise else [Timing(2.0)])]
    monkeypatch.setattr(timing, "medians", lambda key, make_ways, device: make_ways() and times)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        decision = decide(match, fp32=fp32)
    assert isinstance(decision, Plan)  # an exact one is fused always
    assert decision.choices["product"] == ("library" if precise else "direct")
    assert any("please report" in str(w.message) for w in told) == precise


# ---- through the backend -------------------------------------------------------------------------


def test_left_sites_are_counted(on_gpu: Any) -> None:
    on_gpu(1.0, 1.0)
    counters.clear()
    torch._dynamo.reset()
    tensors = linear_tensors()
    value = torch.compile(swish, backend="fx_fuser")(*tensors)
    torch.testing.assert_close(value, swish(*tensors))
    assert not counters["fx_fuser"] and counters["fx_fuser_left"] == {"linear_sigmoid_mul_mul": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taken_through_the_backend(on_gpu: Any, dtype: torch.dtype) -> None:
    """With the reference in place of the kernels: what is compiled, reported and differentiated."""
    on_gpu(1.0, 0.5, 1.0, 0.5)
    counters.clear()
    torch._dynamo.reset()
    twin = [t.requires_grad_() for t in linear_tensors(dtype)]
    tensors = [t.detach().clone().requires_grad_() for t in twin]
    ours, eager = torch.compile(swish, backend="fx_fuser", options={"strict": True}), swish
    for f, own in ((ours, tensors), (eager, twin)):
        f(*own).float().square().sum().backward()
    close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    for mine, its in zip(tensors, twin):
        torch.testing.assert_close(mine.grad, its.grad, **close)
    assert counters["fx_fuser"] == {"linear_sigmoid_mul_mul": 1}
    (site,) = fx_fuser.explain(swish, *tensors).fused
    assert site.kernel.startswith("library 1 ms, ") and site.bytes_saved


def test_a_bad_option_is_no_fault_of_ours_to_survive(on_gpu: Any) -> None:
    torch._dynamo.reset()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(BackendCompilerFailed, match="set it to 'ieee'"):
        torch.compile(swish, backend="fx_fuser", options={"fp32": "ieee"})(*linear_tensors())
