"""Which of several candidates is fastest on this machine?  Measured once, kept on disk.

Medians of the GPU's time over interleaved rounds, each with a cold L2 cache and with the whole
candidate queued before the GPU starts on it. The answers are stored next to the kernels, one file
each, named by the hash of everything they depend on: see `native.store`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fx_fuser.errors import allocations_failed, is_out_of_memory
from fx_fuser.native import binaries, compilers, store
from fx_fuser.planning import ranks

_BUDGET_MS = 40.0  # for the rounds of one candidate
_ROUNDS = (5, 25)  # at least, at most
_LONG_MS = 4.0  # from here on a candidate is run as few times as possible
_CALLS = 10  # over which the host is timed
# The host's time for a Linear's training step (autograd, AOTAutograd's wrappers, launches), in
# calls of the fused op: on an H200's host 0.66 ms for the three of a Llama MLP, one call 24 us
# (2026-11-22, kernels_cu/NOTES.md).
STEP_CALLS = 10
# From here on flushes are not doubled: the launch queue holds some 1000 entries, the candidate's
# included. A host that finds it full waits, and gets no further ahead.
_FLUSHES = 256


@dataclass(frozen=True)
class Candidate:
    """run: timed on the GPU. call: the op alone, timed on the host, if that time matters.

    is_exact: if not, it scores infinity, which is kept and sent to other ranks like a time.
    """

    run: Callable[[], object]
    call: Callable[[], object] | None = None
    is_exact: bool = True

    def __call__(self) -> object:
        return self.run()


class Timing(NamedTuple):
    """Milliseconds. host: 0 if it does not matter."""

    gpu: float
    host: float = 0.0

    @property
    def ms(self) -> float:
        """The least time a graph's node takes: host and GPU work side by side."""
        return max(self)

    def __str__(self) -> str:
        if math.isinf(self.gpu):
            return "less exact than the library (wrong, in TF32, or a NaN is lost)"
        return f"{self.ms:.4g} ms{' of the host' if self.host > self.gpu else ''}"


_lock = threading.Lock()
_known: dict[tuple[str, int], list[Timing]] = {}  # by name and the ranks' store


def medians(
    key: Sequence[Any],
    make_candidates: Callable[[], Sequence[Candidate]],
    device: torch.device,
) -> list[Timing] | None:
    """The times of each candidate on a CUDA device; None if it does not have enough memory.

    key: what the answer depends on besides GPU, driver, torch, fx_fuser and the compiler of the
        kernels; compared as text.
    make_candidates: called only if the answer is not known. They run without gradients.

    All ranks get the times that the first one found.
    """
    name = hashlib.sha256(repr((_machine(device), key)).encode()).hexdigest()[:32]
    with _lock:
        shared = ranks.group_store()
        known = name, id(shared)
        if known not in _known:
            found = _recall(name)
            if found is None:
                found = _measure(make_candidates, device)
                if found is not None:
                    _remember(name, found)
            if shared is not None:
                times = ranks.agreed(shared, name, found)
                found = None if times is None else [Timing(*pair) for pair in times]
            if found is None:
                return None
            _known[known] = found
        return _known[known]


def _machine(device: torch.device) -> tuple[object, ...]:
    gpu = torch.cuda.get_device_properties(device)
    versions = _driver(), torch.__version__, compilers.of_kernels().version, binaries.fingerprint()
    return gpu.name, gpu.multi_processor_count, *versions


@functools.cache
def _driver() -> int:
    """The CUDA version of the driver, times 1000; torch does not expose it."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _measure(
    make_candidates: Callable[[], Sequence[Candidate]], device: torch.device
) -> list[Timing] | None:
    # Dynamo may have a dispatch mode in place; autocast would cast again. A candidate may draw
    # random numbers, as torch's attention with dropout does; the user's state must not change.
    with (
        _disable_current_modes(),
        torch.random.fork_rng(devices=[device]),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.cuda.device(device),
    ):
        failed = allocations_failed(device)
        try:
            return times_of(make_candidates(), device)
        except RuntimeError as error:
            if not is_out_of_memory(error, device, failed):
                raise
            return None
        finally:
            torch.cuda.empty_cache()


def times_of(candidates: Sequence[Candidate], device: torch.device) -> list[Timing]:
    """Medians of each candidate's times, not recalled; all are on `device`, a CUDA device."""
    found = iter(_times_of([c for c in candidates if c.is_exact], device))
    return [next(found) if c.is_exact else Timing(math.inf) for c in candidates]


def _times_of(candidates: Sequence[Candidate], device: torch.device) -> list[Timing]:
    size = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(2 * size, dtype=torch.int8, device=device)
    one_flush = _Timer(flush.zero_, flush).least(3)
    timers, rounds, queued = [], [], []
    for candidate in candidates:
        _host_ms(candidate)  # the first call allocates memory
        queued.append(_host_ms(candidate))
        timers.append(_Timer(candidate, flush, 1 + math.ceil(queued[-1] / one_flush)))
        first = timers[-1].least(1)
        if first < _LONG_MS:
            first = min(first, timers[-1].least(2))
        rounds.append(max(_ROUNDS[0], min(_ROUNDS[1], int(_BUDGET_MS / first))))
    samples: list[list[float]] = [[] for _ in candidates]
    for i in range(max(rounds)):
        for timer, count, found in zip(timers, rounds, samples):
            if i < count:
                found.append(timer.gpu_ms())
    return [_timing(*one) for one in zip(candidates, map(median, samples), queued)]


def _timing(candidate: Candidate, gpu: float, queued: float) -> Timing:
    """queued: the host's time for one call of the candidate, in ms. It is used where no decision
    depends on the host: 30 more calls of a gemm of 6 ms would take 0.2 s.
    """
    if candidate.call is None:
        return Timing(gpu)
    if STEP_CALLS * queued < gpu:
        return Timing(gpu, queued)
    return Timing(gpu, min(_host_ms(candidate.call, _CALLS) for _ in range(3)))


@dataclass
class _Timer:
    """flushes: of the L2 cache; they keep the GPU busy while the host queues the candidate."""

    candidate: Callable[[], object]
    flush: torch.Tensor
    flushes: int = 1

    def least(self, samples: int) -> float:
        return min(self.gpu_ms() for _ in range(samples))

    def gpu_ms(self) -> float:
        """The GPU's time, from a sample in which the host was ahead of the GPU.

        If it never is, say because the candidate synchronises, the shortest sample's.
        """
        least = math.inf
        while True:
            found, ahead = self._sample()
            if ahead:
                return found
            least = min(least, found)
            if self.flushes >= _FLUSHES:
                return least
            self.flushes *= 2

    def _sample(self) -> tuple[float, bool]:
        """Milliseconds, and whether the host had queued everything before the GPU got to it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.flushes):
            self.flush.zero_()
        start.record()
        self.candidate()
        end.record()
        ahead = not start.query()  # the GPU is still at the flushes
        end.synchronize()
        return max(start.elapsed_time(end), 1e-3), ahead


def _host_ms(call: Callable[[], object], calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    found = (time.perf_counter() - start) * 1e3 / calls
    torch.cuda.synchronize()
    return found


def _recall(name: str) -> list[Timing] | None:
    text = store.recall(name)
    try:
        found = json.loads(text or "null")
        if not isinstance(found, list) or not found or not all(map(_is_timing, found)):
            return None
        return [Timing(float(gpu), float(host)) for gpu, host in found]
    except (ValueError, OverflowError, RecursionError):
        return None


def _is_timing(value: object) -> bool:
    """As `_remember` writes them. Only the GPU's time may be infinite: see `Candidate`."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    are_numbers = all(type(part) in (int, float) for part in value)  # not bool
    return are_numbers and value[0] >= 0 and 0 <= value[1] < math.inf  # not NaN


def _remember(name: str, times: list[Timing]) -> None:
    store.remember(name, json.dumps(times))
