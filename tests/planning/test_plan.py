"""What is fused, what is left alone, and in which precision."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_cases import (
    BUILD_KERNELS,
    CONV,
    DENSE,
    LIBRARY,
    SPLIT,
    decide,
    half_norm,
    linear_tensors,
    scaled_norm,
    swish,
)
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser.anchors.linear import Linear
from fx_fuser.errors import BuildError, OptionError
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels.base import odd_rows
from fx_fuser.kernels.split import LINEAR_SPLIT
from fx_fuser.native import binaries, load
from fx_fuser.native.kernel_spec import KernelSpec, texts_of
from fx_fuser.ops import library as ops
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, plan, timing
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.timing import Timing

# ---- linears -------------------------------------------------------------------------------------


def test_on_a_cpu_the_inner_compiler_has_the_plain_ops(match_of: Any) -> None:
    match = match_of(swish, *linear_tensors())
    assert decide(match) == Plan(False, LIBRARY)
    assert decide(match, cpu_ops=True) == Plan(True, LIBRARY)


def test_a_faster_kernel_is_taken_and_says_by_how_much(match_of: Any, on_gpu: Any) -> None:
    on_gpu(2.0, 0.75)
    decision = decide(match_of(swish, *linear_tensors()))
    note = "library 2 ms, split by wgmma 0.75 ms"
    assert decision == Plan(True, {**SPLIT, "backward": "library"}, note)


@pytest.mark.parametrize("split", [0.985, 1.0, 3.0])
def test_what_gains_nothing_is_left_to_inductor(match_of: Any, on_gpu: Any, split: float) -> None:
    on_gpu(1.0, split)
    match = match_of(swish, *linear_tensors())
    decision = decide(match)
    assert isinstance(decision, Refusal)
    assert f"library 1 ms, split by wgmma {split:g} ms" in decision.reason
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


@pytest.mark.parametrize("why", ["not enough memory to time it", "sizes unknown"])
def test_what_was_not_benched_is_not_taken(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Neither a kernel whose result nobody compared, nor a convolution that may be slower."""
    on_gpu(None)
    if why == "sizes unknown":
        monkeypatch.setattr(bench_ops, "tensors_of", lambda match: None)
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
    assert isinstance(decision, Refusal) and "no kernel for this gemm" in decision.reason
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


@pytest.mark.parametrize("compiles", [False, True])  # and does not load
@pytest.mark.parametrize("strict", [False, True])
def test_a_product_that_is_not_made_is_no_choice(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, strict: bool, compiles: bool
) -> None:
    def prepare(specs: Sequence[KernelSpec], device: torch.device) -> None:
        if any(spec.family is LINEAR_SPLIT for spec in specs):
            raise BuildError("it spills registers")

    match = match_of(swish, *linear_tensors())
    on_gpu(1.0, 0.1)
    monkeypatch.setattr(plan, "_build_kernels", BUILD_KERNELS)
    monkeypatch.setattr(load, "prepare", prepare)
    # What compiles is in the cache then.
    monkeypatch.setattr(
        binaries,
        "are_built",
        lambda texts, _: [compiles or "LINEAR_SPLIT" not in text for text in texts],
    )
    if strict:
        with pytest.raises(BuildError, match="it spills"):
            decide(match, strict=True)
        return
    with pytest.warns(UserWarning, match="it spills registers; please report"):
        decision = decide(match)
    assert isinstance(decision, Refusal)
    assert "no kernel for this gemm" in decision.reason

    def nothing_compiles(specs: Sequence[KernelSpec], device: torch.device) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(load, "prepare", nothing_compiles)
    with pytest.warns(UserWarning, match="no compiler; please report"):
        decision = decide(match)
    assert isinstance(decision, Refusal) and decision.failed
    assert decision.reason == "BuildError: no compiler"


def test_what_tails_share_is_not_compiled_for_each_where_it_fails(
    match_of: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tails = (torch.tanh, torch.exp, torch.sin, torch.cos)
    matches = [
        match_of(
            lambda x, w, tail=tail: tail(F.linear(x, w)) * 2.0,
            *linear_tensors()[:2],
            options={"cpu_ops": True},
        )
        for tail in tails
    ]
    request.getfixturevalue("on_gpu")(1.0, 0.1)  # now: on a GPU such small gemms are no matches
    built: set[str] = set()
    tried: Counter[str] = Counter()

    def prepare(specs: Sequence[KernelSpec], device: torch.device) -> None:
        missing = [text for text in texts_of(specs) if text not in built]
        tried.update(missing)
        failed = [text for text in missing if "_COMMON(" in text]
        built.update(text for text in missing if text not in failed)
        if failed:
            raise BuildError("it spills registers")

    monkeypatch.setattr(plan, "_build_kernels", BUILD_KERNELS)
    monkeypatch.setattr(load, "prepare", prepare)
    monkeypatch.setattr(binaries, "are_built", lambda texts, _: [t in built for t in texts])
    with pytest.warns(UserWarning, match="it spills registers; please report"):
        decisions = plan.decide(matches, Options())
    assert all(isinstance(decision, Refusal) for decision in decisions)
    (times,) = (times for text, times in tried.items() if "_COMMON(" in text)
    assert times == 2  # of all at once, and by itself


# ---- the tensors that are timed ------------------------------------------------------------------


def test_forms_have_the_sizes_strides_and_dtypes_of_the_trace(match_of: Any) -> None:
    _, weight, bias = linear_tensors()
    wide = torch.randn(4, 32)[:, ::2]
    forms = bench_ops.tensors_of(match_of(swish, wide, weight, bias))
    assert forms is not None and None not in forms  # none of z itself, or of a number
    made = [form.random(torch.Generator().manual_seed(0)) for form in forms]
    assert [(m.shape, m.stride()) for m in made] == [
        (t.shape, t.stride()) for t in (wide, weight, bias)
    ]
    assert all(m.isfinite().all() and m.std() > 0.1 for m in made)


def test_dynamic_sizes_are_those_of_the_trace(match_of: Any) -> None:
    forms = bench_ops.tensors_of(match_of(swish, *linear_tensors(), dynamic=True))
    assert forms is not None and forms[0] is not None and forms[0].size == (4, 16)


def test_the_bench_is_the_op_that_runs(match_of: Any) -> None:
    match = match_of(swish, *linear_tensors())
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    ways = bench_ops.benches(match, [LIBRARY, SPLIT], forms)
    for (y,) in (way() for way in ways):  # type: ignore[misc]
        assert y.shape == (4, 8)


def test_the_bench_of_training(match_of: Any) -> None:
    x, weight, bias = linear_tensors()
    match = match_of(swish, x, weight.requires_grad_(), bias)
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    with torch.no_grad():
        ways = bench_ops.benches(match, [LIBRARY, SPLIT], forms)
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
        found["weight"][-1, -1] += 0.01 * (args[2]["backward"] == "split")
        return found

    if train:
        monkeypatch.setattr(Linear, "backward", wrong_back)
    else:
        monkeypatch.setattr(ops.FusedCall, "bound", wrong_ahead)
    monkeypatch.setattr(timing, "medians", lambda key, make_ways, device: make_ways())
    with pytest.warns(UserWarning, match=r"split kernel's .* from the library's; please report"):
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


@pytest.mark.slow
def test_left_sites_are_counted(on_gpu: Any) -> None:
    on_gpu(1.0, 1.0)
    counters.clear()
    torch._dynamo.reset()
    tensors = linear_tensors()
    value = torch.compile(swish, backend="fx_fuser")(*tensors)
    torch.testing.assert_close(value, swish(*tensors))
    assert not counters["fx_fuser"] and counters["fx_fuser_left"] == {"linear_sigmoid_mul_mul": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
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


@pytest.mark.parametrize(
    "dtype, sizes, words",
    [
        (torch.float32, (4096, 512, 512), ""),
        (torch.float32, (4, 16, 8), "about 10 us"),
        (torch.bfloat16, (4096, 512, 512), "in bfloat16 the library's gemm is as fast"),
        (torch.bfloat16, (4096, 415, 512), "has no fast kernel for rows of 415 elements"),
        (torch.float16, (64, 512, 50257), "has no fast kernel for rows of 50257 elements"),
    ],
)
def test_why_no_kernel_may_gain(
    match_of: Any, on_gpu: Any, dtype: torch.dtype, sizes: tuple[int, int, int], words: str
) -> None:
    m, k, n = sizes
    match = match_of(swish, torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype))
    reason = plan.no_gain(match, Options.parse(None, {}, []))
    assert words in reason and bool(reason) == bool(words)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_why_no_kernel_may_gain_in_another_precision(
    match_of: Any, on_gpu: Any, precision: str
) -> None:
    words = {"ieee": "'fp32' is 'ieee'", "tf32": "in TF32 the library's gemm is as fast"}
    match = match_of(swish, torch.randn(4096, 512), torch.randn(512, 512))
    assert words[precision] in plan.no_gain(match, Options.parse(None, {"fp32": precision}, []))


def test_rows_are_odd_in_the_dtype_of_the_gemm() -> None:
    """Under autocast its operands are in fp32 in the graph."""
    x, w = torch.randn(8, 12), torch.randn(12, 20).mT
    assert odd_rows([x, w], torch.bfloat16) == [12, 20] and odd_rows([x, w], torch.float32) == []
    assert odd_rows([torch.randn(()), torch.randn(5, 1)], torch.bfloat16) == []
