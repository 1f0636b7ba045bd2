"""Rows of `benchmarks.nets16` that nobody measured."""

from __future__ import annotations

from typing import Any

from benchmarks.net16 import Row
from benchmarks.nets16_models import STEPS


def made_up(name: str = "gpt2", step: str = "train", **other: Any) -> Row:
    """A fixture: no one measured this."""
    times = {"inductor_ms": 10.0, "fx_fuser_ms": 8.0, "spread": 0.005}
    times |= {"inductor_wall_ms": 12.0, "fx_fuser_wall_ms": 10.0}
    seconds = {"inductor_compile_s": 20.0, "fx_fuser_compile_s": 25.0}
    memory = {"inductor_peak_mib": 1000.0, "fx_fuser_peak_mib": 1005.0}
    said: dict[str, Any] = {"error": 3e-3, "eager_error": 4e-3, "sites": {}, "config": "8 × 1024"}
    of = {"gpu": "NVIDIA Test", "torch": "2.11.0", "date": "2026-11-26 10:00", "commit": "abcdef12"}
    found = {"net": name, "step": step, "precision": STEPS[step]}
    return {**found, **times, **seconds, **memory, **said, **of, **other}  # type: ignore[typeddict-item, return-value]
