"""Native sources to cached binaries, keyed by everything that goes into them.

One cache folder serves every process and version side by side. An entry is `<key><suffix>` with
`<key>.json`, the sha256 of its bytes, beside it: an entry that does not match, for whatever reason,
is built again. Builders hold file locks, work in a temporary folder and rename into place, so a
build killed at any point leaves nothing that a later one could mistake for an entry.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fx_fuser.errors import BuildError
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

log = logging.getLogger("fx_fuser.build")

PACKAGE = Path(__file__).parent
KERNELS = PACKAGE / "kernels_cu"

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
LOWEST_CAPABILITY = (8, 0)
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120")  # those --all-archs compiles for

NVCC_FLAGS = ("-cubin", "-O3", "-std=c++17", "-lineinfo", "-Xptxas", "-v,-warn-spills")
FEW_REGISTERS = "-DFX_FUSER_FEW_REGISTERS"  # for what spills; a header may heed it
CXX_FLAGS = (
    *("-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI as of 2.11
)


# ---- toolchain -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolchain:
    """The compilers, and what `--version` says of them."""

    nvcc: Path
    cxx: Path
    versions: str

    def cuda_home(self) -> Path:
        """The toolkit's root: what nvcc says, since the nvcc on PATH may be a link or a script."""
        return _cuda_home_of(str(self.nvcc))


def toolchain() -> Toolchain:
    """nvcc (of PATH, $CUDA_HOME or /usr/local/cuda) and g++.

    Raises:
        BuildError: names what is missing and how to get it.
    """
    folders = [os.environ.get("PATH", "")]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(os.path.join(home, "bin"))
    folders.append(str(DEFAULT_CUDA_HOME / "bin"))
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        raise BuildError(
            f"nvcc was found neither on PATH nor in $CUDA_HOME/bin nor in {DEFAULT_CUDA_HOME}/bin; "
            "install the CUDA toolkit (12.8 or newer) or set CUDA_HOME to where it is"
        )
    cxx = shutil.which("g++")
    if cxx is None:
        raise BuildError("g++ was not found on PATH; install it (Debian: apt-get install g++)")
    return Toolchain(Path(nvcc), Path(cxx), _version_of(nvcc) + _version_of(cxx))


@functools.cache
def _version_of(compiler: str) -> str:
    try:
        return subprocess.run(
            [compiler, "--version"], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{compiler} --version failed ({error}); reinstall it") from error


@functools.cache
def _cuda_home_of(nvcc: str) -> Path:
    steps = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], check=False, capture_output=True, text=True
    ).stderr
    if found := re.search(r"^#\$ TOP=(.+?)/?$", steps, re.MULTILINE):
        return Path(found[1]).resolve()
    raise BuildError(
        f"{nvcc} --dryrun does not tell the CUDA toolkit's root; reinstall the toolkit"
    )


def arch_of(device: torch.device | int | None = None) -> str:
    """The architecture nvcc compiles for: "sm_80", "sm_90a", "sm_100a", "sm_120"...

    Hopper and the datacenter Blackwells get the `a` that their matrix instructions ask for.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"


# ---- cache ---------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """$FX_FUSER_CACHE_DIR, or fx_fuser in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("FX_FUSER_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fx_fuser"


@functools.cache
def _fallback_dir() -> Path:
    folder, owner = Path(tempfile.mkdtemp(prefix="fx_fuser-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and no child that was forked since
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _warn_fallback(folder: Path, reason: str) -> None:
    log.warning(
        "cannot write the cache folder %s (%s); binaries of this process go to a temporary folder "
        "and are built again next time. Set FX_FUSER_CACHE_DIR to a writable folder.",
        folder,
        reason,
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Job:
    """One compiler call: `text`, saved as `<key><source_suffix>`, becomes `<key><suffix>`."""

    key: str
    text: str
    source_suffix: str
    suffix: str
    command: tuple[str, ...]  # with {source} and {target} left to fill in

    @property
    def shard(self) -> str:
        """What is locked to build it: one of 64, so that builds of other things need not wait."""
        return f"{int(self.key[:2], 16) % 64:02x}"

    def entry(self, folder: Path) -> Path:
        return folder / f"{self.key}{self.suffix}"

    def is_cached(self, folder: Path) -> bool:
        try:
            manifest = json.loads((folder / f"{self.key}.json").read_bytes())
            return bool(manifest["sha256"] == _digest(self.entry(folder).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def note_use(self, folder: Path) -> None:
        """For `fx_fuser.eviction`."""
        with contextlib.suppress(OSError):
            os.utime(folder / f"{self.key}.json")


@contextlib.contextmanager
def _locked(folder: Path, shards: Iterable[str]) -> Iterator[None]:
    """Holds these locks of the folder, against other processes and other threads alike.

    All take them in the same order, so that nobody waits for one who waits for them.
    """
    with contextlib.ExitStack() as held:
        for shard in sorted(set(shards)):
            lock = held.enter_context(open(folder / f"lock-{shard}", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Closing does not free it where a process was forked meanwhile, and has it open.
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield


def _ensure(jobs: Sequence[Job]) -> list[Path]:
    """The jobs' binaries, building in one ninja run those the cache does not hold."""
    folder = cache_dir()
    try:
        return _ensure_in(folder, jobs)
    except OSError as error:  # read-only, full, without locks...
        _warn_fallback(folder, os.strerror(error.errno) if error.errno else str(error))
        return _ensure_in(_fallback_dir(), jobs)


_PROGRESS_S = 5.0  # between two lines of the log
_builds = 0


def builds() -> int:
    """How often this process has added to the cache folder."""
    return _builds


def _ensure_in(folder: Path, jobs: Sequence[Job]) -> list[Path]:
    if not all(job.is_cached(folder) for job in jobs):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, (job.shard for job in jobs)):
            # Whoever held the locks before may have built them.
            missing = {job.key: job for job in jobs if not job.is_cached(folder)}
            if missing:
                _build(folder, list(missing.values()))
    for job in jobs:
        job.note_use(folder)
    return [job.entry(folder) for job in jobs]


# ---- building ------------------------------------------------------------------------------------


def _build(folder: Path, jobs: Sequence[Job]) -> None:
    global _builds
    shards = sorted({job.shard for job in jobs})
    _remove_leftovers(folder, shards)
    work = Path(tempfile.mkdtemp(prefix=f"tmp-{shards[0]}-", dir=folder))
    started = time.perf_counter()
    try:
        _run_ninja(work, jobs)
        logs = {job: _read_log(work, job) for job in jobs}
        if spilled := [job for job in jobs if _SPILL.search(logs[job])]:
            log.info("compiling %d kernels again with %s", len(spilled), FEW_REGISTERS)
            commands = [(*job.command, FEW_REGISTERS) for job in spilled]
            _run_ninja(work, [replace(job, command=c) for job, c in zip(spilled, commands)])
            logs |= {job: _read_log(work, job) for job in spilled}
        if failures := [reason for job in jobs if (reason := _failure(work, job, logs[job]))]:
            raise BuildError("\n\n".join(failures))
        for job in jobs:
            binary = job.entry(work)
            manifest = work / f"{job.key}.json"
            manifest.write_text(json.dumps({"sha256": _digest(binary.read_bytes())}))
            # The manifest last: until it is there, the binary is no entry.
            os.replace(binary, job.entry(folder))
            os.replace(manifest, folder / manifest.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _builds += 1
    log.info("built %d binaries in %.1f s", len(jobs), time.perf_counter() - started)


def _remove_leftovers(folder: Path, held: Sequence[str]) -> None:
    """Of killed builds: a folder `tmp-<shard>-…` is made by the holder of that lock alone."""
    for leftover in folder.glob("tmp-??-*"):
        shard = leftover.name.split("-")[1]
        if shard in held:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        with contextlib.suppress(BlockingIOError), open(folder / f"lock-{shard}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
            fcntl.flock(lock, fcntl.LOCK_UN)


def _run_ninja(work: Path, jobs: Sequence[Job]) -> None:
    try:
        from ninja import BIN_DIR
    except ImportError as error:
        raise BuildError("the Python package ninja is missing; pip install ninja") from error

    lines = ["rule run", "  command = $cmd > $out.log 2>&1", ""]
    for job in jobs:
        source = f"{job.key}{job.source_suffix}"
        target = f"{job.key}{job.suffix}"
        (work / source).write_text(job.text)
        command = " ".join(
            _quote(part.format(source=source, target=target)) for part in job.command
        )
        lines += [f"build {target}: run {source}", f"  cmd = {command}", ""]
    (work / "build.ninja").write_text("\n".join(lines))
    # -k 0: one broken source should not hide what is wrong with the others.
    ninja = [os.path.join(BIN_DIR, "ninja"), "-k", "0", "-C", str(work)]
    with subprocess.Popen(ninja, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            _wait_for(running, [work / f"{job.key}{job.suffix}" for job in jobs])
        except BaseException:  # as subprocess.run: no compiler outlives an interrupt
            running.kill()
            raise


def _wait_for(running: subprocess.Popen[bytes], targets: Sequence[Path]) -> None:
    """What takes long says in the log how far it is."""
    while True:
        try:
            running.wait(_PROGRESS_S)
            return
        except subprocess.TimeoutExpired:
            done = sum(target.exists() for target in targets)
            log.info("compiled %d of %d kernels", done, len(targets))


def _quote(part: str) -> str:
    return shlex.quote(part).replace("$", "$$")  # once for the shell, once for ninja


def _read_log(work: Path, job: Job) -> str:
    try:
        return (work / f"{job.key}{job.suffix}.log").read_text(errors="replace")
    except FileNotFoundError:
        return "(the compiler was not started)"


# ptxas only warns of these. Results stay right, but the kernel is then several times slower than
# the one that was measured.
_SPILL = re.compile(r"\b[1-9]\d* bytes spill|Registers are spilled")
_SERIALISED = re.compile(r"C75[01]\d|[Pp]otential [Pp]erformance [Ll]oss: wgmma")


def _failure(work: Path, job: Job, text: str) -> str | None:
    if "No space left on device" in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if not job.entry(work).exists():
        return f"{' '.join(job.command)} failed:\n{text[:4000]}"
    for pattern, meaning in ((_SPILL, "spills registers"), (_SERIALISED, "serialises its wgmma")):
        if found := pattern.search(text):
            line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
            kernel = re.findall(r"Compiling entry function '(\w+)'", text[: found.start()])
            return (
                f"{kernel[-1] if kernel else job.key} {meaning} ({line}); "
                "compile fewer operands or operations into one kernel"
            )
    return None


# ---- what is built -------------------------------------------------------------------------------


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
    return _hash_files([*sorted(python), *_kernel_sources()])


def _key(*parts: str) -> str:
    return _digest("\0".join((*parts, _hash_files(_kernel_sources()))).encode())[:32]


def _cubin_job(source: str, arch: str, tools: Toolchain) -> Job:
    virtual = arch.replace("sm_", "compute_")
    flags = (*NVCC_FLAGS, "-gencode", f"arch={virtual},code={arch}")
    key = _key(source, *flags, tools.versions)
    include = ("-I", str(KERNELS.resolve()), "-ccbin", str(tools.cxx))
    command = (str(tools.nvcc), *flags, *include, "{source}", "-o", "{target}")
    return Job(key, source, ".cu", ".cubin", command)


def _cuda_library_dir(cuda_home: Path) -> Path:
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (cuda_home / folder / "libcudart_static.a").exists():
            return cuda_home / folder
    raise BuildError(
        f"libcudart_static.a is not below {cuda_home}; install the toolkit's development files "
        "(Debian: cuda-cudart-dev)"
    )


def _shim_job(tools: Toolchain) -> Job:
    torch_root = Path(torch.__file__).parent
    include = (
        *("-I", str(KERNELS.resolve())),
        *("-isystem", str(torch_root / "include")),
        *("-isystem", str(tools.cuda_home() / "include")),
    )
    link = (
        *(f"-L{torch_root / 'lib'}", f"-L{_cuda_library_dir(tools.cuda_home())}"),
        # Nothing of torch is called by name of libtorch itself, yet it brings libtorch_cuda along.
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"),
        *("-lcudart_static", "-ldl", "-lrt", "-lpthread"),
    )
    text = (KERNELS / "shim.cpp").read_text()
    key = _key("shim", *CXX_FLAGS, *link, tools.versions, torch.__version__)
    command = (str(tools.cxx), *CXX_FLAGS, *include, "{source}", "-o", "{target}", *link)
    return Job(key, text, ".cpp", ".so", command)


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
    tools = toolchain()
    return _ensure([_cubin_job(source, arch, tools) for source in sources])


def shim() -> Path:
    """The shared library with the `torch.ops.fx_fuser_native` ops.

    Raises:
        BuildError: it does not compile.
    """
    return _ensure([_shim_job(toolchain())])[0]


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
    chosen = parser.parse_args(arguments)

    passed = [_attempt("shim", shim)]
    for arch in (*chosen.arch, *(ARCHS if chosen.all_archs else ())):
        specs = _pointwise_examples() + (_product_examples() if arch == "sm_90a" else [])
        sources = [batch_stats_source(), *(spec.text for spec in specs)]
        compile_all = functools.partial(cubins, sources, arch)
        passed.append(_attempt(f"{arch}: {len(sources)} sources", compile_all))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
