"""One plain sentence for the user: is it worth it?  A pure function of the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

from fx_fuser.compare.column import Column
from fx_fuser.compare.counting import CHANGED

GAIN = 1.05  # times as fast in wall time: below it nothing is gained that a user would notice
BUSY = 0.8  # of a step, run back to back: a GPU that is busy for less waits for the host

GRAPHS = "reduce_overhead"  # the end of a column's name if it replays CUDA graphs
_USE = 'Use torch.compile(model, backend="fx_fuser").'
_OPTION = "torch.compile(model, backend=\"fx_fuser\", options={'mode': 'reduce-overhead'})"
_CALLED = {
    "fx_fuser": "the GPU's time is in fx_fuser's kernels",
    "gemm": "the GPU's time is in the library's gemms",
    "attention": "the GPU's time is in attention kernels",
    "convolution": "the GPU's time is in the library's convolutions",
    "Triton": "the GPU's time is in Inductor's own pointwise kernels",
    "copies": "the GPU's time is in copies",
    "torch's own": "the GPU's time is in torch's own kernels",
    "other": "the GPU's time is in kernels that fx_fuser does not replace",
}


@dataclass(frozen=True)
class Verdict:
    """word: USE IT, NO GAIN, LAUNCH-BOUND, DO NOT USE, OUT OF MEMORY, NO GPU or NOT COMPARED.
    use: is fx_fuser faster here, beyond the spread, and right? launch_bound: the GPU waits for the
    host. sentences: the first goes with the word.
    """

    word: str
    sentences: list[str]
    use: bool = False
    launch_bound: bool = False

    def __str__(self) -> str:
        return "\n  ".join([f"{self.word}: {self.sentences[0]}", *self.sentences[1:]])


def judge(columns: Mapping[str, Column], device: str) -> Verdict:
    """columns: by name: "eager", "inductor", "fx_fuser", "inductor_tf32", and the second and third
    with "_reduce_overhead". device: "cuda", or none of fx_fuser's kernels run."""
    mine = columns.get("fx_fuser")
    if columns and all(column.out_of_memory for column in columns.values()):
        said = "no way to run this step fits into memory. Compare with a smaller batch."
        return Verdict("OUT OF MEMORY", [said])
    if mine is not None and (wrong := _unusable(mine, columns)):
        return Verdict("DO NOT USE", wrong)
    if device != "cuda":
        said = (
            f"fx_fuser has no kernels for a {device.upper()}, so nothing is gained here. Run "
            "compare on a machine with an NVIDIA GPU."
        )
        return Verdict("NO GPU", [said])
    if mine is None or not mine.ran:
        return Verdict("NOT COMPARED", ["fx_fuser's column was left out."])
    rival = _rival(columns)
    if rival is None:
        others = [f"{c.title}: {c.failed}" for c in columns.values() if c.failed]
        if not others:
            return Verdict("NOT COMPARED", ["no other column was measured."])
        return Verdict("USE IT", ["nothing else runs.", *others], use=True)
    return _of_times(mine, rival, columns)


def _rival(columns: Mapping[str, Column]) -> Column | None:
    """What fx_fuser has to beat: Inductor, or eager mode if that is faster or nothing else runs."""
    inductor, eager = (columns.get(name) for name in ("inductor", "eager"))
    if inductor is None or not inductor.ran:
        return eager if eager is not None and eager.ran else None
    if eager is not None and eager.ran:
        speed, sure = speed_up(inductor, eager)
        return eager if speed >= GAIN and sure else inductor
    return inductor


def _unusable(mine: Column, columns: Mapping[str, Column]) -> list[str]:
    """The reasons not to use fx_fuser, however fast it is; empty if there are none."""
    if mine.out_of_memory:
        fits = [c.title for c in columns.values() if c.ran]
        others = f", where {_listed(fits)} fits" if fits else ""
        return [f"fx_fuser runs out of memory{others}.", mine.failed]
    if mine.failed:
        return [f"it failed: {mine.failed}.", "Please report it with this text."]
    if mine.faults:
        count, first = len(mine.faults), mine.faults[0]
        values = "a value is" if count == 1 else f"{count} values are"
        return [
            f"{values} further from float64 than the accuracy contract allows: {first}.",
            "Please report it with this text.",
        ]
    return []


def _of_times(mine: Column, rival: Column, columns: Mapping[str, Column]) -> Verdict:
    speed, sure = speed_up(rival, mine)
    gains = speed >= GAIN and sure
    waits = is_launch_bound(mine)
    notes = [*_remarks(mine, rival, gains, columns)]
    inductor = columns.get("inductor")
    if inductor is not None and inductor is not rival:
        why = f"has no figures: {inductor.failed}" if inductor.failed else "is slower than eager"
        notes.insert(0, f"{inductor.title} {why}.")
    if waits:
        gains_in_graphs, said = _in_graphs(mine, rival, columns)
        if gains:
            faster = f"{speed:.2f} times as fast as {rival.title} in wall time."
            return Verdict("USE IT", [faster, _USE, said, *notes], use=True, launch_bound=True)
        return Verdict("LAUNCH-BOUND", [said, *notes], use=gains_in_graphs, launch_bound=True)
    if gains:
        faster = f"{speed:.2f} times as fast as {rival.title} in wall time{_beside(mine, rival)}."
        return Verdict("USE IT", [faster, _USE, *notes], use=True)
    return Verdict("NO GAIN", [_no_gain(mine, rival, speed, sure), *notes])


def speed_up(rival: Column, mine: Column) -> tuple[float, bool]:
    """How many times as fast in wall time, and whether the rounds agree that it is faster: three
    quarters of them, taken in pairs."""
    ratios = [theirs / own for theirs, own in zip(rival.wall, mine.wall)]
    lower = quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]
    return median(rival.wall) / median(mine.wall), lower > 1


def spread(rival: Column, mine: Column) -> float:
    """Half the distance between the quartiles of the rounds' ratios, over their median."""
    ratios = [theirs / own for theirs, own in zip(rival.wall, mine.wall)]
    if len(ratios) < 2:
        return 0.0
    lower, middle, upper = quantiles(ratios, n=4)
    return (upper - lower) / 2 / middle


def is_launch_bound(column: Column) -> bool:
    """Does the GPU wait for the host?  False if its time is unknown."""
    steady = column.steady_ms
    return steady is not None and column.gpu_ms is not None and column.gpu_ms < BUSY * steady


def _in_graphs(mine: Column, rival: Column, columns: Mapping[str, Column]) -> tuple[bool, str]:
    """Does fx_fuser gain if CUDA graphs are replayed?  And what to say about the slow host."""
    took = f"steps run back to back take {_ms(mine.steady_ms)} each"
    waits = f"{took}, of which the GPU is busy for {_ms(mine.gpu_ms)}"
    own = columns.get(f"fx_fuser_{GRAPHS}")
    if own is None and mine.mode:
        return False, f"{waits}, with mode={mine.mode!r}: the host cannot keep up."
    if own is None:
        try_it = "Try mode='reduce-overhead': compare(…, reduce_overhead=True) measures it."
        return False, f"{waits}: the host cannot keep up. {try_it}"
    if not own.ran:
        return False, f"{waits}, and mode='reduce-overhead' fails: {own.failed}."
    theirs = columns.get(f"inductor_{GRAPHS}")
    beaten = theirs if theirs is not None and theirs.ran else rival
    speed, sure = speed_up(beaten, own)
    gains = speed >= GAIN and sure
    measured = f"with mode='reduce-overhead' {_ms(own.wall_ms)}"
    compared = f"{speed:.2f} times as fast as {beaten.title} ({_ms(beaten.wall_ms)})"
    advice = f"use {_OPTION}" if gains else "no gain over torch.compile in that mode"
    return gains, f"{waits}; {measured}, {compared}: {advice}."


def _no_gain(mine: Column, rival: Column, speed: float, sure: bool) -> str:
    if speed_up(mine, rival)[1] and speed <= 1 / GAIN:
        begin = f"slower, {speed:.2f} times as fast as {rival.title} in wall time"
    elif speed >= GAIN and not sure:
        begin = f"{speed:.2f} times as fast as {rival.title}, but within the spread of the rounds"
    else:
        begin = f"{speed:.2f} times as fast as {rival.title} in wall time"
    keep = "keep torch.compile(model)" if rival.title != "eager" else "keep eager mode"
    if not any(mine.sites.get(key) for key in CHANGED):
        return f"{begin}, and nothing was fused: {keep}."
    if mine.kinds and mine.gpu_ms:
        largest = max(mine.kinds, key=lambda kind: mine.kinds[kind])
        share = mine.kinds[largest] / sum(mine.kinds.values())
        return f"{begin}: {share:.0%} of {_CALLED[largest]}; {keep}."
    return f"{begin}: {keep}."


def _beside(mine: Column, rival: Column) -> str:
    """Memory and error, next to the speed."""
    parts = []
    if mine.peak_mib and rival.peak_mib:
        more = mine.peak_mib / rival.peak_mib - 1
        word = "more" if more >= 0 else "less"
        parts.append(f"{abs(more):.0%} {word} memory")
    if mine.error is not None and rival.error is not None:
        word = "below" if mine.error <= rival.error else "above"
        parts.append(f"error {word} {rival.title}'s")
    return "".join(f", {part}" for part in parts)


def _remarks(
    mine: Column, rival: Column, gains: bool, columns: Mapping[str, Column]
) -> Iterator[str]:
    own, theirs = median(mine.wall), median(rival.wall)
    if mine.faults is None:
        yield "Values were not compared: see the notes."
    if gains and mine.first_s is not None and rival.first_s is not None:
        more = mine.first_s - rival.first_s
        if more > 0 and own < theirs:
            steps, saved = 1e3 * more / (theirs - own), _ms(theirs - own)
            yield (
                f"Pays off after {steps:.0f} steps: {more:.1f} s more to compile, "
                f"{saved} saved each."
            )
    if mine.gpu_ms is not None and mine.steady_ms is not None and not is_launch_bound(mine):
        busy = f"The GPU is busy {min(1.0, mine.gpu_ms / mine.steady_ms):.0%} of the time"
        yield f"{busy}." if mine.mode else f"{busy}: mode='reduce-overhead' would not help."
    tf32 = columns.get("inductor_tf32")
    if tf32 is not None and tf32.ran:
        speed, sure = speed_up(mine, tf32)
        if speed >= GAIN and sure:
            yield (
                "If TF32 is accurate enough for you, torch.set_float32_matmul_precision('high') "
                f"and torch.compile(model) are faster still: {_ms(tf32.wall_ms)}."
            )


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} ms"


def _listed(names: list[str]) -> str:
    return " or ".join(names)
