"""The native kernels on small shapes, from the checkout:

    PYTHONPATH=.:tests compute-sanitizer python tests/kernels/sanitize.py

Run it once without the sanitizer, so that everything is built: compilers are slow under it. With
`--racecheck` it leaves out what that tool mistakes for races: kernels in which one lane arrives at
a stage's barrier for its warp (kernels_cu/conv/NOTES.md, implicit gemm).
"""

import sys
from types import ModuleType

import attention_backward_checks
import attention_bias_backward_checks
import attention_bias_checks
import attention_bias_dropout_checks
import attention_checks
import attention_dropout_checks
import attention_window_checks
import checks
import combs_checks
import conv1d_checks
import conv_backward_checks
import conv_checks
import conv_direct_checks
import depthwise_checks
import depthwise_gradient_checks
import gather_rows_checks
import grouped_checks
import head_loss_checks
import implicit_checks
import linear_dense_checks
import linear_split_checks
import narrow_checks
import split_planes_checks
import stem_checks
import torch
import unaligned_checks
from native_cases import SMALL_CASES

from benchmarks import conv_backward_sm90, conv_sm90, grouped, linear_sm90
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser.kernels import head_loss
from fx_fuser.kernels.attention import gathered, window
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.split import MIXED_GEMMS
from fx_fuser.native import binaries, load
from fx_fuser.ops import run

for case in SMALL_CASES:
    case()
ran = len(SMALL_CASES)
failures: list[str] = []
load.prepare([depthwise_checks.spec_of(*one) for one in depthwise_checks.EXAMPLES], "cuda")
depthwise_checks.sweep(failures, 40, 0, side=20)
load.prepare([stem_checks.spec_of(*one) for one in stem_checks.EXAMPLES], "cuda")
stem_checks.sweep(failures, 40, 0, side=30)
load.prepare([grouped.spec_of(*one) for one in grouped_checks.EXAMPLES], "cuda")
grouped_checks.sweep(failures, 40, 0, side=20)
unaligned_checks.sweep(failures, 36, 0, 12, 140, 150)
conv1d_checks.sweep(failures, 12, 0, 150, 64)
depthwise_gradient_checks.sweep(failures, 16, 0, 20)
load.prepare(head_loss.examples(), "cuda")
head_loss_checks.sweep(failures, 20, 0, (5, 20000))
load.prepare([*window.offered(), *gathered.offered()], "cuda")


def called(name: str, *given: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = run.MANY(*run.arguments(name, given))
    return found


for place in range(len(window.SHAPES)):
    attention_window_checks.sweep(failures, called, place, 4, place)
gather_rows_checks.sweep(failures, called, 0, 8)
ran += 220
if "--racecheck" not in sys.argv:
    load.prepare([implicit_checks.spec_of(*one) for one in implicit_checks.EXAMPLES], "cuda")
    implicit_checks.sweep(failures, 40, 0, side=20)
    ran += 40
assert not failures, failures
if binaries.arch_of() == "sm_90a":

    def sweep(harness: ModuleType, cases: int, *more: object) -> None:
        global ran
        harness.sweep(failures, cases, 0, *more)
        ran += cases

    if "--racecheck" not in sys.argv:  # as the implicit gemm
        sweep(combs_checks, 24)
        for shape in attention_checks.SHAPES:
            sweep(attention_checks, 6, shape, 260)
        for shape in attention_backward_checks.SHAPES:
            sweep(attention_backward_checks, 4, shape, 260)
        sweep(attention_dropout_checks, 4, 260)
        for shape in attention_bias_checks.SHAPES:
            sweep(attention_bias_checks, 6, shape, 260)
            sweep(attention_bias_backward_checks, 4, shape, 260)
        sweep(attention_bias_dropout_checks, 4, 260)
    sweep(linear_split_checks, 8)
    sweep(split_planes_checks, 16)
    load.prepare([*EXACT_GEMMS.values(), *MIXED_GEMMS.values()], "cuda")
    sweep(narrow_checks, 24, checks.small_sizes)
    dense = linear_dense_checks
    load.prepare([e.spec(dtype) for e in dense.EXAMPLES for dtype in dense.DTYPES], "cuda")
    with float32_settings("tf32"):
        sweep(dense, 16, checks.small_sizes)
    for examples in (conv_direct_checks.EXAMPLES, conv_direct_checks.HALF_EXAMPLES):
        load.prepare([e.spec for e in examples], "cuda")
        sweep(conv_direct_checks, 12, conv_checks.small_case, examples)
        sweep(conv_direct_checks, 2, conv_checks.wide_case, examples)
    load.prepare(
        [*conv_backward_sm90.IDENTITY.values(), *conv_backward_sm90.SCALED.values()], "cuda"
    )
    for dtype in conv_sm90.DTYPES:
        sweep(conv_backward_checks, 8, conv_checks.small_case, [dtype])
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
