"""One contest decides what runs: at a site, for a convolution, for a gemm of Inductor's graph.

Candidates are fx_fuser's. Baselines stand for what the inner compiler would run. All are timed in
one run on this machine, side by side, and the answer is kept (`fx_fuser.planning.timing`). A
candidate must be clearly faster than the fastest baseline, with what it costs where it stands: a
folding at each call, one more pass, a copy into a `cat`. The host launches an op while the GPU runs
the one before, so a candidate that takes the host longer than the GPU counts with the host's time,
which must beat the GPU's time of what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, timing
from fx_fuser.planning.timing import Candidate, Timing

# A candidate must take at most this share of the baseline's time and, since CUDA events resolve
# 0.5 us, at least this many ms less.
GAIN = 0.98
_SAVED = 1e-3


def gains(fused: float, library: float) -> bool:
    """Is the fused time clearly less than the library's?  In ms."""
    return fused <= min(GAIN * library, library - _SAVED)


def times(
    key: Sequence[object],
    make: Callable[[], Sequence[Candidate]],
    device: torch.device,
    options: Options | None = None,
) -> list[Timing] | str:
    """The times of all that `make` makes, or why there are none. key: see `timing.medians`.

    options: by which CUDA graphs may be replayed, which takes the host nothing. One warning says
    that a kernel is wrong.
    """
    try:
        found = timing.medians(key, make, device)
    except bench_ops.DisagreementError as error:
        error.warn()
        return str(error)
    if found is None:
        return "no memory to time it"
    replays = options is not None and options.replays_cuda_graphs
    return [Timing(took.gpu) for took in found] if replays else found


class Winner(NamedTuple):
    """place: of the candidate that is clearly faster than the baseline, or None.

    note: why none is, beside the times: what the fastest costs where it stands, and the option with
    which one would gain, if on the GPU alone it does.
    """

    place: int | None
    note: str = ""


def winner(
    candidates: Sequence[Timing],
    baseline: float,
    extra: Sequence[float] = (),
    options: Options | None = None,
) -> Winner:
    """Which of them wins over a baseline of so many ms of the GPU.

    extra: what each costs besides, where it stands, in ms. options: the user's, for the note.
    """
    extra = extra or [0.0] * len(candidates)
    needed = [took.ms + more for took, more in zip(candidates, extra, strict=True)]
    fastest = min(range(len(needed)), key=needed.__getitem__)
    if gains(needed[fastest], baseline):
        return Winner(fastest)
    note = f"; {extra[fastest]:.2g} ms more where it stands" if extra[fastest] else ""
    on_gpu = min(took.gpu + more for took, more in zip(candidates, extra))
    if options is not None and gains(on_gpu, baseline):
        note += host_note(options)
    return Winner(None, note)


def host_note(options: Options) -> str:
    """The option that avoids the host's cost; empty where the user cannot give it."""
    if options.inner != "inductor" or options.exported:
        return ""
    return "; the host is the bottleneck: mode='reduce-overhead' (CUDA graphs) avoids its cost"
