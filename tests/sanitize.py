"""The native kernels on small shapes: `PYTHONPATH=. compute-sanitizer python tests/sanitize.py`.

Run it once without the sanitizer, so that everything is built: compilers are slow under it. With
`--racecheck` it leaves out what that tool takes for races: kernels in which one lane arrives at a
stage's barrier for its warp (kernels_cu/conv/NOTES.md, implicit gemm).
"""

import sys
from types import ModuleType

import torch
from native_cases import SMALL_CASES

from benchmarks import (
    conv_backward_sm90,
    conv_cases,
    conv_sm90,
    depthwise,
    implicit,
    linear_dense_sm90,
    linear_sm90,
    narrow_sm90,
    split_planes_sm90,
    stem,
)
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser.native import binaries, load

for case in SMALL_CASES:
    case()
ran = len(SMALL_CASES)
failures: list[str] = []
load.prepare([depthwise.spec_of(*one) for one in depthwise.EXAMPLES], "cuda")
depthwise.sweep(40, 0, failures, side=20)
load.prepare([stem.spec_of(*one) for one in stem.EXAMPLES], "cuda")
stem.sweep(40, 0, failures, side=30)
ran += 80
if "--racecheck" not in sys.argv:
    load.prepare([implicit.spec_of(*one) for one in implicit.EXAMPLES], "cuda")
    implicit.sweep(40, 0, failures, side=20)
    ran += 40
assert not failures, failures
if binaries.arch_of() == "sm_90a":

    def sweep(harness: ModuleType, cases: int, *more: object) -> None:
        global ran
        harness.sweep(cases, 0, failures, *more)
        ran += cases

    sweep(linear_sm90, 8)
    sweep(split_planes_sm90, 16)
    narrow = [*narrow_sm90.EXACT_GEMMS.values(), *narrow_sm90.MIXED_GEMMS.values()]
    load.prepare(narrow, "cuda")
    sweep(narrow_sm90, 24, narrow_sm90.small_sizes)
    dense = linear_dense_sm90
    load.prepare([e.spec(dtype) for e in dense.EXAMPLES for dtype in dense.DTYPES], "cuda")
    with float32_settings("tf32"):
        sweep(dense, 16, dense.small_sizes)
    for examples in (conv_sm90.EXAMPLES, conv_sm90.HALF_EXAMPLES):
        load.prepare([e.spec for e in examples], "cuda")
        sweep(conv_sm90, 12, conv_cases.small_case, examples)
        sweep(conv_sm90, 2, conv_cases.wide_case, examples)
    backward = conv_backward_sm90
    load.prepare([*backward.IDENTITY.values(), *backward.SCALED.values()], "cuda")
    for dtype in conv_sm90.DTYPES:
        sweep(backward, 8, conv_cases.small_case, [dtype])
    product_alone = linear_sm90.IDENTITY.spec
    load.prepare([product_alone], "cuda")
    # Small, but large enough for the op to take its own kernel. Both operands are transposed views.
    a, b = (torch.randn(200, 2048, device="cuda").t() for _ in range(2))
    product = torch.ops.fx_fuser.split_product.default(a, b, product_alone.name)
    exact = a.double() @ b.double().t()
    if not relative(product, exact) <= 1e-6:
        failures.append("split_product")
    assert not failures, failures
    ran += 1
torch.cuda.synchronize()
print(f"{ran} cases ran")
