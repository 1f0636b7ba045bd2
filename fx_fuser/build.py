"""Kernels with example epilogues, and every one for every architecture:  python -m fx_fuser.build

Tests and benchmarks launch these kernels; the epilogues are in kernels_cu/common/examples.cuh.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable, Sequence

import torch

from fx_fuser.errors import BuildError
from fx_fuser.native.binaries import batch_stats_source, cubins, shim
from fx_fuser.native.kernel_spec import (
    CONV_DIRECT,
    CONV_DIRECT_BACKWARD,
    FOLD,
    LINEAR_DENSE,
    LINEAR_EXACT,
    LINEAR_SPLIT_AUTO,
    LINEAR_SPLIT_MMA,
    POINTWISE,
    Family,
    KernelSpec,
    depthwise,
    implicit,
    stem,
    texts_of,
)

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # those --all-archs compiles for
# And for these two of the split product, whose shared memory and registers differ there.
SPLIT_ARCHS = ("sm_86", "sm_89", "sm_90")

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@functools.cache  # and with the spec its text and name
def example(
    family: Family,
    functor: str,
    scalars: int,
    acc: torch.dtype,
    out: torch.dtype,
    *inputs: torch.dtype,
) -> KernelSpec:
    """A kernel with the epilogue `functor` of examples.cuh."""
    include = '#include "common/examples.cuh"'
    name = f"fx_fuser::examples::{functor}"
    return KernelSpec(family, name, include, scalars, acc, out, inputs)


def _split_examples(family: Family = LINEAR_SPLIT_AUTO) -> list[KernelSpec]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    of_norm = ("BatchNormMul", 1, f32)
    return [
        example(family, "Swish", 1, f32, f32, f32),
        example(family, *of_norm, f16, f32, *[f32] * 5),
        # These need FEW_REGISTERS.
        example(family, "Sigmoid", 0, f32, f32, f32),
        example(family, *of_norm, f32, f32, *[bf16] * 5),
        *(example(family, "Identity", 0, f32, f32, value) for value in (bf16, f16)),
    ]


def _sm90_examples() -> list[KernelSpec]:
    """The kernels that only sm_90a has, and what is forced there."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    of_norm = ("BatchNormMul", 1, f32)
    specs = [
        *_split_examples(LINEAR_SPLIT_MMA),
        example(CONV_DIRECT, "Identity", 0, f32, f16, f32),
        example(CONV_DIRECT_BACKWARD, "Identity", 0, f32, f32, f32),
    ]
    for value in (bf16, f16):
        specs.append(example(LINEAR_EXACT, "Identity", 0, f32, f32, value))
    for value in (f32, bf16, f16):
        specs += [
            example(CONV_DIRECT, *of_norm, value, value, *[f32] * 5),
            example(CONV_DIRECT_BACKWARD, "Scaled", 1, f32, value, value, f32, bf16),
            example(LINEAR_DENSE, "Swish", 1, f32, value, value),
            example(LINEAR_DENSE, *of_norm, value, value, *[value] * 5),
        ]
    return specs


def _fold_examples() -> list[KernelSpec]:
    f32, bf16 = torch.float32, torch.bfloat16
    dtypes = ((f32, f32), (bf16, bf16), (bf16, f32))
    return [example(FOLD, "Identity", 0, f32, out, weight) for out, weight in dtypes]


def _depthwise_examples() -> list[KernelSpec]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    specs = [example(depthwise(7, 3, 2), "ThreeOperands", 1, f32, f16, bf16, f32, bf16, torch.bool)]
    for window in ((3, 3, 1), (5, 5, 1), (5, 5, 2), (7, 7, 1), (7, 7, 2)):
        for value in (f32, bf16):
            norm = ("BatchNormMul", 1, f32, value, value, *[f32] * 5)
            specs.append(example(depthwise(*window), *norm))
    return specs


def _stem_examples() -> list[KernelSpec]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    of_norm = ("BatchNormMul", 1, f32)
    return [
        example(stem(3, 7, 7, 2, 64), *of_norm, bf16, bf16, *[f32] * 5),
        example(stem(3, 7, 7, 2, 64), *of_norm, f32, f32, *[f32] * 5),
        example(stem(3, 3, 3, 2, 32), "Swish", 1, f32, f16, f16),
        example(stem(4, 7, 7, 4, 96), "Swish", 1, f32, f16, f32),
    ]


def _implicit_examples() -> list[KernelSpec]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    of_norm = ("BatchNormMul", 1, f32)
    specs = [
        example(implicit(128, True, 4), *of_norm, f32, f16, *[f32] * 5),
        example(implicit(128, True, 1), "ThreeOperands", 1, f32, f16, bf16, f32, bf16, torch.bool),
    ]
    for columns in (32, 64, 96, 128):
        for is_window in (False, True):
            family = implicit(columns, is_window, 4)
            specs.append(example(family, "NormSilu", 1, f32, bf16, bf16, *[f32] * 4))
            specs.append(example(family, *of_norm, bf16, bf16, *[f32] * 4, bf16))
    return specs


def _pointwise_examples() -> list[KernelSpec]:
    specs = []
    for value in _FLOATS:
        acc = torch.float64 if value is torch.float64 else torch.float32
        specs += [
            example(POINTWISE, "Swish", 1, acc, value, value),
            example(POINTWISE, "BatchNormMul", 1, acc, value, *[value] * 6),
            example(POINTWISE, "EveryFunction", 2, acc, value, value, value),
        ]
    integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    for mask, y in zip(integers[::2], integers[1::2], strict=True):
        gate = (torch.float32, torch.bfloat16, torch.float32, mask, y)
        specs.append(example(POINTWISE, "Gate", 0, *gate))
    return specs


def _sources(arch: str, one_each: bool) -> list[str]:
    """What is compiled for it."""
    if arch in SPLIT_ARCHS:
        return texts_of(_split_examples()[: 1 if one_each else 2])
    specs = _split_examples() + _pointwise_examples() + _fold_examples()
    specs += _depthwise_examples() + _stem_examples() + _implicit_examples()
    specs += _sm90_examples() if arch == "sm_90a" else []
    if one_each:  # the first
        specs = list({spec.family.header: spec for spec in reversed(specs)}.values())
    return [batch_stats_source(), *texts_of(specs)]


def _arch(name: str) -> str:
    if not re.fullmatch(r"sm_\d{2,3}[af]?", name):
        raise argparse.ArgumentTypeError(f"{name!r} is no architecture; give a name such as sm_90a")
    return name


def _attempt(label: str, action: Callable[[], object]) -> bool:
    started = time.perf_counter()
    try:
        action()
    except BuildError as error:
        print(f"FAIL  {label}\n{error}", flush=True)
        return False
    print(f"ok    {label} ({time.perf_counter() - started:.1f} s)", flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles everything and prints a line each; 0 if all of it compiled."""
    parser = argparse.ArgumentParser(prog="python -m fx_fuser.build", description=main.__doc__)
    parser.add_argument(
        "--all-archs",
        action="store_true",
        help=f"for {', '.join(ARCHS)}; of the split product for {', '.join(SPLIT_ARCHS)} too",
    )
    help_arch = "for this one, say sm_90a"
    parser.add_argument("--arch", action="append", default=[], type=_arch, help=help_arch)
    parser.add_argument("--no-shim", action="store_true", help="kernels alone, without g++")
    parser.add_argument("--one-each", action="store_true", help="of each main loop one kernel")
    chosen = parser.parse_args(arguments)

    passed = [] if chosen.no_shim else [_attempt("shim", shim)]
    for arch in (*chosen.arch, *(ARCHS + SPLIT_ARCHS if chosen.all_archs else ())):
        sources = _sources(arch, chosen.one_each)
        compile_all = functools.partial(cubins, sources, arch)
        passed.append(_attempt(f"{arch}: {len(sources)} sources", compile_all))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
