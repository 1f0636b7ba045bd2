"""Where the GPU's time goes in a step: by kind of kernel, from torch's profiler."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import KINDS

_NAMES = (  # the first that is found in a kernel's name; attention comes in cuDNN and CUTLASS, too
    ("Triton", r"^triton_"),
    ("ours", r"fx_fuser"),
    ("attention", r"fmha|flash|sdpa|attention"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|nchwToNhwc|nhwcToNchw|implicit"),
    ("GEMM", r"gemm|gemv|nvjet|splitKreduce|cublas|cutlass"),
)
_OF_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def kind(name: str) -> str:
    found = (k for k, pattern in _NAMES if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


def by_kind(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a trace's kernels, copies and fills, by kind.

    A kernel that was launched ahead of the end of the one before (programmatic dependent launch)
    waits for it while it counts as running: what several share is the first one's.
    """
    found = dict.fromkeys(KINDS, 0.0)
    ended = float("-inf")
    of_the_gpu = [event for event in events if event.get("cat") in _OF_THE_GPU]
    for event in sorted(of_the_gpu, key=lambda event: float(event["ts"])):
        end = event["ts"] + event["dur"]
        found[kind(event["name"])] += max(0.0, end - max(event["ts"], ended)) / 1e3
        ended = max(ended, end)
    return found


def profiled(
    step: Callable[[], object], leaves: list[Tensor], device: torch.device
) -> dict[str, float]:
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return by_kind(json.loads(path.read_text())["traceEvents"])


def medians(
    steps: Mapping[str, Callable[[], object]],
    leaves: list[Tensor],
    device: torch.device,
    rounds: int = 5,
) -> dict[str, dict[str, float]]:
    """By step and kind, over rounds that take all steps in turn; "all" is the whole step's."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found = profiled(step, leaves, device)
            samples[name].append(found | {"all": sum(found.values())})
    return {
        name: {k: statistics.median(one[k] for one in found) for k in (*KINDS, "all")}
        for name, found in samples.items()
    }
