"""An fp32 gemm as three fp16 gemms of hi and lo parts on the tensor cores, within fp32's error.

With wgmma on Hopper (kernels_cu/linear/linear_split_sm90.cuh), with mma.sync elsewhere
(linear_split_mma.cuh), launched by kernels_cu/host/linear_split.h. An operand that was cast up from
16 bits has no lo part, so two gemms are enough (`MIXED_GEMMS`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fx_fuser.anchors.base import Config, Multiply, Operands
from fx_fuser.errors import OptionError
from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import (
    GEMM_KINDS,
    SIXTEEN_BITS,
    Case,
    Kernel,
    example,
    is_float64,
    known_sizes,
)
from fx_fuser.kernels.precision import SPLIT, asked_precision, matmul_tf32_requested
from fx_fuser.native import binaries, limits, load
from fx_fuser.native.kernel_spec import Family, KernelSpec

_ops = torch.ops.fx_fuser_native
# With mma.sync, which every GPU from sm_80 on has.
LINEAR_SPLIT_MMA = Family(
    "linear/linear_split_mma.cuh",
    "FX_FUSER_LINEAR_SPLIT_MMA",
    "linear_split_mma",
    common="FX_FUSER_LINEAR_SPLIT_MMA_COMMON",
)
# With wgmma on Hopper, elsewhere the same kernels as LINEAR_SPLIT_MMA.
LINEAR_SPLIT_AUTO = Family(
    "linear/linear_split.cuh",
    "FX_FUSER_LINEAR_SPLIT",
    "linear_split",
    common="FX_FUSER_LINEAR_SPLIT_COMMON",
)
_SPLIT_LOOP = os.environ.get("FX_FUSER_SPLIT_LOOP")  # "mma" on Hopper too
LINEAR_SPLIT = LINEAR_SPLIT_MMA if _SPLIT_LOOP == "mma" else LINEAR_SPLIT_AUTO

# With the text of a Linear's forward without a tail, so that both are compiled once.
_ALONE = kernel_spec(Epilogue(start="c"), {"c": torch.float32}, (), torch.float32, LINEAR_SPLIT)
SPLIT_GEMM = replace(_ALONE, use="a gemm without an epilogue")
# One operand was cast up from this 16-bit dtype.
MIXED_GEMMS = {
    dtype: kernel_spec(Epilogue(), {"z": dtype}, (), torch.float32, LINEAR_SPLIT)
    for dtype in SIXTEEN_BITS
}


def check_split_loop() -> None:
    """Called when a kernel is needed: at import it would stop programs that run none.

    Raises:
        OptionError: FX_FUSER_SPLIT_LOOP says anything but "mma".
    """
    if _SPLIT_LOOP not in (None, "", "mma"):
        raise OptionError(f"FX_FUSER_SPLIT_LOOP is {_SPLIT_LOOP!r}; give 'mma', or leave it unset")


def split_loop(device: torch.device | str | int) -> str:
    """The main loop on this CUDA device: "wgmma" or "mma.sync"."""
    is_hopper = binaries.arch_of(torch.device(device)) == "sm_90a"
    return "wgmma" if is_hopper and LINEAR_SPLIT is LINEAR_SPLIT_AUTO else "mma.sync"


def split_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in fp32 on tensor cores. b is a matrix, or a and b are batches of one size."""
    c: Tensor = torch.ops.fx_fuser.split_product.default(a, b, SPLIT_GEMM.name)
    return c


def is_small(x: Sequence[int], c: Sequence[int], device: torch.device) -> bool:
    """Does an fp32 gemm of these sizes, x [*, K] to c [*, N], take the library at most about 10 us?

    The split kernel needs as much to start.
    """
    rows, k, n = math.prod(x[:-1]), x[-1], c[-1]
    operations, elements = 2 * rows * n * k, rows * k + rows * n + n * k
    rates = limits.of(device)
    return max(operations / rates.fp32, 4 * elements / rates.copy) < 10e-6


def reset_fallback(specs: Sequence[KernelSpec], device: torch.device) -> None:
    """End both fallbacks of the split gemms among these loaded kernels.

    After data that splits badly, the op uses the library for 1000 calls of the same sizes. After
    operands whose scales were often guessed wrong, a pass finds the scales in advance, for as many
    calls.
    """
    for spec in specs:
        handle = load.loaded(spec, device)
        is_split = spec.family in (LINEAR_SPLIT_AUTO, LINEAR_SPLIT_MMA)
        if is_split and handle != load.NO_KERNEL:
            _ops.reset_linear_split.default(handle)


def examples(family: Family = LINEAR_SPLIT_AUTO) -> list[KernelSpec]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    of_norm = ("BatchNormMul", 1, f32)
    return [
        example(family, "Swish", 1, f32, f32, f32),
        example(family, *of_norm, f16, f32, *[f32] * 5),
        # These need FEW_REGISTERS.
        example(family, "Sigmoid", 0, f32, f32, f32),
        example(family, *of_norm, f32, f32, *[bf16] * 5),
        *(example(family, "Identity", 0, f32, f32, value) for value in SIXTEEN_BITS),
    ]


class Split(Kernel):
    name = SPLIT
    sites = "fp32 Linear, matmul, bmm, forward and backward"
    kinds = GEMM_KINDS
    grows = True
    dtypes = (torch.float32,)

    @property
    def multiply(self) -> Multiply:
        return split_gemm

    def takes(self, case: Case) -> bool:
        c = case.tensors[0]
        if c.dtype not in self.dtypes or not c.is_contiguous() or is_float64(case):
            return False
        precision = asked_precision(case.options)
        if precision == "ieee" and matmul_tf32_requested():
            raise OptionError(
                "option 'fp32' is 'ieee', but torch.backends.cuda.matmul.fp32_precision is 'tf32', "
                "which cuBLAS follows; set it to 'ieee', or give 'split' or 'follow'"
            )
        return precision == SPLIT

    def backwards(self, case: Case) -> tuple[str, ...]:
        return (SPLIT,)

    def family(self, operands: Operands, config: Config) -> Family:
        return LINEAR_SPLIT

    def plain_specs(self) -> list[KernelSpec]:
        return [SPLIT_GEMM]

    def is_too_small(self, case: Case) -> bool:
        sizes = known_sizes(case.operand("x"), case.tensors[0])
        return sizes is not None and is_small(sizes[0], sizes[1], case.device)

    def title(self, device: torch.device) -> str:
        return f"{self.name} by {split_loop(device)}"

    def examples(self, arch: str) -> list[KernelSpec]:
        # On Hopper also those with mma.sync, which FX_FUSER_SPLIT_LOOP forces.
        return examples() + (examples(LINEAR_SPLIT_MMA) if arch == "sm_90a" else [])
