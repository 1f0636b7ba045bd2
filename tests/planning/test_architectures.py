"""What another GPU than a Hopper gets: kernels, limits, refusals; its architecture is faked."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_cases import DENSE, GPU, LIBRARY, SPLIT, decide, linear_tensors, scaled_norm, swish
from toolchains import needs_compilers
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fx_fuser
from benchmarks import kernels
from fx_fuser import registry
from fx_fuser.errors import OptionError
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels import candidates as candidates_of
from fx_fuser.kernels import split
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.implicit import MOST_PER_BYTE
from fx_fuser.kernels.split import MIXED_GEMMS, SPLIT_GEMM, is_small
from fx_fuser.native import limits, load
from fx_fuser.ops import library as ops
from fx_fuser.options import Options
from fx_fuser.passes import products
from fx_fuser.planning import plan, timing
from fx_fuser.planning.plan import Plan

OTHERS = [(8, 0), (8, 6), (12, 0)]
RUNS_ON = load.runs_on  # which `on_gpu` replaces
Become = Callable[..., None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Iterator[Become]:
    """As if the GPU were of this compute capability, with 80 multiprocessors. there: torch sees it;
    then no tensor can be made, since there is none.
    """
    properties = SimpleNamespace(multi_processor_count=80)

    def fake(capability: tuple[int, int], there: bool = False) -> None:
        limits.of.cache_clear()
        monkeypatch.setattr(load, "runs_on", RUNS_ON)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    yield fake
    limits.of.cache_clear()


def candidates(match: Any, **options: Any) -> list[dict[str, Any]]:
    return candidates_of(plan.MatchCase(match, Options(**options)))


# ---- the plan ------------------------------------------------------------------------------------


def gated_product(x, weight, a):  # type: ignore[no-untyped-def]
    return torch.sigmoid(x @ weight) * a


def gated_batch(x, weight, a):  # type: ignore[no-untyped-def]
    return torch.sigmoid(torch.bmm(x, weight)) * a


def gate(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid(x @ weight) * 2.0


@pytest.mark.parametrize("capability", [*OTHERS, (9, 0)])
@pytest.mark.parametrize("f, lead", [(swish, ()), (gate, ()), (gate, (3,))])
def test_fp32_gemms_are_candidates(
    match_of: Any,
    on_gpu: Any,
    become: Become,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    f: Callable[..., Tensor],
    lead: tuple[int, ...],
) -> None:
    """Of linear, matmul and bmm: taken where they are faster."""
    if f is gate:
        monkeypatch.setattr(registry, "_patterns", [])
        fx_fuser.register_pattern(gated_batch if lead else gated_product)
    weight = (8, 16) if f is swish else (16, 8)
    match = match_of(f, torch.randn(*lead, 4, 16), torch.randn(*lead, *weight))
    become(capability)
    assert candidates(match) == [LIBRARY, SPLIT]
    decision = decide(match, strict=True)
    assert isinstance(decision, Plan) and decision.choices["product"] == "split"
    loop = "wgmma" if capability == (9, 0) else "mma.sync"
    assert decision.note == f"library 1 ms, split by {loop} 0.5 ms"
    on_gpu(1.0, 1.1)
    become(capability)
    assert isinstance(decide(match), Refusal)


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHERS)
def test_what_only_hopper_has_is_the_librarys(
    match_of: Any, on_gpu: Any, become: Become, capability: tuple[int, int]
) -> None:
    """16-bit and TF32 gemms and small convolutions."""
    half = match_of(swish, *linear_tensors(torch.bfloat16))
    single = match_of(swish, *linear_tensors())
    conv = match_of(scaled_norm, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    become((9, 0))
    assert [c["product"] for c in candidates(half)] == ["library", "dense"]
    assert candidates(single, fp32="tf32") == [LIBRARY, DENSE]
    become(capability)
    assert candidates(half) == [LIBRARY]
    assert candidates(single, fp32="tf32") == [LIBRARY]
    assert candidates(single, fp32="ieee") == [LIBRARY]
    assert {c["product"] for c in candidates(conv)} == {"library"}


@pytest.mark.parametrize("capability", OTHERS)
def test_a_result_that_disagrees_costs_the_candidate(
    match_of: Any,
    on_gpu: Any,
    become: Become,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
) -> None:
    """With one warning; the graph is compiled without it."""
    match = match_of(swish, *linear_tensors())
    become(capability)
    right = ops.FusedCall.bound

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        y, *others = right(self, *args, **kwargs)()
        y[-1, -1] += 0.01 * (self.config["product"] == "split")
        return lambda: (y, *others)

    monkeypatch.setattr(ops.FusedCall, "bound", wrong)
    monkeypatch.setattr(timing, "medians", lambda key, make_ways, device: make_ways())
    with pytest.warns(UserWarning, match=r"split kernel's .* from the library's") as warned:
        decision = decide(match)
    assert isinstance(decision, Refusal) and len(warned) == 1


# ---- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", OTHERS)
def test_the_passes_over_inductors_graphs_run_there(
    become: Become, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    become(capability)
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda:0")
    narrow = (torch.bfloat16,)
    found = products.kernels_for(Options(), [x], narrow)
    assert found is not None and SPLIT_GEMM in found[GPU] and MIXED_GEMMS[narrow[0]] in found[GPU]
    assert load.runs_on(SPLIT_GEMM, GPU) and not load.runs_on(EXACT_GEMMS[narrow[0]], GPU)


def _imported_with(monkeypatch: pytest.MonkeyPatch, loop: str) -> Any:
    """`split`, imported once more, where FX_FUSER_SPLIT_LOOP says this."""
    monkeypatch.setenv("FX_FUSER_SPLIT_LOOP", loop)
    spec = importlib.util.spec_from_file_location("again", split.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "again", module)
    spec.loader.exec_module(module)
    return module


def test_the_loop_is_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    best, forced = (_imported_with(monkeypatch, loop) for loop in ("", "mma"))
    for module in (best, forced):
        module.check_split_loop()
    assert best.LINEAR_SPLIT.arch is None
    assert forced.LINEAR_SPLIT.loader == "linear_split_mma"


def test_an_unknown_loop_is_told_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where fx_fuser is imported, say as one of many backends."""
    module = _imported_with(monkeypatch, "wgmma")
    with pytest.raises(OptionError, match="FX_FUSER_SPLIT_LOOP is 'wgmma'; give 'mma'"):
        module.check_split_loop()


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, copy, fp32",
    [((8, 0), 1.67e12, 11.7e12), ((8, 6), 0.78e12, 28.2e12), ((12, 0), 1.5e12, 39.7e12)],
)
def test_limits_follow_the_architecture(
    become: Become, capability: tuple[int, int], copy: float, fp32: float
) -> None:
    become(capability, there=True)
    found = limits.of(GPU)
    assert found.multiprocessors == 80
    assert found.copy == pytest.approx(copy, rel=0.01)
    assert found.fp32 == pytest.approx(fp32, rel=0.01)
    become((9, 0), there=True)
    rates = [(here.bandwidth, here.copy, here.fp32) for here in (limits.of(GPU), limits.H200)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    "capability, most",
    [((8, 0), 68), ((8, 6), 58), ((8, 9), 158), ((10, 0), 123), ((9, 0), 90)],
)
def test_multiplications_a_byte_follow_the_gpus_balance(
    become: Become, capability: tuple[int, int], most: float
) -> None:
    become(capability, there=True)
    assert MOST_PER_BYTE * limits.of(GPU).balance == pytest.approx(most, abs=0.6)
    if capability == (9, 0):
        assert limits.of(GPU).balance == 1


# Capability, multiprocessors, kHz, and the memory's kHz and bits; in us the model's time of the
# kernel and of the library for 1024 x 8192 by 8192 x 8192, in fp32. An L40S: 4 rounds of 128 stages
# of 7200 cycles, 4 x 2.2 beside them, 124 and 5 of the pre-pass. Near docs/gpus.md's predictions.
GPUS: dict[str, tuple[tuple[int, ...], tuple[float, float]]] = {
    "H200": (kernels.H200_FIGURES, (660, 2960)),
    "A100": ((80, 108, 1_410_000, 1_593_000, 5120), (1800, 9280)),
    "L40S": ((89, 142, 2_520_000, 9_001_000, 384), (1601, 2400)),
    "RTX 4090": ((89, 128, 2_520_000, 10_501_000, 384), (1583, 2540)),
    "B200": ((100, 148, 1_965_000, 3_996_000, 8192), (932, 2430)),
}


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("name", GPUS)
def test_split_rates_follow_the_gpus_figures(name: str) -> None:
    figures, expected = GPUS[name]
    choice = kernels.linear_split_choice(1, 1024, 8192, 8192, figures)
    assert (choice.ours / 1e3, choice.library / 1e3) == pytest.approx(expected, rel=0.02)


@needs_compilers
def test_a_smaller_gpu_of_the_same_kind_is_slower() -> None:
    """By multiprocessors, clock and memory, each by itself; what the driver does not say is an
    H200's."""
    few, long = (1, 16, 8192, 8192), (1, 1024, 8192, 8192)
    whole = (80, 108, 1_410_000, 1_593_000, 5120)
    of = kernels.linear_split_choice
    assert of(*long, (80, 54, *whole[2:])).ours > 1.5 * of(*long, whole).ours
    assert of(*long, (80, 108, 705_000, *whole[3:])).ours > 1.5 * of(*long, whole).ours
    assert of(*few, (*whole[:4], 2560)).library > 1.5 * of(*few, whole).library
    unknown = of(*few, (80, 108, 0, 0, 0))
    assert 0 < unknown.library < of(*few, whole).library


@needs_compilers
def test_split_choices_of_hopper_are_those_that_were_measured() -> None:
    """Whatever its clock: 256 products by 132 and 114 multiprocessors, as at 51a80a2, before rates
    followed the GPU."""
    products = itertools.product(
        (132, 114), (1, 12), (16, 200, 1024, 6304), (64, 768, 4096, 50257), (64, 768, 8192, 131072)
    )
    found = []
    for i, (count, *sizes) in enumerate(products):
        figures = (90, count, 1_000_000 * (i % 3), 3_201_000, 6144 * (i % 2))
        choice = kernels.linear_split_choice(*sizes, figures)
        found.append(f"{choice.chunks}{'w' if choice.weight_first else 'x'}")
    digest = hashlib.sha256(" ".join(found).encode()).hexdigest()
    assert digest == "33c79eb46a71d1fa0925c9e75050c2247a4fc8fc59ce2934a67669bad5b14593"


def test_a_gemm_is_small_by_the_gpus_own_rates(become: Become) -> None:
    sizes = (256, 1024), (256, 512)  # 0.27 GFLOP
    become((9, 0), there=True)
    assert is_small(*sizes, GPU)
    become((8, 0), there=True)
    assert not is_small(*sizes, torch.device("cuda", 1))
