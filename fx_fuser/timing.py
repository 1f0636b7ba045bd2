"""Which of several ways is fastest on this machine?  Measured once, remembered on disk.

Medians over interleaved rounds, each with a cold L2 cache. The answers lie beside the kernels, in
`plans` of the build cache, a file each, under the hash of all that they depend on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fx_fuser import build

_BUDGET_MS = 40.0  # for the rounds of one way
_ROUNDS = (5, 25)  # at least, at most

_lock = threading.Lock()
_known: dict[str, list[float]] = {}


def medians(
    key: Sequence[Any],
    make_ways: Callable[[], Sequence[Callable[[], object]]],
    device: torch.device,
) -> list[float] | None:
    """Median milliseconds of each way on a CUDA device; None if its memory does not suffice.

    key: what the answer depends on besides GPU, driver, torch and fx_fuser; its text counts.
    make_ways: called only where the answer is not known. The ways run without gradients.
    """
    name = hashlib.sha256(repr((_machine(device), key)).encode()).hexdigest()[:32]
    with _lock:
        if name not in _known:
            found = _recall(name)
            if found is None:
                found = _measure(make_ways, device)
                if found is None:
                    return None
                _remember(name, found)
            _known[name] = found
        return _known[name]


def _machine(device: torch.device) -> tuple[object, ...]:
    gpu = torch.cuda.get_device_properties(device)
    return gpu.name, gpu.multi_processor_count, _driver(), torch.__version__, build.fingerprint()


@functools.cache
def _driver() -> int:
    """The CUDA version of the driver, times 1000; torch has no name for it."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _measure(
    make_ways: Callable[[], Sequence[Callable[[], object]]], device: torch.device
) -> list[float] | None:
    # Dynamo may have a mode of its own in place; autocast would cast what is cast already.
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.cuda.device(device),
    ):
        try:
            samples = _samples(make_ways, device)
        except RuntimeError as error:  # an OutOfMemoryError, or what our own ops make of one
            if "out of memory" not in str(error):
                raise
            return None
        finally:
            torch.cuda.empty_cache()
    return [median(found) for found in samples]


def _samples(
    make_ways: Callable[[], Sequence[Callable[[], object]]], device: torch.device
) -> list[list[float]]:
    ways = make_ways()
    size = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(2 * size, dtype=torch.int8, device=device)
    first = [min(_once(way, flush) for _ in range(3)) for way in ways]
    rounds = [max(_ROUNDS[0], min(_ROUNDS[1], int(_BUDGET_MS / ms))) for ms in first]
    samples: list[list[float]] = [[] for _ in ways]
    for i in range(max(rounds)):
        for way, count, found in zip(ways, rounds, samples):
            if i < count:
                found.append(_once(way, flush))
    return samples


def _once(way: Callable[[], object], flush: torch.Tensor) -> float:
    """The GPU's time: the host queues the call while the flush runs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    way()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end), 1e-3)


def _folder() -> Path:
    return build.cache_dir() / "plans"


def _recall(name: str) -> list[float] | None:
    try:
        found = json.loads((_folder() / f"{name}.json").read_text())
        return [float(ms) for ms in found]
    except (OSError, ValueError, TypeError):
        return None


def _remember(name: str, times: list[float]) -> None:
    """Whole or not at all; a cache that cannot be written to costs another measurement, no more."""
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=_folder())
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(times, file)
            os.replace(partial, _folder() / f"{name}.json")
        except OSError:
            os.unlink(partial)
