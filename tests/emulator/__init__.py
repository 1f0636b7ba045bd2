"""fx_fuser's kernels on the CPU, launched by the shim's own host code.

`machine.cpp` emulates a CUDA multiprocessor, `device/` replaces CUDA's headers and
`common/ptx*.cuh` in a kernel's translation unit, and `shim.cpp` builds the shim for the emulated
device. g++ compiles all of it. CONTRIBUTING.md says what this checks and what it cannot check.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import kernels
from fx_fuser.errors import BuildError
from fx_fuser.native import binaries, compilers, limits, store
from fx_fuser.native.jobs import Job
from fx_fuser.native.kernel_spec import KernelSpec

HERE = Path(__file__).parent
ops = torch.ops.fx_fuser_emulated


@dataclass(frozen=True)
class Gpu:
    """A GPU as kernels and host code see it. shared_bytes: the most that a block may have."""

    capability: int
    shared_bytes: int

    @property
    def macro(self) -> str:
        """__CUDA_ARCH__."""
        return f"-D__CUDA_ARCH__={self.capability}0"


# CUDA C++ Programming Guide, "Technical specifications per compute capability".
GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu(80, 163 << 10),
        Gpu(86, 99 << 10),
        Gpu(89, 99 << 10),
        Gpu(90, 227 << 10),
        Gpu(100, 227 << 10),
        Gpu(120, 99 << 10),
    )
}


@dataclass(frozen=True)
class Settings:
    """The schedule of a launch. order: of warps, of a warp's lanes, and of blocks.

    copies: when cp.async, TMA and wgmma read and write: at once, as late as the rules allow, or one
        of the two at random.
    guard_ahead: the forbidden page is ahead of a tensor, not behind it.
    """

    order: str = "forward"
    copies: str = "late"
    seed: int = 1
    guard_ahead: bool = False

    def use(self) -> None:
        order = ("forward", "reverse", "random").index(self.order)
        copies = ("at once", "late", "random").index(self.copies)
        ops.use_settings.default(order, copies, self.seed, self.guard_ahead)


# ---- compiling -----------------------------------------------------------------------------------

_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden")
_KERNEL_FLAGS = (
    *("-O0", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-w"),
    "-ftrivial-auto-var-init=pattern",  # for reads of registers that were never set
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    # Without the library of -fsanitize: calls.cpp reports what it finds.
    *("-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc"),
)


@functools.cache
def missing() -> str | None:
    """None if kernels can be emulated here, else the reason."""
    if shutil.which("g++") is None:
        return "needs g++"
    asked = ("g++", *_FLAGS, *_KERNEL_FLAGS, "-fsyntax-only", "-x", "c++", "/dev/null")
    known = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return None if known else "needs g++ 12 or newer"


def _library(text: str, *command: str) -> Job:
    host = compilers.of_shim()
    whole = (str(host.cxx), *_FLAGS, *command, "{source}", "-o", "{target}")
    key = hashlib.sha256("\0".join((text, *whole, host.version)).encode()).hexdigest()[:32]
    return Job(key, text, ".cpp", ".so", whole)


def _text_of(*names: str | Path) -> str:
    return "".join((HERE / name).read_text() for name in names)


def _machine() -> Job:
    headers = hashlib.sha256(
        _text_of(
            *("memory.h", "machine.h", "fibers.h", "tensor_core.h", "emulated_map.h"),
            "device/cuda_fp16.h",
        ).encode()
    )
    text = f"// of headers {headers.hexdigest()}\n"
    text += _text_of("memory.cpp", "machine.cpp", "calls.cpp", "tensor_core.cpp", "warpgroup.cpp")
    text += _text_of("tensor_copies.cpp")
    folders = f"-I{HERE}", f"-I{HERE / 'device'}"
    # A fortified longjmp may not change over to another stack.
    flags = ("-O3", "-U_FORTIFY_SOURCE", "-fvisibility=default", "-Wall")
    return _library(text, *flags, *folders)


def _shim() -> Job:
    host = compilers.of_shim()
    benchmarks = Path(kernels.__file__).parent
    command = binaries.shim_command(host, [f"-I{HERE}", f"-I{benchmarks}"])
    command = tuple("-O0" if part.startswith("-O") else part for part in command)
    parts = (*command, host.version, torch.__version__, binaries.shim_sources())
    headers = _text_of(
        "driver.h", "memory.h", "machine.h", "emulated_map.h", benchmarks / "kernels.h"
    )
    text = _text_of("shim.cpp")
    key = hashlib.sha256("\0".join((text, headers, *parts)).encode()).hexdigest()[:32]
    return Job(key, text, ".cpp", ".so", command)


@functools.cache
def load_shim() -> None:
    machine, shim = store.ensure([_machine(), _shim()])
    ctypes.CDLL(str(machine), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(shim)


# CUDA C++ that is not C++, after preprocessing.
_DYNAMIC = re.compile(r"extern __shared__ (?:alignas\(\w+\) )?(\w+) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ ([^;]*?)\b(\w+)((?:\[[^]]*\])*);")
_KERNEL = re.compile(r'extern "C" __attribute__\(\(visibility\("default"\)\)\) void\s+(\w+)\(')

_LAUNCHED = """
extern "C" __attribute__((visibility("default"))) void emulated_{name}(const void* args) {{
  emulator::call({name}, args);
}}
"""


@functools.cache
def translation_unit(text: str, gpu: Gpu) -> str:
    """A kernel's translation unit as C++, which exports `emulated_NAME(args)` for each kernel."""
    folders = (HERE / "device", HERE, binaries.KERNELS.resolve())
    command = [
        *(str(compilers.of_shim().cxx), "-E", "-std=c++17", "-x", "c++", "-", gpu.macro),
        *("-include", "prelude.h"),
        *(f"-I{folder}" for folder in folders),
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
    unit = _DYNAMIC.sub(
        r"\1* const \2 = static_cast<\1*>(emulator::dynamic_shared());", done.stdout
    )
    unit = _STATIC.sub(r"static \1 \2_of_all\3; auto& \2 = emulator::of_block(\2_of_all);", unit)
    for name in _KERNEL.findall(unit):
        unit += _LAUNCHED.format(name=name)
    return unit


def _kernel_job(text: str, gpu: Gpu) -> Job:
    return _library(translation_unit(text, gpu), *_KERNEL_FLAGS, "-fpreprocessed")


def build(specs: Sequence[tuple[KernelSpec, int]]) -> list[list[Path]]:
    """Builds the libraries of all kernels, each for a GPU of a compute capability."""
    jobs = [[_kernel_job(t, GPUS[capability]) for t in spec.texts] for spec, capability in specs]
    paths = iter(store.ensure([job for of_spec in jobs for job in of_spec]))
    return [[next(paths) for _ in of_spec] for of_spec in jobs]


# ---- running -------------------------------------------------------------------------------------


def load(spec: KernelSpec, capability: int, multiprocessors: int = 2) -> int:
    """Loads the kernel on such a GPU. Returns a handle for `ops`."""
    (paths,) = build([(spec, capability)])
    _use_device(capability, multiprocessors)
    return _loaded(capability, spec.family.loader, spec.name, paths, spec.signature)


def load_batch_stats(capability: int, multiprocessors: int = 2) -> int:
    """Loads the kernels of batch statistics, likewise."""
    (path,) = store.ensure([_kernel_job(binaries.batch_stats_source(), GPUS[capability])])
    _use_device(capability, multiprocessors)
    return _loaded(capability, "batch_stats", "batch_stats", [path], [])


def _loaded(
    capability: int, family: str, name: str, paths: Sequence[Path], signature: Sequence[str]
) -> int:
    rates = limits.split_rates(divmod(capability, 10), ops.gpu_figures.default(ON_CPU))
    loading = family, name, [*map(str, paths)], signature, ON_CPU, rates
    handle: int = ops.load.default(*loading)
    return handle


def _use_device(capability: int, multiprocessors: int) -> None:
    load_shim()
    gpu = GPUS[capability]
    ops.use_device.default(capability // 10, multiprocessors, gpu.shared_bytes)
    Settings().use()


def run_kernel(
    text: str,
    name: str,
    tensors: Sequence[Tensor],
    threads: int,
    blocks: int = 1,
    shared_bytes: int = 0,
    cluster: int = 1,
    capability: int = 90,
) -> None:
    """Runs one kernel of a CUDA source, whose argument is a struct of the tensors' addresses.

    Raises:
        RuntimeError: the kernel broke a rule.
    """
    load_shim()
    ops.use_device.default(capability // 10, 2, GPUS[capability].shared_bytes)
    (path,) = store.ensure([_kernel_job(text, GPUS[capability])])
    ops.run_kernel.default(str(path), name, blocks, threads, shared_bytes, cluster, tensors)


ON_CPU = -1  # the index of the CPU, which shim.cpp treats as a GPU


def guarded(tensor: Tensor) -> Tensor:
    """A copy with the same strides and the same misalignment, next to a forbidden page."""
    made: Tensor = ops.guarded.default(tensor, tensor.data_ptr() % 16)
    return made.copy_(tensor)


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A guarded tensor, all NaN, in the same layout."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype)
    made: Tensor = ops.guarded.default(like, 0)
    return made


@contextlib.contextmanager
def memory() -> Iterator[None]:
    """Guarded tensors made inside live until its end, and are checked then."""
    load_shim()
    ops.release.default()  # left over from a failed test, which has reported it
    yield
    found = ops.release.default()
    assert not found, found
