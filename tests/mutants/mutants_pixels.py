"""Mutants of what puts 1 x 1 convolutions with statistics into Inductor's graphs."""

from __future__ import annotations

SITE, PASS = "passes/pixels/site.py", "passes/pixels/__init__.py"
TESTS = "tests/passes/test_pixels_pass.py"
REFUSALS = f"{TESTS}::test_refusals"
VALUES = f"{TESTS}::test_a_convolution_and_its_statistics[dtype0]"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "pixels: mean and variance in their places",
        SITE,
        "_PLACES = {_MEAN: 1, _VARIANCE: 2}",
        "_PLACES = {_MEAN: 2, _VARIANCE: 1}",
        (VALUES,),
    ),
    (
        "pixels: the biased variance",
        SITE,
        "return isinstance(correction, (int, float)) and correction == 0",
        "return isinstance(correction, (int, float))",
        (REFUSALS,),
    ),
    (
        "pixels: over all but channels",
        SITE,
        "if over is None or {d % 4 for d in over} != _OVER or",
        "if over is None or",
        (REFUSALS,),
    ),
    (
        "pixels: statistics in fp32",
        SITE,
        "return node.target is _CAST and node.args[1] is torch.float32",
        "return node.target is _CAST",
        (REFUSALS,),
    ),
    ("pixels: no stride", SITE, "if [*given[name]] != [wanted, wanted]:", "if False:", (REFUSALS,)),
    ("pixels: one group", SITE, 'if given["groups"] != 1:', "if False:", (REFUSALS,)),
    (
        "pixels: no bias",
        SITE,
        'return "" if given["bias"] is None else "it has a bias"',
        'return ""',
        (REFUSALS,),
    ),
    (
        "pixels: one pixel",
        SITE,
        "if weight.ndim != 4 or [*weight.shape[2:]] != [1, 1]:",
        "if False:",
        (REFUSALS,),
    ),
    (
        "pixels: whole vectors of channels",
        SITE,
        "if not pixels.takes(*weight.shape[:2]):",
        "if False:",
        (REFUSALS,),
    ),
    (
        "pixels: channels_last",
        SITE,
        "if not all(v.is_contiguous(memory_format=torch.channels_last) for v in (x, z)):",
        "if False:",
        (REFUSALS,),
    ),
    (
        "pixels: timing decides",
        SITE,
        "return best if contest.gains(ours[best], library) else None",
        "return best",
        (f"{TESTS}::test_the_clock_decides[ours1-None]",),
    ),
    (
        "pixels: the fastest tiles",
        SITE,
        "best = min(range(len(ours)), key=ours.__getitem__)",
        "best = 0",
        (f"{TESTS}::test_the_clock_decides[ours0-2]",),
    ),
    (
        "pixels: a kernel that is not there",
        PASS,
        "if not loaded([site.spec], site.device, self.KIND, self.strict):",
        "if False:",
        (f"{TESTS}::test_a_kernel_that_does_not_build_leaves_it",),
    ),
)
