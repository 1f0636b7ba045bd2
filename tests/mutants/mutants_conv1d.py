"""Mutants of what puts convolutions along one dimension into Inductor's graphs."""

from __future__ import annotations

SITE, PASS = "passes/conv1d/site.py", "passes/conv1d/__init__.py"
SHARED_SITE, SHARED = "passes/convolution/site.py", "passes/convolution/__init__.py"
TESTS = "tests/passes/test_conv1d_pass.py"
LAID, COPIED = (f"{TESTS}::test_forward[dtype0-19-9-True-{last}]" for last in (True, False))
BACKWARD = f"{TESTS}::test_backward"
REFUSALS = f"{TESTS}::test_refusals"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "conv1d: channels that are not adjacent are copied",
        SITE,
        "return seen if is_laid else emit(_aten.clone.default, seen, **_CONTIGUOUS)",
        "return seen",
        (COPIED,),
    ),
    (
        "conv1d: what lies well is not copied",
        SITE,
        "return seen if is_laid else emit(",
        "return emit(",
        (LAID,),
    ),
    (
        "conv1d: the gradient of x reads taps in reverse",
        SITE,
        "grouped = emit(_REVERSE, grouped, [3])",
        "pass",
        (f"{BACKWARD}[True-19-9-asked0]",),
    ),
    (
        "conv1d: the gradient of x has another padding",
        SITE,
        "padding = self.weight.shape[2] - 1 - self.padding",
        "padding = self.padding",
        (f"{BACKWARD}[True-16-0-asked0]",),
    ),
    (
        "conv1d: results are contiguous",
        SITE,
        "    return emit(_aten.clone.default, seen, **_CONTIGUOUS)\n\n\ndef _fault_of_numbers",
        "    return seen\n\n\ndef _fault_of_numbers",
        (LAID, COPIED),
    ),
    (
        "conv1d: no dilation, no stride",
        SITE,
        "if [*parts.numbers[name]] != [1]:",
        "if False:",
        (REFUSALS,),
    ),
    (
        "conv1d: no transposed convolution",
        SHARED_SITE,
        'if self.numbers["transposed"] is not False or',
        "if",
        (f"{TESTS}::test_transposed_convolutions_are_left",),
    ),
    (
        "conv1d: padding within the window",
        SITE,
        "if not 0 <= padding < taps:",
        "if False:",
        (REFUSALS,),
    ),
    (
        "conv1d: kernels for these channels",
        SITE,
        "if not conv1d.takes(out, into, weight.dtype):",
        "if False:",
        (REFUSALS,),
    ),
    (
        "conv1d: timing decides",
        SHARED_SITE,
        "return contest.gains(ours, library)",
        "return True",
        (f"{TESTS}::test_the_clock_decides[1.99-False]",),
    ),
    (
        "conv1d: a kernel that is not there",
        SHARED,
        "return there >= {*specs} and site.gains()",
        "return True",
        (f"{TESTS}::test_a_kernel_that_does_not_build_leaves_it",),
    ),
)
