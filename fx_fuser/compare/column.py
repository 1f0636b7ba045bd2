"""The figures of one column."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fx_fuser.compare.kernels import Cliff


@dataclass
class Column:
    """One way to run the model. None: not measured.

    mode: Inductor's mode, if it is not the default. failed: why it has no figures, in one line.
    out_of_memory: that is the reason. first_s: of the first call, with the compilation. wall: ms of
    each round, in turns with the other columns. steady_ms: wall time, of steps run back to back.
    gpu_ms: how long the GPU is busy in a step; kinds: the same by kind of kernel; cliffs: the
    kernels among them that are known to be slow.
    output_error, grad_error: relative Frobenius errors against float64, of all outputs as one
    vector and of all gradients. faults: values beyond the bound of docs/accuracy.md; None: not
    compared. sites: what became of them, as `counting.Sites`.
    """

    title: str
    mode: str = ""
    failed: str = ""
    out_of_memory: bool = False
    first_s: float | None = None
    wall: list[float] = field(default_factory=list)
    steady_ms: float | None = None
    gpu_ms: float | None = None
    peak_mib: float | None = None
    output_error: float | None = None
    grad_error: float | None = None
    faults: list[str] | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    cliffs: list[Cliff] = field(default_factory=list)
    sites: dict[str, Any] = field(default_factory=dict)

    @property
    def wall_ms(self) -> float | None:
        return median(self.wall) if self.wall else None

    @property
    def ran(self) -> bool:
        return not self.failed and bool(self.wall)

    @property
    def error(self) -> float | None:
        """The larger of the two errors."""
        known = [e for e in (self.output_error, self.grad_error) if e is not None]
        return max(known, default=None)
