"""The oracle of the value fuzz finds what is planted in results, element by element: each excuse
has a fault that it must not hide."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import value_check
import value_totals
from torch import Tensor
from value_check import Illegal, Seen
from value_fuzz import Run, Tally, attempt, too_little
from value_oracle import faults_of
from value_patterns import registered
from value_programs import Program
from value_seen import stride_faults
from value_sets import Possible, around
from value_shares import Shares
from value_tail import Wide, bounded
from value_totals import _scaled
from value_writer import NothingToWrite

from fx_fuser.ops import folded

inf, nan = torch.inf, torch.nan


# ---- sets ----------------------------------------------------------------------------------------


def _sum(terms: list[float], factors: list[float]) -> Possible:
    of = Possible.exactly(torch.tensor(terms, dtype=torch.float64))
    product = of.times(torch.tensor(factors, dtype=torch.float64))
    return product.total(lambda t: t.sum(0, keepdim=True), torch.float32, len(terms))


@pytest.mark.parametrize(
    "terms, factors, right, wrong",
    [
        ([1.0, 2.0], [3.0, 4.0], [11.0], [11.1, inf, -inf, nan]),
        ([inf, 1.0], [2.0, 1.0], [inf], [-inf, nan, 7.0]),
        ([inf, 1.0], [-2.0, 1.0], [-inf], [inf, nan, 7.0]),
        ([inf, -inf], [1.0, 1.0], [nan], [inf, -inf, 7.0]),
        ([inf, 1.0], [0.0, 1.0], [nan], [inf, 1.0, 7.0]),
        ([nan, inf], [1.0, 1.0], [nan], [inf, 7.0]),
        ([3e38, 3e38, -3e38], [1.0, 1.0, 1.0], [3e38, inf], [7.0, -inf, nan, 0.0]),
        ([3e38, 3e38, -3e38, -3e38], [1.0] * 4, [0.0, inf, -inf, nan], [3e35]),
        ([2e38, 2e38], [1.0, 1.0], [inf], [3e38, -inf, nan]),
        ([0.0, -0.0], [inf, 1.0], [nan], [0.0, inf]),
    ],
)
def test_what_a_sum_may_be(
    terms: list[float], factors: list[float], right: list[float], wrong: list[float]
) -> None:
    found = _sum(terms, factors)
    for values, wanted in ((right, True), (wrong, False)):
        for value in values:
            assert bool(found.accepts(torch.tensor([value]))) == wanted, value


def test_an_infinity_reaches_its_own_row_alone() -> None:
    dz = torch.ones(3, 4, dtype=torch.float64)
    dz[1, 2] = inf
    weight = torch.ones(4, 5, dtype=torch.float64)
    terms = Possible.exactly(dz).map(lambda t: t.unsqueeze(2)).times(weight)
    total = terms.total(lambda t: t.sum(1), torch.float32, 4)
    found = torch.full((3, 5), 4.0)
    found[1] = inf
    assert total.accepts(found).all()
    assert not total.accepts(torch.full_like(found, 7.0)).any()


def test_a_rounding_that_may_overflow_allows_that_infinity_alone() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max])
    found = around(largest, [(largest * 2, largest * (1 - 1e-6))])
    for value, right in ((inf, True), (float(largest), True), (-inf, False), (7.0, False)):
        assert bool(found.accepts(torch.tensor([value]))) == right
    assert not found.is_open().any()


def test_what_says_nothing_is_counted() -> None:
    exact = torch.tensor([1.0, 1.0, 0.0])
    moved = exact + torch.tensor([0.6, 0.1, 1e-6])
    assert around(exact, [(moved, exact)]).is_open().tolist() == [True, False, False]


ENDS = torch.tensor([1.5, 9.0])


@pytest.mark.parametrize("tail, is_open", [
    (lambda z: torch.relu(z + 1.5), False),  # of z = -1.5 the sum is 0, whoever adds
    (lambda z: torch.relu(z.neg().sub(1.5)), False),
    (lambda z: torch.minimum(torch.maximum(z, -z), ENDS), False),
    (lambda z: torch.relu(0.5 * z + 0.75), True),  # an fma, which has another rounding
    (lambda z: torch.relu(torch.add(z, ENDS, alpha=1.0)), True),
])  # fmt: skip
def test_a_kink_that_is_met_exactly_has_one_side(tail: Any, is_open: bool) -> None:
    z = torch.tensor([-1.5, 2.0])
    found = bounded(tail, z, (), {}, torch.ones(2), z.shape, functools.partial(Wide, z.dtype))
    assert found.dz is not None and found.dz.is_open().tolist() == [is_open, False]


# ---- planted faults ------------------------------------------------------------------------------

Plant = Callable[[Tensor, Tensor, random.Random], "Tensor | None"]


def _put(found: Tensor, where: Tensor, value: Callable[[Tensor], Any], draw: random.Random) -> Any:
    """One element of those that fit, changed."""
    places = where.flatten().nonzero().flatten().tolist()
    if not places:
        return None
    changed = found.clone(memory_format=torch.contiguous_format)
    at = draw.choice(places)
    changed.view(-1)[at] = value(found.flatten()[at])
    return changed


def _seven_for_what_is_not_finite(found: Tensor, eager: Tensor, draw: random.Random) -> Any:
    return _put(found, ~found.isfinite(), lambda v: 7.0, draw)


def _seven_beside_what_is_not_finite(found: Tensor, eager: Tensor, draw: random.Random) -> Any:
    known = found.isfinite() & ((found - 7).abs() > 1)
    return _put(found, known, lambda v: 7.0, draw) if not found.isfinite().all() else None


def _larger(found: Tensor, eager: Tensor, draw: random.Random) -> Any:
    large = found.isfinite() & (found.abs() > 1e-2) & (found.abs() < 1e30)
    return _put(found, large, lambda v: 1.02 * v, draw) if found.dtype == torch.float32 else None


def _other_infinity(found: Tensor, eager: Tensor, draw: random.Random) -> Any:
    return _put(found, found.isinf() & (found == eager), lambda v: -v, draw)


def _nan_for_a_number(found: Tensor, eager: Tensor, draw: random.Random) -> Any:
    return _put(found, found.isfinite() & eager.isfinite(), lambda v: nan, draw)


PLANTS: dict[str, Plant] = {
    "7 for an infinity or NaN": _seven_for_what_is_not_finite,
    "7 beside an infinity or NaN": _seven_beside_what_is_not_finite,
    "1.02 times": _larger,
    "an infinity of the wrong sign": _other_infinity,
    "NaN for a number": _nan_for_a_number,
}


def _with(seen: Seen, name: str, value: Tensor) -> Seen:
    if name == "y":
        return Seen(value, seen.after, seen.grads, seen.state)
    return Seen(seen.y, seen.after, {**seen.grads, name: value}, seen.state)


def _programs(run: Run, count: int) -> Iterator[tuple[Program, tuple[Any, ...]]]:
    """Those whose oracle was asked, and found nothing; dy of every other has an infinity or NaN."""
    asked: list[tuple[Any, ...]] = []
    drawn = value_check._dy

    def dy(program: Program, seed: int, y: Tensor, device: str) -> Tensor:
        found = drawn(program, seed, y, device)
        if seed % 2:
            draw = random.Random(seed)
            found.view(-1)[draw.randrange(found.numel())] = draw.choice((inf, -inf, nan))
        return found

    def ask(*args: Any) -> str:
        fault = faults_of(*args)
        if not fault:
            asked.append(args)
        return fault

    with registered() as patterns, pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_check, "_dy", dy)
        patch.setattr(value_check, "faults_of", ask)
        for seed in range(count):
            asked.clear()
            try:
                program, fault = attempt(run, seed, patterns)
            except (Illegal, NothingToWrite):
                continue
            if asked and not fault:
                yield program, asked[0]


by_both_rules = pytest.mark.parametrize(
    "bounded",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["to the bit", "bounded"],
)


@pytest.mark.slow
@by_both_rules
def test_what_is_planted_is_found(bounded: bool) -> None:
    """In each result of each program one element. Where the set of what it may be is open, or eager
    itself is no guide, some are not; `Shares` counts those."""
    planted: Counter[str] = Counter()
    missed: dict[str, list[str]] = {plant: [] for plant in PLANTS}
    for program, args in _programs(Run(train=True, bounded=bounded), 24 if bounded else 60):
        draw = random.Random(program.source)
        *head, eager, fused, exact, _shares = args
        for name in fused.grads:
            found, theirs = fused.grads[name], eager.grads[name]
            for plant in sorted(PLANTS, key=lambda plant: planted[plant])[:3]:  # the rarest
                changed = PLANTS[plant](found, theirs, draw)
                if changed is not None:
                    planted[plant] += 1
                    if not faults_of(*head, eager, _with(fused, name, changed), exact):
                        missed[plant].append(f"{name} of {program.label}")
    for plant, count in planted.items():
        assert count >= 10, planted
        assert len(missed[plant]) <= (0.1 if bounded else 0.04) * count, (plant, count, missed)


@pytest.mark.slow
@by_both_rules
def test_a_lost_sign_of_zero_is_found(bounded: bool) -> None:
    planted = missed = 0
    for _, args in _programs(Run(bounded=bounded, magnitudes="extreme"), 60):
        *head, eager, fused, exact, _shares = args
        zero = (fused.y == 0) & (eager.y == 0) & fused.y.signbit() & eager.y.signbit()
        if zero.any():
            planted += 1
            lost = torch.where(zero, 0.0, fused.y)
            missed += not faults_of(*head, eager, _with(fused, "y", lost), exact)
    assert planted >= 5 and missed <= 0.3 * planted, (planted, missed)


# Of `value_relu_bn` in evaluation: a convolution whose weight takes in the BatchNorm's scale.
FOLDED = (8, 10, 26, 30, 34, 37, 90)


@pytest.mark.slow
@pytest.mark.parametrize("magnitudes", ["ordinary", "extreme"])
def test_a_folded_convolution_is_held_to_its_own_roundings(magnitudes: str) -> None:
    run, count = Run(only=("value_relu_bn",), magnitudes=magnitudes), 0
    with registered() as patterns:
        for seed in FOLDED:
            program, fault = attempt(run, seed, patterns)
            assert not fault, (seed, fault)
            count += program.folded
    assert count >= 5


@pytest.mark.slow
def test_a_folded_convolution_with_a_wrong_shift_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fold = folded.fold_in_torch

    def shifted(*args: Any) -> list[Tensor]:
        return [v if v.ndim > 1 else v * 1.001 for v in fold(*args)]

    monkeypatch.setattr(folded, "fold_in_torch", shifted)
    run = Run(only=("value_relu_bn",), magnitudes="ordinary")
    with registered() as patterns:
        assert all(attempt(run, seed, patterns)[1] for seed in FOLDED[:3])


@pytest.mark.slow
def test_nothing_is_fused_where_the_patterns_are_too_many_to_compare() -> None:
    """Its site is refused, with that reason: what runs is the user's own."""
    with registered() as patterns:
        program, fault = attempt(Run(magnitudes="extreme"), 1086, patterns)
    assert program.crowd and not program.fused and not fault


@pytest.mark.slow
def test_the_part_of_a_tail_that_is_fused_is_compared() -> None:
    """All patterns are active, or a tail's end is not taken in."""
    parts: Counter[str] = Counter()
    for run in (Run(train=True, auto=True), Run(train=True)):
        for program, _ in _programs(run, 45):
            parts["part"] += program.part is not None
            parts["early"] += program.part is not None and not program.whole
            assert not program.uncompared
    assert parts["part"] and parts["early"], parts


WITH_A_BIAS = """
def anchor(x, weight):
    return x @ weight

def tail(z, t0):
    return torch.tanh(z + SHIFT) * 2.0

def after(y):
    return y

def forward(x, weight, t0):
    z = anchor(x, weight)
    y = tail(z, t0)
    return y, after(y.detach())
"""


# The fuzzer's 5005708 and 3005043: what the tail makes of an operand alone is the gemm's bias.
@pytest.mark.slow
@pytest.mark.parametrize("shift", ["t0", "torch.neg(t0)", "(-2.0) * torch.multiply(t0, 0.3)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tail_that_begins_with_the_bias_of_its_gemm(dtype: torch.dtype, shift: str) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 3), "weight": torch.randn(3, 8), "t0": torch.randn(8)}
    inputs = {n: v.to(dtype).requires_grad_() for n, v in inputs.items()}
    with registered() as patterns, pytest.MonkeyPatch.context() as patch:
        pattern = next(p for p in patterns if p.name == "value_relu")
        source = WITH_A_BIAS.replace("SHIFT", shift)
        program = Program(source, pattern, inputs, ["t0"], 1, True, dtype, "", auto=True)
        shares = Shares()
        assert not value_check.check(program, "cpu", 0, shares=shares)
        assert program.bias is not None and shares.elements["matmul", "y"] == 32
        assert shares.share() < 0.02

        def wrong(*args: Any) -> str:
            *head, eager, fused, exact, _ = args
            changed = [_with(fused, n, 1.02 * v) for n, v in (("y", fused.y), *fused.grads.items())]
            return " ".join(faults_of(*head, eager, seen, exact) for seen in changed)

        patch.setattr(value_check, "faults_of", wrong)
        faults = value_check.check(program, "cpu", 0)
        assert faults.count("differs") == 4, faults


@pytest.mark.parametrize("seed, name", [(5003406, "t1"), (5004165, "t0")])
def test_a_last_bit_that_another_layout_changes(seed: int, name: str) -> None:
    """It is torch's own, of the same values side by side; any other is a fault."""
    run, faults = Run(train=True, auto=True), {}

    def wrong(*args: Any) -> str:
        *head, eager, fused, exact, shares = args
        one_up = torch.nextafter(fused.grads[name], torch.full_like(fused.y, inf))
        faults["planted"] = faults_of(*head, eager, _with(fused, name, one_up), exact)
        return faults_of(*head, eager, fused, exact, shares)

    with registered() as patterns, pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_check, "faults_of", wrong)
        program, fault = attempt(run, seed, patterns)
    assert not fault and program.fused
    assert f"the gradient of {name} differs" in faults["planted"]
    share = int(faults["planted"].partition("differs at ")[2].partition(" ")[0])
    assert share > 0.2 * program.inputs[name].numel()  # but for what is zero, or not finite


@pytest.mark.slow
def test_factors_of_which_one_order_alone_leaves_the_range() -> None:
    """Of the fuzzer's 4001983, in float64: eager and what is fused are numbers."""
    dz, rstd, gamma = (torch.tensor([v], dtype=torch.float64) for v in (1e-7, 130.0, -1.79e308))
    found = _scaled(Possible.exactly(dz), rstd, gamma)
    for value, right in ((-2.327e303, True), (-inf, True), (inf, False), (nan, False), (1, False)):
        assert bool(found.widened(1e300).accepts(torch.full_like(dz, value))) == right
    held = _scaled(Possible.exactly(dz), rstd, gamma * 1e-10)
    assert not held.accepts(torch.full_like(dz, -inf)).any()
    with registered() as patterns:
        program, fault = attempt(Run(train=True), 4001983, patterns)
    assert program.fused and not fault


@pytest.mark.slow
@pytest.mark.parametrize("flushes, value, right", [
    (True, -1.9375, True),  # of the fuzzer's 5004678, on a CPU with AMX
    (False, -1.9375, False),
    (True, -1.8671875, True),
    (True, -1.98, False),
    (True, nan, False),
])  # fmt: skip
def test_subnormal_factors_that_a_library_takes_for_zero(
    flushes: bool, value: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*args: Any) -> str:
        *head, eager, fused, exact, shares = args
        weight = fused.grads["weight"].clone()
        weight[4, 0, 0, 2] = value
        return faults_of(*head, eager, _with(fused, "weight", weight), exact, shares)

    monkeypatch.setattr(value_totals, "library_flushes", lambda *of: flushes)
    monkeypatch.setattr(value_check, "faults_of", planted)
    with registered() as patterns:
        program, fault = attempt(Run(train=True, auto=True), 5004678, patterns)
    assert program.fused and (fault == "") == right, fault


@pytest.mark.slow
@pytest.mark.parametrize("value, right", [
    (7.572106768716692e36, True),  # of the fuzzer's 1000067, on an H100, as in torch's operations
    (7.572122614349194e36, True),  # as fused
    (7.5735e36, False), (inf, False), (nan, False),
])  # fmt: skip
def test_a_room_whose_terms_overflow_is_a_room(
    value: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch's BatchNorm: gamma is float32's largest, and z a difference of larger numbers."""

    def planted(*args: Any) -> str:
        *head, eager, fused, exact, shares = args
        y = fused.y.clone()
        y[0, 4, 0, 0] = value
        return faults_of(*head, eager, _with(fused, "y", y), exact, shares)

    monkeypatch.setattr(value_check, "faults_of", planted)
    run = Run(train=True, device="cuda", structures=36, first=1_000_000)
    with registered() as patterns:
        program = run.program(1_000_067, patterns)
        fault = value_check.check(program, "cpu", 1_000_067, bounded=True)
    assert program.fused and (fault == "") == right, fault


@pytest.mark.slow
@pytest.mark.parametrize("of_eager, found", [(False, True), (True, False)])
def test_what_a_convolution_loses_beside_a_large_gradient(
    of_eager: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 on CUDA; of z⁶, which is huge in one channel and next to nothing in another. Fused,
    less is lost than eager's algorithm may lose."""
    faults = []

    def off(seen: Seen, by: float) -> Seen:
        grad = seen.grads["weight"].clone()
        assert (grad[2].abs() < 1e-6).all()
        grad[2] += by
        return _with(seen, "weight", grad)

    def planted(*args: Any) -> str:
        *head, eager, fused, exact, _shares = args
        eager = off(eager, 2e-5) if of_eager else eager
        faults.append(faults_of(*head, eager, off(fused, 1e-5), exact))
        return faults_of(*args)

    monkeypatch.setattr(value_check, "faults_of", planted)
    monkeypatch.setattr(value_totals, "has_lost", lambda p, inputs: True)
    run = Run(train=True, auto=True, device="cuda", structures=24, first=2_000_000, bounded=True)
    shares = Shares()
    with registered() as patterns:
        program = run.program(2_000_031, patterns)
        assert not value_check.check(program, "cpu", 0, bounded=True, shares=shares)
    assert program.pattern.kind == "conv2d" and "pow6" in program.label
    assert [bool(fault) for fault in faults] == [found]
    assert shares.share("conv2d", "gradients of the anchor's operands") < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_gradient_beyond_the_range_times_a_weight_of_zero(
    on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 on CUDA it is a number, and 0 may be the product, as in exact arithmetic; where it is
    rounded first, NaN alone is right."""
    values = []

    def planted(*args: Any) -> str:
        *head, eager, fused, exact, _shares = args
        grad = fused.grads["x"]
        for place, value in (((1, 0, 3, 4), -1399.5), ((1, 0, 3, 4), 1e4), ((0, 0, 0, 0), 1e3)):
            changed = grad.clone()
            changed[place] = value
            values.append(faults_of(*head, eager, _with(fused, "x", changed), exact))
        assert grad[1, 0, 3, 4].isnan() and grad[0, 0, 0, 0].abs() < 1e5
        return faults_of(*args)

    monkeypatch.setattr(value_check, "faults_of", planted)
    monkeypatch.setattr(value_totals, "has_lost", lambda p, inputs: on_cuda)
    run = Run(train=True, auto=True, device="cuda", structures=50, first=6_002_000)
    with registered() as patterns:
        program = run.program(6_002_048, patterns)
        assert not value_check.check(program, "cpu", 6_002_048, bounded=True)
    assert [not fault for fault in values] == [on_cuda, False, False]


def test_other_strides_are_found() -> None:
    y = torch.randn(2, 3, 4)
    turned = y.mT.contiguous().mT
    assert stride_faults(Seen(y, y), Seen(turned, turned))
    assert not stride_faults(Seen(y, y), Seen(y.clone(), y))
    one = torch.randn(1, 4)
    assert not stride_faults(Seen(one, one), Seen(one.as_strided((1, 4), (9, 1)), one))


def test_a_run_that_looks_away_fails() -> None:
    run, tally = Run(), Tally(programs=1000)
    assert not too_little(run, tally)
    tally.uncompared["no reason"] = 6
    assert "not compared" in too_little(run, tally)
    tally = Tally(programs=1000)
    tally.ordinary.elements["linear", "y"] = 1000
    tally.ordinary.opened["linear", "y", "unstable"] = 6
    assert "accepted unseen" in too_little(run, tally)
    assert not too_little(Run(bounded=True), tally)
    for count, found in ((999, False), (1000, True)):  # of one part, which all others outnumber
        part = Tally(programs=1000)
        part.ordinary.elements.update({("linear", "y"): 90_000, ("matmul", "y"): count})
        part.ordinary.opened["matmul", "y", "unstable"] = 30
        assert ("matmul, y" in too_little(Run(bounded=True), part)) is found
    tally.extreme.opened["linear", "y", "unstable"] = 600
    assert "accepted unseen" in too_little(run, tally) and isinstance(tally.extreme, Shares)
