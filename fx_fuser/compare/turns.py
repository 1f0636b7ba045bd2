"""Steps measured in turns in one process: wall time, the GPU's kernels, peak memory."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_OF_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def interleaved_rounds(timers: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each timer says in each round. Each round has a new order, and none runs twice running.

    Where the GPU's power is capped, how warm the step before leaves the GPU is worth a tenth of the
    time (kernels_cu/linear/NOTES.md, Power): none may always follow the same one.
    """
    draw = random.Random(0)
    samples: dict[str, list[T]] = {name: [] for name in timers}
    order = list(timers)
    for _ in range(rounds):
        last = order[-1]
        draw.shuffle(order)
        if order[0] == last:
            order.append(order.pop(0))
        for name in order:
            samples[name].append(timers[name]())
    return samples


def wall_ms(step: Callable[[], object], device: torch.device) -> float:
    """Wall time of one step, from an idle GPU with a cleared L2 cache until it is idle again."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        torch.empty(2 * size, dtype=torch.int8, device=device).zero_()
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def steady_ms(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Wall time of a step in milliseconds, from so many steps run back to back.

    The host can run ahead of a busy GPU here; `wall_ms` waits for the GPU after each step.
    """
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3 / steps


def peak_mib(step: Callable[[], object], device: torch.device) -> float:
    """Peak device memory of one step, in MiB, including what was allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)


def kernels_of(step: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel, copy and fill of a step, by torch's profiler.

    Measure wall times first: once the profiler has run, the process's launches take longer. A step
    of ResNet-18 took 1.92 ms of host time after it, 1.09 before (H100, torch 2.11, 2026-11-27).
    """
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return list(busy(json.loads(path.read_text())["traceEvents"]))


def busy(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Name and milliseconds of a trace's kernels, copies and fills.

    A kernel that was launched before its predecessor's end (programmatic dependent launch) waits
    for it and already counts as running: time that several share belongs to the first one.
    """
    ended = float("-inf")
    of_the_gpu = [event for event in events if event.get("cat") in _OF_THE_GPU]
    for event in sorted(of_the_gpu, key=lambda event: float(event["ts"])):
        end = event["ts"] + event["dur"]
        yield event["name"], max(0.0, end - max(event["ts"], ended)) / 1e3
        ended = max(ended, end)
