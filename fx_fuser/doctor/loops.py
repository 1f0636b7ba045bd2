"""The main loops: which of them a GPU gets, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from fx_fuser.doctor.facts import Gpu
from fx_fuser.native.kernel_spec import (
    CONV_DIRECT,
    FOLD,
    LINEAR_DENSE,
    LINEAR_EXACT,
    LINEAR_SPLIT,
    POINTWISE,
    depthwise,
    implicit,
    stem,
)

# Architecture → the GPUs on which these loops were timed (docs/results.md).
TIMED_ON = {"sm_90a": "H200, H100"}


@dataclass(frozen=True)
class Loop:
    """name: as `explain` calls what runs there. what: a user's words for its sites. arch: the only
    one that it exists for, or None."""

    name: str
    what: str
    arch: str | None


LOOPS = (
    Loop("split", "fp32 Linear, matmul, bmm, forward and backward", LINEAR_SPLIT.arch),
    Loop("dense", "16-bit and TF32 Linear, in named patterns", LINEAR_DENSE.arch),
    Loop("exact", "fp32 gemms of operands cast up from 16 bits", LINEAR_EXACT.arch),
    Loop("direct", "Conv2d of at most 8 channels, also in training", CONV_DIRECT.arch),
    Loop("stem", "Conv2d of a first layer with a stride, in inference", stem(3, 7, 7, 2, 64).arch),
    Loop("depthwise", "depthwise Conv2d, in inference", depthwise(3, 3, 1).arch),
    Loop("implicit", "16-bit Conv2d that bytes bound, in inference", implicit(64, False, 0).arch),
    Loop("folded", "Conv2d + BatchNorm + ReLU by cuDNN, in inference", FOLD.arch),
    Loop("library", "the tail behind the library's gemm or convolution", POINTWISE.arch),
)


@dataclass(frozen=True)
class Access:
    """Does a GPU get this loop?  note: by which form, or why not, and on what it was timed."""

    loop: str
    what: str
    gets: bool
    note: str

    def __str__(self) -> str:
        return f"{'yes' if self.gets else 'no':5} {self.what:52} {self.note}"


def loops_of(gpu: Gpu) -> list[Access]:
    return [_access(loop, gpu) for loop in LOOPS]


def _access(loop: Loop, gpu: Gpu) -> Access:
    if loop.arch not in (None, gpu.arch):
        note = f"needs {loop.arch}, this is {gpu.arch}: left to the library"
        return Access(loop.name, loop.what, False, note)
    form = f"split by {gpu.split_loop}" if loop.name == "split" else loop.name
    timed = f"timed on {TIMED_ON[gpu.arch]}" if gpu.arch in TIMED_ON else "not timed on such a GPU"
    return Access(loop.name, loop.what, True, f"{form}; {timed}")
