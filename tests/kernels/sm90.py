"""What the tests of kernels share: marks, and a check that a kernel compiles without spills."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fx_fuser.native import binaries, jobs
from fx_fuser.native.kernel_spec import Family, KernelSpec

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def gpu(test):
    skip = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
    return pytest.mark.gpu(skip(test))


def gpu_from_sm80(test):
    skip = pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs sm_80 or later")
    return pytest.mark.gpu(skip(test))


def check_compiles(
    family: Family, operands: int, value: torch.dtype = torch.float32, divides: bool = False
) -> None:
    """`build.cubin` raises on spills and on serialised wgmma; operands cost registers.

    value: the type of the result and of the product. divides: with divisions, which nvcc compiles
    to calls; a kernel that spills may then be compiled again with other settings.
    """
    last = "in[0]"
    for i in range(1, operands + 1):
        last = f"math::{'div' if divides else 'mul'}({last}, in[{i}])"
    definition = f"""
namespace fx_fuser {{
struct Epilogue {{
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[{operands + 1}], const Acc (&scalar)[1]) const {{
    return math::add(math::mul(math::sigmoid(in[0]), scalar[0]), {last});
  }}
}};
}}"""
    f32 = torch.float32
    inputs = (value, *[f32] * operands)
    spec = KernelSpec(family, "fx_fuser::Epilogue", definition, 1, f32, value, inputs)
    with mock.patch.object(jobs, "FEW_REGISTERS", jobs.FEW_REGISTERS if divides else "-DNONE"):
        assert all(path.stat().st_size > 0 for path in binaries.cubins(spec.texts, "sm_90a"))
