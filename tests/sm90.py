"""What the tests of the sm_90a kernels share."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch

from fx_fuser import build

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None and not (build.DEFAULT_CUDA_HOME / "bin" / "nvcc").exists(),
    reason="needs nvcc",
)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


def check_compiles(
    header: str, macro: str, operands: int, value: str = "float", divides: bool = False
) -> None:
    """`build.cubin` raises on spills and on serialised products; operands cost registers.

    value: the type of the result and of the product. divides: for which nvcc makes calls; what
    spills may then be compiled again for fewer registers.
    """
    names = [f"in[{i}]" for i in range(operands + 1)]
    source = f"""
#include "{header}"
struct Epilogue {{
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[{operands + 1}], const Acc (&scalar)[1]) const {{
    return fx_fuser::math::sigmoid(in[0]) * scalar[0] + {(" / " if divides else " * ").join(names)};
  }}
}};
{macro}(Epilogue, 1, float, {value}, {value}{", float" * operands})
"""
    with mock.patch.object(build, "FEW_REGISTERS", build.FEW_REGISTERS if divides else "-DNONE"):
        assert build.cubin(source, "sm_90a").stat().st_size > 0
