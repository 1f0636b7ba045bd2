"""What is there: GPUs, driver, torch, compilers, the cache folder, settings. Nothing is judged."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor import compile_fx

from fx_fuser import versions
from fx_fuser.errors import BuildError, OptionError
from fx_fuser.kernels.split import check_split_loop, split_loop
from fx_fuser.native import binaries, compilers, jobs, load, store
from fx_fuser.native.kernel_spec import texts_of
from fx_fuser.ops import usual
from fx_fuser.options import SWITCH, Options, is_off
from fx_fuser.report.header import header_of

_OF_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """capability: (major, minor). arch: what kernels are compiled for. split_loop: the main loop of
    the split gemm. unfit: why no kernel can run on it, as `load.available` says; "" if some can."""

    index: int
    name: str
    capability: tuple[int, int]
    arch: str
    multiprocessors: int
    memory_gib: float
    split_loop: str
    unfit: str = ""


@dataclass(frozen=True)
class Cache:
    """untrusted: why nothing is read from the folder. unwritable: why nothing is written to it.
    launchers: libraries that launch kernels. limit: in MB."""

    folder: str
    untrusted: str
    unwritable: str
    kernels: int
    launchers: int
    timings: int
    megabytes: float
    limit: int


@dataclass(frozen=True)
class Facts:
    """Faults are texts, empty if there is none. is_checkout: not a wheel. hip: the version, if
    torch is for ROCm. driver: NVIDIA's, as far as the system says; cuda_of_driver: the CUDA that it
    is for. compiler: of the kernels. brought: how many kernels of the wheel are used, by
    architecture. launcher: the library that launches kernels. switch, split_loop: what these
    variables hold."""

    fx_fuser: str
    folder: str
    is_checkout: bool
    system: str
    python: str
    torch: str
    cuda: str | None
    hip: str | None
    is_registered: bool
    is_installed: bool
    switch: str
    switch_fault: str
    driver: str
    cuda_of_driver: str
    gpus: tuple[Gpu, ...]
    compiler: str
    compiler_fault: str
    brought: dict[str, int]
    launcher: str
    launcher_fault: str
    split_loop: str
    split_loop_fault: str
    cache: Cache
    precision: str


def gather() -> Facts:
    compiler, compiler_fault = _or_fault(_compiler)
    launcher, launcher_fault = _or_fault(_launcher)
    return Facts(
        fx_fuser=versions.PACKAGE,
        folder=str(binaries.PACKAGE),
        is_checkout=(binaries.PACKAGE.parent / "pyproject.toml").exists(),
        system=_system(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        is_registered="fx_fuser" in torch._dynamo.list_backends(exclude_tags=()),
        is_installed=getattr(compile_fx.compile_fx, "is_fx_fusers", False),
        switch=os.environ.get(SWITCH, ""),
        switch_fault=_or_fault(lambda: is_off("the doctor runs anyway"))[1],
        driver=_driver(),
        cuda_of_driver=_cuda_of_driver(),
        gpus=tuple(_gpus()),
        compiler=compiler,
        compiler_fault=compiler_fault,
        brought=_brought(),
        launcher=launcher,
        launcher_fault=launcher_fault,
        split_loop=os.environ.get("FX_FUSER_SPLIT_LOOP", ""),
        split_loop_fault=_or_fault(check_split_loop)[1],
        cache=_cache(),
        precision=header_of([], "", Options()).precision,
    )


def _or_fault(find: Callable[[], object]) -> tuple[str, str]:
    """What is found, as text, and the error if it fails."""
    try:
        return str(find()), ""
    except (BuildError, OptionError) as error:
        return "", str(error)


def _system() -> str:
    libc = " ".join(filter(None, platform.libc_ver()))
    return ", ".join(filter(None, (f"{platform.system()} {platform.machine()}", libc)))


# ---- GPUs ----------------------------------------------------------------------------------------


def _gpus() -> Iterator[Gpu]:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        device = torch.device("cuda", index)
        yield Gpu(
            index=index,
            name=found.name,
            capability=torch.cuda.get_device_capability(index),
            arch=binaries.arch_of(device),
            multiprocessors=found.multi_processor_count,
            memory_gib=round(found.total_memory / 2**30, 1),
            split_loop=split_loop(device),
            unfit=load.available(device) or "",
        )


def _driver() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", _OF_DRIVER.read_text())
        return found[1] if found else ""
    return ""


def _cuda_of_driver() -> str:
    """Say "13.0"; torch has no name for it."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""


# ---- compilers -----------------------------------------------------------------------------------


def _compiler() -> str:
    found = compilers.of_kernels()
    version = re.search(r"builtins\.so\.([\d.]+\d)|release ([\d.]+\d)", found.version)
    number = f" ({version[1] or version[2]})" if version else ""
    return f"{found.title}{number}"


def _brought() -> dict[str, int]:
    texts = {arch: texts_of(usual.specs(arch)) for arch in usual.ARCHS}
    counts = {arch: len(binaries.prebuilt_cubins(texts[arch], arch)) for arch in usual.ARCHS}
    return {arch: count for arch, count in counts.items() if count}


def _launcher() -> str:
    if binaries.prebuilt_shim() is not None:
        return "prebuilt, from the wheel"
    return f"compiled by {compilers.of_shim().cxx} at first use"


# ---- the cache folder ----------------------------------------------------------------------------


def _cache() -> Cache:
    folder = store.cache_dir()
    binaries_of_it, timings = store.entries(folder), store.timings(folder)
    kinds = [path.suffix for path in binaries_of_it]
    return Cache(
        folder=str(folder),
        untrusted=store.unused_because(folder),
        unwritable=_unwritable(folder),
        kernels=kinds.count(".cubin"),
        launchers=kinds.count(".so"),
        timings=len(timings),
        megabytes=round(sum(path.lstat().st_size for path in (*binaries_of_it, *timings)) / 1e6, 1),
        limit=Options().cache_size,
    )


def _unwritable(folder: Path) -> str:
    try:
        jobs.check_folder(folder)
    except OSError as error:
        return str(error)
    at = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not at.is_dir():
        return f"{at} is not a folder"
    return "" if os.access(at, os.W_OK | os.X_OK) else f"{at} is not writable"


# ---- what a report may say -----------------------------------------------------------------------


def without_home(text: str) -> str:
    """Writes ~ for the user's home: what is pasted into an issue need not name them."""
    home = os.path.expanduser("~")
    if home in ("", "/", "~"):
        return text
    return re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
