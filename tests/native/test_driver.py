"""What the shim declares of the CUDA driver, against a toolkit's own cuda.h."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fx_fuser.native import binaries, compilers

HEADER = binaries.KERNELS / "host/driver.h"
# Ours, and cuda.h's.
NUMBERS = {
    "kDeviceMultiprocessors": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "kKernelMaxDynamicShared": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "kHostMemoryPortable": "CU_MEMHOSTALLOC_PORTABLE",
    "kHostMemoryMapped": "CU_MEMHOSTALLOC_DEVICEMAP",
    "kLaunchCluster": "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
    "kLaunchOverlapped": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    "kMapFloat16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "kMapFloat32": "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    "kMapBFloat16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "kMapTFloat32": "CU_TENSOR_MAP_DATA_TYPE_TFLOAT32",
    "kMapNotInterleaved": "CU_TENSOR_MAP_INTERLEAVE_NONE",
    "kMapSwizzle128": "CU_TENSOR_MAP_SWIZZLE_128B",
    "kMapPromotion256": "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
    "kMapZerosOutside": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
}
MEMBERS = {
    ("LaunchConfig", "CUlaunchConfig"): {
        "grid": "gridDimX", "block": "blockDimX", "shared_bytes": "sharedMemBytes",
        "stream": "hStream", "attributes": "attrs", "count": "numAttrs",
    },
    ("LaunchAttribute", "CUlaunchAttribute"): {"id": "id", "value": "value"},
}  # fmt: skip


def functions() -> list[tuple[str, int]]:
    """The driver's that the shim calls, with the number of their arguments."""
    body = re.search(r"struct Driver \{(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    found = re.findall(r"int \(\*(\w+)\)\((.*?)\);", body[1], re.DOTALL)
    return [(name, arguments.count(",") + 1) for name, arguments in found]


def checks() -> str:
    lines = ["#include <cuda.h>", '#include "host/driver.h"', "using namespace fx_fuser;"]
    lines += [f"static_assert(long({ours}) == long({its}));" for ours, its in NUMBERS.items()]
    lines += [
        "static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));",
        "static_assert(alignof(TensorMap) % alignof(CUtensorMap) == 0);",
        "template <class R, class... A> constexpr int count(R (*)(A...)) { return sizeof...(A); }",
    ]
    for (ours, its), members in MEMBERS.items():
        lines.append(f"static_assert(sizeof({ours}) == sizeof({its}));")
        lines += [
            f"static_assert(offsetof({ours}, {mine}) == offsetof({its}, {theirs}));"
            for mine, theirs in members.items()
        ]
    for name, arguments in functions():
        lines.append(f"static_assert(count(&cu{name}) == {arguments});")
        lines.append(f"static_assert(count(decltype(Driver::{name}){{}}) == {arguments});")
    return "\n".join(lines)


def test_every_function_is_looked_up() -> None:
    names = {name for name, _ in functions()}
    assert names == set(re.findall(r"FX_FUSER_SET\((\w+)\);", HEADER.read_text()))
    assert len(names) == 15


@pytest.mark.slow
def test_it_is_as_in_cuda_h(tmp_path: Path) -> None:
    folders = [files.include for files in compilers.cuda_files()]
    include = next((f for f in folders if (f / "cuda.h").exists()), None)
    if include is None or shutil.which("g++") is None:
        pytest.skip("a toolkit's cuda.h and g++ are not both here")
    source = tmp_path / "checks.cpp"
    source.write_text(checks())
    torch_headers = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++17", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    folders = ["-I", binaries.KERNELS, "-isystem", torch_headers, "-isystem", include]
    done = subprocess.run(
        [*command, *map(str, folders), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
