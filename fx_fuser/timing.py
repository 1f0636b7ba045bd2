"""Which of several ways is fastest on this machine?  Measured once, remembered on disk.

Medians of the GPU's time over interleaved rounds, each with a cold L2 cache and with all of a way
queued before the GPU comes to it. The answers lie beside the kernels, in `plans` of the build
cache, a file each, under the hash of all that they depend on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fx_fuser import build

_BUDGET_MS = 40.0  # for the rounds of one way
_ROUNDS = (5, 25)  # at least, at most
_CALLS = 10  # that the host is timed over


@dataclass(frozen=True)
class Way:
    """run: what the GPU is timed on. call: the op alone, where the host's time for it matters."""

    run: Callable[[], object]
    call: Callable[[], object] | None = None

    def __call__(self) -> object:
        return self.run()


class Took(NamedTuple):
    """Milliseconds, of the host 0 where they do not matter."""

    gpu: float
    host: float = 0.0

    @property
    def ms(self) -> float:
        """Of a graph's node at best: the two work side by side."""
        return max(self)

    def __str__(self) -> str:
        return f"{self.ms:.4g} ms{' of the host' if self.host > self.gpu else ''}"


_lock = threading.Lock()
_known: dict[str, list[Took]] = {}


def medians(
    key: Sequence[Any],
    make_ways: Callable[[], Sequence[Way]],
    device: torch.device,
) -> list[Took] | None:
    """What each way takes on a CUDA device; None if its memory does not suffice.

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


def _measure(make_ways: Callable[[], Sequence[Way]], device: torch.device) -> list[Took] | None:
    # Dynamo may have a mode of its own in place; autocast would cast what is cast already.
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.cuda.device(device),
    ):
        try:
            return times_of(make_ways(), device)
        except RuntimeError as error:  # an OutOfMemoryError, or what our own ops make of one
            if "out of memory" not in str(error):
                raise
            return None
        finally:
            torch.cuda.empty_cache()


def times_of(ways: Sequence[Way], device: torch.device) -> list[Took]:
    """Medians of each way's times, measured anew; all are on `device`, a CUDA device."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(2 * size, dtype=torch.int8, device=device)
    one_flush = min(_gpu_ms(flush.zero_, flush, 1) for _ in range(3))
    flushes, rounds = [], []
    for way in ways:
        _host_ms(way)  # the first call takes memory
        flushes.append(1 + math.ceil(_host_ms(way) / one_flush))
        first = min(_gpu_ms(way, flush, flushes[-1]) for _ in range(3))
        rounds.append(max(_ROUNDS[0], min(_ROUNDS[1], int(_BUDGET_MS / first))))
    samples: list[list[float]] = [[] for _ in ways]
    for i in range(max(rounds)):
        for way, count, queue, found in zip(ways, rounds, flushes, samples):
            if i < count:
                found.append(_gpu_ms(way, flush, queue))
    hosts = [min(_host_ms(way.call, _CALLS) for _ in range(3)) if way.call else 0 for way in ways]
    return [Took(median(found), host) for found, host in zip(samples, hosts)]


def _gpu_ms(way: Callable[[], object], flush: torch.Tensor, flushes: int) -> float:
    """The GPU's time: the host queues all of the call while the flushes run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(flushes):
        flush.zero_()
    start.record()
    way()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end), 1e-3)


def _host_ms(call: Callable[[], object], calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    found = (time.perf_counter() - start) * 1e3 / calls
    torch.cuda.synchronize()
    return found


def _folder() -> Path:
    return build.cache_dir() / "plans"


def _recall(name: str) -> list[Took] | None:
    try:
        found = json.loads((_folder() / f"{name}.json").read_text())
        return [Took(float(gpu), float(host)) for gpu, host in found]
    except (OSError, ValueError, TypeError):
        return None


def _remember(name: str, times: list[Took]) -> None:
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
