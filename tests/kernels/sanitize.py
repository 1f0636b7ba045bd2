"""The native kernels on small shapes, from the checkout:

    PYTHONPATH=.:tests compute-sanitizer python tests/kernels/sanitize.py [--only WORD …]

Run it once without the sanitizer, so that everything is built: compilers are slow under it. With
`--racecheck` it leaves out what that tool mistakes for races: kernels in which one lane arrives at
a stage's barrier for its warp (kernels_cu/conv/NOTES.md, implicit gemm). `--only` takes the parts
whose names hold one of the words, so that several processes can share the work.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

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
import pixels_checks
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
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run

Failures = list[str]


def native(failures: Failures) -> int:
    for case in SMALL_CASES:
        case()
    return len(SMALL_CASES)


def swept(
    sweep: Callable[..., object], count: int, *more: object,
    specs: Callable[[], list[KernelSpec]] = list, first: int = 0,
) -> Callable[[Failures], int]:  # fmt: skip
    """A part: `sweep` over so many cases, of kernels that are built all at once."""

    def part(failures: Failures) -> int:
        load.prepare(specs(), "cuda")
        sweep(failures, count, first, *more)
        return count

    return part


def of_examples(module: Any, count: int, *more: object) -> Callable[[Failures], int]:
    """Of a harness whose `spec_of` makes a kernel of each of its `EXAMPLES`."""
    specs = lambda: [module.spec_of(*one) for one in module.EXAMPLES]  # noqa: E731
    return swept(module.sweep, count, *more, specs=specs)


def called(name: str, *given: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = run.MANY(*run.arguments(name, given))
    return found


def windows(failures: Failures) -> int:
    load.prepare(window.offered(), "cuda")
    for place in range(len(window.SHAPES)):
        attention_window_checks.sweep(failures, called, place, 4, place)
    return 4 * len(window.SHAPES)


def gathers(failures: Failures) -> int:
    load.prepare(gathered.offered(), "cuda")
    gather_rows_checks.sweep(failures, called, 0, 8)
    return 8


def statistics_of_pixels(failures: Failures) -> int:
    pixels_checks.sweep(failures, pixels_checks.on_gpu, 12, 0, 300, 200)
    return 12


def dense(failures: Failures) -> int:
    checked = linear_dense_checks
    load.prepare([e.spec(dtype) for e in checked.EXAMPLES for dtype in checked.DTYPES], "cuda")
    with float32_settings("tf32"):
        checked.sweep(failures, 16, 0, checks.small_sizes)
    return 16


def direct(failures: Failures) -> int:
    for examples in (conv_direct_checks.EXAMPLES, conv_direct_checks.HALF_EXAMPLES):
        load.prepare([e.spec for e in examples], "cuda")
        conv_direct_checks.sweep(failures, 12, 0, conv_checks.small_case, examples)
        conv_direct_checks.sweep(failures, 2, 0, conv_checks.wide_case, examples)
    return 28


def backward_of_convolutions(failures: Failures) -> int:
    made = conv_backward_sm90
    load.prepare([*made.IDENTITY.values(), *made.SCALED.values()], "cuda")
    for dtype in conv_sm90.DTYPES:
        conv_backward_checks.sweep(failures, 8, 0, conv_checks.small_case, [dtype])
    return 8 * len(conv_sm90.DTYPES)


def split_product(failures: Failures) -> int:
    """Small, but large enough for the op to take its own kernel. Both operands are transposed
    views."""
    spec = linear_sm90.IDENTITY.spec
    load.prepare([spec], "cuda")
    a, b = (torch.randn(200, 2048, device="cuda").t() for _ in range(2))
    product = torch.ops.fx_fuser.split_product.default(a, b, spec.name)
    if not relative(product, a.double() @ b.double().t()) <= 1e-6:
        failures.append("split_product")
    return 1


def narrow_specs() -> list[KernelSpec]:
    return [*EXACT_GEMMS.values(), *MIXED_GEMMS.values()]


# Name → what runs it and says how many cases there were.
PARTS: dict[str, Callable[[Failures], int]] = {
    "native": native,
    "depthwise": of_examples(depthwise_checks, 40, 20),
    "depthwise gradients": swept(depthwise_gradient_checks.sweep, 16, 20),
    "stem": of_examples(stem_checks, 40, 30),
    "grouped": swept(
        grouped_checks.sweep, 40, 20,
        specs=lambda: [grouped.spec_of(*one) for one in grouped_checks.EXAMPLES],
    ),
    "unaligned": swept(unaligned_checks.sweep, 36, 12, 140, 150),
    "conv1d": swept(conv1d_checks.sweep, 12, 150, 64),
    "head loss": swept(head_loss_checks.sweep, 20, (5, 20000), specs=head_loss.examples),
    "attention of windows": windows,
    "gathers": gathers,
    "pixels": statistics_of_pixels,
    "implicit": of_examples(implicit_checks, 40, 20),
}  # fmt: skip
HOPPER: dict[str, Callable[[Failures], int]] = {
    "combs": swept(combs_checks.sweep, 24),
    **{
        f"{name} {shape}": swept(module.sweep, count, shape, 260)
        for name, module, count in (
            ("attention forward", attention_checks, 6),
            ("attention backward", attention_backward_checks, 4),
            ("attention bias forward", attention_bias_checks, 6),
        )
        for shape in module.SHAPES
    },
    **{
        f"attention bias backward {shape}": swept(
            attention_bias_backward_checks.sweep, 4, shape, 260
        )
        for shape in attention_bias_checks.SHAPES
    },
    "attention dropout": swept(attention_dropout_checks.sweep, 4, 260),
    "attention bias dropout": swept(attention_bias_dropout_checks.sweep, 4, 260),
    "linear split": swept(linear_split_checks.sweep, 8),
    "split planes": swept(split_planes_checks.sweep, 16),
    "narrow": swept(narrow_checks.sweep, 24, checks.small_sizes, specs=narrow_specs),
    "linear dense": dense,
    "conv direct": direct,
    "conv backward": backward_of_convolutions,
    "split product": split_product,
}
# What racecheck mistakes for races.
BY_LANES = ("implicit", "combs", "attention forward", "attention backward", "attention dropout",
            "attention bias")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/kernels/sanitize.py")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="of parts' names")
    parser.add_argument("--racecheck", action="store_true")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    parts = {**PARTS}
    if asked.list or binaries.arch_of() == "sm_90a":
        parts |= HOPPER
    names = [name for name in parts if any(word in name for word in asked.only)]
    if asked.racecheck:
        names = [name for name in names if not name.startswith(BY_LANES)]
    if asked.list:
        print("\n".join(names))
        return 0
    failures: Failures = []
    ran = 0
    for name in names:
        begun = time.monotonic()
        count = parts[name](failures)
        torch.cuda.synchronize()
        print(f"{name}: {count} cases in {time.monotonic() - begun:.0f} s", flush=True)
        ran += count
    print("\n".join([f"{ran} cases ran", *failures]))
    return bool(failures) or not ran


if __name__ == "__main__":
    sys.exit(main())
