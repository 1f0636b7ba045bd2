"""The mutants of what holds gradients in range, for tests/mutants/mutate.py."""

from __future__ import annotations

from test_extreme_gradients import NORM, QUICK

FILE = "anchors/conv2d_batchnorm.py"
EXTREME = "tests/oracle/test_extreme_gradients.py"


def _at(*places: str) -> tuple[str, ...]:
    """The quick cases of a BatchNorm in evaluation in which these places are extreme."""
    test = f"{EXTREME}::test_gradients_are_numbers_where_eagers_are"
    cases = (case for case in QUICK if case[0] == NORM and case[2] in places)
    return tuple(f"{test}[{'-'.join(case)}]" for case in cases)


# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "extreme: rstd comes after the sum", FILE,
        "return torch.where(_is_normal(total) | other.isnan(), total * rstd, other)",
        "return other",
        _at("running_var tiny, x"),
    ),
    (
        "extreme: or before a sum that overflows", FILE,
        "return torch.where(_is_normal(total) | other.isnan(), total * rstd, other)",
        "return total * rstd",
        _at("running_var, dy, x"),
    ),
    (
        "extreme: but not before one that does not", FILE,
        "torch.where(_is_normal(total) | other.isnan(), total * rstd, other)",
        "torch.where(other.isnan(), total * rstd, other)",
        _at("running_var, dy, x tiny"),
    ),
    (
        "extreme: rstd and gamma are multiplied first", FILE,
        "return dz * first * rest", "return dz * rstd * gamma",
        _at("gamma 0, dy", "gamma tiny, dy"),
    ),
    (
        "extreme: but for a product out of range", FILE,
        "return dz * first * rest", "return dz * both",
        _at("gamma, x dead", "gamma and running_var, dy"),
    ),
    (
        "extreme: a variance times a count", FILE,
        "var = var + var / (count - 1)", "var = var * count / (count - 1)",
        (f"{EXTREME}::test_a_running_variance_near_the_largest_number",),
    ),
)  # fmt: skip
