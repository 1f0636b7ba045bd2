"""All columns, compiled and measured in turns. A failure affects only its own column."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from fx_fuser.compare import turns
from fx_fuser.compare.column import Column
from fx_fuser.compare.counting import Sites, counted
from fx_fuser.compare.kernels import by_kind, cliffs
from fx_fuser.compare.step import Step
from fx_fuser.compare.untouched import Kept, cold_caches
from fx_fuser.compare.variants import Call, Variant
from fx_fuser.errors import allocations_failed, is_out_of_memory
from fx_fuser.native import load

T = TypeVar("T")
_ROUNDS = (5, 100)  # of wall time, at least and at most
_PROFILES = 7  # of GPU time
_STEPS, _STEADY_MS = (3, 100), 300.0  # back to back: at least and at most, for about so long
_WARM_UP = 2  # steps after the first: a mode that replays CUDA graphs records them here


def summary(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Race:
    """model, in its step, on a device. say: gets the progress. notes: for the reader."""

    def __init__(
        self,
        model: Any,
        step: Step,
        held: Kept,
        device: torch.device,
        variants: Mapping[str, Variant],
        say: Callable[[str], None],
    ) -> None:
        self.model, self.step, self.held, self.device = model, step, held, device
        self.variants, self.say = variants, say
        self.columns = {name: Column(v.title, v.mode) for name, v in variants.items()}
        self.calls: dict[str, Call] = {}
        self.notes: list[str] = []
        self.allocations_failed = allocations_failed(device)

    def ran_out(self, error: BaseException) -> bool:
        """Did what was attempted last run out of memory?"""
        return is_out_of_memory(error, self.device, self.allocations_failed)

    def attempt(self, name: str, run: Callable[[], T]) -> T | None:
        """What it returns, or None if it raises, which ends the column."""
        self.allocations_failed = allocations_failed(self.device)
        try:
            with self.variants[name].settings():
                return run()
        except Exception as error:
            self.fail(name, error)
        free_memory()
        return None

    def fail(self, name: str, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # which hold tensors
        old = self.columns[name]
        self.columns[name] = Column(
            old.title,
            old.mode,
            failed=summary(error),
            out_of_memory=self.ran_out(error),
            first_s=old.first_s,
            sites=old.sites,
        )
        self.calls.pop(name, None)
        self.say(f"{old.title} failed: {summary(error)}")

    # ---- first calls ----------------------------------------------------------------------------

    def compile_all(self, cold: bool, caches: ExitStack) -> None:
        """cold: each with empty caches. caches: keeps these in place until it is closed."""
        on_disk = "empty caches on disk" if cold else "the caches on disk as they were"
        self.notes.append(f"First calls include compilation, with {on_disk}.")
        if self.device.type == "cuda":
            self._warm_up()
        for name, variant in self.variants.items():
            if self.columns[name].failed:
                continue
            self.held.rewind()
            free_memory()
            if name == "eager":
                self.calls[name] = self.model
                continue
            self.say(f"{variant.title}: compile and first step")
            if cold:
                caches.enter_context(cold_caches())
            self.attempt(name, partial(self._first, name, variant))

    def _warm_up(self) -> None:
        """Do what takes time only in a process's first compilation, and in a checkout build the
        shim, which a wheel brings. A failure here recurs in its column, which reports it."""
        with contextlib.suppress(Exception):
            torch.compile(lambda x: x + 1)(torch.ones(8, device=self.device))
            load.load_shim()

    def _first(self, name: str, variant: Variant) -> None:
        sites: Sites = {}
        start = time.perf_counter()
        try:
            with counted(sites) if name == "fx_fuser" else contextlib.nullcontext():
                call = variant.compile(self.model)
                self.step.fresh(call)
                self._synchronize()
        finally:
            self.columns[name].sites = {key: found for key, found in sites.items() if found}
        self.columns[name].first_s = round(time.perf_counter() - start, 3)
        self.calls[name] = call

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- times ----------------------------------------------------------------------------------

    def measure(self, seconds: float, narrow: bool) -> None:
        """seconds: for the rounds of wall time. narrow: the model computes in 16 bits."""
        for name in list(self.calls):
            for _ in range(_WARM_UP):
                if name in self.calls:
                    self.attempt(name, partial(self.step.fresh, self.calls[name]))
        self._time_rounds(seconds)
        if self.device.type == "cuda":
            self.say("memory and GPU time")
            for name in list(self.calls):
                step = partial(self.step.run, self.calls[name])
                self.step.drop_grads()
                peak = self.attempt(name, partial(turns.peak_mib, step, self.device))
                self.columns[name].peak_mib = peak
                self._time_steady(name)
            try:
                self._profile(narrow)
            except Exception as error:  # the profiler's: no column's fault
                self.notes.append(f"GPU time is unknown: {summary(error)}")

    def _time_rounds(self, seconds: float) -> None:
        timers = {name: partial(self._wall_ms, name) for name in self.calls}
        one_round = sum(ms for timer in timers.values() if not math.isnan(ms := timer()))
        if not one_round:
            return
        rounds = max(_ROUNDS[0], min(_ROUNDS[1], int(1e3 * seconds / one_round)))
        titles = [self.columns[name].title for name in timers]
        self.say(f"{rounds} rounds of {', '.join(titles)}, {one_round:.3g} ms each")
        for name, samples in turns.interleaved_rounds(timers, rounds).items():
            if name in self.calls:
                self.columns[name].wall = [round(ms, 5) for ms in samples]

    def _wall_ms(self, name: str) -> float:
        call = self.calls.get(name)
        if call is None:  # failed in an earlier round
            return math.nan
        self.step.drop_grads()
        ms = self.attempt(name, partial(turns.wall_ms, partial(self.step.run, call), self.device))
        return math.nan if ms is None else ms

    def _time_steady(self, name: str) -> None:
        column, call = self.columns[name], self.calls.get(name)
        if call is None or not column.wall_ms:
            return
        steps = max(_STEPS[0], min(_STEPS[1], int(_STEADY_MS / column.wall_ms)))
        step = partial(self.step.fresh, call)
        found = self.attempt(name, partial(turns.steady_ms, step, self.device, steps))
        column.steady_ms = None if found is None else round(found, 5)

    def _kernels(self, name: str) -> list[tuple[str, float]]:
        self.step.drop_grads()
        with self.variants[name].settings():
            return turns.kernels_of(partial(self.step.run, self.calls[name]), self.device)

    def _profile(self, narrow: bool) -> None:
        profilers = {name: partial(self._kernels, name) for name in self.calls}
        if not profilers:
            return
        for name, profiles in turns.interleaved_rounds(profilers, _PROFILES).items():
            totals = [sum(ms for _, ms in profile) for profile in profiles]
            middle = profiles[totals.index(sorted(totals)[len(totals) // 2])]
            column = self.columns[name]
            if not middle:
                self.notes.append("GPU time is unknown: the profiler saw no kernel.")
                return
            column.gpu_ms = round(median(totals), 5)
            column.kinds = {kind: round(ms, 5) for kind, ms in by_kind(middle).items()}
            column.cliffs = cliffs(middle, narrow)
