"""The main loops: which of them a GPU gets, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from fx_fuser.doctor.facts import Gpu
from fx_fuser.kernels import KERNELS, Kernel
from fx_fuser.kernels.precision import SPLIT

# Architecture → the GPUs; each loop was timed on one or both (docs/results.md).
TIMED_ON = {"sm_90a": "H200 or H100"}


@dataclass(frozen=True)
class Access:
    """Does a GPU get this loop?  note: in which form, or why not, and which GPU it was timed on."""

    loop: str
    what: str
    gets: bool
    note: str

    def __str__(self) -> str:
        return f"{'yes' if self.gets else 'no':5} {self.what:52} {self.note}"


def loops_of(gpu: Gpu) -> list[Access]:
    return [_access(kernel, gpu) for kernel in KERNELS.values()]


def _access(kernel: Kernel, gpu: Gpu) -> Access:
    if kernel.arch not in (None, gpu.arch):
        note = f"needs {kernel.arch}, this is {gpu.arch}: left to the library"
        return Access(kernel.name, kernel.sites, False, note)
    form = f"split by {gpu.split_loop}" if kernel.name == SPLIT else kernel.name
    timed = f"timed on {TIMED_ON[gpu.arch]}" if gpu.arch in TIMED_ON else "not timed on such a GPU"
    return Access(kernel.name, kernel.sites, True, f"{form}; {timed}")
