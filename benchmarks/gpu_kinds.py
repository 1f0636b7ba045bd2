"""Where the GPU's time goes in a step: by kind of kernel, from torch's profiler."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import KINDS
from fx_fuser.compare import kernels, turns

_CALLED = {"fx_fuser": "ours", "gemm": "GEMM", "copies": "other", "torch's own": "other"}


def kind(name: str) -> str:
    """Like `fx_fuser.compare.kernels.kind`, in the words of the tables."""
    found = kernels.kind(name)
    return _CALLED.get(found, found)


def by_kind(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a trace's kernels, copies and fills, by kind."""
    return _sums(turns.busy(events))


def _sums(of: Iterable[tuple[str, float]]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    for name, ms in of:
        found[kind(name)] += ms
    return found


def profiled(
    step: Callable[[], object], leaves: list[Tensor], device: torch.device
) -> dict[str, float]:
    for leaf in leaves:
        leaf.grad = None
    return _sums(turns.kernels_of(step, device))


def medians(
    steps: Mapping[str, Callable[[], object]],
    leaves: list[Tensor],
    device: torch.device,
    rounds: int = 5,
) -> dict[str, dict[str, float]]:
    """By step and kind, over rounds that take all steps in turn; "all" is the whole step."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found = profiled(step, leaves, device)
            samples[name].append(found | {"all": sum(found.values())})
    return {
        name: {k: statistics.median(one[k] for one in found) for k in (*KINDS, "all")}
        for name, found in samples.items()
    }
