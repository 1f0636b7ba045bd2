"""What fx_fuser compiles: the shim, and cubins of kernels' sources, kept in `fx_fuser.store`."""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fx_fuser import compilers, store
from fx_fuser.compilers import Compiler, Host
from fx_fuser.errors import BuildError
from fx_fuser.jobs import Job
from fx_fuser.kernel_spec import (
    CONV_DIRECT,
    CONV_DIRECT_BACKWARD,
    LINEAR_DENSE,
    LINEAR_EXACT,
    LINEAR_SPLIT,
    POINTWISE,
    Family,
    KernelSpec,
)

PACKAGE = Path(__file__).parent
KERNELS = PACKAGE / "kernels_cu"
PREBUILT = PACKAGE / "prebuilt"  # of wheels

LOWEST_CAPABILITY = (8, 0)
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # those --all-archs compiles for

_CXX_FLAGS = (
    *("-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI as of 2.11
)


def arch_of(device: torch.device | int | None = None) -> str:
    """The architecture kernels are compiled for: "sm_80", "sm_90a", "sm_100a", "sm_120"...

    Hopper and the datacenter Blackwells get the `a` that their matrix instructions ask for.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"


def _kernel_sources() -> list[Path]:
    return sorted(
        path for path in KERNELS.iterdir() if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    )


def _hash_files(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint() -> str:
    """sha256 over fx_fuser's Python and CUDA sources: a tag for caches of what it compiled."""
    python = {*PACKAGE.rglob("*.py"), *(PACKAGE / "patterns").glob("*.py")}
    headers = compilers.nvrtc_headers(KERNELS)
    return _hash_files([*sorted(python), *_kernel_sources(), *headers])


def _key(*parts: str) -> str:
    text = "\0".join((*parts, _hash_files(_kernel_sources())))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cubin_job(source: str, arch: str, compiler: Compiler) -> Job:
    headers = _hash_files(compiler.headers(KERNELS))
    key = _key(source, *compiler.flags(arch), compiler.version, headers)
    return Job(key, source, ".cu", ".cubin", compiler.command(arch, KERNELS.resolve()))


def shim_command(host: Host, more: Sequence[str] = ()) -> tuple[str, ...]:
    """With {source} and {target} to fill in. more: flags that go before all others'."""
    torch_root = Path(torch.__file__).parent
    include = ("-I", str(KERNELS.resolve()), "-isystem", str(torch_root / "include"))
    link = (
        f"-L{torch_root / 'lib'}",
        # Nothing of torch is called by name of libtorch itself, yet it brings libtorch_cuda along.
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"),
    )
    return (str(host.cxx), *more, *_CXX_FLAGS, *include, "{source}", "-o", "{target}", *link)


def _shim_job(host: Host) -> Job:
    command = shim_command(host)
    key = _key("shim", *command, host.version, torch.__version__)
    return Job(key, (KERNELS / "shim.cpp").read_text(), ".cpp", ".so", command)


def cubin(source: str, arch: str) -> Path:
    """The cubin of one CUDA source, which may include the headers of kernels_cu.

    Args:
        source: the text of a .cu file.
        arch: "sm_90a" and the like, see `arch_of`.

    Raises:
        BuildError: the source does not compile, or compiles to code that spills registers.
    """
    return cubins([source], arch)[0]


def cubins(sources: Sequence[str], arch: str) -> list[Path]:
    """As `cubin`, for several sources at once, compiled in parallel."""
    compiler = compilers.of_kernels()
    return store.ensure([_cubin_job(source, arch, compiler) for source in sources])


def shim_sources() -> str:
    """sha256 over what the shim is made of."""
    return _hash_files([path for path in _kernel_sources() if path.suffix in (".cpp", ".h")])


def prebuilt_shim() -> Path | None:
    """That of the wheel; None in a checkout, and where its sources have changed since."""
    made_of = PREBUILT / "shim.sources"
    if not made_of.exists() or made_of.read_text() != shim_sources():
        return None
    return PREBUILT / "shim.so"


def shim() -> Path:
    """The shared library with the `torch.ops.fx_fuser_native` ops: the wheel's, or one built here.

    Raises:
        BuildError: it does not compile.
    """
    prebuilt = prebuilt_shim()
    if prebuilt is not None:
        return prebuilt
    return store.ensure([_shim_job(compilers.of_shim())])[0]


def batch_stats_source() -> str:
    """The source of the batch-statistics kernels, for `cubin`."""
    return (KERNELS / "batch_stats.cu").read_text()


# ---- python -m fx_fuser.build --------------------------------------------------------------------


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
    """A kernel with an epilogue of examples.cuh, of which `functor` is the name."""
    include = '#include "examples.cuh"'
    name = f"fx_fuser::examples::{functor}"
    return KernelSpec(family, name, include, scalars, acc, out, inputs)


def _product_examples() -> list[KernelSpec]:
    """Of the kernels that only sm_90a has."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    of_norm = ("BatchNormMul", 1, f32)
    specs = [
        example(CONV_DIRECT, "Identity", 0, f32, f16, f32),
        example(CONV_DIRECT_BACKWARD, "Identity", 0, f32, f32, f32),
        example(LINEAR_SPLIT, "Swish", 1, f32, f32, f32),
        example(LINEAR_SPLIT, *of_norm, f16, f32, *[f32] * 5),
        # These need FEW_REGISTERS.
        example(LINEAR_SPLIT, "Sigmoid", 0, f32, f32, f32),
        example(LINEAR_SPLIT, *of_norm, f32, f32, *[bf16] * 5),
    ]
    for value in (bf16, f16):
        specs += [
            example(LINEAR_EXACT, "Identity", 0, f32, f32, value),
            example(LINEAR_SPLIT, "Identity", 0, f32, f32, value),
        ]
    for value in (f32, bf16, f16):
        specs += [
            example(CONV_DIRECT, *of_norm, value, value, *[f32] * 5),
            example(CONV_DIRECT_BACKWARD, "Scaled", 1, f32, value, value, f32, bf16),
            example(LINEAR_DENSE, "Swish", 1, f32, value, value),
            example(LINEAR_DENSE, *of_norm, value, value, *[value] * 5),
        ]
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
    parser.add_argument("--all-archs", action="store_true", help=f"for {', '.join(ARCHS)}")
    parser.add_argument("--arch", action="append", default=[], help="for this one, say sm_90a")
    parser.add_argument("--no-shim", action="store_true", help="kernels alone, without g++")
    chosen = parser.parse_args(arguments)

    passed = [] if chosen.no_shim else [_attempt("shim", shim)]
    for arch in (*chosen.arch, *(ARCHS if chosen.all_archs else ())):
        specs = _pointwise_examples() + (_product_examples() if arch == "sm_90a" else [])
        sources = [batch_stats_source(), *(spec.text for spec in specs)]
        compile_all = functools.partial(cubins, sources, arch)
        passed.append(_attempt(f"{arch}: {len(sources)} sources", compile_all))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
