"""fp32 gemms with TF32's accuracy at the speed of 16 bits: the operands' planes in fp16.

Of no site yet: nothing offers it before a GPU has run it (issue 44).
kernels_cu/linear/linear_planes.cuh, launched by kernels_cu/host/planes.h.
"""

from __future__ import annotations

import torch

from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import Case, Kernel
from fx_fuser.native.kernel_spec import Family, KernelSpec

PLANES = Family("linear/linear_planes.cuh", "FX_FUSER_PLANES", "planes")
MAKE_PLANE = kernel_spec(Epilogue(), {"z": torch.float32}, (), torch.float32, PLANES)


class Planes(Kernel):
    name = "planes"
    sites = "fp32 gemms where torch's settings ask for TF32"
    arch = "sm_90a"

    def takes(self, case: Case) -> bool:
        return False

    def examples(self, arch: str) -> list[KernelSpec]:
        return [MAKE_PLANE]
