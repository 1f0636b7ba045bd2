"""Mutants of `verify`, for tests/mutants/mutate.py: ways in which it would look away."""

from __future__ import annotations

BOUND, FAULTS = "tests/verify/test_verify_bound.py", "tests/verify/test_verify_faults.py"
VALUE = f"{FAULTS}::test_a_wrong_value_is_found"
ACCURACY, RIVALS = "verify/accuracy.py", "verify/rivals.py"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "verify: the factor of fp32 is 1.5", ACCURACY,
        "factor={torch.float32: 1.5,", "factor={torch.float32: 3,",
        (f"{BOUND}::test_the_factor[dtype1-1.7-True]",
         f"{BOUND}::test_the_factor[dtype2-2.5-True]"),
    ),
    (
        "verify: infinities and NaNs are compared", ACCURACY,
        "distance = torch.where(right, 0.0, distance)",
        "distance = torch.where(right | ~torch.isfinite(g), 0.0, distance)",
        (f"{BOUND}::test_where_eager_overflows[in range-1.0]",
         f"{BOUND}::test_a_nan_is_a_nan[inf-dtype0]",
         f"{VALUE}[7 for an overflow]", f"{VALUE}[0.5 for NaN]",
         f"{VALUE}[the largest number for an infinity]"),
    ),
    (
        "verify: an infinity has a sign", ACCURACY,
        "right |= overflowed & v.isinf() & (v.sign() == e.sign())",
        "right |= overflowed & v.isinf()",
        (f"{BOUND}::test_where_eager_overflows[in range-1.0]",
         f"{BOUND}::test_where_eager_overflows[in range--1.0]"),
    ),
    (
        "verify: a NaN is no number", ACCURACY,
        "nan_to_num(nan=math.inf, posinf=math.inf)", "nan_to_num(nan=0.0, posinf=math.inf)",
        (f"{BOUND}::test_a_number_is_a_number[nan-dtype0]", f"{VALUE}[NaN for a number]"),
    ),
    (
        "verify: single elements are compared", ACCURACY,
        "bound.peak[real] * largest + least)", "largest)",
        (f"{BOUND}::test_ten_wrong_elements_of_a_million[dtype1]",),
    ),
    (
        "verify: of a small gradient eager has digits right", ACCURACY,
        "noise = is_grad and rivals[0].whole > _NOISE * size", "noise = is_grad",
        (f"{BOUND}::test_the_factor[dtype1-1.7-True]",),
    ),
    (
        "verify: strides of results are compared", ACCURACY,
        "if all(value.stride(i) == eager.stride(i) for i in reaching):", "if True:",
        (f"{BOUND}::test_strides_of_outputs_and_buffers_are_compared[outputs]",
         f"{FAULTS}::test_other_strides_are_found"),
    ),
    (
        "verify: a folded convolution's rival is channels_last", RIVALS,
        'return given.get("product") == FOLDED', "return False",
        (f"{FAULTS}::test_a_folded_convolution_is_held_to_the_users_own_in_its_layout",),
    ),
)  # fmt: skip
