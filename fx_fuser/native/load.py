"""Spec and device → a kernel, built, loaded, and kept as a handle that the ops take.

Nothing touches CUDA before the first kernel is asked for. A kernel is built and loaded once per
spec and device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser.errors import BuildError
from fx_fuser.native import binaries, compilers, limits, store
from fx_fuser.native.kernel_spec import KernelSpec, texts_of

_lock = threading.RLock()
_kernels: dict[tuple[str, int], int] = {}  # (spec's name, device index) → handle
_batch_stats: dict[int, int] = {}  # device index → handle
_expected: Callable[[], Sequence[str]] | None = None
NO_KERNEL = 0  # the handle if the device has no such kernel


def available(device: torch.device | str | int) -> str | None:
    """None if kernels can be built for and run on `device`, otherwise the reason in words."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device} is not a CUDA device"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    if torch.version.hip is not None:
        return "this build of torch is for ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < binaries.LOWEST_CAPABILITY:
        lowest = ".".join(map(str, binaries.LOWEST_CAPABILITY))
        return f"compute capability {major}.{minor} is below {lowest}"
    try:
        compilers.of_kernels().command(binaries.arch_of(device), binaries.KERNELS.resolve())
        if binaries.prebuilt_shim() is None:
            compilers.of_shim()
    except BuildError as error:
        return str(error)
    return None


def loaded(spec: KernelSpec, device: torch.device) -> int:
    """The handle of a loaded kernel."""
    return _kernels[spec.name, _index_of(device)]


def handle_of(spec: KernelSpec, tensor: Tensor) -> int:
    """The kernel on the tensor's device; built and loaded at its first use."""
    handle = _kernels.get((spec.name, tensor.get_device()))
    if handle is None:
        prepare([spec], tensor.device)
        handle = _kernels[spec.name, tensor.get_device()]
    return handle


def runs_on(spec: KernelSpec, device: torch.device | str | int) -> bool:
    """Is there such a kernel for the architecture of this device?"""
    arch = spec.family.arch
    return arch is None or arch == binaries.arch_of(torch.device(device))


def prepare(specs: Sequence[KernelSpec], device: torch.device | str | int) -> None:
    """Builds (in parallel) and loads the kernels ahead of their use.

    Raises:
        BuildError: a kernel does not compile or load, or the shim does not fit this Python code.
    """
    device = torch.device(device)
    index = _index_of(device)
    with _lock:
        if not (missing := not_loaded(specs, device)):
            return
        load_shim()
        arch = binaries.arch_of(device)
        for spec in [s for s in missing if not runs_on(s, device)]:
            _kernels[spec.name, index] = NO_KERNEL
            missing.remove(spec)
        _load_all(missing, arch, index)


def _load_all(specs: Sequence[KernelSpec], arch: str, index: int) -> None:
    texts = texts_of(specs)
    built = dict(zip(texts, binaries.cubins(texts, arch), strict=True))
    for i, spec in enumerate(specs):
        cubins = [built[text] for text in spec.texts]
        arguments = spec.family.loader, spec.name, [*map(str, cubins)], spec.signature
        try:
            _kernels[spec.name, index] = _loaded_on(index, *arguments)
        except BuildError as error:
            if not binaries.refuse_prebuilt(cubins, arch, error):
                raise
            _load_all(specs[i:], arch, index)
            return


def not_loaded(specs: Sequence[KernelSpec], device: torch.device) -> list[KernelSpec]:
    """The specs that `prepare` would have to load, each once."""
    index = _index_of(device)
    return [spec for spec in dict.fromkeys(specs) if (spec.name, index) not in _kernels]


def not_built(specs: Sequence[KernelSpec], device: torch.device) -> dict[KernelSpec, list[str]]:
    """The specs for which `build` would have to compile something, and the texts."""
    wanted = [spec for spec in not_loaded(specs, device) if runs_on(spec, device)]
    texts = texts_of(wanted)
    built = dict(zip(texts, binaries.are_built(texts, binaries.arch_of(device)), strict=True))
    missing = {spec: [text for text in spec.texts if not built[text]] for spec in wanted}
    return {spec: texts for spec, texts in missing.items() if texts}


def build(specs: Sequence[KernelSpec], device: torch.device, batch_stats: bool = False) -> None:
    """Builds the kernels in parallel, and the statistics kernels if asked, and loads none.

    Raises:
        BuildError: a kernel does not compile; the others are built.
    """
    texts = texts_of(spec for spec in not_loaded(specs, device) if runs_on(spec, device))
    if batch_stats and _index_of(device) not in _batch_stats:
        texts.append(binaries.batch_stats_source())
    binaries.cubins(texts, binaries.arch_of(device))


def expect(contract: Callable[[], Sequence[str]]) -> None:
    """What the shim's `contract()` must say, line by line; compared when the shim is loaded."""
    global _expected
    _expected = contract


def prepare_batch_stats(device: torch.device) -> int:
    """Builds and loads the statistics kernels ahead of their use; returns their handle.

    Raises:
        BuildError: they do not compile or load.
    """
    index = _index_of(device)
    if index in _batch_stats:
        return _batch_stats[index]
    with _lock:
        if index not in _batch_stats:
            load_shim()
            path = binaries.cubin(binaries.batch_stats_source(), binaries.arch_of(device))
            name = "batch_stats"  # also the name of their family
            _batch_stats[index] = _loaded_on(index, name, name, [str(path)], [])
        return _batch_stats[index]


def _index_of(device: torch.device) -> int:
    if device.type != "cuda":
        raise BuildError(f"kernels run on CUDA devices, not on {device}; move the tensors")
    return torch.cuda.current_device() if device.index is None else device.index


def load_shim() -> None:
    """Registers the ops, once per process: a second library with their namespace would abort it."""
    with _lock:
        if not hasattr(torch.ops.fx_fuser_native, "pointwise"):
            path = binaries.shim()
            try:
                torch.ops.load_library(path)
            except OSError as error:
                text = f"cannot load {path} ({error}); does it fit this torch?"
                raise BuildError(text) from error
        _check_contract()
        if torch.cuda.is_available():
            _call("use_driver", driver_address())


def driver_address() -> int:
    """Address of the CUDA driver function that finds the others; torch has loaded the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    return ctypes.cast(driver.cuGetProcAddress_v2, ctypes.c_void_p).value or 0


def _check_contract() -> None:
    """Compares what C++ assumes about Python with what Python has."""
    if _expected is None:
        return
    found = torch.ops.fx_fuser_native.contract.default()
    cpp, python = ({_subject(line): line for line in lines} for lines in (found, _expected()))
    differences = [
        f"  {subject}\n    C++:    {cpp.get(subject, '(nothing)')}\n"
        f"    Python: {python.get(subject, '(nothing)')}"
        for subject in (cpp | python)
        if cpp.get(subject) != python.get(subject)
    ]
    if differences:
        raise BuildError(
            "the compiled shim and fx_fuser's Python code are of different versions:\n"
            + "\n".join(differences)
            + f"\nRemove the cache folder {store.cache_dir()} and start again; if they still "
            "differ, reinstall fx_fuser"
        )


def _subject(line: str) -> str:
    """The subject of a contract's line: `limit tensors`, `leaves`..."""
    kind, _, rest = line.partition(" ")
    return f"{kind} {rest.split()[0]}" if kind == "limit" else kind


def _loaded_on(index: int, *arguments: object) -> int:
    figures = _call("gpu_figures", index)
    rates = limits.split_rates(torch.cuda.get_device_capability(index), figures)
    handle: int = _call("load", *arguments, index, rates)
    return handle


def _call(op: str, *arguments: object) -> Any:
    try:
        return getattr(torch.ops.fx_fuser_native, op).default(*arguments)
    except RuntimeError as error:
        raise BuildError(str(error)) from error
