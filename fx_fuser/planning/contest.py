"""The same contest decides at a Linear, at a convolution, and at a gemm of Inductor's graph.

Candidates are fx_fuser's. Baselines stand for what the inner compiler would run. All are timed in
one run on this machine, side by side, and the answer is kept (`fx_fuser.planning.timing`). A
candidate's time, including what it costs in its place (a fold at each call, one more pass, a copy
into a `cat`), must be clearly below the fastest baseline's. The host launches an op while the GPU
runs the one before. So at a site a launch-bound candidate counts with the host's time, which must
beat the GPU's time of what it replaces. For tails and for gemms of Inductor's graph only GPU times
are compared: they add no call. (`passes.padding` asks for a larger gain.)
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
    """The times of the candidates that `make` makes, or why there are none. key: see
    `timing.medians`.

    options: if they replay CUDA graphs, the host's times are dropped. Warns if a kernel is wrong.
    """
    try:
        found = timing.medians(key, make, device)
    except bench_ops.DisagreementError as error:
        error.warn()
        return str(error)
    if found is None:
        return "not enough memory to time it"
    replays = options is not None and options.replays_cuda_graphs
    return [Timing(took.gpu) for took in found] if replays else found


class Winner(NamedTuple):
    """place: the winner's index, or None. note: why no candidate wins, besides the times: what the
    fastest costs in its place, and the option that would help if the GPU's time alone would win.
    """

    place: int | None
    note: str = ""


def winner(
    candidates: Sequence[Timing],
    baseline: float,
    extra: Sequence[float] = (),
    options: Options | None = None,
) -> Winner:
    """The fastest candidate, if it clearly beats a baseline of so many ms on the GPU.

    extra: what each costs in its place, in ms. options: the user's, for the note.
    """
    extra = extra or [0.0] * len(candidates)
    needed = [took.ms + more for took, more in zip(candidates, extra, strict=True)]
    fastest = min(range(len(needed)), key=needed.__getitem__)
    if gains(needed[fastest], baseline):
        return Winner(fastest)
    is_told = extra[fastest] >= _SAVED
    note = f"; {extra[fastest]:.2g} ms more in this graph" if is_told else ""
    on_gpu = min(took.gpu + more for took, more in zip(candidates, extra, strict=True))
    if options is not None and gains(on_gpu, baseline):
        note += host_note(options)
    return Winner(None, note)


def host_note(options: Options) -> str:
    """The option that avoids the host's cost; empty where the user cannot set it."""
    if options.inner != "inductor" or options.exported:
        return ""
    return "; the host is the bottleneck: mode='reduce-overhead' (CUDA graphs) avoids its cost"
