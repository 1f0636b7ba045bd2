"""The bound of `verify`: each way to be wrong is a fault, and no other rounding is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from right_results import Rounded
from torch import Tensor

from fx_fuser.verify.accuracy import (
    NEIGHBOURS,
    PROMISED,
    Observed,
    compare,
    remaining_faults,
)

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def _values(exact: Tensor, dtype: torch.dtype, seed: int, ulps: float = 1.0) -> Tensor:
    """The exact values off by errors of some ulps, rounded."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    return (exact + noise * ulps * torch.finfo(dtype).eps * exact.std()).to(dtype)


def _faults(value: Tensor, eager: Tensor, exact: Tensor, peers: bool = True) -> list[str]:
    """Of an output; peers: eager's neighbours are asked as well."""
    found = Observed({"y": value})
    spread = [_values(exact, eager.dtype, 100 + i) for i in range(NEIGHBOURS if peers else 0)]
    runs = [Observed({"y": torch.where(eager.isfinite(), s, eager)}) for s in spread]
    return remaining_faults(
        found, Observed({"y": eager}), Observed({"y": exact}), PROMISED, (), runs
    )


def _three(dtype: torch.dtype, count: int = 10_000) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return _values(exact, dtype, 1), _values(exact, dtype, 2), exact


# ---- infinities and NaN -------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("value", [0.5, 0.0, math.inf, -math.inf])
def test_a_nan_is_a_nan(value: float, dtype: torch.dtype) -> None:
    found, eager, exact = _three(dtype)
    for tensor in (found, eager, exact):
        tensor[3] = math.nan
    assert not _faults(found, eager, exact)
    found[3] = value
    assert "infinities or NaNs" in _faults(found, eager, exact)[0]


@each_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_is_a_number(value: float, dtype: torch.dtype) -> None:
    found, eager, exact = _three(dtype)
    found[3] = value
    assert _faults(found, eager, exact)


@each_dtype
def test_an_infinity_keeps_its_sign_and_is_not_the_largest_number(dtype: torch.dtype) -> None:
    found, eager, exact = _three(dtype)
    for tensor in (found, eager, exact):
        tensor[3] = math.inf
    assert not _faults(found, eager, exact)
    for value in (-math.inf, torch.finfo(dtype).max, math.nan, 7.0):
        found[3] = value
        assert "infinities or NaNs" in _faults(found, eager, exact)[0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("exactly", [3e4, 1e5], ids=["in range", "out of range"])
def test_where_eager_overflows(exactly: float, sign: float) -> None:
    """In range: an operation before the last overflowed."""
    found, eager, exact = (t * 1e4 for t in _three(torch.float16))
    exact[3], eager[3] = sign * exactly, sign * math.inf
    near = [sign * min(exactly, 65504.0) * f for f in (1.0, 1 - 2e-3)]
    for value in (sign * math.inf, *(near[:1] if exactly == 1e5 else near)):
        found[3] = value
        beyond = exactly == 1e5 and math.isfinite(value)  # 65504 for 100000 is far off
        assert bool(_faults(found, eager, exact)) == beyond, value
    for value in (7.0, -sign * math.inf, -sign * exactly, sign * exactly / 2, math.nan):
        found[3] = value
        assert _faults(found, eager, exact), value


def test_where_eager_is_nan_by_overflow() -> None:
    found, eager, exact = _three(torch.float16)
    exact[3], eager[3] = 0.25, math.nan
    for value, right in ((math.nan, True), (0.25, True), (7.0, False), (-math.inf, False)):
        found[3] = value
        assert bool(_faults(found, eager, exact)) != right, value


def test_an_overflow_elsewhere_excuses_nothing() -> None:
    found, eager, exact = _three(torch.float16)
    found[3], eager[3], exact[3] = math.inf, math.inf, 1e30
    assert not _faults(found, eager, exact)
    found[5] = 7.0
    assert _faults(found, eager, exact)


def test_an_infinity_is_as_far_off_as_the_numbers_that_round_to_it() -> None:
    exact = torch.tensor([65515.0, 65525.0, 1.0], dtype=torch.float64)
    eager = torch.tensor([65504.0, math.inf, 1.0], dtype=torch.float16)
    found = torch.tensor([math.inf, 65504.0, 1.0], dtype=torch.float16)
    assert not _faults(found, eager, exact, peers=False)
    exact[0] = 60000.0
    assert _faults(found, exact.half(), exact, peers=False)


# ---- size of errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "times", "wrong"),
    [
        (torch.float32, 1.4, False),
        (torch.float32, 1.7, True),
        (torch.float32, 2.5, True),
        (torch.bfloat16, 1.9, False),
        (torch.bfloat16, 2.3, True),
    ],
)
def test_the_factor(dtype: torch.dtype, times: float, wrong: bool) -> None:
    """Of many elements, whatever the neighbours are; of gradients as of values."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(10_000, generator=generator, dtype=torch.float64).to(dtype).double()
    noise = torch.randn(10_000, generator=generator, dtype=torch.float64)
    eager = (exact + 20 * torch.finfo(dtype).eps * noise).to(dtype)
    found = (exact + times * (eager.double() - exact).flip(0)).to(dtype)
    assert bool(_faults(found, eager, exact)) == wrong
    gradients = [Observed(grads={"w": v}) for v in (found, eager, exact)]
    assert bool(compare(*gradients)) == wrong


SPOILS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": torch.zeros_like,
    "negated": torch.neg,
    "off by half": lambda v: v * 1.5,
    "shifted": lambda v: v + 1.0,
}


@each_dtype
@pytest.mark.parametrize("spoil", SPOILS)
def test_ten_wrong_elements_of_many(spoil: str, dtype: torch.dtype) -> None:
    found, eager, exact = _three(dtype)
    places = exact.abs().gt(0.5).nonzero()[:10].flatten()
    found[places] = SPOILS[spoil](found[places])
    assert _faults(found, eager, exact)


@pytest.mark.slow
@each_dtype
def test_ten_wrong_elements_of_a_million(dtype: torch.dtype) -> None:
    """In bfloat16 the norm alone does not show them."""
    found, eager, exact = _three(dtype, 10**6)
    assert not _faults(found, eager, exact, peers=False)
    found[exact.abs().gt(0.5).nonzero()[:10].flatten()] = 0.0
    (fault,) = _faults(found, eager, exact, peers=False)
    assert "worst element" in fault or dtype != torch.bfloat16


@pytest.mark.slow
def test_wrong_elements_beside_much_larger_ones() -> None:
    found, eager, exact = _three(torch.bfloat16, 10**5)
    for tensor in (found, eager, exact):
        tensor[0] = 1000.0
    assert not _faults(found, eager, exact)
    found[exact.abs().gt(0.5).nonzero()[:3].flatten()] = 0.0
    assert _faults(found, eager, exact)


def test_complex_numbers() -> None:
    found, eager, exact = (torch.complex(t, t.flip(0)) for t in _three(torch.float32))
    assert not compare(*(Observed({"y": t}) for t in (found, eager, exact)))
    found = torch.complex(
        found.real, found.imag.clone().index_fill_(0, torch.tensor([3]), math.nan)
    )
    assert compare(*(Observed({"y": t}) for t in (found, eager, exact)))


# ---- gradients ----------------------------------------------------------------------------------


def _gradients(*small: Tensor) -> list[Observed]:
    """Runs whose other gradient is large."""
    large = _three(torch.float32)
    return [Observed(grads={"large": 1e4 * v, "small": s}) for v, s in zip(large, small)]


@pytest.mark.parametrize("factor", [-1.0, 1000.0, 0.0, 1.001])
def test_a_small_gradient_is_compared(factor: float) -> None:
    found, eager, exact = (t * 1e-12 for t in _three(torch.float32, 16))
    assert not compare(*_gradients(found, eager, exact))
    (fault,) = compare(*_gradients(found * factor, eager, exact))
    assert fault.startswith("gradient of small: error")


def test_a_gradient_that_is_zero_in_exact_arithmetic_is_noise_of_eagers_size() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, generator=generator)
    exact = 1e-16 * torch.randn(16, generator=generator, dtype=torch.float64)
    for factor, wrong in ((-5.0, False), (0.0, False), (1000.0, True)):
        faults = compare(*_gradients(1e-7 * factor * noise.flip(0), 1e-7 * noise, exact))
        assert bool(faults) == wrong, factor


def test_strides_of_gradients_are_compared_where_they_are_promised() -> None:
    right = torch.randn(4, 5)
    runs = [Observed(grads={"w": t}) for t in (right.t().contiguous().t(), right, right.double())]
    assert compare(*runs) == ["gradient of w: strides (1, 4), in eager (5, 1)"]


def test_strides_of_one_element_are_no_fault_of_a_gradient() -> None:
    right = torch.randn(4, 1)
    runs = [right.as_strided((4, 1), (1, 4)), right, right.double()]
    assert not compare(*(Observed(grads={"w": t}) for t in runs))
    assert "strides" in compare(*(Observed(outputs={"y": t}) for t in runs))[0]


@pytest.mark.parametrize("part", ["outputs", "state"])
def test_strides_of_outputs_and_buffers_are_compared(part: str) -> None:
    right = torch.randn(4, 5)
    runs = [
        Observed(**{part: {"y": t}}) for t in (right.t().contiguous().t(), right, right.double())
    ]
    assert "strides (1, 4), in eager (5, 1)" in compare(*runs)[0]


# ---- what is right ------------------------------------------------------------------------------


def _is_by_order(fault: str, found: Observed, exact: Observed) -> bool:
    """Is it of one number, a sum of thousands that is off by the roundings of its partial sums?

    Eager's neighbours add in eager's order, and are too near to it to round otherwise, so they do
    not show how far another order may be off (seeds 1263 and 1683): `verify` would leave such
    a site unfused.
    """
    name = fault.partition(":")[0].removeprefix("gradient of ")
    if name not in exact.grads or exact.grads[name].numel() > 1:
        return False
    terms, value = exact.outputs["y"].numel(), float(exact.grads[name])
    roundings = terms**0.5 * torch.finfo(torch.float32).eps / 2 * abs(value)
    return terms > 1000 and abs(float(found.grads[name]) - value) <= roundings


def test_a_single_number_is_excused_by_its_sums_roundings_alone() -> None:
    def seen(value: float, size: int = 4096) -> Observed:
        return Observed({"y": torch.zeros(size)}, {"scalar": torch.tensor(value).double()})

    fault, off = "gradient of scalar: error", 1 + 64 * 2**-24
    assert _is_by_order(fault, seen(100 * off), seen(100.0))
    assert not _is_by_order(fault, seen(100 * (2 * off - 1)), seen(100.0))
    assert not _is_by_order(fault, seen(100 * off, 64), seen(100.0, 64))
    assert not _is_by_order("output 0: error", seen(100.0), seen(100.0))


def _cases(seeds: range, sizes: tuple[int, ...]) -> int:
    """Compares right results, and returns how many."""
    count = 0
    for seed in seeds:
        pick = random.Random(seed)
        size = pick.choice(sizes)
        rows = max(1, round(size ** pick.random()))
        shape = (rows, pick.choice((1, 2, 5, 16, 64, 257)), max(1, size // rows))
        case = Rounded.draw(seed, shape, pick.choice((0.0, 0.0, 1.0)))
        exact, eager = case.exact(), case.eager()
        for order in (1, 2, 3):
            found = case.fused(7 * seed + order)
            faults = remaining_faults(found, eager, exact, PROMISED, (), case.peers())
            faults = [fault for fault in faults if not _is_by_order(fault, found, exact)]
            assert not faults, (seed, order, case.tail, case.dtype, shape)
            count += 1
    return count


@pytest.mark.slow
def test_right_results_raise_no_alarm() -> None:
    assert _cases(range(80), (1, 3, 10, 30, 100, 1000)) == 240


@pytest.mark.slow
@pytest.mark.combination
@pytest.mark.parametrize("first", range(1000, 2500, 100))
def test_right_results_of_many_sizes_raise_no_alarm(first: int) -> None:
    assert _cases(range(first, first + 100), (1, 3, 10, 30, 100, 1000, 10**4)) == 300


@pytest.mark.slow
@pytest.mark.combination
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_large_right_results_raise_no_alarm(first: int) -> None:
    assert _cases(range(first, first + 5), (10**5, 10**6)) == 15
