"""Wrong values, each at a place or of a kind that an excuse of `value_oracle` might hide, for
tests/mutants/mutate.py."""

from __future__ import annotations

FUZZ = "tests/oracle/test_value_fuzz.py"
TRAINED, GROWN = f"{FUZZ}::test_programs[train]", f"{FUZZ}::test_programs_that_are_grown[train]"
BOUNDED = f"{FUZZ}::test_within_the_bound_of_a_gpu"
NORM, CONV, LINEAR = (f"anchors/{n}.py" for n in ("conv2d_batchnorm", "conv2d", "linear"))

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "values: gamma's gradient is 7 where dz is not finite", NORM,
        'grads["gamma"] = dgamma.flatten().to(operands["gamma"].dtype)',
        'grads["gamma"] = dgamma.masked_fill(~dz.isfinite().all(), 7.0).flatten()'
        '.to(operands["gamma"].dtype)',
        (TRAINED, BOUNDED),
    ),
    (
        "values: x's gradient is 7 where dz is not finite", LINEAR,
        'grads["x"] = multiply(dz, self.rows(weight).mT)',
        'grads["x"] = multiply(dz, self.rows(weight).mT).masked_fill(~dz.isfinite().all(), 7.0)',
        (TRAINED, GROWN, BOUNDED),
    ),
    (
        "values: a convolution's weight's gradient is 7 where dz is not finite", CONV,
        'grads["weight"] = dweight',
        'grads["weight"] = dweight.masked_fill(~dz.isfinite().all(), 7.0)',
        (TRAINED, GROWN, BOUNDED),
    ),
    (
        "values: an operand's gradient times 1.02", "ops/library.py",
        "dt[i] = grad.to(t[i].dtype).to(t[i].device)",
        "dt[i] = (1.02 * grad).to(t[i].dtype).to(t[i].device)",
        (TRAINED, GROWN, BOUNDED),
    ),
    (
        "values: x's gradient times 1.02", LINEAR,
        'grads["x"] = multiply(dz, self.rows(weight).mT)',
        'grads["x"] = multiply(1.02 * dz, self.rows(weight).mT)',
        (TRAINED, GROWN, BOUNDED),
    ),
    (
        "values: -0 lost", "ops/apply.py",
        "return _evaluated(epilogue, z, t, s, dtype).to(dtype) if epilogue.steps",
        "return (_evaluated(epilogue, z, t, s, dtype) + 0.0).to(dtype) if epilogue.steps",
        (TRAINED, GROWN, BOUNDED),
    ),
    (
        "values: an infinity of the wrong sign", "ops/apply.py",
        "return _evaluated(epilogue, z, t, s, dtype).to(dtype) if epilogue.steps",
        "return _evaluated(epilogue, z, t, s, dtype).nan_to_num(torch.nan, -torch.inf, torch.inf)"
        ".to(dtype) if epilogue.steps",
        (TRAINED, GROWN, BOUNDED),
    ),
    (
        "values: NaN for a number", "ops/apply.py",
        "return _evaluated(epilogue, z, t, s, dtype).to(dtype) if epilogue.steps",
        "return (lambda y: y.where(y.abs() < 3e38, torch.nan))("
        "_evaluated(epilogue, z, t, s, dtype)).to(dtype) if epilogue.steps",
        (TRAINED, GROWN, BOUNDED),
    ),
)  # fmt: skip
