"""The binaries: the shim and the kernels' cubins, from the wheel, or compiled and kept in
`native.store`.

A wheel brings the shim, and cubins of kernels that nearly every model asks for. Each is used only
if it is what would be compiled here: from the same text and the same sources, those of the host
included, so that a kernel's arguments match the shim's. A wheel cannot know a compiler's version
and flags, which are in the cache's keys.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from fx_fuser.native import compilers, store
from fx_fuser.native.compilers import Compiler, Host
from fx_fuser.native.jobs import SOURCE, TARGET, Job

log = logging.getLogger("fx_fuser.native.binaries")

PACKAGE = Path(__file__).parent.parent
KERNELS = PACKAGE / "kernels_cu"
PREBUILT = PACKAGE / "prebuilt"  # of wheels
_refused: set[str] = set()  # architectures whose prebuilt cubins do not load in this process

LOWEST_CAPABILITY = (8, 0)

# With -O2 calling an op is no faster, because libtorch takes the time, and g++ takes twice as long
# (kernels_cu/NOTES.md).
_CXX_FLAGS = (
    *("-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI as of 2.11
)


def arch_of(device: torch.device | int | None = None) -> str:
    """The architecture kernels are compiled for: "sm_80", "sm_90a", "sm_100a", "sm_120"...

    Hopper and the datacenter Blackwells get the `a` that their matrix instructions need.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"


# Planning a graph needs the hash of all sources at each kind of site: with pathlib, and reading
# each file, one took 33 ms in Python 3.12.


def _files(folder: Path, *suffixes: str) -> list[str]:
    """Paths below, in order. Links to folders are not followed."""
    found = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.endswith(suffixes))


def _kernel_sources() -> list[str]:
    """All sources of kernels_cu. What only NVRTC sees is in `compilers.nvrtc_headers`."""
    of_nvrtc = os.path.join(KERNELS, "nvrtc", "")
    found = _files(KERNELS, ".cu", ".cuh", ".cpp", ".h")
    return [path for path in found if not path.startswith(of_nvrtc)]


def _hash_files(paths: Sequence[str | Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        found = os.stat(path)
        version = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        digest.update(_named_hash(os.fspath(path), version))
    return digest.hexdigest()


@functools.lru_cache(4096)
def _named_hash(name: str, version: tuple[int, ...]) -> bytes:
    """The hash of a file's name and contents. The name is the path below kernels_cu or the package,
    wherever that is; for others the file's. version: changes whenever the file is written."""
    path = Path(name)
    roots = (root for root in (KERNELS, PACKAGE) if path.is_relative_to(root))
    known_as = next((path.relative_to(root).as_posix() for root in roots), path.name)
    return hashlib.sha256(f"{known_as}\0".encode() + path.read_bytes()).digest()


def fingerprint() -> str:
    """sha256 over fx_fuser's Python and CUDA sources: a tag for caches of what it compiled."""
    python = {*_files(PACKAGE, ".py"), *_files(PACKAGE / "patterns", ".py")}  # the latter a link
    headers = compilers.nvrtc_headers(KERNELS)
    return _hash_files([*sorted(python), *_kernel_sources(), *headers])


def _key(*parts: str) -> str:
    return _hash_texts(*parts, _hash_files(_kernel_sources()))


def _hash_texts(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _cubin_job(source: str, arch: str, compiler: Compiler) -> Job:
    headers = _hash_files(compiler.headers(KERNELS))
    key = _key(source, *compiler.flags(arch), compiler.version, headers)
    return Job(key, source, ".cu", ".cubin", compiler.command(arch, KERNELS.resolve()))


def shim_command(host: Host, more: Sequence[str] = ()) -> tuple[str, ...]:
    """The command, with SOURCE and TARGET of `jobs` to fill in. more: flags that go first."""
    torch_root = Path(torch.__file__).parent
    include = ("-I", str(KERNELS.resolve()), "-isystem", str(torch_root / "include"))
    link = (
        f"-L{torch_root / 'lib'}",
        # The shim calls nothing of libtorch by name, but libtorch loads libtorch_cuda.
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"),
    )
    return (str(host.cxx), *more, *_CXX_FLAGS, *include, SOURCE, "-o", TARGET, *link)


def _shim_job(host: Host) -> Job:
    command = shim_command(host)
    key = _key("shim", *command, host.version, torch.__version__)
    return Job(key, (KERNELS / "host/shim.cpp").read_text(), ".cpp", ".so", command)


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
    """Like `cubin`, for several sources at once, compiled in parallel."""
    found, jobs = _prebuilt_and_jobs(sources, arch)
    if jobs:  # otherwise the cache folder need not exist
        found |= zip(jobs, store.ensure(list(jobs.values())))
    return [found[source] for source in sources]


def are_built(sources: Sequence[str], arch: str) -> list[bool]:
    """For each source: is its cubin in the wheel or in the cache?"""
    found, jobs = _prebuilt_and_jobs(sources, arch)
    return [source in found or store.holds(jobs[source]) for source in sources]


def _prebuilt_and_jobs(sources: Sequence[str], arch: str) -> tuple[dict[str, Path], dict[str, Job]]:
    """The wheel's cubins by source, and the jobs that compile all others."""
    found = prebuilt_cubins(sources, arch)
    missing = [source for source in dict.fromkeys(sources) if source not in found]
    if not missing:
        return found, {}
    compiler = compilers.of_kernels()
    return found, {source: _cubin_job(source, arch, compiler) for source in missing}


# ---- what wheels bring ---------------------------------------------------------------------------


def prebuilt_names(sources: Iterable[str], arch: str) -> dict[str, str]:
    """Source → the path of its cubin below PREBUILT."""
    files = _hash_files([*_kernel_sources(), *compilers.nvrtc_headers(KERNELS)])
    return {source: f"{arch}/{_hash_texts(source, arch, files)}.cubin" for source in sources}


def prebuilt_cubins(sources: Iterable[str], arch: str) -> dict[str, Path]:
    """Source → the wheel's cubin, if there is one.

    A checkout has none, and none fits sources that were edited. After the driver has refused one,
    none of its architecture is used. Whoever names a compiler gets kernels from that one.
    """
    if arch in _refused or os.environ.get("FX_FUSER_COMPILER") or not (PREBUILT / arch).is_dir():
        return {}
    paths = {source: PREBUILT / name for source, name in prebuilt_names(sources, arch).items()}
    return {source: path for source, path in paths.items() if path.exists()}


def refuse_prebuilt(cubins: Sequence[Path], arch: str, reason: Exception) -> bool:
    """From now on compile this architecture's kernels in this process, because one of these cubins
    does not load: a driver that is older than the wheel's compiler may take none. False if none of
    these is from the wheel."""
    if not any(PREBUILT in path.parents for path in cubins):
        return False
    log.info("compiling kernels for %s instead of using the wheel's: %s", arch, reason)
    _refused.add(arch)
    return True


def shim_sources() -> str:
    """sha256 over the shim's sources."""
    return _hash_files([path for path in _kernel_sources() if path.endswith((".cpp", ".h"))])


def prebuilt_shim() -> Path | None:
    """The wheel's shim; None in a checkout, or if its sources have changed since."""
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
    return (KERNELS / "pointwise/batch_stats.cu").read_text()
