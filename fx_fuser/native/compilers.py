"""The compilers: NVRTC, which comes with torch for CUDA, or nvcc for kernels; g++ for the shim."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fx_fuser.errors import BuildError
from fx_fuser.native.jobs import IN_PARALLEL, SOURCE, TARGET

log = logging.getLogger("fx_fuser.native.compilers")

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
_FLAGS = ("-std=c++17", "-lineinfo")  # for kernels, whichever compiler is used


class Compiler(Protocol):
    """Makes cubins. title: its name for a user. version: tells it, with all that it includes by
    itself, from any other.
    """

    @property
    def title(self) -> str: ...

    @property
    def version(self) -> str: ...

    def flags(self, arch: str) -> tuple[str, ...]:
        """The flags that affect the result."""

    def command(self, arch: str, kernels: Path) -> tuple[str, ...]:
        """The command, with SOURCE and TARGET of `jobs` to fill in. kernels: the include folder.

        More flags may be appended.

        Raises:
            BuildError: a path in it has a character that the compiler misreads.
        """

    def headers(self, kernels: Path) -> list[Path]:
        """Headers that only this compiler includes, and that `version` does not cover."""


def of_kernels() -> Compiler:
    """The one that $FX_FUSER_COMPILER names; by default NVRTC, or nvcc if there is no NVRTC.

    Raises:
        BuildError: names what is missing and how to get it.
    """
    finders: dict[str, Callable[[], Compiler]] = {"nvrtc": nvrtc, "nvcc": nvcc}
    wanted = os.environ.get("FX_FUSER_COMPILER")
    if wanted:
        if wanted not in finders:
            raise BuildError(f"FX_FUSER_COMPILER is {wanted!r}; set it to nvrtc or nvcc")
        return finders[wanted]()
    try:
        return nvrtc()
    except BuildError as error:
        reason = error
    try:
        found = nvcc()
    except BuildError as error:
        raise BuildError(f"{reason}; or nvcc: {error}") from error
    log.info("nvcc compiles the kernels: %s", reason)
    return found


def _refuse(title: str, characters: str, *paths: Path) -> None:
    for path in paths:
        if found := next((c for c in characters if c in str(path)), None):
            other = " or let NVRTC compile" if title == "nvcc" and found != '"' else ""
            raise BuildError(
                f"{title} takes no {found} in a path, and there is one in {path}; "
                f"rename the folder{other}"
            )


# ---- CUDA's files --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaFiles:
    """CUDA's headers and libraries: those that pip has installed next to torch, or a toolkit's."""

    include: Path
    libraries: tuple[Path, ...]

    def find(self, name: str) -> Path | None:
        return next((f / name for f in self.libraries if os.path.exists(f / name)), None)


def cuda_files() -> Iterator[CudaFiles]:
    """pip's first, then the toolkits' in $CUDA_HOME, in the usual folder, and nvcc's."""
    for root in _pip_folders():
        for whole in sorted(root.glob("cu[0-9]*"), reverse=True):  # of CUDA 13 and later
            yield CudaFiles(whole / "include", (whole / "lib",))
        libraries = (root / "cuda_nvrtc/lib", root / "cuda_runtime/lib")  # of CUDA 12
        yield CudaFiles(root / "cuda_runtime/include", libraries)
    if home := os.environ.get("CUDA_HOME"):
        yield _toolkit(Path(home))
    yield _toolkit(DEFAULT_CUDA_HOME)
    if (found := _which_nvcc()) and (toolkit := _cuda_home_of(str(found))):
        yield _toolkit(toolkit)


def _cuda_of_torch() -> str | None:
    """The major version of torch's CUDA, say "13"."""
    return torch.version.cuda.split(".")[0] if torch.version.cuda else None


def _toolkit(home: Path) -> CudaFiles:
    folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    return CudaFiles(home / "include", tuple(home / folder for folder in folders))


def _pip_folders() -> list[Path]:
    """The `nvidia` folders of this environment, the one next to torch first."""
    beside_torch = Path(torch.__file__).parents[1] / "nvidia"
    spec = importlib.util.find_spec("nvidia")
    others = spec.submodule_search_locations if spec is not None else None
    return list(dict.fromkeys((beside_torch, *map(Path, others or ()))))


# ---- NVRTC ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvrtc:
    """library: libnvrtc. include: CUDA's headers of 16-bit floats."""

    library: Path
    include: Path
    version: str

    @property
    def title(self) -> str:
        return f"NVRTC, {self.library}"

    def flags(self, arch: str) -> tuple[str, ...]:
        # Unannotated functions are device functions: there is no host. ptxas's options one by one.
        flags = ("-default-device", "--pre-include=prelude.h", f"--gpu-architecture={arch}")
        ptxas = ("--ptxas-options=-v", "--ptxas-options=-warn-spills")
        return (*_FLAGS, *flags, IN_PARALLEL, *ptxas)  # a source has two to four large kernels

    def command(self, arch: str, kernels: Path) -> tuple[str, ...]:
        folders = (kernels / "nvrtc", kernels, self.include)
        # -lineinfo writes paths into PTX in quotes, without escapes.
        _refuse("NVRTC", '"', *folders)
        include = (f"-I{folder}" for folder in folders)
        run = (*_RUN_NVRTC, str(self.library), SOURCE, TARGET)
        return (*run, *self.flags(arch), *include)

    def headers(self, kernels: Path) -> list[Path]:
        # NVRTC and these come in two packages, each with its own version.
        of_cuda = sorted(self.include.glob("cuda_[bf]*16.h*"))
        return [*nvrtc_headers(kernels), *of_cuda]


# Run as a file, in a Python that ignores the user's environment: see `fx_fuser.native.nvrtc`.
_RUN_NVRTC = (sys.executable or "python3", "-I", "-S", str(Path(__file__).with_name("nvrtc.py")))


def nvrtc_headers(kernels: Path) -> list[Path]:
    """fx_fuser's headers in place of the C++ library, which NVRTC lacks."""
    return sorted(path for path in (kernels / "nvrtc").iterdir() if path.is_file())


def _version_of_nvrtc(library: Path) -> str:
    """Builtins are named by version, and builds differ in size. Loading it would take 0.1 s."""
    builtins = (path.name for path in library.resolve().parent.glob("libnvrtc-builtins.so.*"))
    return f"{library.name}, {library.stat().st_size} bytes, {', '.join(sorted(builtins))}"


def nvrtc() -> Nvrtc:
    """The NVRTC of the CUDA version that torch was built for; any, if it was built without CUDA.

    Raises:
        BuildError: it is missing or of another version.
    """
    wanted = _cuda_of_torch()
    others: dict[Path, Path] = {}  # folders of a toolkit may be links to each other
    for files in cuda_files():
        for library in _libnvrtcs(files):
            if wanted not in (None, library.suffix[1:]):
                others.setdefault(library.resolve(), library)
            elif os.path.exists(files.include / "cuda_fp16.h"):
                return Nvrtc(library, files.include, _version_of_nvrtc(library))
    of_version = f" of CUDA {wanted}, for which this torch was built," if wanted else ""
    instead = f", only {', '.join(map(str, others.values()))}" if others else ""
    ending = "-cu12" if wanted == "12" else f"=={wanted or 13}.*"
    raise BuildError(
        f"NVRTC{of_version} was not found next to torch, in $CUDA_HOME or in "
        f"{DEFAULT_CUDA_HOME}{instead}; pip install 'nvidia-cuda-nvrtc{ending}' "
        f"'nvidia-cuda-runtime{ending}'"
    )


def _libnvrtcs(files: CudaFiles) -> list[Path]:
    """libnvrtc.so.13 and the like, the newest first."""
    found: list[Path] = []
    for folder in files.libraries:
        with contextlib.suppress(OSError):  # $CUDA_HOME may be anything
            found += folder.glob("libnvrtc.so.*")
    numbered = [path for path in found if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)]
    return sorted(numbered, key=lambda path: int(path.suffix[1:]), reverse=True)


# ---- nvcc ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    nvcc: Path
    cxx: Path
    version: str

    @property
    def title(self) -> str:
        return f"nvcc, {self.nvcc}"

    def flags(self, arch: str) -> tuple[str, ...]:
        code = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
        return ("-cubin", "-O3", *_FLAGS, "-Xptxas", "-v,-warn-spills", "-gencode", code)

    def command(self, arch: str, kernels: Path) -> tuple[str, ...]:
        # It splits lists at commas, and runs its parts in a shell.
        _refuse("nvcc", "\"'`,", kernels, self.cxx)
        include = ("-I", str(kernels), "-ccbin", str(self.cxx))
        return (str(self.nvcc), *self.flags(arch), *include, SOURCE, "-o", TARGET)

    def headers(self, kernels: Path) -> list[Path]:
        return []


def nvcc() -> Nvcc:
    """The nvcc of PATH, $CUDA_HOME or /usr/local/cuda.

    Raises:
        BuildError: it or g++, which it needs, is missing.
    """
    found = _which_nvcc()
    if found is None:
        raise BuildError(
            f"nvcc was not found on PATH, in $CUDA_HOME/bin or in {DEFAULT_CUDA_HOME}/bin; "
            "install the CUDA toolkit (12.8 or newer) or set CUDA_HOME to where it is"
        )
    cxx = _gxx()
    return Nvcc(found, cxx, _version_of(str(found)) + _version_of(str(cxx)))


def _which_nvcc() -> Path | None:
    folders = [os.environ.get("PATH", "")]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(os.path.join(home, "bin"))
    folders.append(str(DEFAULT_CUDA_HOME / "bin"))
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return None if found is None else Path(found)


@functools.cache
def _cuda_home_of(nvcc: str) -> Path | None:
    """The toolkit's root, as far as nvcc says; the nvcc on PATH may be a link or a script."""
    steps = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], check=False, capture_output=True, text=True
    ).stderr
    found = re.search(r"^#\$ TOP=(.+?)/?$", steps, re.MULTILINE)
    return Path(found[1]).resolve() if found else None


# ---- g++ -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """g++, which compiles the shim without any CUDA file."""

    cxx: Path
    version: str


def of_shim() -> Host:
    """The g++ of PATH.

    Raises:
        BuildError: names what is missing and how to get it.
    """
    cxx = _gxx()
    return Host(cxx, _version_of(str(cxx)))


def _gxx() -> Path:
    found = shutil.which("g++")
    if found is None:
        raise BuildError("g++ was not found on PATH; install it (Debian: apt-get install g++)")
    return Path(found)


@functools.cache
def _version_of(compiler: str) -> str:
    try:
        return subprocess.run(
            [compiler, "--version"], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{compiler} --version failed ({error}); reinstall it") from error
